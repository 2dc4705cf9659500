"""ShuffleNetV2 1x for small images (Ma et al., ShuffleNet V2, ECCV 2018)."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Net, Shape, check_images
from fedjax_pfl.types import Array

STEM, LAST = 24, 1024
STAGES = ((116, 4), (232, 8), (464, 4))  # channels out and units of each stage


class ConvNorm(nnx.Module):
    """A convolution without bias, batch norm and, if asked for, ReLU."""

    def __init__(
        self,
        cin: int,
        cout: int,
        side: int,
        rngs: nnx.Rngs,
        strides: int = 1,
        relu: bool = True,
        groups: int = 1,
    ):
        self.conv = layers.conv(
            cin,
            cout,
            side,
            side // 2,
            rngs,
            strides,
            use_bias=False,
            feature_group_count=groups,
        )
        self.norm, self.relu = layers.BatchNorm(cout, rngs=rngs), relu

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        x = self.norm(self.conv(x), mask, train)
        return jax.nn.relu(x) if self.relu else x


class Unit(nnx.Module):
    """Two branches of half the channels out each, joined and shuffled: [B, H, W, C] ->
    [B, H', W', O].

    The right branch is 1x1, depthwise 3x3, 1x1. With stride 1 the channels are split
    between the branches and the left half passes unchanged; with stride 2 both branches
    see all of them and the left one is depthwise 3x3, 1x1.
    """

    def __init__(self, cin: int, cout: int, strides: int, rngs: nnx.Rngs):
        half, self.down = cout // 2, strides > 1
        depthwise: Callable[[int], ConvNorm] = lambda c: ConvNorm(
            c, c, 3, rngs, strides, relu=False, groups=c
        )
        seen = cin if self.down else half
        self.right = nnx.List(
            [
                ConvNorm(seen, half, 1, rngs),
                depthwise(half),
                ConvNorm(half, half, 1, rngs),
            ]
        )
        self.left = nnx.List(
            [depthwise(cin), ConvNorm(cin, half, 1, rngs)] if self.down else []
        )

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        left, right = (x, x) if self.down else jnp.split(x, 2, axis=-1)
        for layer in self.left:
            left = layer(left, mask, train)
        for layer in self.right:
            right = layer(right, mask, train)
        return shuffle(left, right)


def shuffle(left: Array, right: Array) -> Array:
    """Shuffles the channels of two groups: two halves [..., C], joined alternately to
    [..., 2 C]."""
    return jnp.stack([left, right], axis=-1).reshape(*left.shape[:-1], -1)


class ShuffleNet(nnx.Module):
    """A stem, stages of units, a 1x1 convolution and the mean over pixels.

    Each stage is (channels out, units), and its first unit halves the image. `last` is
    K. A ReLU after the stem's batch norm is an option: KT-pFL's code has none. Images
    [B, H, W, C] -> [B, K]."""

    def __init__(
        self,
        channels: int,
        rngs: nnx.Rngs,
        stages: Sequence[tuple[int, int]] = STAGES,
        last: int = LAST,
        stem_relu: bool = False,
    ):
        self.stem = ConvNorm(channels, STEM, 3, rngs, relu=stem_relu)
        widths = (STEM, *(width for width, _ in stages))
        self.units = nnx.List(
            [
                Unit(widths[i], width, 2, rngs)
                if first
                else Unit(width, width, 1, rngs)
                for i, (width, count) in enumerate(stages)
                for first in [True, *[False] * (count - 1)]
            ]
        )
        self.last = ConvNorm(widths[-1], last, 1, rngs)

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        for layer in (self.stem, *self.units, self.last):
            x = layer(x, mask, train)
        return x.mean((1, 2))


def shufflenet(
    input_shape: Shape, num_classes: int, rngs: nnx.Rngs, stem_relu: bool = False
) -> Net:
    """ShuffleNetV2 1x for small images: 3x3 stem of stride 1 without pooling, batch
    norm, K = 1024."""
    check_images("shufflenet", input_shape)
    return Net(
        ShuffleNet(input_shape[-1], rngs, stem_relu=stem_relu),
        layers.linear(LAST, num_classes, rngs),
    )
