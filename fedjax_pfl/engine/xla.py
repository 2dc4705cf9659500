"""What XLA is given for the functions of a run: its options, and what they compute as
text."""

import functools
import hashlib
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_IN_PLACE = {"xla_cpu_copy_insertion_use_region_analysis": True}
_LEVEL = "xla_backend_optimization_level"


@functools.cache
def compiler_options() -> dict[str, bool]:
    """What `jax.jit` should be given as `compiler_options` for a round or an
    evaluation.

    On a CPU XLA would copy the weights in every local step, as far as it knows the step
    might update them before it reads them last; with this option it looks at the order
    in which it runs them, as it does by itself for other devices. The results are the
    same bit for bit. Empty where this XLA does not know the option. JAX takes options
    for the outermost jit only.
    """
    return _known(_IN_PLACE)


@functools.cache
def init_options() -> dict[str, int]:
    """The same for `init`, which is called once: on a CPU a network's draws take
    seconds to compile and milliseconds to run, and less optimisation makes the seconds
    fewer.

    The results are the same bit for bit (not at level 0). Empty where XLA_FLAGS has a
    level.
    """
    return {} if _LEVEL in os.environ.get("XLA_FLAGS", "") else _known({_LEVEL: 1})


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a CPU, as far as they are known to this XLA."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return options


def computation(function: Callable[..., Any], *args: Any) -> str:
    """What a function computes of arguments of these shapes, as text that is the same
    for functions made apart.

    Raises:
      whatever the function does where it is traced.
    """
    jaxpr = jax.make_jaxpr(function)(*args)
    plain: Callable[[Any], Any] = lambda x: (
        jax.random.key_data(x)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
    )
    consts = [
        hashlib.sha256(np.asarray(plain(x)).tobytes()).hexdigest() for x in jaxpr.consts
    ]
    return re.sub("0x[0-9a-f]+", "", f"{jaxpr} {consts}")  # addresses say nothing
