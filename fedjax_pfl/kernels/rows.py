"""Softmax and layer norm over the last axis with gradients that are fast on a CPU.

XLA has fast loops there for the sum of a row and for the sum of a product of two rows.
The sums in the gradients of softmax and layer norm have more factors. Here all factors
but two are multiplied first, into an array of their own.
"""

import jax
import jax.numpy as jnp

from fedjax_pfl.kernels.dense import laid_out
from fedjax_pfl.types import Array


@jax.custom_jvp
def softmax(x: Array) -> Array:
    """Like `jax.nn.softmax` of x [..., K]."""
    return jax.nn.softmax(x, axis=-1)


@softmax.defjvp
def _softmax_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y, (dx,) = laid_out(softmax(*primals)), tangents
    return y, y * (dx - _spread(jnp.sum(y * dx, axis=-1), y))


def layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    """Computes (x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis
    (Ba et al., Layer normalization, 2016), in float32 or wider.

    Args:
      x: [..., K].
      scale: [K], as `bias`.
      epsilon: added to the variance, above 0.

    Returns:
      [..., K], of the type of x and scale together.
    """
    dtype = jnp.result_type(x, scale)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = laid_out(x - _spread(jnp.mean(x, axis=-1), x))
    variance = jnp.mean(x * x, axis=-1)
    factor = _spread(jax.lax.rsqrt(variance + epsilon), x)
    x = laid_out(x * factor)
    ones = [1] * (x.ndim - 1)
    scale, bias = (a.astype(x.dtype).reshape(*ones, -1) for a in (scale, bias))
    return (x * scale + bias).astype(dtype)


def _spread(x: Array, like: Array) -> Array:
    """Returns x [...] as an array [..., K] of the shape of another one."""
    return jax.lax.broadcast_in_dim(x, like.shape, range(x.ndim))
