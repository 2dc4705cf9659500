"""Feature shift and concept shift: one data set, changed per client."""

import colorsys
import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge, Interval
from scipy import ndimage

from fedjax_pfl import user_code
from fedjax_pfl.data.datasets import Dataset, checked
from fedjax_pfl.data.marks import owners
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.errors import InputError
from fedjax_pfl.options import Options


class Shift(NamedTuple):
    """One change of a client's examples."""

    # (x [n, H, W, C] in [0, 1], rng) -> x
    images: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None
    labels: Callable[[int], np.ndarray] | None = None  # C -> new label of each [C]
    coloured: bool = False  # grey images become coloured ones


def rotate(
    degrees: Annotated[float, Interval(gt=-math.inf, lt=math.inf)],
) -> Shift:
    """Rotates images by degrees."""

    def rotated(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if degrees % 90 == 0 and x.shape[1] == x.shape[2]:
            return np.rot90(x, int(degrees // 90), axes=(1, 2))
        return ndimage.rotate(x, degrees, axes=(2, 1), reshape=False, order=1)

    return Shift(rotated)


def invert(on: Annotated[int, Interval(ge=0, le=1)]) -> Shift:
    """Inverts images with 1, none with 0."""
    return Shift(lambda x, rng: 1 - x if on else x)


def colour(hue: Annotated[float, Interval(ge=-1, lt=1)]) -> Shift:
    """Tints grey images by a hue in [0, 1), none with -1."""

    def tinted(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if hue < 0:
            return x
        return x * np.array(colorsys.hsv_to_rgb(hue, 1, 1), np.float32)

    return Shift(tinted, coloured=True)


def noise(deviation: Annotated[float, Ge(0)]) -> Shift:
    """Adds Gaussian noise, its deviation as a share of the range of pixels."""
    return Shift(lambda x, rng: x + deviation * rng.normal(size=x.shape))


def blur(deviation: Annotated[float, Ge(0)]) -> Shift:
    """Blurs images by a Gaussian, its deviation in pixels."""
    sides = (0, deviation, deviation, 0)
    return Shift(lambda x, rng: ndimage.gaussian_filter(x, sides))


def contrast(factor: Annotated[float, Ge(0)]) -> Shift:
    """Multiplies the distance from the mean pixel by a factor."""
    return Shift(lambda x, rng: x.mean() + factor * (x - x.mean()))


def label_offset(offset: int) -> Shift:
    """Moves labels to y + offset modulo C (FedDVA's concept shift)."""
    return Shift(labels=lambda classes: (np.arange(classes) + offset) % classes)


def label_permutation(seed: Annotated[int, Ge(0)]) -> Shift:
    """Permutes labels by a seed, none with 0."""

    def permuted(classes: int) -> np.ndarray:
        order = np.random.default_rng(seed).permutation(classes)
        return order if seed else np.arange(classes)

    return Shift(labels=permuted)


_IMAGES = (rotate, invert, colour, noise, blur, contrast)
_CLASSES = (label_offset, label_permutation)
SHIFTS = Options("shift", {x.__name__: x for x in (*_IMAGES, *_CLASSES)}, listed=True)


def shift(dataset: Dataset, partition: Partition, spec: str, seed: int) -> Dataset:
    """Changes the examples of each client: client i has value i modulo their number.

    Args:
      dataset: images [n, H, W, C], of label shifts any inputs.
      partition: all rows of a client change. No two clients may share a row.
      spec: KIND:V1,V2,... of SHIFTS, such as `rotate:0,90,180,270`, or a function of
        your own, called with the data set, the partition and the seed.
      seed: of the noise.

    Raises:
      InputError: an unknown kind, values that are no numbers, or other inputs.
    """
    if user_code.named(spec):
        given = {"dataset": dataset, "partition": partition, "seed": seed}
        return checked(user_code.call("shift", spec, **given))
    shifts, rng = parse(spec), np.random.default_rng([seed, 2])
    owner = owners(partition, len(dataset.y))
    groups = [
        np.flatnonzero((owner >= 0) & (owner % len(shifts) == i))
        for i in range(len(shifts))
    ]
    if shifts[0].labels is not None:
        return _labels(dataset, spec, shifts, groups)
    if dataset.x.ndim != 4:
        raise InputError(
            f"shift={spec} needs images [height, width, channels], got inputs of shape "
            f"{dataset.x.shape[1:]}."
        )
    grey = dataset.x.shape[3] == 1
    widened = grey and shifts[0].coloured
    x = np.repeat(dataset.x, 3, axis=3) if widened else dataset.x.copy()
    low, high = float(x.min()), float(x.max())
    for change, rows in zip(shifts, groups, strict=True):
        assert change.images is not None
        unit = (x[rows].astype(np.float32) - low) / max(high - low, 1e-12)
        moved = low + np.clip(change.images(unit, rng), 0, 1) * (high - low)
        x[rows] = np.rint(moved) if x.dtype.kind in "iu" else moved
    return dataset._replace(x=x)


def parse(spec: str) -> list[Shift]:
    """Returns the shift of each value of KIND:V1,V2,...; InputError if it is none."""
    found: list[Shift] = SHIFTS.read(spec)()
    return found


def _labels(
    dataset: Dataset, spec: str, shifts: list[Shift], groups: list[np.ndarray]
) -> Dataset:
    if dataset.y.ndim != 1:
        raise InputError(f"shift={spec} needs one class per example.")
    y = dataset.y.copy()
    for change, rows in zip(shifts, groups, strict=True):
        assert change.labels is not None
        y[rows] = change.labels(dataset.num_classes)[y[rows]]
    return dataset._replace(y=y)


def flipped(dataset: Dataset, partition: Partition, clients: np.ndarray) -> Dataset:
    """Returns the data set with wrong labels on some clients' training examples.

    A class y becomes C - 1 - y, several labels and targets are negated, and -1 (none)
    remains.

    Args:
      clients: ids of the malicious clients.
    """
    of_each = [partition.train[i, : partition.train_sizes[i]] for i in clients]
    rows = np.concatenate([np.zeros(0, np.int64), *of_each])
    y = dataset.y.copy()
    old = y[rows]
    if y.dtype == bool:
        y[rows] = ~old
    elif y.dtype.kind == "f":
        y[rows] = -old
    else:
        y[rows] = np.where(old >= 0, dataset.num_classes - 1 - old, old)
    return dataset._replace(y=y)
