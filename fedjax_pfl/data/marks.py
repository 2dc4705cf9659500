"""Heterogeneous inputs of FedDVA: marks of one type on all images of a client (Section
5, its released code)."""

from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.partition import Partition, flat
from fedjax_pfl.errors import InputError

# client k has type k mod 4
MARKS = ("plain", "horizontal_sine", "vertical_sine", "ellipse")
ANGLE = 0.2  # between the points of a curve: 32 of them in a turn
ECCENTRICITY = 0.9
SMALLEST = 8  # pixels per side


class Marked(NamedTuple):
    """A data set with marks, and the type of each client."""

    dataset: Dataset
    marks: tuple[str, ...]  # [N] of MARKS, the type of each client


def mark(dataset: Dataset, partition: Partition, seed: int) -> Marked:
    """Draws a mark over every image as the maximum of image and mark.

    A mark has the data set's largest value in all channels. It depends on the seed, the
    row of the example and the type of its client.

    Args:
      dataset: square images [n, H, W, C].
      partition: client k gets marks of type k mod 4 on its train, validation and test
        rows. No two clients may share a row.
      seed: equal seeds give equal marks.

    Raises:
      InputError: not square images of at least 8 pixels per side.
    """
    shape = dataset.x.shape[1:]
    if len(shape) != 3 or shape[0] != shape[1] or shape[0] < SMALLEST:
        raise InputError(
            f"Marks need square images of at least {SMALLEST} pixels per side, got "
            f"shape {shape}."
        )
    owner = owners(partition, len(dataset.y))
    phase = np.random.default_rng(seed).random(len(dataset.y))
    x, top = dataset.x.copy(), dataset.x.max()
    for kind in range(1, len(MARKS)):
        rows = np.flatnonzero((owner >= 0) & (owner % len(MARKS) == kind))
        drawn = draw(MARKS[kind], phase[rows], shape[0])
        x[rows] = np.maximum(
            x[rows], np.where(drawn, top, dataset.x.min())[..., None].astype(x.dtype)
        )
    return Marked(
        dataset._replace(x=x),
        tuple(MARKS[k % len(MARKS)] for k in range(len(partition.train))),
    )


def draw(kind: str, phase: np.ndarray, side: int) -> np.ndarray:
    """Returns the pixels of marks, bool [n, side, side], the outermost pixels free.

    Args:
      kind: one of MARKS. A sine is one period over the whole width (height); an ellipse
        has eccentricity 0.9.
      phase: [n] in [0, 1): of a turn for a sine, of half a turn for an ellipse's
        rotation.
      side: of the image, in pixels.
    """
    pixels = np.zeros((len(phase), side, side), bool)
    if kind != "plain":
        rows, columns = (
            _sine(phase, side) if kind.endswith("sine") else _ellipse(phase, side)
        )
        rows, columns = (columns, rows) if kind == "vertical_sine" else (rows, columns)
        pixels[
            np.arange(len(phase))[:, None], _pixel(rows, side), _pixel(columns, side)
        ] = True
    return pixels


def _angles(side: int) -> np.ndarray:
    """32 for images of up to 32 pixels a side, as published; larger ones get as many as
    their side."""
    angles = np.arange(0, 2 * np.pi, ANGLE)
    return angles if side <= len(angles) else np.arange(side) * 2 * np.pi / side


def _sine(phase: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns [n, points] of a horizontal sine."""
    span, angles = side - 3, _angles(side)
    rows = 1 + span / 2 * (1 + np.sin(angles + 2 * np.pi * phase[:, None]))
    return rows, np.broadcast_to(
        1 + np.arange(len(angles)) * span / len(angles), rows.shape
    )


def _ellipse(phase: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns [n, points] of an ellipse about the middle, rotated."""
    long, angles, turn = (side - 3) / 2, _angles(side), np.pi * phase[:, None]
    x, y = long * np.cos(angles), long * np.sqrt(1 - ECCENTRICITY**2) * np.sin(angles)
    middle = (side - 2) / 2
    return middle + x * np.sin(turn) + y * np.cos(turn), middle + x * np.cos(
        turn
    ) - y * np.sin(turn)


def _pixel(at: np.ndarray, side: int) -> np.ndarray:
    return np.asarray(np.clip(np.rint(at), 1, side - 2), np.int64)


def owners(partition: Partition, n: int) -> np.ndarray:
    """Returns the client of each of the n rows, -1 where nobody owns it."""
    owner = np.full(n, -1)
    for part in ("train", "test", "val"):
        sizes = getattr(partition, f"{part}_sizes")
        rows = flat(getattr(partition, part), sizes)
        owner[rows] = np.repeat(np.arange(len(sizes)), sizes)
    return owner
