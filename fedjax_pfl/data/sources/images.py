"""Folders of image files, decoded once."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl import cache
from fedjax_pfl.data.datasets import SPLITS, Dataset, prepare_floats, prepare_images
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm")
_CACHE_FORMAT = 3
_ORIENTATION = 0x0112  # tag of EXIF
_FACTS = (  # of images, in the note with their number
    "EXIF orientation of {:,} images applied",
    "transparency of {:,} images ignored",
    "CMYK or LAB colours of {:,} images converted",
)
File = tuple[Path, str, str]  # its class and its client, "" where there are none


@register(
    "imagefolder:PATH",
    "images: CLASS/*.png, CLIENT/CLASS/*.png, train/ and test/ of these, or "
    "Tiny-ImageNet's layout",
)
def load(path: str, image_size: int | None = None) -> Dataset:
    """Reads a folder of images, from the cache where that is fresh.

    Layouts: `CLASS/*.png`; `CLIENT/CLASS/*.png`, which gives the column `client`;
    `train/` of these with `val/` or `test/`, in any case; and Tiny-ImageNet's, whose
    validation images, the test set, have their classes in `val/val_annotations.txt`.
    Names that begin with a dot are ignored. EXIF orientations are applied, and
    transparency is ignored.

    Args:
      image_size: side to which images are resized; None: all must have one size.

    Returns:
      a data set of uint8 images [n, H, W, 1] if all are grey, else [n, H, W, 3]. Images
      of 16 bits or of floats are float32, their range in the folder becomes [-1, 1].

    Raises:
      InputError: the folder has another layout, a file cannot be read, or sizes or
        types differ.
    """
    folder = Path(path).expanduser()
    parts, ignored = _listed(folder)
    files = [file for part in parts for file in part]
    train, val, _ = map(len, parts)
    names = sorted({label for _, label, _ in files})
    number = {name: i for i, name in enumerate(names)}
    paths = [file for file, _, _ in files]
    found = cache.stored(
        folder,
        folder.name,
        [_CACHE_FORMAT, image_size],
        paths,
        lambda: _decode(paths, image_size),
    )
    clients = np.array([client for _, _, client in files])
    deep, x = found["x"].dtype != np.uint8, found["x"]
    low, high = found["low"].item(), found["high"].item()
    notes = [f"pixels in [{low:g}, {high:g}] become [-1, 1]"] if deep else []
    counts = (*found["facts"], ignored)
    texts = (*_FACTS, "{:,} files without the name of an image ignored")
    notes += [text.format(n) for text, n in zip(texts, counts, strict=True) if n]
    return Dataset(
        f"imagefolder:{path}",
        x,
        np.array([number[label] for _, label, _ in files], np.int32),
        train + val,
        len(names),
        prepare_floats if deep else prepare_images,
        columns={"client": clients} if clients.any() else {},
        validation=np.repeat([False, True], [train, val]) if val else None,
        classes=tuple(names),
        note="; ".join(notes),
    )


def _listed(folder: Path) -> tuple[list[list[File]], int]:
    """Returns the files of training, validation and test, and the number of others."""
    if not folder.is_dir():
        raise InputError(f"{folder} must be a folder of images.")
    annotations = folder / "val" / "val_annotations.txt"
    if annotations.is_file():
        rows = annotations.read_text(encoding="utf-8").splitlines()
        pairs = [row.split("\t")[:2] for row in rows if row.strip()]
        test = [(folder / "val" / "images" / name, label, "") for name, label in pairs]
        files, _ = _by_class(folder / "train", ("images",))
        return [files, [], test], 0
    inside = [x for x in sorted(folder.iterdir()) if x.is_dir() and x.name[0] != "."]
    parts = {x: SPLITS.get(x.name.lower(), "") for x in inside}
    if not any(parts.values()):
        files, ignored = _by_class(folder)
        return [files, [], []], ignored
    known = [x for x in parts.values() if x]
    if "train" not in known or len(set(known)) < len(parts):
        raise InputError(
            f"{folder} must have one folder for train, val and test each, or a folder "
            f"per class, got {', '.join(x.name for x in inside)}."
        )
    found = {part: _by_class(x) for x, part in parts.items()}
    lists = [found.get(part, ([], 0)) for part in ("train", "val", "test")]
    return [files for files, _ in lists], sum(ignored for _, ignored in lists)


def _by_class(folder: Path, inner: tuple[str, ...] = ()) -> tuple[list[File], int]:
    """Returns files of CLASS/ or CLIENT/CLASS/ in sorted order, and the number of those
    that are no images."""
    found, ignored = list[File](), 0
    for path in sorted(folder.rglob("*")):
        *parts, name = path.relative_to(folder).parts
        if any(x.startswith(".") for x in (*parts, name)) or path.is_dir():
            continue
        if path.suffix.lower() not in SUFFIXES:
            ignored += 1
            continue
        if inner and tuple(parts[-len(inner) :]) == inner:
            parts = parts[: -len(inner)]
        if len(parts) not in (1, 2):
            raise InputError(f"{path} must be in CLASS/ or CLIENT/CLASS/ of {folder}.")
        found.append((path, parts[-1], parts[0] if len(parts) == 2 else ""))
    if not found:
        raise InputError(f"{folder} must have images ({', '.join(SUFFIXES)}).")
    if len({client == "" for _, _, client in found}) > 1:
        raise InputError(f"{folder} has images both in CLASS/ and in CLIENT/CLASS/.")
    return found, ignored


def _decode(files: Sequence[Path], side: int | None) -> dict[str, np.ndarray]:
    """Returns images x [n, H, W, C], the range of their pixels low and high, and the
    number of images of each of `_FACTS`."""
    images, facts = list[np.ndarray](), list[list[bool]]()
    for file in files:
        image, found = _read(file, side)
        images.append(image)
        facts.append(found)
        if image.shape[:2] != images[0].shape[:2]:
            height, width = images[0].shape[:2]
            raise InputError(
                f"{file} is {image.shape[0]}x{image.shape[1]} pixels, {files[0]} "
                f"{height}x{width}. Give an image size."
            )
        if image.dtype != images[0].dtype:
            depths = ["8 bits" if x.dtype == np.uint8 else "more" for x in images]
            raise InputError(
                f"{file} has pixels of {depths[-1]}, {files[0]} of {depths[0]}."
            )
    colour = any(image.shape[2] == 3 for image in images)
    shape = (*images[0].shape[:2], 3)
    x = np.stack([np.broadcast_to(i, shape) if colour else i for i in images])
    low, high = x.min(), x.max()
    if x.dtype != np.uint8:
        x = (x - low) / max(high - low, np.finfo(np.float32).tiny) * 2 - 1
    return {"x": x, "low": low, "high": high, "facts": np.sum(facts, axis=0)}


def unlabelled(
    path: str, shape: Sequence[int], resized: bool = False
) -> tuple[list[Path], np.ndarray]:
    """Returns the files of a folder in sorted order, and their images [n, H, W, C].

    Args:
      shape: (H, W, C).
      resized: resizes images; else they must have this size.

    Raises:
      InputError: there is no image, or one has another size, depth or colours.
    """
    folder, images = Path(path).expanduser(), list[np.ndarray]()
    inside = sorted(x for x in folder.rglob("*") if x.suffix.lower() in SUFFIXES)
    files = [folder] if folder.is_file() else inside
    for file in files:
        image, _ = _read(file, shape[0] if resized else None)
        fits = image.shape[:2] == tuple(shape[:2]) and image.shape[2] in (1, shape[2])
        if not fits or image.dtype != np.uint8:
            got = f"{image.dtype}{list(image.shape)}"
            raise InputError(f"{file} must be an image uint8{list(shape)}, got {got}.")
        images.append(np.broadcast_to(image, shape))
    if not files:
        raise InputError(f"{path} must have images ({', '.join(SUFFIXES)}).")
    return files, np.stack(images)


def _read(file: Path, side: int | None) -> tuple[np.ndarray, list[bool]]:
    """Returns an image [H, W, 1], or [H, W, 3] in colour, and which of `_FACTS` hold;
    float32 of more than 8 bits, else uint8."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            frames = getattr(opened, "n_frames", 1)
            still = opened.format == "MPO" or frames == 1  # a photo and its preview
            narrowed = any(map(_narrowed, opened.tile))
            turned = opened.getexif().get(_ORIENTATION, 1) != 1
            image = ImageOps.exif_transpose(opened)
            facts = [turned, _clear(image), image.mode in ("CMYK", "LAB", "HSV")]
            image = plain(image)
    except Exception as error:  # of Pillow, whose types vary with the format
        reason = type(error).__name__
        raise InputError(f"{file} cannot be read as an image ({reason}).") from error
    if not still:
        raise InputError(f"{file} must be one image, got {frames}.")
    if narrowed:
        raise InputError(
            f"{file} must have 8 bits per channel or be grey, got 16 in colour or with "
            "transparency."
        )
    if side is not None:
        image = image.resize((side, side), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    if not np.isfinite(pixels).all():
        raise InputError(f"{file} must have finite pixels.")
    return pixels[..., None] if pixels.ndim == 2 else pixels, facts


def plain(image: Any) -> Any:
    """Returns an image of Pillow as one of mode F of more than 8 bits, L, or RGB."""
    from PIL import Image

    if image.mode[0] in "IF":
        return Image.fromarray(np.asarray(image, np.float32))
    return image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")


def _clear(image: Any) -> bool:
    """Returns whether an image has pixels that are not opaque."""
    if not image.has_transparency_data or image.mode[0] in "IF":
        return bool(image.has_transparency_data)
    return bool((np.asarray(image.convert("RGBA"))[..., 3] < 255).any())


def _narrowed(tile: Any) -> bool:
    """Returns whether Pillow keeps 8 of 16 bits of the pixels of a tile."""
    if tile.codec_name == "ppm":
        return tile.args[1] > 255
    return re.search(r"(RGB[AX]?|LA|CMYK);16", str(tile.args)) is not None
