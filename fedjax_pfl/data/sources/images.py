"""Folders of image files, decoded once, and augmentations of images."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data import cache
from fedjax_pfl.data.datasets import Dataset, prepare_images
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.types import Array

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm")
AUGMENTATIONS = ("none", "flip", "crop_flip")
MARGIN = 4  # pixels of `crop_flip`
_CACHE_FORMAT = 1
File = tuple[Path, str, str]  # its class and its client, "" where there are none


@register(
    "imagefolder:PATH",
    "images: CLASS/*.png, CLIENT/CLASS/*.png, train/ and test/ of these, or "
    "Tiny-ImageNet's layout",
)
def load(path: str, image_size: int | None = None) -> Dataset:
    """Reads a folder of images, from the cache where that is fresh.

    Layouts: `CLASS/*.png`; `CLIENT/CLASS/*.png`, which gives the column `client`;
    `train/CLASS/*.png` with `test` or `val`; and Tiny-ImageNet's, whose validation
    images, the test set, have their classes in `val/val_annotations.txt`.

    Args:
      image_size: side to which images are resized; None: all must have one size.

    Returns:
      a data set of uint8 images [n, H, W, 1] if all are grey, else [n, H, W, 3].

    Raises:
      InputError: the folder has another layout, a file cannot be read, or the sizes
        differ.
    """
    folder = Path(path).expanduser()
    train, test = _listed(folder)
    files = train + test
    names = sorted({label for _, label, _ in files})
    number = {name: i for i, name in enumerate(names)}
    x = _decoded(folder, [file for file, _, _ in files], image_size)
    clients = np.array([client for _, _, client in files])
    return Dataset(
        f"imagefolder:{path}",
        x,
        np.array([number[label] for _, label, _ in files], np.int32),
        len(train),
        len(names),
        prepare_images,
        columns={"client": clients} if clients.any() else {},
    )


def _listed(folder: Path) -> tuple[list[File], list[File]]:
    """The files of training and of testing."""
    if not folder.is_dir():
        raise InputError(f"{folder} must be a folder of images.")
    annotations = folder / "val" / "val_annotations.txt"
    if annotations.is_file():
        rows = annotations.read_text(encoding="utf-8").splitlines()
        pairs = [row.split("\t")[:2] for row in rows if row.strip()]
        test = [(folder / "val" / "images" / name, label, "") for name, label in pairs]
        return _by_class(folder / "train", ("images",)), test
    if (folder / "train").is_dir():
        held = [folder / name for name in ("test", "val") if (folder / name).is_dir()]
        return _by_class(folder / "train"), _by_class(held[0]) if held else []
    return _by_class(folder), []


def _by_class(folder: Path, inner: tuple[str, ...] = ()) -> list[File]:
    """Files of CLASS/ or CLIENT/CLASS/, in sorted order."""
    found: list[File] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in SUFFIXES:
            continue
        parts = path.relative_to(folder).parts[:-1]
        parts = (
            parts[: -len(inner)] if inner and parts[-len(inner) :] == inner else parts
        )
        if len(parts) not in (1, 2):
            raise InputError(f"{path} must be in CLASS/ or CLIENT/CLASS/ of {folder}.")
        found.append((path, parts[-1], parts[0] if len(parts) == 2 else ""))
    if not found:
        raise InputError(f"{folder} must have images ({', '.join(SUFFIXES)}).")
    if len({client == "" for _, _, client in found}) > 1:
        raise InputError(f"{folder} has images both in CLASS/ and in CLIENT/CLASS/.")
    return found


def _decoded(folder: Path, files: list[Path], side: int | None) -> np.ndarray:
    """The images of all files [n, H, W, C], from the cache where it has them."""
    stats = [
        (str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.is_file()
    ]
    content = json.dumps([_CACHE_FORMAT, str(folder.resolve()), side, stats])
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    path = cache.folder() / f"{folder.name}-{key}.npz"
    return cache.stored(path, folder.name, lambda: {"x": _decode(files, side)})["x"]


def _decode(files: Iterable[Path], side: int | None) -> np.ndarray:
    images = [_read(file, side) for file in files]
    first, shape = images[0][0], images[0][1].shape[:2]
    for file, image in images:
        if image.shape[:2] != shape:
            raise InputError(
                f"{file} is {image.shape[0]}x{image.shape[1]} pixels, {first} "
                f"{shape[0]}x{shape[1]}. Give an image size."
            )
    colour = any(image.shape[2] == 3 for _, image in images)
    as_colour: Callable[[Any], Any] = lambda x: np.broadcast_to(x, (*shape, 3))
    return np.stack([as_colour(x) if colour else x for _, x in images])


def _read(file: Path, side: int | None) -> tuple[Path, np.ndarray]:
    """An image as uint8 [H, W, 1], or [H, W, 3] in colour."""
    from PIL import Image

    try:
        with Image.open(file) as opened:
            grey = opened.mode in ("1", "L", "LA", "I;16")
            image = opened.convert("L" if grey else "RGB")
    except Exception as error:  # of Pillow, whose types vary with the format
        reason = type(error).__name__
        raise InputError(f"{file} cannot be read as an image ({reason}).") from error
    if side is not None:
        image = image.resize((side, side), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.uint8)
    return file, pixels[..., None] if pixels.ndim == 2 else pixels


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
