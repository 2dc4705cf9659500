"""Strict JAX for every test; the toy federation itself is in toy.py."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
