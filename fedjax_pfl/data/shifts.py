"""Feature shift and concept shift: one data set, changed per client."""

import colorsys
from collections.abc import Callable

import numpy as np
from scipy import ndimage

from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.marks import owners
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.errors import InputError, choose

Images = Callable[[np.ndarray, float, np.random.Generator], np.ndarray]
SHIFTS: dict[str, str] = {
    "rotate": "images by degrees",
    "invert": "images with 1, none with 0",
    "colour": "grey images tinted by a hue in [0, 1), -1: grey",
    "noise": "Gaussian noise, its deviation as a share of the range of pixels",
    "blur": "Gaussian blur, its deviation in pixels",
    "contrast": "factor on the distance from the mean pixel",
    "label_offset": "labels y + k modulo C (FedDVA's concept shift)",
    "label_permutation": "labels permuted by the seed k, none with 0",
}


def shift(dataset: Dataset, partition: Partition, spec: str, seed: int) -> Dataset:
    """Changes the examples of each client: client i has value i modulo their number.

    Args:
      dataset: images [n, H, W, C], of label shifts any inputs.
      partition: all rows of a client change. No two clients may share a row.
      spec: KIND:V1,V2,... of SHIFTS, such as `rotate:0,90,180,270`.
      seed: of the noise.

    Raises:
      InputError: an unknown kind, values that are no numbers, or other inputs.
    """
    kind, values = parse(spec)
    owner = owners(partition, len(dataset.y))
    rng = np.random.default_rng([seed, 2])
    groups = [
        np.flatnonzero((owner >= 0) & (owner % len(values) == i))
        for i in range(len(values))
    ]
    if kind.startswith("label_"):
        return _labels(dataset, kind, values, groups)
    if dataset.x.ndim != 4:
        raise InputError(
            f"shift={spec} needs images [height, width, channels], got inputs of shape "
            f"{dataset.x.shape[1:]}."
        )
    x = np.repeat(dataset.x, 3, axis=3) if _widens(kind, dataset) else dataset.x.copy()
    low, high = float(x.min()), float(x.max())
    for value, rows in zip(values, groups, strict=True):
        unit = (x[rows].astype(np.float32) - low) / max(high - low, 1e-12)
        moved = low + np.clip(_IMAGES[kind](unit, value, rng), 0, 1) * (high - low)
        x[rows] = np.rint(moved) if x.dtype.kind in "iu" else moved
    return dataset._replace(x=x)


def parse(spec: str) -> tuple[str, list[float]]:
    """Returns the kind and the values of KIND:V1,V2,...; InputError if it is none."""
    kind, _, rest = spec.partition(":")
    choose("shift", kind, SHIFTS)
    try:
        return kind, [float(value) for value in rest.split(",")]
    except ValueError:
        raise InputError(f"`shift` must be KIND:V1,V2,..., got {spec}.") from None


def _labels(
    dataset: Dataset, kind: str, values: list[float], groups: list[np.ndarray]
) -> Dataset:
    if dataset.y.ndim != 1:
        raise InputError(f"shift={kind} needs one class per example.")
    y, classes = dataset.y.copy(), dataset.num_classes
    for value, rows in zip(values, groups, strict=True):
        new = (np.arange(classes) + int(value)) % classes
        if kind == "label_permutation":
            order = np.random.default_rng(int(value)).permutation(classes)
            new = order if value else np.arange(classes)
        y[rows] = new[y[rows]]
    return dataset._replace(y=y)


def _widens(kind: str, dataset: Dataset) -> bool:
    return kind == "colour" and dataset.x.shape[3] == 1


def _rotated(x: np.ndarray, degrees: float, rng: np.random.Generator) -> np.ndarray:
    if degrees % 90 == 0 and x.shape[1] == x.shape[2]:
        return np.rot90(x, int(degrees // 90), axes=(1, 2))
    return ndimage.rotate(x, degrees, axes=(2, 1), reshape=False, order=1)


def _tinted(x: np.ndarray, hue: float, rng: np.random.Generator) -> np.ndarray:
    return x if hue < 0 else x * np.array(colorsys.hsv_to_rgb(hue, 1, 1), np.float32)


# (x [n, H, W, C] in [0, 1], value, rng) -> x
_IMAGES: dict[str, Images] = {
    "rotate": _rotated,
    "invert": lambda x, value, rng: 1 - x if value else x,
    "colour": _tinted,
    "noise": lambda x, value, rng: x + value * rng.normal(size=x.shape),
    "blur": lambda x, value, rng: ndimage.gaussian_filter(x, (0, value, value, 0)),
    "contrast": lambda x, value, rng: x.mean() + value * (x - x.mean()),
}
