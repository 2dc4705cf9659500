"""XLA's options for the functions of a run."""

import functools

import jax

_IN_PLACE = {"xla_cpu_copy_insertion_use_region_analysis": True}


@functools.cache
def compiler_options() -> dict[str, bool]:
    """What `jax.jit` should be given as `compiler_options` for a round or an evaluation.

    On a CPU XLA would copy the weights in every local step, as far as it knows the step might
    update them before it reads them last; with this option it looks at the order in which it runs
    them, as it does by itself for other devices. The results are the same bit for bit. Empty where
    this XLA does not know the option. JAX takes options for the outermost jit only.
    """
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda: 0, compiler_options=_IN_PLACE).lower().compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return _IN_PLACE
