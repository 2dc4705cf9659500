"""Maxima over windows of pixels.

Axes: B batch, H and W pixels, C channels. Images are NHWC.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_pfl.kernels.convolution import current_form, shifts
from fedjax_pfl.types import Array

NONE = 4  # instead of the number of a window's value: none is positive


def max_pool(x: Array) -> Array:
    """Maximum over 2x2 windows with stride 2: [B, H, W, C] -> [B, H // 2, W // 2, C].

    An odd last row or column is left out; where values tie, one of them gets the
    gradient. On a TPU the windows are reduced in one operation, elsewhere by slices,
    whose gradient is much faster there.
    """
    if current_form() == "packed":
        return _reduce_window(x, 2, 0)
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    x = x.reshape(batch, height // 2, 2, width // 2 * 2, channels)
    x = larger(x[:, :, 0], x[:, :, 1]).reshape(
        batch, height // 2, width // 2, 2, channels
    )
    return larger(x[:, :, :, 0], x[:, :, :, 1])


def max_pool_3(x: Array) -> Array:
    """Maximum over 3x3 windows with stride 2 and one pixel of padding: [B, H, W, C] ->
    [B, ceil(H/2), ceil(W/2), C]."""
    if current_form() == "packed":
        return _reduce_window(x, 3, 1)
    x = lax.pad(
        x, jnp.asarray(-jnp.inf, x.dtype), [(0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)]
    )
    for axis in (2, 1):
        x = functools.reduce(larger, shifts(x, axis, 3, 2))
    return x


def _reduce_window(x: Array, side: int, padding: int) -> Array:
    pads = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, side, side, 1), (1, 2, 2, 1), pads
    )


@jax.custom_jvp
def larger(a: Array, b: Array) -> Array:
    """The maximum; its gradient is one selection, that of `jnp.maximum` shares ties and
    so divides."""
    return jnp.maximum(a, b)


@larger.defjvp
def larger_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (a, b), (da, db) = primals, tangents
    return jnp.maximum(a, b), jnp.where(b > a, db, da)


def relu_of_largest(parts: Sequence[Array], bias: Array) -> Array:
    """Computes relu(max(a, b, c, d) + bias) for the four values of pooling windows, in
    one pass, and so its gradient.

    Where values tie, one of them gets the gradient.

    Args:
      parts: 4 arrays [..., O].
      bias: [O].
    """
    shift = jnp.broadcast_to(
        bias.reshape(*[1] * (parts[0].ndim - 1), -1), parts[0].shape
    )
    return _relu_of_largest(*parts, shift)


@jax.custom_jvp
def _relu_of_largest(*args: Array) -> Array:
    *parts, shift = args
    return jax.nn.relu(functools.reduce(jnp.maximum, parts) + shift)


@_relu_of_largest.defjvp
def _relu_of_largest_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    *parts, shift = primals
    value, which = largest(parts, shift)
    # only `which`, a byte per window, is kept for the gradient
    return value, jax.checkpoint(_route, prevent_cse=False)(which, *tangents)


def largest(parts: Sequence[Array], shift: Array) -> tuple[Array, Array]:
    """Returns relu(max(a, b, c, d) + shift), and the number of the largest part; NONE
    where the result is not positive."""
    top = functools.reduce(jnp.maximum, parts)
    value = jax.nn.relu(top + shift)
    which = jnp.full(top.shape, 3, jnp.uint8)
    for i in (2, 1, 0):
        which = jnp.where(parts[i] == top, jnp.uint8(i), which)
    return value, jnp.where(value > 0, which, jnp.uint8(NONE))


def _route(which: Array, *args: Array) -> Array:
    *parts, shift = args
    chosen = [jnp.where(which == i, x, 0) for i, x in enumerate(parts)]
    return functools.reduce(operator.add, chosen) + jnp.where(which < NONE, shift, 0)
