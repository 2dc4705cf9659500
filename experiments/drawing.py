"""What the figures have in common: style, colours, and files that are written whole or
not at all.

Matplotlib is imported where something is drawn: it takes a sixth of a command's start.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import scores
from experiments.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # Okabe & Ito's: colour-blind-safe
LINES: tuple[Any, ...] = (
    "-",
    "--",
    "-.",
    (0, (1, 1)),
    (0, (6, 2, 1, 2, 1, 2)),
    (0, (8, 3)),
)
MARKERS = "osD^vPX*"
SUFFIXES = (".png", ".pdf")
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 150,
}
SMALL: Any = STYLE | {"font.size": 9}


@contextlib.contextmanager
def drawn(
    path: str | Path,
    size: tuple[float, float],
    style: Any = STYLE,
    *,
    layout: Any = "constrained",
    suffixes: tuple[str, ...] = ("",),
) -> Iterator[Figure]:
    """A figure so large in inches, which is written when the block ends: as PATH, with
    each of the suffixes."""
    import matplotlib

    # not pyplot: no global state, no display, nothing to close
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout=layout)
        yield figure
        for suffix in suffixes:
            save(figure, f"{path}{suffix}")


def whole_numbers(axis: Any, most: int, steps: Sequence[float] | None = None) -> None:
    """Puts at most `most` + 1 ticks at whole numbers of an axis; steps: between them,
    up to a power of ten."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True, steps=steps))


def legend_columns(width: float, labels: Iterable[str]) -> int:
    """Columns of a legend below a figure, so wide in inches; a column is filled before
    the next."""
    sizes = [len(label) + 8 for label in labels]
    for columns in range(min(6, len(sizes)), 1, -1):
        rows = math.ceil(len(sizes) / columns)
        if (
            sum(max(sizes[i : i + rows]) for i in range(0, len(sizes), rows))
            <= 11 * width
        ):
            return columns
    return 1


def band(
    axes: Any, x: np.ndarray, mean: np.ndarray, std: np.ndarray, name: str, colour: str
) -> None:
    """Fills one standard deviation around the means of a score; an accuracy cannot
    leave [0, 1], a band of a skewed one can."""
    low, high = mean - std, mean + std
    if scores.is_share(name):
        low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure whole or not at all; the suffix of the path is the format."""
    path = Path(path)
    write_bytes(path, lambda file: figure.savefig(file, format=path.suffix[1:]))
