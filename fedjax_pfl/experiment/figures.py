"""Figures of runs: `fedjax-pfl plot RUN ... [--output=FOLDER]`.

RUN is a run directory, or the directory of a sweep. Several runs are compared by round,
by cost, and from the worst client to the best, over several settings of the data by
mean ranks. A single run also has its partition.
"""

import contextlib
import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.ticker
import numpy as np
import pandas as pd
from absl import logging
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import (
    attention,
    cli,
    metrics,
    results,
    significance,
    standalone,
    text,
)
from fedjax_pfl.experiment.cli import Flag
from fedjax_pfl.experiment.results import Run

# Okabe and Ito's colours, safe for colour-blind readers
PALETTE = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
)
FLAGS = {
    "output": Flag(str, "folder (default: figures in the directory of the runs)"),
    "attention": Flag(str, "client of one run whose test images get Grad-CAM"),
    **cli.TRUST,
}
LINES = ("-", "--", "-.", ":")
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.dpi": 150,
}
_BASELINE: Any = {"color": "0.35", "linewidth": 1, "linestyle": (0, (1, 3))}
_THIN: Any = {"color": "0.6", "linewidth": 0.5, "alpha": 0.5, "zorder": 1}
_TITLES = {
    "pre": "Before local training",
    "post": "After local training",
    "train": "Training loss",
}
# panels: point, column and its title
BY_ROUND = (("pre", "completed", "rounds"), ("post", "completed", "rounds"))
BY_COST = (
    ("pre", "megabytes", "MB sent and received"),
    ("pre", "seconds", "seconds of training"),
)
BY_UPLOAD = (
    ("pre", "uploaded", "MB sent by clients"),
    ("post", "uploaded", "MB sent by clients"),
)
_LINES = 8  # on one pair of axes, else there is one per label
_COLUMNS = 5  # of these
_CLIENTS = 200  # drawn at most of a partition
_NAMED = 40  # with a name on an axis


class Panel(NamedTuple):
    """Curves over one horizontal axis.

    Attributes:
      score: of the values; panels with the same score share their vertical axis.
      curves: {label: [3, points]}, x, mean and half of the band.
      floor: the majority baseline, if there is one.
      thin: pairs (x, y) of curves without a label.
    """

    title: str
    xlabel: str
    score: str
    curves: dict[str, Any]
    floor: float | None = None
    thin: Sequence[Any] = ()


def _grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    with matplotlib.rc_context(STYLE):
        size = 1 + width * columns, height * rows
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False)


def _styles(labels: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """Returns a colour and a line per label; Local is grey."""
    pairs = itertools.cycle(itertools.product(LINES, PALETTE))
    chosen = {x: ("-", "#999999") if x == "local" else next(pairs) for x in labels}
    return {
        label: {"label": label, "color": colour, "linestyle": line, "linewidth": 1.6}
        for label, (line, colour) in chosen.items()
    }


def _line(axes: Any, curve: Any, score: str, **style: Any) -> None:
    """Draws a curve with its band."""
    x, mean, spread = np.asarray(curve, float)
    marker = "o" if len(x) <= 25 else ""
    axes.plot(x, mean, marker=marker, markersize=3.5, **style)
    ends = [mean - spread, mean + spread]
    low, high = np.clip(ends, 0, 1) if metrics.is_share(score) else ends
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _fill(axes: Any, panel: Panel, styles: Any, first: dict[str, Any]) -> None:
    """Draws the curves of a panel that have a style.

    Args:
      first: axes by score, whose vertical axis is shared.
    """
    if (shared := first.setdefault(panel.score, axes)) is not axes:
        axes.sharey(shared)
    for label in (x for x in styles if x in panel.curves):
        _line(axes, panel.curves[label], panel.score, **styles[label])
    if panel.floor is not None:
        axes.axhline(panel.floor, label=results.FLOOR, **_BASELINE)
    for x, y in panel.thin:
        axes.plot(x, y, **_THIN)
    if metrics.is_share(panel.score):
        axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.4g} %")
    if panel.xlabel == "rounds":
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def _draw(panels: Sequence[Panel], ylabel: str) -> Figure:
    """Draws a pair of axes per panel, and of more than eight labels one per label."""
    labels = list(dict.fromkeys(x for panel in panels for x in panel.curves))
    if len(labels) > _LINES:
        return _multiples(panels, labels, ylabel)
    figure, (every,) = _grid(1, len(panels), 4.2, 4.2)
    first: dict[str, Any] = {}
    common = len({panel.title for panel in panels}) == 1 < len(panels)
    if common:
        figure.suptitle(panels[0].title)
    for axes, panel in zip(every, panels, strict=True):
        _fill(axes, panel, _styles(labels), first)
        axes.set(title="" if common else panel.title, xlabel=panel.xlabel)
    return _finish(figure, ylabel)


