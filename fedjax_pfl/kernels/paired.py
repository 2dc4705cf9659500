"""Images whose neighbouring pixels stand next to each other in the lanes of a TPU.

64 channels fill half of a register's 128 lanes. Two neighbours in a row, one after the
other in the last axis, fill all of them. Pairs of pixels are 0 and 1, 2 and 3, and so
on. Two neighbours' outputs of a convolution 3 wide depend on 4 pixels, from the one
before them: on two whole pairs only if the outputs' pairs are shifted by one pixel
against the inputs'. Shifted pairs are pixels -1 and 0, 1 and 2, and so on: one more
than the others. The first and the last have a pixel outside the image, which is 0
where a convolution wrote it, and anything after that.

Axes: B batch, H and W pixels, P pairs in a row, C and O channels in and out. Kernels
are HWIO. W is a multiple of 4, so that an odd P says that pairs are shifted.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_pfl.types import Array


def pairs(x: Array) -> Array:
    """Puts neighbours next to each other: [B, H, W, C] -> [B, H, W // 2, 2 C]."""
    assert x.shape[2] % 4 == 0
    return x.reshape(*x.shape[:2], x.shape[2] // 2, -1)


def singles(x: Array) -> Array:
    """The inverse of `pairs`, for shifted ones too: [B, H, P, 2 C] -> [B, H, W, C]."""
    row = x.reshape(*x.shape[:2], 2 * x.shape[2], -1)
    return row[:, :, 1:-1] if _shift(x) else row


def is_paired(x: Array, channels: int) -> bool:
    """True if the last axis of an image holds two pixels of that many channels."""
    return x.ndim == 4 and x.shape[-1] == 2 * channels


def pixels(x: Array) -> int:
    """H W, the number of pixels inside an image of pairs."""
    return x.shape[1] * 2 * (x.shape[2] - _shift(x))


def sum_of_both(v: Array) -> Array:
    """Sums over the two pixels of a pair: [2 C] -> [C]."""
    return _product(v, np.tile(np.eye(len(v) // 2), (2, 1)))


def for_both(v: Array) -> Array:
    """Repeats values for the two pixels of a pair: [C] -> [2 C]."""
    return _product(v, np.tile(np.eye(len(v)), 2))


def _product(v: Array, matrix: np.ndarray) -> Array:
    """A product with zeros and ones, exact. XLA makes one operation of it, also of
    those of two vectors, where parts of lanes that are joined or split are one each."""
    return jnp.dot(v[None], matrix.astype(v.dtype), precision="highest")[0]


def _shift(x: Array) -> int:
    return x.shape[2] % 2


def _inside(x: Array) -> Array:
    """x, 0 outside the image."""
    if not _shift(x):
        return x
    outside = np.zeros((1, 1, *x.shape[2:]), bool)
    outside[..., 0, : x.shape[3] // 2] = outside[..., -1, x.shape[3] // 2 :] = True
    return jnp.where(outside, 0, x)


def conv(
    x: Array,
    kernel: Array,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    precision: lax.PrecisionLike = None,
) -> Array:
    """Convolution of an image of pairs whose row of outputs is as long as that of
    inputs, or with stride 2 half as long.

    Args:
      x: [B, H, P, 2 C].
      kernel: [kh, kw, C, O], kw odd.
      strides: of H, and 1 or 2 of W.
      padding: (before, after) of H, and (kw - 1) // 2 of W.
      precision: of the products.

    Returns:
      [B, H', P', 2 O] in pairs, with (kw - 1) // 2 odd shifted against those of x; with
      stride 2 [B, H', W // 2, O] without.
    """
    width, before = kernel.shape[1], padding[1][0]
    assert padding[1] == (before, before) and width == 2 * before + 1
    shift = _shift(x)
    # of the first output in front of the image
    out = (shift + before) % 2 if strides[1] == 1 else 0
    outputs = x.shape[2] - shift + out
    # pairs before the first, and the first output's offset in them
    left = -(-(before + out - shift) // 2)
    first = 2 * left + shift - out - before
    size = -(-(first + width + (strides[1] == 1)) // 2)
    # each output's kernel stands elsewhere in the same window of pixels
    parts = [
        jnp.pad(kernel, ((0, 0), (i, 2 * size - width - i), (0, 0), (0, 0)))
        for i in range(first, first + 2 // strides[1])
    ]
    channels, features = kernel.shape[2:]
    wide = jnp.concatenate(parts, -1).reshape(
        len(kernel), size, 2 * channels, features * len(parts)
    )
    pads = (tuple(padding[0]), (left, outputs - x.shape[2] - left + size - 1))
    is_longer = outputs > x.shape[2] and strides[0] == 1
    function = _longer_rows if is_longer else _conv
    y = function(_inside(x), wide, (strides[0], 1), pads, precision)
    return _inside(y) if strides[1] == 1 else y


def _conv(x: Array, kernel: Array, *window: Any) -> Array:
    strides, padding, precision = window
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=numbers, precision=precision
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _longer_rows(x: Array, kernel: Array, *window: Any) -> Array:
    """`_conv` whose rows of outputs are longer than those of inputs.

    XLA would compute the kernel's gradient from a reversed copy of the cotangents,
    because these are more than the inputs. Here nothing but that gradient is reversed.
    """
    return _conv(x, kernel, *window)


def _longer_rows_forward(
    x: Array, kernel: Array, *window: Any
) -> tuple[Array, tuple[Array, Array]]:
    return _conv(x, kernel, *window), (x, kernel)


def _longer_rows_backward(
    strides: tuple[int, int],
    padding: tuple[tuple[int, int], ...],
    precision: lax.PrecisionLike,
    given: tuple[Array, Array],
    g: Array,
) -> tuple[Array, Array]:
    x, kernel = given
    window = strides, padding, precision
    sides = zip(kernel.shape, padding, x.shape[1:3], g.shape[1:3], strict=False)
    pads = [
        (side - 1 - before, inputs - outputs + before)
        for side, (before, _), inputs, outputs in sides
    ]
    # features in and out are the images, the batch is summed over
    numbers = ("CHWN", "IHWO", "HWCN")
    dkernel = lax.conv_general_dilated(
        g, x, strides, pads, dimension_numbers=numbers, precision=precision
    )
    (dx,) = jax.vjp(lambda x: _conv(x, kernel, *window), x)[1](g)
    return dx, dkernel[::-1, ::-1]


_longer_rows.defvjp(_longer_rows_forward, _longer_rows_backward)
