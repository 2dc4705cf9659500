"""The product of a dense layer, differentiated in the order that is fastest for few
rows.

Axes: B batch, I and O features in and out.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fedjax_pfl.kernels.convolution import XLA, current_form
from fedjax_pfl.kernels.platform import platform
from fedjax_pfl.types import Array

MOST_ROWS, LEAST_OUT, LEAST_SIZE = 12, 32, 2**18  # see `dot_general`


def dot_general(
    x: Array,
    kernel: Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    **kwargs: Any,
) -> Array:
    """Like `lax.dot_general` of x [B, I] and a kernel [I, O]; give it to `nnx.Linear`.

    For few rows and a large kernel, and unless the form chosen by `convolution` is
    "matmul" or "xla", the kernel's gradient is a sum of B outer products, which XLA
    computes where it is used: no array of the kernel's size is written and read again.
    A loop of SGD over one layer, without `_computed`, was measured on a core of an
    Intel Xeon with AVX-512 to be faster by these factors: with 10 rows 1.2 (1600x512,
    3136x512), 1.15 (12544x128), with 16 rows 1.0, with 32 rows 0.7. The MLP of 784x64
    was 1.1 times as fast for one client, 0.3 for 4 at once, the CNN's whole step 1.08
    and 0.8: models with a kernel this large are trained one at a time on a CPU.
    """
    plain = (
        x.ndim == kernel.ndim == 2
        and dimension_numbers == (((1,), (0,)), ((), ()))
        and not any(kwargs.values())
    )
    large = kernel.size >= LEAST_SIZE and kernel.shape[-1] >= LEAST_OUT
    # sums of bfloat16 would lose digits
    few = plain and large and len(x) <= MOST_ROWS and x.dtype.itemsize >= 4
    if not few or platform() != "cpu" or current_form() in ("matmul", *XLA):
        return lax.dot_general(
            x, kernel, dimension_numbers, precision=precision, **kwargs
        )
    return _product(x, kernel, precision)


def laid_out(x: Array) -> Array:
    """Returns x [...], which XLA on a CPU then does not merge with its neighbours.

    Products that XLA merged with a transposition were slower there than a copy and a
    plain product; a step of `benchmarks.adapters speed` is faster with it.
    """
    return lax.optimization_barrier(x) if platform() == "cpu" else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product(x: Array, kernel: Array, precision: lax.PrecisionLike) -> Array:
    return jnp.dot(x, kernel, precision=precision)


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _product_jvp(
    precision: lax.PrecisionLike,
    primals: tuple[Array, Array],
    tangents: tuple[Any, Any],
) -> tuple[Array, Array]:
    (x, kernel), (dx, dkernel) = primals, tangents
    parts = []
    # its gradient is kernel g^T, transposed: faster than g kernel^T
    if not isinstance(dx, SymbolicZero):
        parts.append(
            jnp.dot(lax.optimization_barrier(dx.T).T, kernel, precision=precision)
        )
    if not isinstance(dkernel, SymbolicZero):
        rows = jnp.unstack(_computed(x))
        parts.append(
            _computed(
                jnp.stack([jnp.sum(row[:, None] * dkernel, axis=0) for row in rows])
            )
        )
    return _product(x, kernel, precision), functools.reduce(operator.add, parts)


def _computed(x: Array) -> Array:
    """x [B, K] itself, as a product: XLA would compute again what leads to it for every
    element that it is used for."""
    return jnp.dot(jnp.eye(len(x), dtype=x.dtype), x, precision=lax.Precision.HIGHEST)