def _multiples(panels: Sequence[Panel], labels: Sequence[str], ylabel: str) -> Figure:
    """Draws a pair of axes per label, on which panels of one score are curves."""
    kinds = itertools.groupby(panels, lambda panel: (panel.xlabel, panel.score))
    blocks = [(kind[0], list(of)) for kind, of in kinds]
    first: dict[str, Any] = {}
    rows, columns = math.ceil(len(labels) / _COLUMNS), _COLUMNS
    figure, grid = _grid(rows * len(blocks), columns, 2.2, 1.9)
    titles = _styles(dict.fromkeys(panel.title for panel in panels))
    for style, line in zip(titles.values(), itertools.cycle(LINES), strict=False):
        style["linestyle"] = line  # the curves of a method may be equal
    for (xlabel, block), part in zip(blocks, np.split(grid, len(blocks)), strict=True):
        for axes in part.flat[len(labels) :]:
            axes.set_axis_off()
        for i, (axes, label) in enumerate(zip(part.flat, labels, strict=False)):
            for panel in block:
                _fill(axes, panel, {label: titles[panel.title]}, first)
            axes.set_title(textwrap.fill(label, 32), fontsize=8)
            axes.tick_params(labelsize=7)
            axes.set_xlabel(xlabel if i >= len(labels) - columns else "", fontsize=8)
    return _finish(figure, ylabel)


def _finish(figure: Figure, ylabel: str) -> Figure:
    """Adds the label of the vertical axes and a legend below the figure."""
    figure.supylabel(ylabel, fontsize=10)
    pairs = [axes.get_legend_handles_labels() for axes in figure.axes]
    found = {x: handle for pair in pairs for handle, x in zip(*pair, strict=True)}
    names = sorted(found, key=lambda label: label == results.FLOOR)
    columns = max(1, int(10 * figure.get_figwidth() / (max(map(len, names)) + 6)))
    position: Any = {"loc": "outside lower center", "ncols": min(columns, len(names))}
    handles = [found[name] for name in names]
    figure.legend(handles, names, frameon=False, **position)
    return figure


def _of_test(attacks: Iterable[Any], score: str) -> str:
    """Returns the label of a test score of runs with these values of --malicious."""
    attacked = any(isinstance(x, str) for x in attacks)
    return f"test {score}" + " of benign clients" * attacked


def curves(table: pd.DataFrame, score: str, panels: Sequence[Any] = BY_ROUND) -> Figure:
    """Draws the mean over clients, a curve per label.

    Bands are one standard deviation: over seeds, of a single run over clients.

    Args:
      panels: (point, column of the table, its title) of each, as BY_ROUND and BY_COST;
        point train has the loss.
    """
    baseline, drawn = metrics.baseline(score), []
    table = results.benign(results.benign(table, score), baseline)
    for point, column, xlabel in panels:
        here, found = table[table["point"] == point], {}
        name = "loss" if point == "train" else score
        for label, rows in here[here["score"] == name].groupby("label", sort=False):
            seeds, runs = rows.groupby("completed"), rows["run"].nunique()
            means = seeds[["macro", "std", "uploaded", *results.COSTS]].mean()
            means["std"] = seeds["macro"].std() if runs > 1 else means["std"]
            means = means[seeds.size() == runs]  # rounds that all have
            found[label] = means[[column, "macro", "std"]].to_numpy().T
        floor = here[here["score"] == baseline].drop_duplicates("run")["macro"]
        least = None if floor.empty or point == "train" else floor.mean()
        drawn.append(Panel(_TITLES[point], xlabel, name, found, least))
    return _draw(drawn, f"{_of_test(table['malicious'], score)}, mean over clients")


