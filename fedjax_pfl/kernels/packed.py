"""Convolutions of several clients next to each other in the lanes of a TPU.

A register of a TPU has 128 lanes, of which the channels of one small network fill a
fraction. Under `jax.vmap` the channels of P clients are joined, and their kernels are
the blocks of one block-diagonal kernel. Images are [H, W, B, P C]: windows over the
leading axes move nothing.

Axes: S clients, P of them at once, B batch, H and W pixels, C and O channels in and
out. Images are NHWC, kernels HWIO.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_pfl.kernels.pooling import relu_of_largest
from fedjax_pfl.kernels.vmapped import vmapped
from fedjax_pfl.types import Array

LANES = 128
FEW = 4  # clients whose kernels are joined one by one
IMAGE = 4  # channels of an image, at most


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
    return _block(padding)(x, kernel, bias)[0]


@functools.cache
def _block(padding: int) -> Callable[..., tuple[Array, ...]]:
    return vmapped(
        functools.partial(_one, padding=padding),
        functools.partial(_many, padding=padding),
    )


def _one(x: Array, kernel: Array, bias: Array, *, padding: int) -> tuple[Array]:
    x = x.transpose(1, 2, 0, 3)
    return (_pooled(x, kernel, bias, padding).transpose(2, 0, 1, 3),)


def _many(x: Array, kernel: Array, bias: Array, *, padding: int) -> tuple[Array]:
    count = side_by_side(*x.shape[:1], *kernel.shape[-2:])
    is_image = kernel.shape[-2] <= IMAGE

    def pack(x: Array, kernel: Array, bias: Array) -> Array:
        pooled = _pooled_in_blocks if is_image else _pooled
        y = pooled(_joined(x), block_diagonal(kernel), bias.reshape(-1), padding)
        return _split(y, count)

    if count == len(x):
        return (pack(x, kernel, bias),)
    grouped = [a.reshape(-1, count, *a.shape[1:]) for a in (x, kernel, bias)]
    y = jax.vmap(pack)(*grouped)
    return (y.reshape(-1, *y.shape[2:]),)


def _joined(x: Array) -> Array:
    """Joins the channels of clients: [P, B, H, W, C] -> [H, W, B, P C].

    The compiler's estimates prefer to join the leading axes of many clients, and the
    last ones of a few.
    """
    if len(x) <= FEW:
        x = x.transpose(2, 3, 1, 0, 4)
        return x.reshape(*x.shape[:3], -1)
    x = x.transpose(0, 4, 2, 3, 1)
    return x.reshape(-1, *x.shape[2:]).transpose(1, 2, 3, 0)


def _split(y: Array, count: int) -> Array:
    """Inverts `_joined`."""
    if count <= FEW:
        return y.reshape(*y.shape[:3], count, -1).transpose(3, 2, 0, 1, 4)
    y = y.transpose(3, 0, 1, 2)
    return y.reshape(count, -1, *y.shape[1:]).transpose(0, 4, 2, 3, 1)


def _pooled(x: Array, kernel: Array, bias: Array, padding: int) -> Array:
    """x [H, W, B, C] -> [H', W', B, O]."""
    numbers, pads = ("HWNC", "HWIO", "HWNC"), [(padding, padding)] * 2
    y = lax.conv_general_dilated(x, kernel, (1, 1), pads, dimension_numbers=numbers)
    window = (2, 2, 1, 1)
    y = lax.reduce_window(y, -jnp.inf, lax.max, window, window, "VALID")
    return jax.nn.relu(y + bias[None, None, None])


def _pooled_in_blocks(x: Array, kernel: Array, bias: Array, padding: int) -> Array:
    """The same for an image of few channels, as a convolution of its 2x2 blocks.

    The kernel is repeated at four offsets in a window that is larger by one or two:
    channels in fill four times as many lanes, and the values of a pooling window are
    four parts of the lanes.
    """
    out, pads, parts = kernel.shape[-1], [], []
    sides = [side // 2 * 2 + 2 for side in kernel.shape[:2]]
    for size, side, large in zip(x.shape, kernel.shape[:2], sides, strict=False):
        windows = (size + 2 * padding - side + 1) // 2
        pads.append((padding, 2 * (windows - 1) + large - size - padding, 0))
    x = lax.pad(x, jnp.zeros((), x.dtype), [*pads, (0, 0, 0), (0, 0, 0)])
    rest = sides[0] - kernel.shape[0], sides[1] - kernel.shape[1]
    lanes = (0, -out % LANES)
    for i in (0, 1):
        for j in (0, 1):
            offset = [(i, rest[0] - i), (j, rest[1] - j), (0, 0), lanes]
            parts.append(jnp.pad(kernel, offset))
    kernel, numbers = jnp.concatenate(parts, axis=3), ("HWNC", "HWIO", "HWNC")
    y = lax.conv_general_dilated(
        _blocks(x, 3), _blocks(kernel, 2), (1, 1), "VALID", dimension_numbers=numbers
    )
    return relu_of_largest([part[..., :out] for part in jnp.split(y, 4, axis=3)], bias)


def _blocks(x: Array, axis: int) -> Array:
    """Joins 2x2 pixels with the channels: [H, W, ...] -> [H / 2, W / 2, ...], the given
    axis 4 times as long."""
    high, wide, *rest = x.shape
    x = x.reshape(high // 2, 2, wide // 2, 2, *rest)
    order = [0, 2, 1, 3, 4, 5] if axis == 2 else [0, 2, 4, 1, 3, 5]
    rest[axis - 2] *= 4
    return x.transpose(order).reshape(high // 2, wide // 2, *rest)


def side_by_side(clients: int, channels: int, out: int) -> int:
    """Returns P, the clients that share the lanes: the largest divisor of `clients`
    with which the channels of a hidden layer's images fit."""
    most = max(1, LANES // (channels if channels > IMAGE else out))
    return max(p for p in range(1, min(most, clients) + 1) if clients % p == 0)


def block_diagonal(kernels: Array) -> Array:
    """Returns the kernel [kh, kw, P C, P O] with the kernels [P, kh, kw, C, O] on its
    diagonal."""
    count, *window, channels, out = kernels.shape
    if count <= FEW:
        rest = [(0, 0)] * 3
        rows = [
            jnp.pad(kernel, [*rest, (i * out, (count - 1 - i) * out)])
            for i, kernel in enumerate(kernels)
        ]
        return jnp.concatenate(rows, axis=2)
    joined = jnp.moveaxis(kernels, 0, 2).reshape(*window, count * channels, out)
    block = np.kron(np.eye(count), np.ones((channels, out)))
    # a product with ones: the gradient of a tile would split the lanes
    copies = np.tile(np.eye(out, dtype=joined.dtype), count)
    whole = jnp.matmul(joined, copies, precision=lax.Precision.HIGHEST)
    return jnp.where(block.astype(bool)[None, None], whole, 0)
