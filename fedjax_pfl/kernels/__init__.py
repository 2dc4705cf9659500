"""Convolutions, pooling and dense layers in each platform's fastest form."""
