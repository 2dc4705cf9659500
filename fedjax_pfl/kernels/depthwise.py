"""Depthwise convolution as shifted multiply-adds.

Axes: B batch, H and W pixels, C channels. Images are NHWC, kernels [kh, kw, 1, C].
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from fedjax_pfl.types import Array


def depthwise_conv(
    x: Array, kernel: Array, strides: Sequence[int], pads: Sequence[tuple[int, int]]
) -> Array:
    """Convolves each channel with a kernel of its own, as a sum of shifted copies of
    the image.

    Measured against XLA's convolution with feature_group_count = C, forward and both
    gradients in a fori_loop, float32, 3x3 kernels, batch 16, medians in one process on
    one core of a noisy machine: 75 times as fast (16x16 pixels, 58 channels), 150 (8x8,
    116), 170 (4x4, 232); with stride 2, 42 (32x32, 24), 73 (32x32, 58), 180 (16x16,
    116). Gradients written by hand and sums over one axis at a time were as fast within
    the noise.

    Args:
      x: [B, H, W, C].
      kernel: [kh, kw, 1, C].
      strides: of H and W.
      pads: (before, after) of H and W.

    Returns:
      [B, H', W', C], in x's type; sums are of float32 at least.
    """
    (kh, kw, _, channels), dtype = kernel.shape, x.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    x = lax.pad(
        x.astype(wide),
        jnp.zeros((), wide),
        [(0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)],
    )
    spans = [
        (size - side) // by * by + 1
        for size, side, by in zip(x.shape[1:3], (kh, kw), strides, strict=True)
    ]
    steps = (1, *strides, 1)
    taps = jnp.unstack(kernel.astype(wide).reshape(kh * kw, 1, 1, 1, channels))
    ends: Callable[[int, int], tuple[int, ...]] = lambda i, j: (
        len(x),
        i + spans[0],
        j + spans[1],
        channels,
    )
    seen = [
        lax.slice(x, (0, i, j, 0), ends(i, j), steps)
        for i, j in itertools.product(range(kh), range(kw))
    ]
    return functools.reduce(operator.add, map(operator.mul, seen, taps)).astype(dtype)
