"""Configuration of JAX and XLA: CPU devices, the compilation cache, compiler
options."""

import contextlib
import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax
import jaxlib

from fedjax_pfl import cache

# of rounds and evaluations, by platform
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
    "tpu": {"xla_tpu_use_bundle_aware_cost_model_for_fusions": True},
}
_LEVEL = "xla_backend_optimization_level"


def split_cpu() -> None:
    """Makes JAX use each of up to 8 CPU cores as a device, unless it has started or a
    number is set.

    Small steps do not fill several cores, so clients on all of them train faster.
    """
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    given = "device_count" in os.environ.get("XLA_FLAGS", "")
    if not given and "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", min(len(affinity(0)), 8))


def keep_compilations() -> None:
    """Sets JAX's compilation cache to the user's cache directory, unless another is set
    (JAX_COMPILATION_CACHE_DIR).

    Code for a CPU runs only on machines with the same features: each kind of machine
    and each version of JAX has its own directory.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = {x for x in lines if x.startswith(("model name", "flags", "Features"))}
    versions = (jax.__version__, jaxlib.version.__version__)
    kind = (*versions, platform.machine(), platform.processor(), *sorted(cpu))
    folder = hashlib.sha256(repr(kind).encode()).hexdigest()[:16]
    path = str(cache.folder() / "compiled" / folder)
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@functools.cache
def compiler_options() -> dict[str, bool]:
    """Returns the `compiler_options` of `jax.jit` for a round or an evaluation.

    On a CPU XLA would copy the weights in every local step, in case the step updates
    them before their last use. With this option it checks the order of execution, as on
    other devices. The results are the same bit for bit. On a TPU the option makes XLA
    choose fusions by counts of instructions. JAX takes options for the outermost jit
    only.
    """
    backend = jax.default_backend()
    return _known(OPTIONS[backend]) if backend in OPTIONS else {}


@functools.cache
def init_options() -> dict[str, int]:
    """Returns the `compiler_options` of `jax.jit` for `init`, which runs once: less
    optimisation compiles faster on a CPU.

    The results are the same bit for bit (not at level 0). Empty where XLA_FLAGS sets a
    level.
    """
    given = _LEVEL in os.environ.get("XLA_FLAGS", "")
    return {} if given or jax.default_backend() != "cpu" else _known({_LEVEL: 1})


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options if this version of XLA knows them, else none."""
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return options