def uploads(table: pd.DataFrame, score: str) -> Figure:
    """Draws the mean over clients by what they have sent, a curve per label, without
    bands."""
    figure = curves(table, score, BY_UPLOAD)
    for axes in figure.axes:
        axes.set_xscale("log", nonpositive="mask")
        for band in list(axes.collections):
            band.remove()
    return figure


def of_run(run: Run) -> Figure:
    """Draws one run's headline and loss by round.

    Clients of several architectures also have a curve for each.
    """
    table, score = results.frame([run]), run.headline[0]
    parts = table[table["score"].str.startswith(score + metrics.OF)]
    kinds = parts["score"].str.removeprefix(score + metrics.OF)
    table = pd.concat([table, parts.assign(label=kinds, score=score)])
    return curves(table, score, (*BY_ROUND, ("train", "completed", "rounds")))


def clients(runs: Sequence[Run]) -> Figure:
    """Draws every client's last score, from the worst client to the best.

    Bands are over seeds, at equal shares of the clients.
    """
    score, better = runs[0].headline
    names, shares = results.labels(runs), np.linspace(0, 1, 101)
    scores: dict[str, list[pd.DataFrame]] = {}
    for run in runs:
        found = results.last_scores(run, score).quantile(shares)
        scores.setdefault(names[str(run.path)], []).append(found)
    panels = []
    for point in ("pre", "post"):
        drawn = {}
        for label, of in scores.items():
            rows = np.array([found[point] for found in of])
            rows = rows[:, :: 1 if better == "max" else -1]
            spread = rows.std(axis=0, ddof=min(1, len(rows) - 1))
            drawn[label] = [100 * shares, rows.mean(axis=0), spread]
        title = "clients from worst to best (%)"
        panels.append(Panel(_TITLES[point], title, score, drawn))
    attacks = [run.config.get("malicious") for run in runs]
    return _draw(panels, f"{_of_test(attacks, score)}, per client")


def own_values(runs: Sequence[Run]) -> Figure | None:
    """Draws the methods' own values by round, such as mixing weights, if there are any.

    A curve per label is the mean over clients; of a single run there is a thin one per
    client, else bands are one standard deviation over clients and seeds.
    """
    names = results.labels(runs)
    parts = [run.scores.assign(label=names[str(run.path)]) for run in runs]
    table = pd.concat(parts)
    table, panels = table[table["point"] == metrics.OWN], []
    for name, of in table.groupby("score", sort=False):
        drawn = {}
        for label, rows in of.groupby("label", sort=False):
            by = rows.groupby("round")["value"].agg(["mean", "std"])
            spread = by["std"].fillna(0) * (len(runs) > 1)
            drawn[label] = [by.index + 1, by["mean"], spread]
        single = [rows for _, rows in of.groupby("client") if len(runs) == 1]
        thin = [(rows["round"] + 1, rows["value"]) for rows in single]
        panels.append(Panel(str(name), "rounds", str(name), drawn, thin=thin))
    return _draw(panels, "value of a client") if panels else None


