"""Heat maps of what a method reports of pairs of clients, such as MNFL's coefficients,
round beside round."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import drawing

Array = np.ndarray
PANELS = 4  # rounds side by side, at most
_NAMED = 30  # clients up to which each is named at the axes
# of the mean: entries that differ by less all in all are shown as one colour, not as a
# pattern
_FLAT = 0.01
_STYLE: Any = {"font.size": 9, "figure.dpi": 150}  # with all four spines: a frame


def order(architecture: Array, class_counts: Array) -> Array:
    """The ids [N] of the clients by architecture, then by dominant class, then by id.

    Args:
      architecture: [N] numbers.
      class_counts: [N, C] training examples.
    """
    return np.lexsort((class_counts.argmax(axis=1), architecture))  # which is stable


def chosen(rounds: list[int]) -> list[int]:
    """The rounds that are drawn: the first, the last, and some between."""
    places = np.linspace(0, len(rounds) - 1, min(PANELS, len(rounds)))
    return [rounds[int(place)] for place in np.round(places)]


def scale(matrices: list[Array]) -> tuple[float, float, str]:
    """The least and the largest value of the colours, and which ends are beyond them,
    as matplotlib's `extend`.

    Where the diagonals exceed all that is beside them, they are beyond the end: else
    nothing else could be seen. NaN is left out.
    """
    beside = np.concatenate(
        [found[~np.eye(len(found), dtype=bool)] for found in matrices]
    )
    every = np.concatenate([found.ravel() for found in matrices])
    beside, every = beside[np.isfinite(beside)], every[np.isfinite(every)]
    every = every if every.size else np.zeros(1)
    beside = beside if beside.size else every
    low, high = float(beside.min()), float(beside.max())
    least = _FLAT * abs(float(beside.mean())) or 1e-12
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    ends = {
        (False, False): "neither",
        (True, False): "min",
        (False, True): "max",
        (True, True): "both",
    }
    return low, high, ends[bool(every.min() < low), bool(every.max() > high)]


def draw(
    path: str | Path,
    name: str,
    matrices: Mapping[int, Array],
    names: Array,
    class_counts: Array,
) -> None:
    """Draws some rounds of a matrix side by side in one scale of colours, as PNG and
    PDF.

    Args:
      path: of the image files, without a suffix.
      name: of the matrix.
      matrices: {round: [N, N]}, at least one; NaN, which stays white, is not known.
      names: [N] the name of each client's network, at whose borders lines are drawn.
      class_counts: [N, C] training examples.
    """
    kinds = list(dict.fromkeys(names))
    group = np.array([kinds.index(kind) for kind in names])
    ids = order(group, class_counts)
    shown = {
        t: np.asarray(matrices[t])[np.ix_(ids, ids)] for t in chosen(list(matrices))
    }
    low, high, extend = scale(list(shown.values()))
    side = float(np.clip(0.17 * len(ids), 2.6, 5))
    size = ((side + 0.2) * len(shown) + 1.9, side + 1.2)
    with drawing.drawn(
        path, size, _STYLE, layout="compressed", suffixes=drawing.SUFFIXES
    ) as figure:
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        for axes, (t, matrix) in zip(panels, shown.items(), strict=True):
            # cividis looks the same without red and green
            image = axes.imshow(
                matrix, cmap="cividis", vmin=low, vmax=high, interpolation="nearest"
            )
            axes.set_title(f"round {t}", fontsize=9)
            _client_axes(axes, group[ids])
        _name_clients(panels, [f"{k} ({np.argmax(class_counts[k])})" for k in ids])
        if len(kinds) > 1:
            _name_architectures(panels[-1], group[ids], [str(kind) for kind in kinds])
        panels[0].set_ylabel("client of the row")
        how = (
            "its most frequent class in brackets"
            if len(ids) <= _NAMED
            else "by architecture and most frequent class"
        )
        figure.supxlabel(f"client of the column, {how}", fontsize=9)
        bar = figure.colorbar(
            image, ax=list(panels), extend=extend, shrink=0.9, label=name
        )
        bar.ax.ticklabel_format(useOffset=False)


def _client_axes(axes: Any, group: Array) -> None:
    """Marks where architectures end, on axes without ticks."""
    axes.set(xticks=[], yticks=[])
    axes.tick_params(length=0, pad=1, labelsize=6)
    for border in np.flatnonzero(np.diff(group)) + 0.5:
        for line in (axes.axhline, axes.axvline):
            line(border, color="white", linewidth=2.2)
            line(border, color="black", linewidth=0.9)


def _name_clients(panels: Any, clients: list[str]) -> None:
    """Names the columns of all panels and the rows of the first, unless they are too
    many."""
    if len(clients) <= _NAMED:
        panels[0].set_yticks(range(len(clients)), clients)
        for axes in panels:
            axes.set_xticks(range(len(clients)), clients, rotation=90)


def _name_architectures(axes: Any, group: Array, kinds: list[str]) -> None:
    """Names the architectures beside their rows, at the right."""
    right = axes.secondary_yaxis("right")
    middles = [
        float(np.flatnonzero(group == number).mean()) for number in range(len(kinds))
    ]
    right.set_yticks(middles, kinds, rotation=270, va="center", fontsize=8)
    right.tick_params(length=0)
