"""Vectorised simulation of personalised federated learning in JAX and Flax."""

__version__ = "0.1.0"
