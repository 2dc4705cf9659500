"""Several data sets of images as one, with a column `domain`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedjax_pfl.data.datasets import Dataset, from_arrays, pixels
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError


@register(
    "domains:A,B",
    "several data sets of the same classes of images, resized to one shape, as "
    "values of the column domain",
)
def domains(
    names: str, load: Callable[[str], Dataset], image_size: int | None = None
) -> Dataset:
    """Joins data sets of the same classes; each is a value of the column `domain`.

    Args:
      names: of data sets of images, with commas between them.
      load: name -> data set.
      image_size: side to which all images are resized; default: the largest.

    Returns:
      uint8 images [n, S, S, C]; colour if one of the data sets is.

    Raises:
      InputError: fewer than two, inputs that are no images, or other classes.
    """
    name, sources = f"domains:{names}", names.split(",")
    if len(sources) < 2:
        raise InputError(f"{name} must name two data sets or more.")
    parts = [load(source) for source in sources]
    stems = [Path(source.partition(":")[2] or source).stem for source in sources]
    if len(set(stems)) < len(stems):
        raise InputError(f"{name}: its data sets must have other names: {stems}.")
    for part in parts:
        if part.x.ndim != 4:
            raise InputError(f"{name} needs images, {part.name} has other inputs.")
        if part.num_classes != parts[0].num_classes:
            raise InputError(
                f"{name} needs the same classes, got {part.num_classes} of {part.name} "
                f"and {parts[0].num_classes} of {parts[0].name}."
            )
    side = image_size or max(max(part.x.shape[1:3]) for part in parts)
    colour = any(part.x.shape[3] == 3 for part in parts)
    images = [_shaped(_bytes(part), side, colour) for part in parts]
    pieces: list[tuple[np.ndarray, ...]] = []
    for test in (False, True):
        for source, part, x in zip(stems, parts, images, strict=True):
            rows = slice(part.num_train, None) if test else slice(part.num_train)
            y = part.y[rows]
            pieces.append((x[rows], y, np.full(len(y), source)))
    x, y, domain = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return parts[0]._replace(
        name=name,
        x=x,
        y=y,
        num_train=sum(part.num_train for part in parts),
        prepare=from_arrays(x[:1], y[:1] * 0).prepare,
        superclass=None,
        columns={"domain": domain},
    )


def _bytes(dataset: Dataset) -> np.ndarray:
    """Images of a data set as uint8 with black 0 and white 255."""
    if dataset.name == "digits":  # of 17 levels
        return np.rint(dataset.x * (255 / 16)).astype(np.uint8)
    if dataset.x.dtype == np.uint8:
        return dataset.x
    low, high = dataset.x.min(), dataset.x.max()
    return pixels((dataset.x - low) / max(high - low, 1e-12))


def _shaped(x: np.ndarray, side: int, colour: bool) -> np.ndarray:
    """uint8 images [n, H, W, C] resized to [n, side, side, 1 or 3]."""
    from PIL import Image

    count, channels = len(x), x.shape[3]
    if x.shape[1:3] != (side, side):
        planes = np.moveaxis(x, 3, 1).reshape(-1, *x.shape[1:3])
        how = Image.Resampling.BILINEAR
        resized = [Image.fromarray(p).resize((side, side), how) for p in planes]
        x = np.stack([np.asarray(p) for p in resized])
        x = np.moveaxis(x.reshape(count, channels, side, side), 1, 3)
    return np.repeat(x, 3, axis=3) if colour and x.shape[3] == 1 else x
