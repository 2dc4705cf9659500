"""AlexNet for small images (Krizhevsky et al., NeurIPS 2012), as in KT-pFL's
experiments."""

import jax
from flax import nnx

from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Net, Shape, check_images
from fedjax_pfl.types import Array

CHANNELS = (64, 192, 384, 256, 256)
POOLED = (0, 1, 4)  # the convolutions that are followed by pooling
WIDTH = 4096


class AlexNet(nnx.Module):
    """Five 3x3 convolutions with ReLU, three of them pooled, and two linear layers of
    4,096.

    The first convolution has stride 2. Dropout before each linear layer is active where
    `train` and `rngs` are given. Images [B, H, W, C] -> [B, 4096].
    """

    def __init__(self, shape: Shape, rngs: nnx.Rngs, rate: float = 0.5):
        height, width = (_pooled(size) for size in shape[:2])
        sizes = (shape[-1], *CHANNELS)
        strides = (2, 1, 1, 1, 1)
        self.convs = nnx.List(
            [
                layers.conv(sizes[i], sizes[i + 1], 3, 1, rngs, s)
                for i, s in enumerate(strides)
            ]
        )
        flat = height * width * CHANNELS[-1]
        self.dense = nnx.List(
            [layers.linear(flat, WIDTH, rngs), layers.linear(WIDTH, WIDTH, rngs)]
        )
        self.drops = nnx.List([nnx.Dropout(rate), nnx.Dropout(rate)])

    def __call__(
        self, x: Array, train: bool = False, rngs: nnx.Rngs | None = None
    ) -> Array:
        for i, conv in enumerate(self.convs):
            x = conv(x)
            # after the pool: the same, on fewer pixels
            x = jax.nn.relu(layers.max_pool(x) if i in POOLED else x)
        x = x.reshape(len(x), -1)
        for drop, layer in zip(self.drops, self.dense, strict=True):
            x = jax.nn.relu(
                layer(drop(x, deterministic=not train or rngs is None, rngs=rngs))
            )
        return x


def _pooled(size: int) -> int:
    return -(-size // 2) // 2 // 2 // 2


def alexnet(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """AlexNet for small images: 3x3 convolutions, two linear layers with dropout 0.5, K
    = 4096."""
    check_images("alexnet", input_shape, 15)
    return Net(AlexNet(input_shape, rngs), layers.linear(WIDTH, num_classes, rngs))