def partition(
    class_counts: Any,
    title: str = "",
    names: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> Figure:
    """Draws clients by classes; the area of a bubble is the number of examples.

    Args:
      class_counts: [N, C] training examples; the first 200 clients are drawn.
      names: of the clients, shown unless they are many or numbers.
      classes: likewise.
    """
    counts = np.asarray(class_counts)[:_CLIENTS]
    width, height = np.clip(0.3 * np.array(counts.shape) + 2, 4, 16)
    figure, ((axes,),) = _grid(1, 1, width, height)
    owners, labels = np.nonzero(counts)
    area = 200 * counts[owners, labels] / max(counts.max(), 1)
    axes.scatter(owners, labels, s=np.maximum(area, 1), alpha=0.75, linewidths=0)
    axes.set(xlabel="client", ylabel="class", title=title)
    for axis, own in ((axes.xaxis, names), (axes.yaxis, classes)):
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        if 0 < len(own) <= _NAMED and not all(map(str.isdecimal, own)):
            axis.set_ticks(range(len(own)), own, rotation=90 * (axis is axes.xaxis))
    most = max(int(counts.max()), 1)
    shown = {f"{x:,}": math.sqrt(200 * x / most) for x in (most, -(-most // 4))}
    marks = [Line2D([], [], marker="o", ls="", markersize=x) for x in shown.values()]
    figure.legend(marks, shown, title="examples", loc="outside right upper")
    return figure


def ranks(found: significance.Ranks, blocks: str = "settings") -> Figure:
    """Draws mean ranks over settings with Nemenyi's critical difference (Demsar, JMLR
    2006): methods whose bars do not overlap differ."""
    figure, ((axes,),) = _grid(1, 1, 5, 1 + 0.28 * len(found.means))
    y, half = np.arange(len(found.means)), found.difference / 2
    style: Any = {"fmt": "o", "capsize": 3, "markersize": 4, "color": PALETTE[0]}
    axes.errorbar(found.means, y, xerr=half, **style)
    known = [text.proper(str(name)) for name in found.means.index]
    labels = [
        f"{label} ({name})" if known.count(label) > 1 else label
        for label, name in zip(known, found.means.index, strict=True)
    ]
    axes.set_yticks(y, labels)
    axes.invert_yaxis()
    title = f"Friedman p = {found.p:.2g}, critical difference {found.difference:.2f}"
    xlabel = f"mean rank over {found.settings} {blocks} (1 is best)"
    axes.set(xlabel=xlabel, title=title)
    return figure


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Draws the figures that need nothing but the files of runs: {name: figure}.

    Of several runs, those whose headline is the first one's are drawn.
    """
    score = runs[0].headline[0]
    same = [run for run in runs if run.headline[0] == score]
    table = results.frame(same)
    found = {"clients": clients(same), "costs": curves(table, score, BY_COST)}
    if any(run.config.get("compress") for run in same):
        found["uploads"] = uploads(table, score)
    if (own := own_values(same)) is not None:
        found["values"] = own
    with contextlib.suppress(InputError):  # few methods or settings
        values = significance.scores(same, f"pre/{score}")
        found["ranks"] = ranks(significance.friedman(values, runs[0].headline[1]))
    drawn = of_run(same[0]) if len(same) == 1 else curves(table, score)
    return {"curves": drawn} | found


@cli.isolated
def main(argv: Sequence[str]) -> int:
    """Draws the figures of the runs of a command line as PNG and PDF."""
    given, words = cli.parse(argv, FLAGS, __doc__ or "")
    runs = results.find(words)
    parent = runs[0].path if len(runs) == 1 else runs[0].path.parent
    folder = Path(given.get("output", parent / "figures"))
    if folder.suffix in (".png", ".pdf"):
        raise InputError(f"--output must be a folder, got {folder}.")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures(runs)
    if len(runs) == 1:
        try:
            known = standalone.owned(runs[0].path)
            counts, *names = known or (runs[0].trained.task.class_counts,)
            drawn["partition"] = partition(counts, "", *names)
        except InputError as error:  # a run of an earlier version without its data
            logging.warning("Not drawn: partition.png. %s", error)
    if "attention" in given:
        if len(runs) > 1:
            raise InputError("--attention needs one run.")
        drawn["attention"] = attention.figure(
            attention.maps(runs[0], given["attention"])
        )
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png")
        figure.savefig(folder / f"{name}.pdf")
        print(folder / f"{name}.png")
    return 0
