"""CelebA by attribute: the faces of FedDVA's experiment, a class for each of four
attributes."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

ATTRIBUTES = ("Bald", "Wearing_Hat", "Blond_Hair", "Black_Hair")  # the classes
LARGEST = 5000  # images of an attribute
SIDE = 64  # pixels
_CHUNK = 1000  # records read at a time


def decode(builder: Any) -> dict[str, np.ndarray]:
    """Reads the images that have one of the attributes from a prepared TFDS data set.

    Of an attribute with more than 5,000 images as many are drawn, always the same. An
    image with two of the attributes may be drawn for both, and then stands twice; the
    log says how many do.

    Args:
      builder: of celeb_a, whose official splits are taken together.

    Returns:
      x [n, 64, 64, 3] uint8, shorter side resized to 64 and the middle cut out; y [n]
      int32, place in ATTRIBUTES; coarse [n], -1; num_train, n.
    """
    import tensorflow_datasets as tfds

    skip = {"image": tfds.decode.SkipDecoding()}
    sources = [
        builder.as_data_source(split, decoders=skip)
        for split in ("train", "validation", "test")
    ]
    has = np.concatenate([_attributes(source) for source in sources])
    chosen = choose(has)
    rows, labels = (
        np.concatenate(chosen),
        np.repeat(np.arange(len(ATTRIBUTES)), [len(rows) for rows in chosen]),
    )
    twice = len(rows) - len(np.unique(rows))
    logging.info(
        "celeb_a: %d images by attribute, %d of them for two attributes.",
        len(rows),
        twice,
    )
    x = np.zeros((len(rows), SIDE, SIDE, 3), np.uint8)
    starts = np.cumsum([0, *map(len, sources)])
    for source, start, end in zip(sources, starts[:-1], starts[1:], strict=True):
        mine = np.flatnonzero((rows >= start) & (rows < end))
        for place, record in zip(
            mine, records(source, (rows[mine] - start).tolist()), strict=True
        ):
            x[place] = shrink(record["image"])
    coarse, count = np.full(len(rows), -1, np.int32), np.asarray(len(rows))
    return {"x": x, "y": labels.astype(np.int32), "coarse": coarse, "num_train": count}


def records(source: Any, rows: Sequence[int]) -> Iterator[Any]:
    """The records `rows` of a TFDS data source, some at a time, which bounds the
    memory: one call for many is five times as fast as one call each."""
    for start in range(0, len(rows), _CHUNK):
        yield from source.__getitems__(list(rows[start : start + _CHUNK]))


def choose(has: np.ndarray) -> list[np.ndarray]:
    """Rows of every attribute, at most 5,000 of each, drawn with a fixed seed; has [n,
    attributes] bool."""
    rng = np.random.default_rng(0)
    found = [np.flatnonzero(column) for column in has.T]
    return [np.sort(rng.permutation(rows)[:LARGEST]) for rows in found]


def shrink(encoded: bytes) -> np.ndarray:
    """An encoded image as 64x64 pixels [64, 64, 3]: its shorter side resized to 64, the
    middle cut out."""
    from PIL import Image

    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    scale = SIDE / min(image.size)
    width, height = (max(round(scale * size), SIDE) for size in image.size)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + SIDE, top + SIDE)))


def _attributes(source: Any) -> np.ndarray:
    """Which of the attributes every record has, [n, attributes] bool."""
    found = records(source, range(len(source)))
    rows = [[record["attributes"][name] for name in ATTRIBUTES] for record in found]
    return np.asarray(rows, bool).reshape(-1, len(ATTRIBUTES))
