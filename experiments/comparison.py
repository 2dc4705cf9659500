"""Several runs in one setting beside each other: a short table, and one picture."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import courses, drawing, gather, networks, plain, scores
from experiments.config import Config
from experiments.drawing import PALETTE
from experiments.gather import Found
from experiments.plain import plural
from experiments.scores import Headline

_BY_CLASSES = ("pathological", "pathological_subset", "label_groups")
# grey; methods without a personal model
_LOCAL, _DASHED = "#999999", ("fedavg", "fedprox", "scaffold", "fedma")
# the baseline's line
MAJORITY: dict[str, Any] = {"color": "0.35", "linewidth": 1, "linestyle": (0, (1, 3))}
# of the first method of a colour, and of the next
_LINES = {"-": "-", "--": "--"}, {"-": "-.", "--": ":"}


def table(workdirs: Sequence[Path]) -> str:
    """A line for each method, the best before local training first: mean over seeds,
    and standard deviation."""
    title, rows, notes = content([gather.read(path) for path in workdirs])
    return "\n".join([title, plain.columns(rows), *notes])


def content(every: Sequence[Found]) -> tuple[str, list[list[str]], list[str]]:
    """What stands in `table`: its title; its rows, that of the headings first; and
    notes on runs that are not complete, are there twice, or are of other settings."""
    found = gather.grouped(every, gather.labels(every))
    headline, several = (
        next(iter(found.values()))[0].headline,
        max(map(len, found.values())) > 1,
    )
    name = headline[0]
    points = {
        "before local training": ("pre", "macro"),
        "worst tenth": ("pre", "worst10"),
        "after it": ("post", "macro"),
    }
    costs: dict[str, Callable[[Found], Any]] = {
        "MB sent": lambda run: run.said["traffic"]["bytes"] / 1e6,
        "seconds": lambda run: run.said.get("seconds", {}).get("train"),
    }
    rows = [["method", *(["runs"] if several else []), *points, "rounds", *costs]]
    for method in _ordered(found, headline):
        runs, whole = compared(found[method]), len(found[method])
        row = [
            method,
            *(
                [str(whole) if len(runs) == whole else f"{len(runs)} of {whole}"]
                if several
                else []
            ),
        ]
        for point, which in points.values():
            row.append(
                mean_std(
                    values(runs, point, name, which),
                    functools.partial(scores.shown, name),
                )
            )
        rounds = sorted({run.said["rounds"] for run in runs or found[method]})
        row.append(
            str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        )
        row += [
            _costs([cost(run) for run in runs if cost(run) is not None])
            for cost in costs.values()
        ]
        rows.append(row)
    every = [run for runs in found.values() for run in runs]  # by method
    floors = {
        column: majority(every, name, point)
        for column, (point, which) in points.items()
        if which == "macro"
    }
    if any(floors.values()):
        known = {
            column: mean_std(of, functools.partial(scores.shown, name))
            for column, of in floors.items()
        }
        rows.append(
            ["majority baseline", *(known.get(column, "-") for column in rows[0][1:])]
        )
    unit = " in %" if scores.is_share(name) else ""
    spread = "; ± is the sample standard deviation over seeds" if several else ""
    title = (
        f"{name}{unit}, mean over clients{' (and over seeds)' if several else ''}, "
        f"after the last round{spread}:"
    )
    return title, rows, [*unfinished(every), *_twice(found), *gather.unlike(every)]


def compared(runs: Sequence[Found]) -> list[Found]:
    """Those that have not diverged: what a run scored before says nothing of the
    method."""
    return [run for run in runs if run.said.get("status") != "diverged"]


def majority(runs: Sequence[Found], name: str, point: str = "pre") -> list[float]:
    """What always answering a client's most frequent class scores, mean over the
    clients of a point, for each seed; nothing where it is not recorded, or the runs of
    a seed have other data."""
    known: dict[int, set[float]] = {}
    for run in runs:
        if (value := run.value(point, scores.baseline(name))) is not None:
            known.setdefault(run.config.seed, set()).add(value)
    alike = all(len(values) == 1 for values in known.values())
    return [value for values in known.values() for value in values] if alike else []


def unfinished(runs: Sequence[Found]) -> list[str]:
    """A sentence on every run that is not complete."""
    return [
        f"{run.path}: {run.status} of {run.config.rounds}."
        for run in runs
        if not run.complete
    ]


def _twice(found: dict[str, list[Found]]) -> list[str]:
    """A sentence on every method of which a seed is there more than once."""
    seeds = {
        method: [run.config.seed for run in runs] for method, runs in found.items()
    }
    again = [method for method, of in seeds.items() if len(set(of)) < len(of)]
    return [
        f"{method}: several runs have one seed, and each counts." for method in again
    ]


def mean_std(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """The mean, and behind ± the sample standard deviation of more than one value; `-`
    of none."""
    spread = f" ± {shown(float(np.std(values, ddof=1)))}" if len(values) > 1 else ""
    return f"{shown(float(np.mean(values)))}{spread}" if values else "-"


def _costs(values: Sequence[float]) -> str:
    """As `mean_std`, with three digits of the mean, or all before the point."""
    largest = max(map(abs, values), default=0)
    digits = min(3, max(0, 2 - math.floor(math.log10(largest)))) if largest else 0
    return mean_std(
        values if len(set(values)) > 1 else values[:1],
        lambda value: f"{value:,.{digits}f}",
    )


def draw(workdirs: Sequence[Path], root: Path) -> Path:
    """Draws ROOT/comparison.png: the headline before local training by round, and what
    it is at the end for whom."""
    every = [gather.read(path) for path in workdirs]
    found = gather.grouped(every, gather.labels(every))
    headline = next(iter(found.values()))[0].headline
    found = {
        method: compared(runs) for method, runs in found.items() if compared(runs)
    } or found
    colours = dict(zip(found, _palette(list(found)), strict=True))
    name = headline[0]
    columns = drawing.legend_columns(
        10, [f"{method}  99.9%" for method in (*found, "majority baseline")]
    )
    with drawing.drawn(
        root / "comparison.png", (10, 4 + 0.2 * math.ceil((len(found) + 1) / columns))
    ) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
        for method, runs in found.items():
            again = list(colours.values())[: list(found).index(method)].count(
                colours[method]
            )
            line = _LINES[again % 2][
                "--" if method.partition(",")[0] in _DASHED else "-"
            ]
            _curve(
                left, runs, name, method, {"color": colours[method], "linestyle": line}
            )
        _ends(right, found, headline, colours)
        everything = [run for runs in found.values() for run in runs]
        if floor := majority(everything, name):
            at = float(np.mean(floor))
            left.axhline(
                at, **MAJORITY, label=f"majority baseline  {scores.shown(name, at)}"
            )
            right.axvline(at, **MAJORITY)
        what = "test accuracy" if name == "acc" else f"test {name}"
        left.set(
            xlabel="round",
            ylabel=f"{what}, mean over clients",
            title="Before local training, by round",
        )
        drawing.whole_numbers(left.xaxis, 8)
        figure.legend(
            *left.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
        )
        right.set(xlabel=what, title="After the last round")
        for axes in (left, right):
            axes.grid(alpha=0.25)
        figure.suptitle(title(everything).partition("\n")[0], fontsize=10)
    return root / "comparison.png"


def _ends(
    axes: Any,
    found: dict[str, list[Found]],
    headline: Headline,
    colours: dict[str, str],
) -> None:
    """From the worst tenth of the clients to the mean over all, before local training;
    and the mean after it."""
    methods = _ordered(found, headline)[::-1]
    for row, method in enumerate(methods):
        colour, name, runs = colours[method], headline[0], found[method]
        worst, mean = _mean(runs, "pre", name, "worst10"), _mean(runs, "pre", name)
        axes.plot([worst, mean], [row, row], color=colour, linewidth=1.8)
        axes.plot(
            worst,
            row,
            "o",
            color=colour,
            markerfacecolor="white",
            label="worst tenth" * (row == 0),
        )
        axes.plot(
            mean,
            row,
            "o",
            color=colour,
            label="mean, before local training" * (row == 0),
        )
        after = _mean(runs, "post", name)
        axes.plot(
            after,
            row,
            "|",
            color=colour,
            markersize=13,
            label="mean, after it" * (row == 0),
        )
    axes.set(
        yticks=range(len(methods)), yticklabels=methods, ylim=(-0.6, len(methods) + 0.9)
    )
    axes.legend(framealpha=1, edgecolor="none", loc="upper left", ncols=1, fontsize=8)


def values(
    runs: Sequence[Found], point: str, name: str, which: str = "macro"
) -> list[float]:
    """A statistic of the runs that have it, one for each seed."""
    return [x for x in (run.value(point, name, which) for run in runs) if x is not None]


def _mean(runs: Sequence[Found], point: str, name: str, which: str = "macro") -> float:
    """Mean over seeds of a statistic; NaN if no run has it."""
    found = values(runs, point, name, which)
    return float(np.mean(found)) if found else math.nan


def _ordered(found: dict[str, list[Found]], headline: Headline) -> list[str]:
    """The methods, the best before local training first."""
    name, sign = headline[0], -1 if headline[1] == "max" else 1
    means = {
        method: _mean(compared(runs), "pre", name) for method, runs in found.items()
    }
    return sorted(
        found, key=lambda method: np.nan_to_num(sign * means[method], nan=np.inf)
    )


def styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each method is drawn: its colour as in `draw`, and a line and a marker that
    tell it apart in print without colours; `markevery` differs, so that markers of
    close curves do."""
    lines, markers = itertools.cycle(drawing.LINES), itertools.cycle(drawing.MARKERS)
    places = itertools.cycle((0, 0.25, 0.5, 0.75))
    common = {"linewidth": 1.6, "markersize": 4.5}
    return {
        method: common
        | {
            "color": colour,
            "linestyle": next(lines),
            "marker": next(markers),
            "markevery": next(places),
        }
        for method, colour in zip(methods, _palette(list(methods)), strict=True)
    }


