"""Several runs in one setting beside each other: a short table, and one picture."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments import drawing, runs, schema, scores
from experiments.config import Config
from experiments.drawing import PALETTE, STYLE
from experiments.files import read_json, read_rows
from experiments.scores import Headline

_LOCAL, _DASHED = "#999999", ("fedavg", "fedprox", "scaffold", "fedma")  # grey; methods without a personal model


def _by_method(workdirs: Sequence[Path]) -> dict[str, list[Path]]:
    """The runs of each method, one for each seed."""
    found: dict[str, list[Path]] = {}
    for path in workdirs:
        found.setdefault(runs.read_config(path).algo, []).append(path)
    return found


def _last(path: Path) -> dict[str, Any]:
    """What a run's summary says of the headline: {point: statistics in its last round}."""
    summary = read_json(path / "summary.json", schema.SUMMARY)
    said = summary.get("headline")
    headline = (said["score"], said["better"]) if said else scores.ACCURACY
    found = {point: known[headline[0]] for point, known in summary["scores"].items() if headline[0] in known}
    return found | {"headline": headline}


def table(workdirs: Sequence[Path]) -> str:
    """A line for each method, the best before local training first: mean over seeds, and standard
    deviation."""
    found = {method: [_last(path) for path in paths] for method, paths in _by_method(workdirs).items()}
    headline, several = next(iter(found.values()))[0]["headline"], max(map(len, found.values())) > 1
    name = headline[0]

    def cell(ends: list[dict], point: str, which: str) -> str:
        values = [run[point][which] for run in ends if point in run]
        spread = f" ± {scores.shown(name, float(np.std(values, ddof=1)))}" if len(values) > 1 else ""
        return f"{scores.shown(name, float(np.mean(values)))}{spread}" if values else "-"

    head = ["method", "before local training", "worst tenth", "after it"]
    points = [("pre", "macro"), ("pre", "worst10"), ("post", "macro")]
    rows = [[method, *(cell(found[method], *which) for which in points)] for method in _ordered(found, headline)]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    unit = " in %" if scores.is_share(name) else ""
    title = f"{name}{unit}, mean over clients{' (and over seeds)' if several else ''}, after the last round:"
    return "\n".join([title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in [head, *rows])])


def draw(workdirs: Sequence[Path], root: Path) -> Path:
    """Draws ROOT/comparison.png: the headline before local training by round, and what it is at the
    end for whom."""
    found = _by_method(workdirs)
    ends = {method: [_last(path) for path in paths] for method, paths in found.items()}
    headline, colours = ends[next(iter(ends))][0]["headline"], dict(zip(found, _palette(list(found)), strict=True))
    name = headline[0]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
        for method, paths in found.items():
            _curve(left, [read_rows(path / "metrics.jsonl") for path in paths], name, method, colours[method])
        _ends(right, ends, headline, colours)
        title = "test accuracy" if name == "acc" else f"test {name}"
        left.set(xlabel="round", ylabel=f"{title}, mean over clients", title="Before local training, by round")
        left.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        left.legend(frameon=False, loc="best")
        right.set(xlabel=title, title="After the last round")
        for axes in (left, right):
            axes.grid(alpha=0.25)
        figure.suptitle(_setting(runs.read_config(workdirs[0])), fontsize=10)
        drawing.save(figure, root / "comparison.png")
    return root / "comparison.png"


def _ends(axes: Any, ends: dict[str, list[dict]], headline: Headline, colours: dict[str, str]) -> None:
    """From the worst tenth of the clients to the mean over all, before local training; and the mean
    after it."""
    for row, method in enumerate(reversed(_ordered(ends, headline))):
        colour, where = colours[method], {}
        for label, point, which in (("worst", "pre", "worst10"), ("mean", "pre", "macro"), ("after", "post", "macro")):
            where[label] = _mean(ends[method], point, which)
        axes.plot([where["worst"], where["mean"]], [row, row], color=colour, linewidth=1.8)
        axes.plot(where["worst"], row, "o", color=colour, markerfacecolor="white", label="worst tenth" * (row == 0))
        axes.plot(where["mean"], row, "o", color=colour, label="mean, before local training" * (row == 0))
        axes.plot(where["after"], row, "|", color=colour, markersize=13, label="mean, after it" * (row == 0))
    axes.set(yticks=range(len(ends)), yticklabels=_ordered(ends, headline)[::-1], ylim=(-0.6, len(ends) + 0.9))
    axes.legend(frameon=False, loc="upper left", ncols=1, fontsize=8)


def _mean(ends: list[dict], point: str, which: str) -> float:
    """Mean over seeds of a statistic; NaN if no run has it."""
    values = [run[point][which] for run in ends if point in run]
    return float(np.mean(values)) if values else math.nan


def _ordered(ends: dict[str, list[dict]], headline: Headline) -> list[str]:
    """The methods, the best before local training first."""
    sign = -1 if headline[1] == "max" else 1
    return sorted(ends, key=lambda method: np.nan_to_num(sign * _mean(ends[method], "pre", "macro"), nan=np.inf))


def _palette(methods: list[str]) -> list[str]:
    rest = itertools.cycle(PALETTE)
    return [_LOCAL if method == "local" else next(rest) for method in methods]


def _curve(axes: Any, runs: list[list[dict]], name: str, method: str, colour: str) -> None:
    """Mean over seeds, a band of one standard deviation, and the last value in the legend."""
    key = f"pre/{name}"
    series = [{row["round"]: row[key] for row in rows if row.get(key) is not None} for rows in runs]
    rounds = sorted(set.intersection(*map(set, series)))
    values = np.array([[one[t] for t in rounds] for one in series])
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=min(1, len(series) - 1))
    label = f"{method}  {scores.shown(name, float(mean[-1]))}" if len(mean) else method
    axes.plot(rounds, mean, color=colour, linewidth=1.8, label=label, linestyle="--" if method in _DASHED else "-")
    if len(series) > 1:
        axes.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)


def _setting(c: Config) -> str:
    work = f"{c.steps} steps" if c.steps is not None else f"{c.epochs} epochs"
    spread = f", alpha {c.alpha:g}" if c.alpha is not None and "dirichlet" in c.partition else ""
    return f"{c.dataset}: {c.clients} clients ({c.partition}{spread}), {c.model}, {work} a round, batch {c.batch_size}"
