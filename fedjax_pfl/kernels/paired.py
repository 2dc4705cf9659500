"""Convolutions of images whose adjacent pixels are joined in the lanes of a TPU.

64 channels fill half of a register's 128 lanes. Two adjacent pixels of a row, joined in
the last axis, fill all of them. Aligned pairs are pixels 0 and 1, 2 and 3, and so on.
Shifted pairs are pixels -1 and 0, 1 and 2, and so on, one pair more.

Two adjacent outputs of a kernel 3 pixels wide depend on 4 pixels. These are two whole
pairs if the pairs of the outputs are shifted against those of the inputs. A convolution
therefore maps aligned pairs to shifted ones and shifted pairs to aligned ones. From
aligned to aligned pairs its kernel would span 6 pixels.

The first and the last shifted pair have a pixel outside the image. A convolution writes
0 there and ignores what it finds there.

Axes: B batch, H and W pixels, P pairs in a row, C and O channels in and out. Kernels
are HWIO. W is a multiple of 4, so that P is odd for shifted pairs only.
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
    """Joins pixels to aligned pairs: [B, H, W, C] -> [B, H, W // 2, 2 C]."""
    assert x.shape[2] % 4 == 0
    return x.reshape(*x.shape[:2], x.shape[2] // 2, -1)


def is_paired(x: Array, channels: int) -> bool:
    """Returns True if the last axis of an image has two pixels of `channels`."""
    return x.ndim == 4 and x.shape[-1] == 2 * channels


def pixels(x: Array) -> int:
    """Returns H W, the number of pixels of an image of pairs."""
    return x.shape[1] * 2 * (x.shape[2] - _shift(x))


def sum_of_both(v: Array) -> Array:
    """Sums over the two pixels of a pair: [2 C] -> [C]."""
    return _product(v, np.tile(np.eye(len(v) // 2), (2, 1)))


def for_both(v: Array) -> Array:
    """Repeats values for the two pixels of a pair: [C] -> [2 C]."""
    return _product(v, np.tile(np.eye(len(v)), 2))


def _product(v: Array, matrix: np.ndarray) -> Array:
    # Exact: the factors are 0 and 1. XLA computes the products of two vectors in one
    # operation, where to join or split lanes takes one for each of them.
    return jnp.dot(v[None], matrix.astype(v.dtype), precision="highest")[0]


def _shift(x: Array) -> int:
    return x.shape[2] % 2


def _inside(x: Array) -> Array:
    """Returns x with 0 outside the image."""
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
    """Computes a convolution of pairs whose rows have as many outputs as inputs, or
    half as many with stride 2. It has derivatives in reverse mode only.

    Args:
      x: [B, H, P, 2 C].
      kernel: [kh, kw, C, O], kw odd.
      strides: of H, and 1 or 2 of W.
      padding: (before, after) of H, and (kw - 1) // 2 of W.
      precision: of the products.

    Returns:
      Pairs [B, H', P', 2 O], shifted against those of x if (kw - 1) // 2 is odd; with
      stride 2 pixels [B, H', W // 2, O].
    """
    width, before = kernel.shape[1], padding[1][0]
    assert padding[1] == (before, before) and width == 2 * before + 1
    shift = _shift(x)
    # pixels of the first pair of outputs in front of the image
    out = (shift + before) % 2 if strides[1] == 1 else 0
    outputs = x.shape[2] - shift + out
    # pairs of padding, and the first output's offset in its window
    left = -(-(before + out - shift) // 2)
    first = 2 * left + shift - out - before
    size = -(-(first + width + (strides[1] == 1)) // 2)
    # the kernels of both outputs have different offsets in the same window
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
    """Computes `_conv` where rows of outputs are longer than those of inputs.

    For the kernel's gradient XLA would reverse the cotangents, because they are larger
    than the inputs. Its own gradient reverses the result, which is small.
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
