"""Figures of several runs beside each other: over rounds, over clients, over what they
cost, and over the data's heterogeneity; mean and sample standard deviation over
seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments import (
    comparison,
    courses,
    drawing,
    gather,
    scores,
    settings as all_settings,
)
from experiments.courses import Band
from experiments.drawing import STYLE
from experiments.gather import Found
from experiments.targets import Flops

_COSTS = {
    "MB": "sent down and up",
    "TFLOP": "local work of the clients",
    "seconds": "training and evaluation",
}
_LEFT_OUT = {
    "MB": "bytes",
    "TFLOP": "operations (counted in a run with --targets, or now, where its data are)",
    "seconds": "seconds",
}
_UNITS = {  # column: factors and units, the largest first
    "MB": ((1e-3, "GB"), (1.0, "MB"), (1e3, "kB")),
    "TFLOP": ((1e-3, "PFLOP"), (1.0, "TFLOP"), (1e3, "GFLOP"), (1e6, "MFLOP")),
    "seconds": ((1.0, "seconds"),),
}
_HETEROGENEITY = {
    "alpha": "Dirichlet concentration alpha",
    "classes_per_client": "classes per client",
}
_WIDE = 20.0  # costs that differ by more are drawn on a logarithmic axis


class Series(NamedTuple):
    """The runs of one method, one for each seed, and how they are drawn."""

    runs: list[Found]
    courses: list[dict[str, np.ndarray]]
    style: dict[str, Any]


def figures(
    runs: Sequence[Found],
    flops: Callable[[Found], Flops | None] = courses.counted_flops,
) -> tuple[dict[str, Figure], list[str]]:
    """All figures of some runs by the name of their file, and a sentence on each that
    is left out.

    Args:
      flops: of a run; asked of the first run of each method.
    """
    name = runs[0].headline[0]
    shown = [run for run in runs if run.headline[0] == name]
    notes = [
        f"{run.path} is left out: its score is {run.headline[0]}."
        for run in runs
        if run not in shown
    ]
    notes += [
        f"{run.path} is left out: it has no evaluation yet."
        for run in shown
        if run.value("pre", name) is None
    ]
    kept = comparison.compared(shown) or shown
    notes += [
        f"{run.path} is left out: it has diverged." for run in shown if run not in kept
    ]
    shown = [run for run in kept if run.value("pre", name) is not None]
    if not shown:
        return {}, notes
    labels, data = gather.names(shown), list(map(tuple, gather.settings(shown)))
    styles = comparison.styles(list(dict.fromkeys(labels)))
    counted = {
        key: flops(of[0])
        for key, of in gather.grouped(
            shown, list(zip(labels, data, strict=True))
        ).items()
    }
    drawn: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        for where, here in gather.grouped(
            list(zip(shown, labels, strict=True)), data
        ).items():
            series = {
                label: Series(
                    of,
                    [courses.course(run, name, counted[label, where]) for run in of],
                    styles[label],
                )
                for label, of in gather.grouped(
                    [run for run, _ in here], [label for _, label in here]
                ).items()
            }
            suffix = _suffix(where)
            drawn["curves" + suffix], drawn["clients" + suffix] = (
                curves(series),
                clients(series),
            )
            drawn["costs" + suffix], more = costs(series)
            notes += [note for note in more if note not in notes]
        ended = [
            (run, label)
            for run, label in zip(shown, labels, strict=True)
            if run.complete
        ]
        for setting in _HETEROGENEITY:
            other = list(
                map(tuple, gather.settings([run for run, _ in ended], without=setting))
            )
            for where, here in gather.grouped(ended, other).items():
                groups = gather.grouped(
                    [run for run, _ in here], [label for _, label in here]
                )
                everywhere = {
                    label: Series(of, [], styles[label]) for label, of in groups.items()
                }
                if found := heterogeneity(everywhere, setting):
                    drawn[setting + _suffix(where)] = found
    return drawn, notes + comparison.unfinished(shown)


def _suffix(where: Sequence[str]) -> str:
    """What the name of a figure ends in that is of some settings of the data."""
    return f"-{all_settings.file_name(list(where))}" if where else ""


def curves(series: Mapping[str, Series]) -> Figure:
    """Draws the headline by round, before and after local training."""
    figure, axes, name = _panels(series, 2, sharex=True)
    for panel, (point, when) in zip(
        axes, courses.BEFORE_AND_AFTER.items(), strict=True
    ):
        for label, one in series.items():
            _line(
                panel,
                courses.band([course[point] for course in one.courses]),
                one.style,
                label,
                name,
            )
        _baseline(panel, series, name, point)
        panel.set(xlabel="rounds", title=when.capitalize())
        drawing.whole_numbers(panel.xaxis, 8, steps=[1, 2, 5, 10])
    axes[0].set_ylabel(f"{_score(name)}, mean over clients")
    _limit(axes[0], series, name)
    return _finished(figure, axes[0], series)


def clients(series: Mapping[str, Series]) -> Figure:
    """Draws each client's last score, from the worst client to the best, before and
    after local training."""
    figure, axes, name = _panels(series, 2)
    for label, one in series.items():
        found = [courses.of_clients(run, name) for run in one.runs]
        for panel, (point, when) in zip(
            axes, courses.BEFORE_AND_AFTER.items(), strict=True
        ):
            way = scores.better(name, one.runs[0].headline)
            _line(
                panel,
                courses.ranked([of[point] for of in found], way),
                one.style,
                label,
                name,
            )
            title = f"{when.capitalize()} (each client's last)"
            panel.set(
                xlabel="clients, sorted by their score, in %",
                title=title,
                xlim=(0, 100),
            )
    axes[0].set_ylabel(f"{_score(name)} of a client")
    return _finished(figure, axes[0], series)


def costs(series: Mapping[str, Series]) -> tuple[Figure, list[str]]:
    """Draws the headline before local training against bytes, operations and seconds;
    what some run does not know is left out, and said."""
    columns = [
        column
        for column in _COSTS
        if all(_knows(one, column) for one in series.values())
    ]
    notes = [
        f"Left out, for not every run knows them: {_LEFT_OUT[x]}."
        for x in _COSTS
        if x not in columns
    ]
    figure, axes, name = _panels(series, len(columns))
    for panel, column in zip(axes, columns, strict=True):
        bands = {
            label: courses.band([of["pre"] for of in one.courses], column)
            for label, one in series.items()
        }
        ends = [found.x.max() for found in bands.values() if found.x.any()]
        wide = bool(ends) and max(ends) > _WIDE * min(ends)
        unit, scale = _unit(
            column, min(ends, default=0) if wide else max(ends, default=0)
        )
        for label, found in bands.items():
            # costs nothing: what it has at the end, at any price
            if not found.x.any() and len(found.x) > 1:
                panel.axhline(
                    found.mean[-1], **series[label].style | {"marker": ""}, label=label
                )
                continue
            # a logarithmic axis has no 0
            drawn = found.x > 0 if wide else np.ones(len(found.x), bool)
            kept = Band(found.x[drawn] * scale, found.mean[drawn], found.std[drawn])
            _line(panel, kept, series[label].style, label, name)
        if wide:
            panel.set_xscale("log")
        elif ends:
            panel.set_xlim(left=0)
        _baseline(panel, series, name)
        panel.set(xlabel=f"{unit}, {_COSTS[column]}")
    axes[0].set_ylabel(f"{_score(name)} before\nlocal training, mean over clients")
    _limit(axes[0], series, name)
    return _finished(figure, axes[-1], series), notes


def _unit(column: str, largest: float) -> tuple[str, float]:
    """The unit in which numbers are neither long nor small, and the factor to it."""
    scale, unit = next(
        (found for found in _UNITS[column] if largest * found[0] >= 1),
        _UNITS[column][-1],
    )
    return unit, scale


def heterogeneity(series: Mapping[str, Series], setting: str) -> Figure | None:
    """Draws the headline after the last round against a setting of the partition, of
    runs that are complete; None where they do not differ in it."""
    levels = {
        gather.setting(run.config, setting)
        for one in series.values()
        for run in one.runs
    } - {None}
    if len(levels) < 2:
        return None
    figure, axes, name = _panels(series, 2, sharex=True)
    apart = 0.012 * math.log(max(levels) / min(levels))
    for panel, (point, when) in zip(
        axes, courses.BEFORE_AND_AFTER.items(), strict=True
    ):
        for i, (label, one) in enumerate(series.items()):
            found = _by_level(one, setting, point, name)
            # so that bars do not hide each other
            x = found[:, 0] * math.exp(apart * (i - (len(series) - 1) / 2))
            panel.errorbar(
                x,
                found[:, 1],
                found[:, 2],
                capsize=3,
                label=label,
                **one.style | {"markevery": 1},
            )
        panel.set(
            xlabel=_HETEROGENEITY[setting],
            title=f"{when.capitalize()} (last round)",
            xscale="log",
        )
        panel.set_xticks(sorted(levels), [f"{value:g}" for value in sorted(levels)])
        panel.minorticks_off()
    axes[0].set_ylabel(f"{_score(name)}, mean over clients")
    return _finished(figure, axes[0], series, without=(setting,))


def _by_level(one: Series, setting: str, point: str, name: str) -> np.ndarray:
    """[levels, 3]: the level of a setting, mean and sample standard deviation of the
    last score."""
    ends = [
        (gather.setting(run.config, setting), run.value(point, name))
        for run in one.runs
    ]
    known = [
        (level, end) for level, end in ends if level is not None and end is not None
    ]
    found = gather.grouped([end for _, end in known], [level for level, _ in known])
    rows = [
        (level, np.mean(of), np.std(of, ddof=min(1, len(of) - 1)))
        for level, of in sorted(found.items())
    ]
    return np.array(rows, float).reshape(-1, 3)


def _knows(one: Series, column: str) -> bool:
    place = courses.COLUMNS.index(column)
    return all(np.isfinite(course["pre"][:, place]).all() for course in one.courses)


def _panels(
    series: Mapping[str, Series], count: int, sharex: bool = False
) -> tuple[Figure, list[Any], str]:
    """A figure with panels side by side that have one y-axis, and the name of the
    score."""
    width = 1.2 + 3.9 * count
    rows = math.ceil(
        (len(series) + 1)
        / drawing.legend_columns(width, [*series, "majority baseline"])
    )
    figure = Figure(figsize=(width, 4.0 + 0.2 * rows), layout="constrained")
    axes = list(figure.subplots(1, count, sharey=True, sharex=sharex, squeeze=False)[0])
    for panel in axes:
        panel.grid(alpha=0.25)
    return figure, axes, next(iter(series.values())).runs[0].headline[0]


def _line(axes: Any, found: Band, style: dict[str, Any], label: str, name: str) -> None:
    """A curve with markers at a tenth of its points, and a band of one standard
    deviation."""
    every = max(1, len(found.x) // 10)
    axes.plot(
        found.x,
        found.mean,
        label=label,
        **style | {"markevery": (int(every * style["markevery"]), every)},
    )
    if found.std.any():
        drawing.band(axes, *found, name, style["color"])


def _limit(axes: Any, series: Mapping[str, Series], name: str) -> None:
    """Cuts the y-axis of shares below what the methods have after a tenth of their
    rounds: else the first rounds take most of the height."""
    if not scores.is_share(name):
        return
    points = [
        course[point]
        for one in series.values()
        for course in one.courses
        for point in course
    ]
    late = [of[of[:, 0] >= 0.1 * of[:, 0].max(), 1].min() for of in points if len(of)]
    axes.set_ylim(
        max(-0.02, min([*late, *_majority(series, name)]) - 0.04), axes.get_ylim()[1]
    )


def _majority(
    series: Mapping[str, Series], name: str, point: str = "pre"
) -> list[float]:
    return comparison.majority(
        [run for one in series.values() for run in one.runs], name, point
    )


def _baseline(
    axes: Any, series: Mapping[str, Series], name: str, point: str = "pre"
) -> None:
    if values := _majority(series, name, point):
        axes.axhline(
            float(np.mean(values)), **comparison.MAJORITY, label="majority baseline"
        )


def _score(name: str) -> str:
    return "test accuracy" if name == "acc" else f"test {name}"


def _finished(
    figure: Figure,
    axes: Any,
    series: Mapping[str, Series],
    without: tuple[str, ...] = (),
) -> Figure:
    """With title and legend."""
    handles, labels = axes.get_legend_handles_labels()
    columns = drawing.legend_columns(figure.get_figwidth(), labels)
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False
    )
    figure.suptitle(
        comparison.title([run for one in series.values() for run in one.runs], without),
        fontsize=9,
    )
    return figure


def draw(runs: Sequence[Found], folder: Path) -> list[str]:
    """Draws all figures into a folder as PNG and PDF; what was drawn, and what was
    not."""
    drawn, notes = figures(runs)
    if drawn:
        folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, figure in drawn.items():
            for suffix in drawing.SUFFIXES:
                drawing.save(figure, f"{folder / name}{suffix}")
    return [*(f"{folder}: {name}.png, {name}.pdf" for name in drawn), *notes]
