"""Strict JAX for every test; the toy federation itself is in toy.py."""

import os

# Tests compile much and compute little, so a compiler that optimises less saves a quarter of the time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # for the tests of several devices
