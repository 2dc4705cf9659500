"""Strided 4x4 convolutions from an image to one pixel: the backbone of FedDVA and the
CNN of its comparisons."""

import math
from collections.abc import Sequence

import jax
from flax import nnx

from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Dense, Net, Shape
from fedjax_pfl.types import Array

# the published channels; for 64x64 pixels (32, 64, 128, 256, 512)
HIDDEN = (64, 128, 256, 512)
# of every kernel; of the image that the last convolution maps to one pixel
SIDE, SMALLEST = 4, 4


class Backbone(nnx.Module):
    """4x4 convolutions of given channels, each with batch norm and LeakyReLU: [B, H, W,
    C] -> [B, hidden[-1]].

    All have stride 2 but the last, which maps 4x4 pixels to one; the first pads smaller
    images up."""

    def __init__(self, shape: Shape, hidden: Sequence[int], rngs: nnx.Rngs):
        paddings = (first_padding(shape, hidden), *[1] * (len(hidden) - 2), 0)
        strides = (*[2] * (len(hidden) - 1), 1)
        sizes = zip((shape[-1], *hidden), hidden, paddings, strides, strict=False)
        self.convs = nnx.List(
            [layers.conv(a, b, SIDE, pad, rngs, stride) for a, b, pad, stride in sizes]
        )
        self.norms = nnx.List([layers.BatchNorm(width, rngs=rngs) for width in hidden])

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.leaky_relu(norm(conv(x), mask, train))
        return x.reshape(len(x), -1)


class Features(nnx.Module):
    """A backbone and linear layers on it."""

    def __init__(self, backbone: Backbone, dense: Dense):
        self.backbone, self.dense = backbone, dense

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        return self.dense(self.backbone(x, mask, train))


def first_padding(shape: Shape, hidden: Sequence[int]) -> int:
    """Returns the padding of the first convolution that leads to 4x4 pixels before the
    last one.

    Raises:
      InputError: not a square image of even side, or a side that these layers do not
        reduce to 4 pixels.
    """
    full: int = SMALLEST * 2 ** (len(hidden) - 1)
    if (
        len(shape) != 3
        or shape[0] != shape[1]
        or shape[0] % 2
        or not full - 4 <= shape[0] <= full
    ):
        raise InputError(
            f"{len(hidden)} strided 4x4 convolutions need square images of {full - 4}, "
            f"{full - 2} or {full} pixels per side, got input shape {tuple(shape)}."
        )
    return 1 + (full - shape[0]) // 2


def channels(shape: Shape, last: int = HIDDEN[-1]) -> tuple[int, ...]:
    """Returns the channels of the convolutions that lead from an image to one pixel.

    Args:
      shape: (height, width, channels) of an image.
      last: channels of the last one; each before it has half. 512 gives the published
        ones for 28, 32 and 64 pixels per side.
    """
    count = (
        max(2, 1 + math.ceil(math.log2(max(shape[0], 1) / SMALLEST)))
        if len(shape) == 3
        else 4
    )
    return tuple(last // 2 ** (count - 1 - i) for i in range(count))


def cnn_dva(
    input_shape: Shape, num_classes: int, rngs: nnx.Rngs, hidden: Sequence[int] = HIDDEN
) -> Net:
    """The classifier of FedDVA's comparisons: 4x4 convolutions 64 to 512 with batch
    norm, linear 256, K = 256."""
    width = hidden[-1]
    body = Features(
        Backbone(tuple(input_shape), hidden, rngs), Dense(width, (width // 2,), rngs)
    )
    return Net(body, layers.linear(width // 2, num_classes, rngs))


def cnn_dva_small(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """`cnn_dva` with a quarter of its channels, 16 to 128, linear 64, K = 64 (FedDVA
    with hidden=128)."""
    return cnn_dva(
        input_shape, num_classes, rngs, tuple(width // 4 for width in HIDDEN)
    )
