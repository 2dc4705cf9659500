"""MobileNetV2 for small images (Sandler et al., MobileNetV2: inverted residuals and
linear bottlenecks, CVPR 2018)."""

from typing import Any

import jax
from flax import nnx

from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Net, Shape, check_images
from fedjax_pfl.types import Array

# expansion, channels, blocks and stride of the first block of each stage (Table 2)
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM, LAST = 32, 1280  # channels


class Normed(nnx.Module):
    """A convolution without bias and batch norm, then ReLU6 unless it is linear."""

    def __init__(
        self,
        cin: int,
        cout: int,
        side: int,
        rngs: nnx.Rngs,
        strides: int = 1,
        groups: int = 1,
        linear: bool = False,
    ):
        init: Any = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        self.conv = layers.conv(
            cin,
            cout,
            side,
            side // 2,
            rngs,
            strides,
            use_bias=False,
            kernel_init=init,
            feature_group_count=groups,
        )
        self.norm = layers.BatchNorm(cout, rngs=rngs)
        self.linear = linear

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        h = self.norm(self.conv(x), mask, train)
        return h if self.linear else jax.nn.relu6(h)


class InvertedResidual(nnx.Module):
    """1x1 expansion, depthwise 3x3, linear 1x1 projection; plus the input where the
    shape is the same."""

    def __init__(
        self, cin: int, cout: int, expansion: int, strides: int, rngs: nnx.Rngs
    ):
        wide = cin * expansion
        parts = [Normed(cin, wide, 1, rngs)] if expansion > 1 else []
        parts.append(Normed(wide, wide, 3, rngs, strides, groups=wide))
        parts.append(Normed(wide, cout, 1, rngs, linear=True))
        self.parts = nnx.List(parts)
        self.adds = strides == 1 and cin == cout

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        h = x
        for part in self.parts:
            h = part(h, mask, train)
        return x + h if self.adds else h


class MobileNet(nnx.Module):
    """Stem, inverted residuals, a 1x1 convolution and the mean over pixels: images [B,
    H, W, C] -> [B, 1280]."""

    def __init__(self, channels: int, small: bool, rngs: nnx.Rngs):
        self.stem = Normed(channels, STEM, 3, rngs, 1 if small else 2)
        blocks, width = [], STEM
        for i, (expansion, cout, count, first) in enumerate(STAGES):
            for j in range(count):
                strides = first if j == 0 and not (small and i == 1) else 1
                blocks.append(InvertedResidual(width, cout, expansion, strides, rngs))
                width = cout
        self.blocks = nnx.List(blocks)
        self.last = Normed(width, LAST, 1, rngs)

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        h = self.stem(x, mask, train)
        for block in self.blocks:
            h = block(h, mask, train)
        return self.last(h, mask, train).mean(axis=(1, 2))


def mobilenet_v2(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """MobileNetV2 of width 1, K = 1280; below 64 pixels a side stem and second stage
    have stride 1."""
    check_images("mobilenet_v2", input_shape, 8)
    body = MobileNet(input_shape[-1], min(input_shape[:2]) < 64, rngs)
    return Net(body, layers.linear(LAST, num_classes, rngs))