def _palette(methods: list[str]) -> list[str]:
    """A colour for each method; that of Local, or of the first of several, is grey."""
    rest, first = (
        itertools.cycle(PALETTE),
        next((x for x in methods if x.partition(",")[0] == "local"), None),
    )
    return [_LOCAL if method == first else next(rest) for method in methods]


def _curve(
    axes: Any, runs: list[Found], name: str, method: str, style: dict[str, Any]
) -> None:
    """Mean over seeds in the rounds that all have, a band of one standard deviation,
    and in the legend the mean of the last values."""
    found = [courses.course(run, name, None)["pre"] for run in runs]
    # seeds may end after different rounds
    ends = [course[-1, 1] for course in found if len(course)]
    label = f"{method}  {scores.shown(name, float(np.mean(ends)))}" if ends else method
    band = courses.band(found)
    axes.plot(band.x, band.mean, linewidth=1.8, label=label, **style)
    if len(runs) > 1:
        drawing.band(axes, *band, name, style["color"])


def title(runs: Sequence[Found], without: Sequence[str] = ()) -> str:
    """The setting of some runs, as far as it is the same for all: data, partition,
    network, local work; and how many seeds, if there are several.

    Args:
      without: settings that are not to be said.
    """
    found = [_parts(run.config.replace(**dict.fromkeys(without))) for run in runs]
    same = [parts[0] for parts in zip(*found, strict=True) if len(set(parts)) == 1]
    seeds = {
        len({run.config.seed for run in of})
        for of in gather.grouped(runs, gather.labels(runs)).values()
    }
    spread = (
        "\nmean and sample standard deviation over "
        f"{'up to ' * (len(seeds) > 1)}{max(seeds)} seeds"
    )
    return "".join(same).strip(", ") + spread * (max(seeds) > 1)


def _parts(c: Config) -> list[str]:
    work = (
        plural(c.epochs or 0, "epoch") if c.steps is None else plural(c.steps, "step")
    )
    spread = (
        f", alpha {c.alpha:g}"
        if c.alpha is not None and "dirichlet" in c.partition
        else ""
    )
    classes = (
        f", {c.classes_per_client} classes each"
        if c.classes_per_client and c.partition in _BY_CLASSES
        else ""
    )
    held = f" ({c.partition}{spread}{classes})"
    clients = plural(c.clients or 0, "client") + (
        f" ({c.unseen:.4g} of them unseen)" if c.unseen else ""
    )
    part = "" if c.data_fraction == 1 else f" ({c.data_fraction:.4g} of it)"
    return [
        f"{c.dataset}{part}: {clients}",
        held,
        f", {networks.label(c)}",
        f", {work} a round",
        f", batch {c.batch_size}",
    ]
