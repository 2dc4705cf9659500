"""Small networks: a `body`, inputs to K features, and a `head`, the last linear
layer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers
from fedjax_pfl.types import Array

Shape = tuple[int, ...]
# of CNN-k: channels of the second convolution, width of the first linear layer
# (pFedAFM, Table 1). The 3.81 MiB printed there for CNN-4 would be a width of 753; its
# code has 800.
AFM = {
    "cnn1": (32, 2000),
    "cnn2": (16, 2000),
    "cnn3": (32, 1000),
    "cnn4": (32, 800),
    "cnn5": (32, 500),
}


class Net(nnx.Module):
    """A body, x [B, *input] -> h [B, K], and a head, h -> logits [B, C]."""

    def __init__(self, body: nnx.Module, head: nnx.Module):
        self.body, self.head = body, head

    def __call__(self, x: Array, **kwargs: Any) -> Array:
        return self.head(self.body(x, **kwargs))


class Dense(nnx.Module):
    """Linear layers with ReLU of the given widths on the flat input."""

    def __init__(self, din: int, widths: Sequence[int], rngs: nnx.Rngs):
        sizes = (din, *widths)
        self.layers = nnx.List(
            [layers.linear(a, b, rngs) for a, b in zip(sizes[:-1], widths, strict=True)]
        )

    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


class Conv(nnx.Module):
    """Blocks of 5x5 convolution, optional batch norm, ReLU and 2x2 pooling, then linear
    layers with ReLU."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        channels: Shape,
        paddings: Shape,
        widths: Shape,
        rngs: nnx.Rngs,
        norm: bool = False,
    ):
        height, width = pooled_size(name, shape, paddings)
        sizes = (shape[-1], *channels)
        self.convs = nnx.List(
            [
                layers.conv(sizes[i], sizes[i + 1], 5, padding, rngs)
                for i, padding in enumerate(paddings)
            ]
        )
        self.norms = nnx.List(
            [layers.BatchNorm(c, rngs=rngs) for c in channels] if norm else []
        )
        self.dense = Dense(height * width * channels[-1], widths, rngs)

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = False
    ) -> Array:
        for i, conv in enumerate(self.convs):
            if self.norms:  # ReLU after the pool: the same, on a quarter of the pixels
                x = jax.nn.relu(layers.max_pool(self.norms[i](conv(x), mask, train)))
            else:
                x = layers.conv_relu_pool(conv, x)
        return self.dense(x)


class ConvDropout(nnx.Module):
    """Two 3x3 convolutions of 32 and 64 with ReLU, one 2x2 pooling, dropout, a linear
    layer with ReLU, dropout."""

    def __init__(
        self, shape: Shape, width: int, rates: tuple[float, float], rngs: nnx.Rngs
    ):
        height, wide = ((size - 4) // 2 for size in shape[:2])
        self.convs = nnx.List(
            [layers.conv(shape[-1], 32, 3, 0, rngs), layers.conv(32, 64, 3, 0, rngs)]
        )
        self.dense = Dense(height * wide * 64, (width,), rngs)
        self.drops = nnx.List([nnx.Dropout(rate) for rate in rates])

    def __call__(
        self, x: Array, train: bool = False, rngs: nnx.Rngs | None = None
    ) -> Array:
        def drop(i: int, h: Array) -> Array:
            return self.drops[i](h, deterministic=not train or rngs is None, rngs=rngs)

        x = jax.nn.relu(self.convs[0](x))
        x = drop(0, layers.conv_relu_pool(self.convs[1], x))
        return drop(1, self.dense(x))


def check_images(name: str, shape: Shape, least: int = 1) -> None:
    """Raises InputError unless inputs are images of `least` pixels per side or more."""
    if len(shape) != 3 or min(shape[:2]) < least:
        raise InputError(
            f"Model {name!r} needs images [height, width, channels] of at least "
            f"{least}x{least} pixels, got input shape {tuple(shape)}."
        )


def pooled_size(name: str, shape: Shape, paddings: Shape) -> tuple[int, int]:
    """Returns height and width after blocks of 5x5 convolution and 2x2 pooling, at
    least one pixel."""

    def after(size: int) -> int:
        for padding in paddings:
            size = max(size + 2 * padding - 4, 0) // 2
        return size

    check_images(name, shape, next(size for size in range(1, 1000) if after(size)))
    return after(shape[0]), after(shape[1])


def linear(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """Softmax regression: the flat input is the feature vector, K = its size."""
    size = math.prod(input_shape)
    return Net(Dense(size, (), rngs), layers.linear(size, num_classes, rngs))


def mlp(input_shape: Shape, num_classes: int, rngs: nnx.Rngs, hidden: int = 64) -> Net:
    """Multilayer perceptron with one hidden ReLU layer, K = hidden = 64."""
    return Net(
        Dense(math.prod(input_shape), (hidden,), rngs),
        layers.linear(hidden, num_classes, rngs),
    )


def _lenet(
    name: str,
    shape: Shape,
    num_classes: int,
    rngs: nnx.Rngs,
    padding: int,
    norm: bool = False,
) -> Net:
    body = Conv(name, shape, (6, 16), (padding, 0), (120, 84), rngs, norm)
    return Net(body, layers.linear(84, num_classes, rngs))


def lenet(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """LeNet-5 with 2 pixels of padding: 5x5 convolutions 6 and 16, linear 120 and 84, K
    = 84."""
    return _lenet("lenet", input_shape, num_classes, rngs, 2)


def lenet_valid(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """LeNet without padding, as in the KT-pFL family, K = 84."""
    return _lenet("lenet_valid", input_shape, num_classes, rngs, 0)


def lenet_bn(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """LeNet-5 with 2 pixels of padding and batch norm after each convolution, K =
    84."""
    return _lenet("lenet_bn", input_shape, num_classes, rngs, 2, norm=True)


def _cnn(
    name: str, shape: Shape, num_classes: int, rngs: nnx.Rngs, padding: int
) -> Net:
    body = Conv(name, shape, (32, 64), (padding, padding), (512,), rngs)
    return Net(body, layers.linear(512, num_classes, rngs))


def cnn(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """The 4-layer CNN of FedCP: 5x5 convolutions 32 and 64 without padding, linear 512,
    K = 512."""
    return _cnn("cnn", input_shape, num_classes, rngs, 0)


def cnn_same(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """The CNN of McMahan et al., 2017: as cnn, with SAME padding, K = 512."""
    return _cnn("cnn_same", input_shape, num_classes, rngs, 2)


def _afm(name: str, channels: int, width: int) -> Callable[[Shape, int, nnx.Rngs], Net]:
    """One of pFedAFM's CNN-1 to CNN-5."""

    def make(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
        body = Conv(name, input_shape, (16, channels), (0, 0), (width, 500), rngs)
        return Net(body, layers.linear(500, num_classes, rngs))

    make.__name__ = name
    sizes = (
        f"5x5 convolutions 16 and {channels} without padding, linear {width} and 500"
    )
    make.__doc__ = f"CNN-{name[-1]} of pFedAFM: {sizes}, K = 500."
    return make


AFM_NETS = tuple(_afm(name, *sizes) for name, sizes in AFM.items())


def cnn_dropout(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """The CNN with dropout (0.25, 0.5) of Reddi et al., 2021, for EMNIST: 3x3
    convolutions 32 and 64, K = 128."""
    check_images("cnn_dropout", input_shape, 6)
    return Net(
        ConvDropout(input_shape, 128, (0.25, 0.5), rngs),
        layers.linear(128, num_classes, rngs),
    )
