"""CelebA with four attributes as classes, as in the experiments of FedDVA."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

ATTRIBUTES = ("Bald", "Wearing_Hat", "Blond_Hair", "Black_Hair")  # the classes
LARGEST = 5000  # images of an attribute
SIDE = 64  # pixels
_CHUNK = 1000  # records read at a time


def decode(builder: Any) -> dict[str, np.ndarray]:
    """Reads the images that have one of the attributes from a prepared TFDS data set.

    At most 5,000 images are drawn for an attribute, with a fixed seed. An image with
    two of the attributes may be drawn for both and is then there twice.

    Args:
      builder: TFDS builder of celeb_a, whose official splits are pooled.

    Returns:
      x [n, 64, 64, 3] uint8, shorter side resized to 64 and the centre cropped; y [n]
      int32, index in ATTRIBUTES; coarse [n], -1; num_train, n.
    """
    import tensorflow_datasets as tfds

    skip = {"image": tfds.decode.SkipDecoding()}
    sources = [
        builder.as_data_source(split, decoders=skip)
        for split in ("train", "validation", "test")
    ]
    has = np.concatenate([_attributes(source) for source in sources])
    chosen = choose(has)
    rows = np.concatenate(chosen)
    labels = np.repeat(np.arange(len(ATTRIBUTES)), [len(rows) for rows in chosen])
    x = np.zeros((len(rows), SIDE, SIDE, 3), np.uint8)
    starts = np.cumsum([0, *map(len, sources)])
    for source, start, end in zip(sources, starts[:-1], starts[1:], strict=True):
        mine = np.flatnonzero((rows >= start) & (rows < end))
        for row, record in zip(
            mine, records(source, (rows[mine] - start).tolist()), strict=True
        ):
            x[row] = shrink(record["image"])
    coarse, count = np.full(len(rows), -1, np.int32), np.asarray(len(rows))
    return {"x": x, "y": labels.astype(np.int32), "coarse": coarse, "num_train": count}


def records(source: Any, rows: Sequence[int]) -> Iterator[Any]:
    """Yields the records `rows` of a TFDS data source, read in chunks."""
    for start in range(0, len(rows), _CHUNK):
        yield from source.__getitems__(list(rows[start : start + _CHUNK]))


def choose(has: np.ndarray) -> list[np.ndarray]:
    """Returns the rows of every attribute, at most 5,000 each, drawn with a fixed seed;
    has [n, attributes] bool."""
    rng = np.random.default_rng(0)
    found = [np.flatnonzero(column) for column in has.T]
    return [np.sort(rng.permutation(rows)[:LARGEST]) for rows in found]


def shrink(encoded: bytes) -> np.ndarray:
    """Decodes an image to [64, 64, 3]: shorter side resized to 64, centre cropped."""
    from PIL import Image

    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    scale = SIDE / min(image.size)
    width, height = (max(round(scale * size), SIDE) for size in image.size)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + SIDE, top + SIDE)))


def _attributes(source: Any) -> np.ndarray:
    """The attributes of every record, [n, attributes] bool."""
    found = records(source, range(len(source)))
    rows = [[record["attributes"][name] for name in ATTRIBUTES] for record in found]
    return np.asarray(rows, bool).reshape(-1, len(ATTRIBUTES))
