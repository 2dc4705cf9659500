"""Strict JAX for every test; the toy federation itself is in toy.py."""

import gc
import itertools
import os
from collections import Counter
from importlib.metadata import version
from pathlib import Path

# Tests compile much and compute little: a compiler that optimises less, compiles a
# module in one piece, and makes code of fusions in the older of its two ways takes a
# third of the time. An unknown flag would stop the process.
FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
FLAGS += ["--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):  # newer ones do not have it
    FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

# the command line would fill the user's
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax  # noqa: E402  (it reads the flags)
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # for the tests of several devices

# Groups of few tests that take long, first: one that began last would keep one worker
# busy alone.
LONG = ("feddva", "train", "processes", "sweep", "devices", "reductions", "benchmarks")
LONG += ("dva", "groups", "style", "readme", "notebooks", "offload")
# Linux allows a process 65,530; each compiled function takes some, and at the limit XLA
# crashes
MAPPINGS = 30_000
TESTS = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One worker for the tests that share compilations: those of a method, or else of a
    file; the longest groups begin first, the others by how many tests they have."""
    counts = Counter(map(_group, items))
    order = [
        *LONG,
        *sorted(
            (name for name in counts if name not in LONG),
            key=lambda name: -counts[name],
        ),
    ]
    rank = {name: place for place, name in enumerate(order)}
    items.sort(key=lambda item: rank[_group(item)])
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def pytest_collection_finish():
    """Tracing makes many objects and few cycles: looking for those less often takes a
    twentieth less time."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None:
        return
    within = _group(item) == _group(nextitem)
    if within and next(TESTS) % 20:  # counting takes a hundredth of a second
        return
    # what a group shares is dropped only if it must be
    if _mappings() > (4 / 3 * MAPPINGS if within else MAPPINGS):
        jax.clear_caches()


def _group(item) -> str:
    given = getattr(item, "callspec", None)
    method = (
        given.params.get("method")
        if given and item.get_closest_marker("contract")
        else None
    )
    return method or item.path.stem.removeprefix("test_")


def _mappings() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0
