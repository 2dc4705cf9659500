"""Augmentation and mixing of training examples, as `Task.augment` and `Task.mix` take
them."""

import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt

from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.types import Array

# (key, x [B, ...], labels [B, C], mask [B]) -> x, soft labels [B, C]
Mix = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
AUGMENTATIONS = ("none", "flip", "crop_flip")
MARGIN = 4  # pixels of `crop_flip`


def partners(key: Array, mask: Array) -> Array:
    """Returns the row [B] with which each row is mixed: the next valid one in a random
    order."""
    draw = jnp.where(mask, jax.random.uniform(key, mask.shape, jnp.float32), 2)
    order, count = jnp.argsort(draw), jnp.maximum(jnp.sum(mask), 1)
    following = order[(jnp.arange(len(mask)) + 1) % count]
    return jnp.zeros_like(order).at[order].set(following)


def mixup(alpha: Annotated[float, Gt(0)] = 0.2) -> Mix:
    """Returns mixup (Zhang et al., ICLR 2018): each example is l x + (1 - l) x' with
    another one of the batch, l ~ Beta(alpha, alpha), and so are its labels."""
    check("alpha", alpha, 0, math.inf, open_low=True)

    def mix(key: Array, x: Array, y: Array, mask: Array) -> tuple[Array, Array]:
        key_weight, key_order = jax.random.split(key)
        weight = jax.random.beta(key_weight, alpha, alpha, (), jnp.float32)
        other = partners(key_order, mask)
        x, y = (weight * a + (1 - weight) * a[other] for a in (x, y))
        return x, y

    return mix


def cutmix(alpha: Annotated[float, Gt(0)] = 1.0) -> Mix:
    """Returns CutMix (Yun et al., ICCV 2019): a box of each image [H, W, C] is another
    image's, of the area 1 - l, l ~ Beta(alpha, alpha); labels are mixed by area."""
    check("alpha", alpha, 0, math.inf, open_low=True)

    def mix(key: Array, x: Array, y: Array, mask: Array) -> tuple[Array, Array]:
        if x.ndim != 4:
            raise InputError(
                f"`cutmix` needs images [height, width, channels], got inputs of shape "
                f"{x.shape[1:]}."
            )
        key_weight, key_order, *centres = jax.random.split(key, 4)
        side = jnp.sqrt(1 - jax.random.beta(key_weight, alpha, alpha, (), jnp.float32))
        other, inside = partners(key_order, mask), jnp.ones((1, 1), bool)
        for axis, draw in enumerate(centres):
            n = x.shape[1 + axis]
            centre = jax.random.randint(draw, (), 0, n)
            half = jnp.round(side * n / 2).astype(jnp.int32)
            at = jnp.expand_dims(jnp.arange(n), 1 - axis)
            inside = inside & (at >= centre - half) & (at < centre + half)
        box = inside[None, :, :, None]
        x = jnp.where(box, x[other], x)
        weight = 1 - jnp.mean(inside)
        return x, weight * y + (1 - weight) * y[other]

    return mix


def augmentation(name: str, dataset: Dataset) -> Callable[[Array, Array], Array] | None:
    """Returns (key, prepared images [B, H, W, C]) -> augmented images, None for `none`.

    Args:
      name: `flip` mirrors half of the images left to right; `crop_flip` also pads 4
        black pixels on every side and crops a random window of the original size.

    Raises:
      InputError: an unknown name, or inputs that are no images.
    """
    choose("augmentation", name, AUGMENTATIONS)
    if name == "none":
        return None
    if dataset.x.ndim != 4:
        raise InputError(
            f"augment={name} needs images [height, width, channels], got inputs of "
            f"shape {dataset.x.shape[1:]}."
        )
    # black, as the model takes it
    fill = np.asarray(dataset.prepare(jnp.zeros((1, 1, 1, 1), dataset.x.dtype))).item()

    def flip(key: Array, x: Array) -> Array:
        mirrored = jax.random.bernoulli(key, shape=(len(x), 1, 1, 1))
        return jnp.where(mirrored, x[:, :, ::-1], x)

    def crop_flip(key: Array, x: Array) -> Array:
        where, mirror = jax.random.split(key)
        sides = ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0))
        start = jax.random.randint(where, (len(x), 2), 0, 2 * MARGIN + 1)

        def crop(x: Array, start: Array) -> Array:
            padded = jnp.pad(x, sides, constant_values=fill)
            return jax.lax.dynamic_slice(padded, (*start, 0), x.shape)

        return flip(mirror, jax.vmap(crop)(x, start))

    return flip if name == "flip" else crop_flip
