"""Vision transformers (Dosovitskiy et al., An image is worth 16x16 words, ICLR
2021)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Net, Shape, check_images
from fedjax_pfl.models.transformer import Block, Layout, norm
from fedjax_pfl.types import Array


class Pixels(NamedTuple):
    """Preparation of images for a pretrained network, as an image processor of
    transformers does it.

    Images are resized, the centre is cut out, and pixels p in [0, 1] become
    (p - mean) / deviation of their channel.
    """

    mean: tuple[float, ...] = (0.5,)
    deviation: tuple[float, ...] = (0.5,)
    # (height, width), or the shorter side; None: images are not resized
    size: tuple[int, int] | int | None = None
    method: str = "linear"  # of `jax.image.resize`

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width of an image after resizing."""
        if isinstance(self.size, tuple):
            return self.size
        if self.size is None:
            return height, width
        longer = int(self.size * max(height, width) / min(height, width))
        return (self.size, longer) if height <= width else (longer, self.size)


class Patches(nnx.Module):
    """Linear embeddings of square patches with learned positions, pre-norm blocks, a
    layer norm, and the features of `pool`: images [B, H, W, C] -> [B, K].

    `pool` is the "mean" over all positions, the "first" one, or "both": the first and
    the mean of the patches [B, 2 K]."""

    def __init__(
        self,
        shape: Shape,
        patch: int,
        depth: int,
        layout: Layout,
        rngs: nnx.Rngs,
        *,
        pool: str = "mean",
        extra: int = 0,
        first_norm: bool = False,
        embed_bias: bool = True,
        pixels: Pixels | None = None,
    ):
        """Makes the layers.

        Args:
          shape: of the images that are cut into patches.
          patch: pixels per side.
          depth: number of blocks.
          layout: of a block.
          rngs: for the initialisation.
          pool: as above.
          extra: number of learned tokens before the patches.
          first_norm: the embeddings are normalised.
          embed_bias: the embedding has a bias.
          pixels: preparation of images; None: pixels in [-1, 1] are taken as they
            are, and images of other sides are resized.
        """
        height, wide, channels = shape
        count = extra + (height // patch) * (wide // patch)
        size, width = patch * patch * channels, layout.width
        self.embed = layers.linear(size, width, rngs, use_bias=embed_bias)
        small = nnx.initializers.normal(0.02, jnp.float32)
        self.places = nnx.Param(small(rngs.params(), (count, width)))
        self.blocks = nnx.List([Block(layout, rngs) for _ in range(depth)])
        self.norm = norm(layout, rngs)
        if extra:
            self.tokens = nnx.Param(small(rngs.params(), (extra, width)))
        if first_norm:
            self.first_norm = norm(layout, rngs)
        self.drop = nnx.Dropout(layout.rate)
        self.shape, self.patch, self.pool, self.extra = shape, patch, pool, extra
        self.pixels = pixels

    def __call__(
        self, x: Array, train: bool = False, rngs: nnx.Rngs | None = None
    ) -> Array:
        patches = self._patches(x)
        h = self.embed(patches)
        if self.extra:
            tokens = jnp.broadcast_to(
                self.tokens[...].astype(h.dtype)[None],
                (len(h), self.extra, h.shape[-1]),
            )
            h = jnp.concatenate([tokens, h], axis=1)
        h = h + self.places[...][None]
        if hasattr(self, "first_norm"):
            h = self.first_norm(h)
        h = self.drop(h, deterministic=not train or rngs is None, rngs=rngs)
        if hasattr(self, "stack"):
            h = self.stack(h, train=train, rngs=rngs)
        for block in self.blocks:
            h = block(h, None, train, rngs)
        h = self.norm(h)
        if self.pool == "mean":
            return h.mean(axis=1)
        if self.pool == "first":
            return h[:, 0]
        return jnp.concatenate([h[:, 0], h[:, self.extra :].mean(axis=1)], axis=-1)

    def _patches(self, x: Array) -> Array:
        """Maps images [B, H, W, C] to flat patches [B, L, P * P * C]."""
        batch = len(x)
        height, wide, channels = self.shape
        if self.pixels is not None:
            x = prepared(x, self.pixels, height, wide)
        elif x.shape[1:] != self.shape:
            x = jax.image.resize(x, (batch, *self.shape), "linear")
        p = self.patch
        x = x.reshape(batch, height // p, p, wide // p, p, channels)
        return jnp.swapaxes(x, 2, 3).reshape(batch, -1, p * p * channels)


def prepared(x: Array, pixels: Pixels, height: int, width: int) -> Array:
    """Returns images [B, H, W, C] in [-1, 1] as an image processor prepares them:
    [B, height, width, C]."""
    batch, *shape, channels = x.shape
    wanted = pixels.resized(*shape)
    high, wide = shape[0] / wanted[0], shape[1] / wanted[1]
    between = (wanted[0], shape[1]) if high > max(wide, 1) else (shape[0], wanted[1])
    for partly in (between, wanted):  # one axis at a time and clipped, as Pillow does
        if partly != x.shape[1:3]:
            x = jax.image.resize(x, (batch, *partly, channels), pixels.method)
            x = x if pixels.method == "linear" else jnp.clip(x, -1, 1)
    top, left = (wanted[0] - height) // 2, (wanted[1] - width) // 2
    x = x[:, top : top + height, left : left + width]
    mean, deviation = (
        jnp.asarray(a, x.dtype)[None, None, None]
        for a in (pixels.mean, pixels.deviation)
    )
    return ((x + 1) / 2 - mean) / deviation


def vit_small(input_shape: Shape, num_classes: int, rngs: nnx.Rngs) -> Net:
    """Vision transformer of patches of 4 pixels (8 from 64 pixels on): 4 pre-norm
    blocks of 4 heads, the mean over patches, K = 128."""
    check_images("vit_small", input_shape, 8)
    patch = 8 if min(input_shape[:2]) >= 64 else 4
    if input_shape[0] % patch or input_shape[1] % patch:
        raise InputError(
            f"Model 'vit_small' needs sides that are multiples of {patch} pixels, got "
            f"input shape {tuple(input_shape)}."
        )
    body = Patches(input_shape, patch, 4, Layout(128, 4, 512), rngs)
    return Net(body, layers.linear(128, num_classes, rngs))
