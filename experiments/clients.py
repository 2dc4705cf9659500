"""Every client's scores as a table: clients.csv, and on the terminal."""

from pathlib import Path

import numpy as np
from rich.console import Console

from experiments import networks, report, scores
from experiments.build import Experiment
from experiments.files import Row, Rows, write_csv
from fedjax_pfl.data.partition import Partition

MOST = 40  # lines of the table on the terminal
# before and after local training
_COLUMNS = (("pre", "unseen"), ("post", "unseen_post"))
_POINTS = tuple(point for point in report.WITH_UNSEEN if point != "post_latest")
_NUMBERS = ("train", "val", "test", "classes")


def rows(experiment: Experiment, path: Path) -> list[Row]:
    """A row for each client: who it is, its examples, and its scores in the last round
    that has them.

    Rows of clients that did not train follow, with no number in `client`; `row` is
    their place in partition.npz.

    Args:
      path: of scores.jsonl.
    """
    e, apart = experiment, experiment.unseen
    trains = e.of_trained(np.arange(len(e.everybody.train)))
    names = networks.names(e.config, len(e.everybody.train))
    who = lambda client, row: {
        "client": client,
        "row": int(row),
        "architecture": str(names[row]),
    }
    found: list[Row] = [
        who(i, row) | _about(e, e.partition, i) for i, row in enumerate(trains)
    ]
    unseen: list[Row] = []
    if apart is not None:
        unseen = [
            who("", row) | _about(e, apart.partition, i)
            for i, row in enumerate(apart.ids)
        ]
    last: Row = {}
    for row in Rows(path):
        last |= {
            point: (row["ids"] if point == "post" else None, row[point])
            for point in _POINTS
            if point in row
        }
    for point, (ids, values) in last.items():
        group = unseen if point.startswith("unseen") else found
        for name, numbers in values.items():
            for i, value in zip(
                range(len(group)) if ids is None else ids, numbers, strict=True
            ):
                group[i][f"{point}/{name}"] = value
    return [*found, *unseen]


def _about(e: Experiment, p: Partition, i: int) -> Row:
    """The examples of client i of a partition."""
    sizes = {
        part: int(getattr(p, f"{part}_sizes")[i]) for part in ("train", "val", "test")
    }
    labels = e.dataset.y[p.train[i][: sizes["train"]]]
    return {**sizes, "classes": len(np.unique(labels))}


def write(experiment: Experiment, folder: Path) -> None:
    """Writes clients.csv beside scores.jsonl."""
    write_csv(folder / "clients.csv", rows(experiment, folder / "scores.jsonl"))


def show(console: Console, experiment: Experiment, folder: Path) -> None:
    """Prints the clients, the one served worst first; of many the two ends."""
    headline = experiment.headline
    name, sign = headline[0], 1 if headline[1] == "max" else -1
    found = rows(experiment, folder / "scores.jsonl")
    score = lambda row, *points: next(
        (row[p] for p in points if row.get(p) is not None), None
    )
    for row in found:
        row["before"], row["after"] = (
            score(row, f"{p}/{name}", f"{q}/{name}") for p, q in _COLUMNS
        )
    if not any(row["before"] is not None for row in found):
        return
    ordered = sorted(
        found, key=lambda row: np.inf if row["before"] is None else sign * row["before"]
    )
    half = MOST // 2
    unit = "in %" if scores.is_share(name) else f"({scores.direction(headline)})"
    title = (
        f"Clients by {name} {unit}, the one served worst first (all of them, and all "
        "scores: clients.csv)"
    )
    several = len({row["architecture"] for row in found}) > 1
    names = ["client", *(["architecture"] if several else [])]
    table = report.plain_table(title, names, [*_NUMBERS, "before", "after"])
    for i, row in enumerate(ordered):
        if len(ordered) > MOST and half <= i < len(ordered) - half:
            table.add_row("...") if i == half else None
            continue
        who = str(row["client"]) if row["client"] != "" else f"unseen, row {row['row']}"
        cells = [str(row[x]) for x in (*names[1:], *_NUMBERS)]
        values = [
            "" if row[x] is None else scores.shown(name, row[x])
            for x in ("before", "after")
        ]
        table.add_row(who, *cells, *values)
    console.print(table)
