"""A small vision transformer (Dosovitskiy et al., An image is worth 16x16 words, ICLR
2021), pooled by the mean over patches."""

import jax.numpy as jnp
from flax import nnx

from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Net, Shape, check_images
from fedjax_pfl.models.text import Block
from fedjax_pfl.types import Array


class Patches(nnx.Module):
    """Linear embeddings of square patches with learned positions, pre-norm blocks, a
    layer norm, and the mean: images [B, H, W, C] -> [B, K]."""

    def __init__(
        self,
        shape: Shape,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        rngs: nnx.Rngs,
    ):
        height, wide, channels = shape
        count = (height // patch) * (wide // patch)
        self.embed = layers.linear(patch * patch * channels, width, rngs)
        small = nnx.initializers.normal(0.02)
        self.places = nnx.Param(small(rngs.params(), (count, width)))
        self.blocks = nnx.List(
            [Block(width, heads, 4 * width, 0.0, rngs) for _ in range(depth)]
        )
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.patch = patch

    def __call__(self, x: Array) -> Array:
        batch, height, wide, channels = x.shape
        p = self.patch
        x = x.reshape(batch, height // p, p, wide // p, p, channels)
        patches = jnp.swapaxes(x, 2, 3).reshape(batch, -1, p * p * channels)
        h = self.embed(patches) + self.places[...][None]
        for block in self.blocks:
            h = block(h, None, False, None)
        return self.norm(h).mean(axis=1)


def vit_small(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """Vision transformer of patches of 4 pixels (8 from 64 pixels on): 4 pre-norm
    blocks of 4 heads, K = 128."""
    check_images("vit_small", input_shape, 8)
    patch = 8 if min(input_shape[:2]) >= 64 else 4
    if input_shape[0] % patch or input_shape[1] % patch:
        raise InputError(
            f"Model 'vit_small' needs sides that are multiples of {patch} pixels, got "
            f"input shape {tuple(input_shape)}."
        )
    body = Patches(input_shape, patch, 128, 4, 4, rngs)
    return Net(body, layers.linear(128, num_classes, rngs))
