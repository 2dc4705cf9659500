"""Blocks of convolution, bias, pooling and ReLU for a GPU.

The four values of a pooling window are one axis: maximum, bias and ReLU are one pass
over them, and the gradient is one selection. Of an image with few channels the patches
are gathered by a constant index, once for each window.

Axes: B batch, H and W pixels, C and O channels in and out. Images are NHWC, kernels
HWIO.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.kernels.convolution import conv_general_dilated
from fedjax_pfl.kernels.pooling import NONE, largest
from fedjax_pfl.types import Array

FEW = 4  # channels of an image, at most


def conv_relu_pool(x: Array, kernel: Array, bias: Array, padding: int) -> Array:
    """Computes relu(max_pool(conv(x, kernel) + bias)) for a convolution of stride 1 and
    windows of 2x2; the bias is added after the pooling.

    Args:
      x: [B, H, W, C].
      kernel: [kh, kw, C, O].
      bias: [O].
      padding: pixels on every side.

    Returns:
      [B, H' // 2, W' // 2, O].
    """
    if x.shape[-1] <= FEW:
        return _relu_of_largest(_by_patches(x, kernel, padding), bias)
    pads = [(padding, padding)] * 2
    y = conv_general_dilated(
        x, kernel, (1, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return _relu_of_largest(windows(y), bias)


def windows(y: Array) -> Array:
    """y [B, H, W, O] -> the values of its 2x2 windows, [B, H // 2, W // 2, 4, O]."""
    batch, height, width, out = y.shape
    high, wide = height // 2, width // 2
    y = y[:, : high * 2, : wide * 2].reshape(batch, high, 2, wide, 2, out)
    return y.swapaxes(2, 3).reshape(batch, high, wide, 4, out)


def _by_patches(x: Array, kernel: Array, padding: int) -> Array:
    """The convolution as one product with stride 2: a window is larger by one, and has
    the kernel at four offsets.

    A third as many patches as with stride 1. Returns what `windows` returns.
    """
    kh, kw, _, out = kernel.shape
    x = jnp.pad(x, ((0, 0), *[(padding, padding)] * 2, (0, 0)))
    offsets = [((i, 1 - i), (j, 1 - j), (0, 0), (0, 0)) for i in (0, 1) for j in (0, 1)]
    kernels = jnp.stack([jnp.pad(kernel, offset) for offset in offsets], axis=3)
    index = _index(x.shape[1:], kh + 1, kw + 1)  # [H', W', (kh + 1) (kw + 1) C]
    flat = x.reshape(len(x), -1)
    patches = flat.at[:, index].get(mode="promise_in_bounds")
    y = jnp.dot(patches.reshape(-1, index.shape[-1]), kernels.reshape(-1, 4 * out))
    return y.reshape(len(x), *index.shape[:2], 4, out)


@functools.cache
def _index(shape: tuple[int, ...], high: int, wide: int) -> np.ndarray:
    """The positions in a flat image of the pixels of windows with stride 2."""
    pixels = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    rows, columns = shape[0] - high + 1, shape[1] - wide + 1
    parts = [
        pixels[i : i + rows : 2, j : j + columns : 2]
        for i in range(high)
        for j in range(wide)
    ]
    return np.concatenate(parts, axis=-1)


@jax.custom_jvp
def _relu_of_largest(y: Array, bias: Array) -> Array:
    """`pooling.relu_of_largest` of y [B, H, W, 4, O], whose gradient is one array."""
    return largest(jnp.unstack(y, axis=3), bias[None, None, None])[0]


@_relu_of_largest.defjvp
def _relu_of_largest_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    y, bias = primals
    value, which = largest(jnp.unstack(y, axis=3), bias[None, None, None])
    return value, jax.checkpoint(_route, prevent_cse=False)(which, *tangents)


def _route(which: Array, dy: Array, dbias: Array) -> Array:
    values = jnp.arange(4, dtype=jnp.uint8).reshape(1, 1, 1, 4, 1)
    moved = jnp.where(which < NONE, dbias[None, None, None], 0)
    return jnp.sum(jnp.where(which[:, :, :, None] == values, dy, 0), axis=3) + moved
