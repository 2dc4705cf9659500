"""Residual networks of basic blocks (He et al., Deep residual learning for image
recognition, CVPR 2016)."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from fedjax_pfl.errors import choose
from fedjax_pfl.kernels import packed, paired
from fedjax_pfl.kernels.convolution import current_form
from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Dense, Net, Shape, check_images
from fedjax_pfl.types import Array

Norm = Callable[..., nnx.Module]
NORMS: dict[str, Norm] = {"batch": layers.BatchNorm, "group": layers.GroupNorm}
# side and stride of the first kernel; imagenet pools after it
STEMS = {"cifar": (3, 1), "imagenet": (7, 2)}
# of torchvision's convolutions
HE = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
WIDTHS = (64, 128, 256, 512)


class Block(nnx.Module):
    """conv3x3, norm, ReLU, conv3x3, norm, plus the input or, where the shape changes,
    its 1x1 projection; ReLU."""

    def __init__(
        self,
        cin: int,
        cout: int,
        strides: int,
        norm: Norm,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        self.conv1 = layers.conv(
            cin, cout, 3, 1, rngs, strides, use_bias=False, **kwargs
        )
        self.norm1 = norm(cout, rngs=rngs)
        self.conv2 = layers.conv(cout, cout, 3, 1, rngs, use_bias=False, **kwargs)
        self.norm2 = norm(cout, rngs=rngs)
        self.projects = strides != 1 or cin != cout
        if self.projects:
            self.shortcut = layers.conv(
                cin, cout, 1, 0, rngs, strides, use_bias=False, **kwargs
            )
            self.shortcut_norm = norm(cout, rngs=rngs)

    def convolutions(self) -> list[nnx.Module]:
        """Returns the two or three convolutions."""
        return [self.conv1, self.conv2, *([self.shortcut] if self.projects else [])]

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        h = jax.nn.relu(self.norm1(self.conv1(x), mask, train))
        h = self.norm2(self.conv2(h), mask, train)
        return jax.nn.relu(
            h
            + (
                self.shortcut_norm(self.shortcut(x), mask, train)
                if self.projects
                else x
            )
        )


class ResNet(nnx.Module):
    """A stem, stages of two basic blocks each, the mean over pixels, and linear layers
    with ReLU of given widths.

    The first block of every stage but the first has stride 2. Images [B, H, W, C] ->
    [B, K].
    """

    def __init__(
        self,
        channels: int,
        widths: Sequence[int],
        rngs: nnx.Rngs,
        norm: str = "batch",
        stem: str = "cifar",
        dense: Sequence[int] = (),
    ):
        make = NORMS[choose("norm", norm, NORMS)]
        side, strides = STEMS[choose("stem", stem, STEMS)]
        init: dict[str, Any] = {} if stem == "cifar" else {"kernel_init": HE}
        self.pools = stem == "imagenet"
        self.stem = layers.conv(
            channels, widths[0], side, side // 2, rngs, strides, use_bias=False, **init
        )
        self.norm = make(widths[0], rngs=rngs)
        firsts = [
            (a, b, 1 + (i > 0))
            for i, (a, b) in enumerate(itertools.pairwise((widths[0], *widths)))
        ]
        shapes = [shape for a, b, s in firsts for shape in ((a, b, s), (b, b, 1))]
        self.blocks = nnx.List([Block(*shape, make, rngs, **init) for shape in shapes])
        self.dense = Dense(widths[-1], dense, rngs)

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        x = paired.pairs(x) if self._has_pairs(x) else x
        x = jax.nn.relu(self.norm(self.stem(x), mask, train))
        x = layers.max_pool_3(x) if self.pools else x
        for block in self.blocks:
            x = block(x, mask, train)
        return self.dense(x.mean((1, 2)))

    def _has_pairs(self, x: Array) -> bool:
        """Returns True if the stem and the first stage compute on `paired.pairs`.

        Their channels fill at most half of a TPU's lanes. The stride of the second
        stage splits the pairs.
        """
        first = [self.stem, *(c for b in self.blocks[:3] for c in b.convolutions())]
        norms = [self.norm, *(n for b in self.blocks[:2] for n in (b.norm1, b.norm2))]
        return (
            current_form() == "packed"
            and not self.pools
            and len(self.blocks) > 2
            and 2 * self.stem.out_features <= packed.LANES
            and x.shape[2] % 4 == 0
            # adapters add to a convolution
            and all(type(c) is nnx.Conv for c in first)
            and all(type(n) is layers.BatchNorm for n in norms)
        )


def resnet(
    input_shape: Shape,
    num_classes: int,
    rngs: nnx.Rngs,
    *,
    widths: Sequence[int] = WIDTHS,
    norm: str = "batch",
    stem: str = "cifar",
    feature_dim: int | None = None,
) -> Net:
    """Makes a residual network with two basic blocks a stage, by default ResNet-18.

    Args:
      input_shape: (height, width, channels) of an image.
      num_classes: C.
      rngs: for the initialisation: PyTorch's default, and with the imagenet stem
        torchvision's.
      widths: channels of each stage; K is the last.
      norm: one of batch (masked statistics), group (32 groups, Wu & He 2018: no running
        ones, and examples do not mix).
      stem: one of cifar (3x3 convolution), imagenet (7x7 with stride 2, then 3x3
        pooling with stride 2: torchvision).
      feature_dim: width of a linear layer with ReLU before the head, which is then K.

    Raises:
      InputError: for inputs that are not images, or an unknown norm or stem.
    """
    check_images("resnet", input_shape)
    dense = () if feature_dim is None else (feature_dim,)
    body = ResNet(input_shape[-1], widths, rngs, norm, stem, dense)
    return Net(body, layers.linear((*widths, *dense)[-1], num_classes, rngs))


def resnet18(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """ResNet-18 for small images: 3x3 stem without pooling, batch norm, K = 512."""
    return resnet(input_shape, num_classes, rngs)


def resnet18_gn(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """ResNet-18 for small images with group norm instead of batch norm, K = 512."""
    return resnet(input_shape, num_classes, rngs, norm="group")


def resnet18_50(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """ResNet-18 for small images with a linear layer of 50 before the head, as in
    pFedC, K = 50."""
    return resnet(input_shape, num_classes, rngs, feature_dim=50)


def resnet18_imagenet(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """ResNet-18 as in torchvision: 7x7 stem with stride 2 and pooling, batch norm, K =
    512."""
    return resnet(input_shape, num_classes, rngs, stem="imagenet")
