"""Images whose neighbouring pixels stand next to each other in the lanes of a TPU.

64 channels fill half of a register's 128 lanes. Two neighbours in a row, one after the
other in the last axis, fill all of them. A convolution of such pairs has kernels of
pairs, a quarter to a half of which is zero: the matrix unit would be as empty without
them.

Axes: B batch, H and W pixels, C and O channels in and out. Kernels are HWIO.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from fedjax_pfl.types import Array


def pairs(x: Array) -> Array:
    """Puts neighbours next to each other: [B, H, W, C] -> [B, H, W // 2, 2 C], W
    even."""
    return x.reshape(*x.shape[:2], x.shape[2] // 2, -1)


def is_paired(x: Array, channels: int) -> bool:
    """True if the last axis of an image holds two pixels of that many channels."""
    return x.shape[-1] == 2 * channels


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
      x: [B, H, W // 2, 2 C].
      kernel: [kh, kw, C, O], kw odd.
      strides: of H, and 1 or 2 of W.
      padding: (before, after) of H, and (kw - 1) // 2 of W.
      precision: of the products.

    Returns:
      [B, H', W // 2, 2 O] in pairs, with stride 2 [B, H', W // 2, O] without.
    """
    width, before = kernel.shape[1], padding[1][0]
    assert padding[1] == (before, before) and width == 2 * before + 1
    # pairs before and after that of the first output, and its offset in them
    left = -(-before // 2)
    offsets = [2 * left - before + i for i in range(2 // strides[1])]
    right = (offsets[-1] + width - 1) // 2 - left
    size = 2 * (left + 1 + right)
    # each output's kernel stands elsewhere in the same window of pixels
    parts = [
        jnp.pad(kernel, ((0, 0), (i, size - width - i), (0, 0), (0, 0)))
        for i in offsets
    ]
    channels, out = kernel.shape[2:]
    wide = jnp.concatenate(parts, -1).reshape(
        len(kernel), size // 2, 2 * channels, out * len(parts)
    )
    return lax.conv_general_dilated(
        x,
        wide,
        (strides[0], 1),
        (padding[0], (left, right)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision,
    )
