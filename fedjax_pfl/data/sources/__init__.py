"""Loaders of data sets, one module per kind; `data.loading` imports all."""
