"""What the figures have in common: style, colours, and files that are written whole or not at all."""

import os
from pathlib import Path
from typing import Any

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
LINES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1)), (0, (6, 2, 1, 2, 1, 2)), (0, (8, 3)))
MARKERS = "osD^vPX*"
STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150}
SMALL: Any = STYLE | {"font.size": 9}


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure whole or not at all; the suffix of the path is the format."""
    path = Path(path)
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    figure.savefig(part)
    os.replace(part, path)


def save_both(figure: Figure, path: str | Path) -> None:
    """Writes a figure as PATH.png and PATH.pdf."""
    for suffix in ("png", "pdf"):
        save(figure, f"{path}.{suffix}")
