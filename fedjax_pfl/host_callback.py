"""A step of a round on the host: a function of NumPy arrays, called from inside the
compiled program."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_pfl.types import Array, PyTree

PIECE = 96_000  # bytes


def call(function: Callable[..., PyTree], shapes: PyTree, *args: Array) -> PyTree:
    """`function(*args)` on the host; under vmap one call after another.

    XLA's CPU client copies an operand of more than 100 KiB on a thread of its pool, and
    while the callback waits for the copy all threads may be waiting for the callback,
    in a sum over devices: the program hangs (seen with JAX 0.10 on 2 cores that are 2
    devices). So operands are handed over in pieces below that size.

    Args:
      function: of NumPy arrays; it must not compute with jax, and what it returns
        depends on its arguments alone.
      shapes: a tree of jax.ShapeDtypeStruct, of the results.
    """
    wanted = [x.shape for x in args]

    def whole(*pieces: Any) -> PyTree:
        # they come as arrays of jax
        joined = [np.concatenate([np.asarray(x) for x in each]) for each in pieces]
        return function(
            *(x.reshape(shape) for x, shape in zip(joined, wanted, strict=True))
        )

    pieces = [_pieces(x.reshape(-1), PIECE // x.dtype.itemsize) for x in args]
    return jax.pure_callback(whole, shapes, *pieces, vmap_method="sequential")


def _pieces(x: Array, length: int) -> list[Array]:
    return [x[i : i + length] for i in range(0, max(1, x.shape[0]), length)]
