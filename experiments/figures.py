"""Figures of runs, one or several: `python -m experiments.figures RUN ...
[--output=FOLDER]`.

Of one run who owns which classes, and how its score and the loss went, drawn anew into
the run directory. Into its folder figures go, as PNG and PDF, heat maps of the matrices
that the method reports of pairs of clients, some rounds side by side, and of a run of
FedDVA what its latents hold: reconstructions, manifolds, t-SNE and swaps, and what
linear probes find in them (probes.json).

Several runs, or the directory of a sweep, are compared, each method with mean and
sample standard deviation over its seeds: its score by round; of the clients, from the
worst to the best; against bytes sent, operations and seconds; and against alpha or
classes per client, if the runs differ in it. Runs on other data have figures of their
own. PNG and PDF go into --output (default: the folder figures beside the runs); where
it is given, one run is drawn in the same way.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from experiments import courses, drawing, report, scores
from experiments.drawing import PALETTE
from experiments.files import Rows
from experiments.flags import Flag
from experiments.scores import ACCURACY, Headline
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.partition import Partition, class_counts

_FLAGS = {"output": Flag(str, "the folder of the figures that compare runs")}
_MAX_CLIENTS, _MAX_POINTS = 200, 2000
_COLOURS = {
    "pre": PALETTE[0],
    "post": PALETTE[1],
    "loss": "#444444",
    "majority": "#777777",
}


def draw_partition(partition: Partition, dataset: Dataset, path: str | Path) -> None:
    """Draws clients by classes: the area of a bubble is the number of training
    examples.

    Args:
      partition: N clients; only the first 200 are drawn, and the title says so.
      dataset: whose labels are counted.
      path: image file; its suffix chooses the format.
    """
    counts = class_counts(partition, dataset)
    shown = counts[:_MAX_CLIENTS]
    num_clients, num_classes = shown.shape
    width, height = (
        np.clip(0.3 * num_clients + 2.4, 5, 18),
        np.clip(0.3 * num_classes + 1.6, 3.6, 12),
    )
    with drawing.drawn(path, (width, height)) as figure:
        axes = figure.subplots()
        # points between two bubbles
        pitch = 72 * min((width - 1.9) / num_clients, (height - 1.2) / num_classes)
        clients, classes = np.nonzero(shown)
        largest = max(int(shown.max()), 1)
        # The largest bubble is somewhat wider than the pitch (crowded tables are
        # sparse), the smallest a visible dot.
        area = np.maximum(
            max(1.15 * pitch, 14) ** 2 * shown[clients, classes] / largest, 1
        )
        axes.scatter(
            clients, classes, s=area, color=_COLOURS["pre"], alpha=0.75, linewidths=0
        )
        _class_axes(axes, num_clients, num_classes)
        axes.set_title(
            _partition_title(counts, dataset.name, largest), fontsize=10, loc="left"
        )


def draw_curves(
    records: Iterable[dict[str, Any]], path: str | Path, headline: Headline = ACCURACY
) -> None:
    """Draws a score (macro mean, band of one standard deviation over clients) and loss
    against the round.

    Where clients are of several architectures, a third part has the score's mean for
    each.

    Args:
      records: rows of metrics, read twice; `round` is required, `pre/acc`,
        `pre/acc_std`, `post/acc`, `post/acc_std` and `loss` may be missing or None in
        any row; rows without a value are skipped, the line joins its neighbours.
      path: image file; its suffix chooses the format.
      headline: the score in place of `acc`.
    """
    keys = {
        when: (f"{when}/{headline[0]}", f"{when}/{headline[0]}_std")
        for when in ("pre", "post")
    }
    kinds = _architectures(records, headline[0])
    each = {
        (when, kind): f"{when}/{headline[0]}{scores.OF}{kind}"
        for kind in kinds
        for when in keys
    }
    wanted = {of: (name, f"{name}_clients") for of, name in each.items()}
    baseline = f"pre/{scores.baseline(headline[0])}"
    series = _series(
        records, {**keys, "loss": ("loss",), "majority": (baseline,), **wanted}
    )
    with drawing.drawn(path, (15 if kinds else 10, 3.8)) as figure:
        left, *middle, right = figure.subplots(1, 3 if kinds else 2)
        for when in keys:
            _score(left, series[when], when, headline[0])
        if len(series["majority"]):
            left.plot(
                *series["majority"].T,
                ":",
                color=_COLOURS["majority"],
                label="majority baseline",
            )
        _score_axes(left, headline)
        rounds, loss = series["loss"].T
        right.plot(rounds, loss, color=_COLOURS["loss"], **_markers(rounds))
        right.set(ylabel="training loss", title="Loss")
        for axes in middle:
            _draw_architectures(axes, series, kinds, headline)
        for axes, has_data in (
            (left, bool(left.lines)),
            *((axes, True) for axes in middle),
            (right, len(rounds) > 0),
        ):
            _round_axes(axes, has_data)
        if left.lines:
            left.legend(
                loc="lower right" if headline[1] == "max" else "upper right",
                frameon=False,
            )


def _architectures(records: Iterable[dict[str, Any]], name: str) -> list[str]:
    """The architectures of which a score is recorded, in the order of the records."""
    starts = tuple(f"{when}/{name}{scores.OF}" for when in ("pre", "post"))
    known = dict.fromkeys(
        key
        for row in records
        for key in row
        if key.startswith(starts) and key.endswith("_clients")
    )
    return list(
        dict.fromkeys(
            key.partition(scores.OF)[2].removesuffix("_clients") for key in known
        )
    )


def _draw_architectures(
    axes: Any, series: dict[Any, np.ndarray], kinds: list[str], headline: Headline
) -> None:
    """Draws the mean over the clients of each architecture, dashed before local
    training."""
    for i, kind in enumerate(kinds):
        clients = int(
            max(
                np.nanmax(series[when, kind][:, 2], initial=0)
                for when in ("pre", "post")
            )
        )
        for when, line in (("pre", "--"), ("post", "-")):
            rounds, mean = series[when, kind][:, :2].T
            label = f"{kind} ({clients} clients)" if when == "post" else None
            axes.plot(
                rounds,
                mean,
                line,
                color=PALETTE[i % len(PALETTE)],
                label=label,
                **_markers(rounds),
            )
    _score_axes(axes, headline)
    axes.set(
        ylabel=f"test {headline[0]}, mean over its clients",
        title="By architecture (dashed: before)",
    )
    axes.legend(
        loc="lower right" if headline[1] == "max" else "upper right",
        frameon=False,
        fontsize=8,
    )


def _score_axes(axes: Any, headline: Headline) -> None:
    name = headline[0]
    if name == "acc":
        axes.set(ylabel="test accuracy, mean ± std over clients", title="Accuracy")
    else:
        axes.set(
            ylabel=f"test {name}, mean ± std over clients",
            title=f"{name} ({scores.direction(headline)})",
        )
    if scores.is_share(name):
        axes.set_ylim(0, 1.02)


def _score(axes: Any, series: np.ndarray, when: str, name: str) -> None:
    if not len(series):
        return
    axes.plot(
        *series[:, :2].T,
        color=_COLOURS[when],
        label=courses.BEFORE_AND_AFTER[when],
        **_markers(series),
    )
    rounds, mean, std = series[~np.isnan(series[:, 2])].T
    drawing.band(axes, rounds, mean, std, name, _COLOURS[when])


def _series(
    records: Iterable[dict[str, Any]], keys: dict[Any, tuple[str, ...]]
) -> dict[Any, np.ndarray]:
    """{name: [points, 1 + keys]}: rounds and values of the rows that have the first
    value (of `post` the rounds behind it), the last one of a stretch of rounds where
    there are more than `_MAX_POINTS`; NaN for another value that is missing."""
    stride, kept = 1, {name: dict[int, list]() for name in keys}
    for row in records:
        for name, wanted in keys.items():
            if row.get(wanted[0]) is not None:
                behind = report.rounds_behind(wanted[0].partition("/")[0], row["round"])
                kept[name][row["round"] // stride] = [behind, *map(row.get, wanted)]
        if max(map(len, kept.values())) > _MAX_POINTS:
            stride *= 2
            kept = {
                name: {place // 2: point for place, point in points.items()}
                for name, points in kept.items()
            }
    return {
        name: np.array([*points.values()], float).reshape(-1, 1 + len(keys[name]))
        for name, points in kept.items()
    }


def _markers(points: np.ndarray) -> dict[str, Any]:
    """Few points are shown as points: one alone would draw no line."""
    return (
        {"marker": "o", "markersize": 4, "linewidth": 1.6}
        if len(points) <= 25
        else {"linewidth": 1.6}
    )


def _round_axes(axes: Any, has_data: bool) -> None:
    axes.set_xlabel("round")
    drawing.whole_numbers(axes.xaxis, 8, steps=[1, 2, 5, 10])
    axes.grid(alpha=0.25)
    if not has_data:
        axes.set(xticks=[], yticks=[])
        axes.text(
            0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="0.5"
        )


def _class_axes(axes: Any, num_clients: int, num_classes: int) -> None:
    axes.set(
        xlabel="client",
        ylabel="class",
        xlim=(-0.8, num_clients - 0.2),
        ylim=(-0.8, num_classes - 0.2),
    )
    for axis in (axes.xaxis, axes.yaxis):
        drawing.whole_numbers(axis, 25, steps=[1, 2, 5, 10])
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)


def _partition_title(counts: np.ndarray, name: str, largest: int) -> str:
    cut = f" (the first {_MAX_CLIENTS} drawn)" if len(counts) > _MAX_CLIENTS else ""
    sizes = counts.sum(axis=1)
    return (
        f"{name}: {len(counts):,} clients{cut}, {sizes.min():,} to {sizes.max():,} "
        "training examples each; "
        f"largest bubble: {largest:,}"
    )


def main(argv: list[str]) -> str:
    """Draws the figures of the run directories of a command line, and says what was
    drawn."""
    # imported here: a run directory draws with this module
    from experiments import comparison_figures, entry, flags, gather, phases

    parsed = flags.parse(argv, _FLAGS, words=True)
    paths = gather.directories(parsed.words)
    if len(paths) == 1 and not parsed.get("output"):
        with phases.said(entry.errors(), f"Drawing the figures of {paths[0]}"):
            return "\n".join(_of_one(paths[0]))
    folder = gather.output(parsed.get("output"), paths, "figures")
    with phases.said(entry.errors(), "Reading the runs and drawing their figures"):
        found = [gather.read(path) for path in paths]
        with gather.writing(folder):
            return "\n".join(comparison_figures.draw(found, folder))


def _of_one(path: Path) -> list[str]:
    from experiments import dva_run, matrices, runs

    run = runs.load(path)
    draw_partition(
        run.experiment.everybody, run.experiment.dataset, path / "partition.png"
    )
    draw_curves(
        Rows(path / "metrics.jsonl"), path / "curves.png", run.experiment.headline
    )
    said = [f"{path}: partition.png, curves.png"]
    said += [
        f"{path / 'figures'}: {name}.png, {name}.pdf"
        for name in matrices.draw(path, run)
    ]
    if run.config.algo == "feddva":
        said.append(f"{path / 'figures'}: {dva_run.draw(run, path / 'figures')}")
    return said


if __name__ == "__main__":
    from experiments import entry

    sys.exit(entry.enter(main, __doc__))
