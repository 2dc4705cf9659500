"""What the files of runs say of a score: its course against what was spent, its
clients, and both over seeds."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments import account, build, report, schema
from experiments.files import Rows, read_derived
from experiments.gather import Found
from experiments.targets import Flops, Spent
from fedjax_pfl.errors import InputError

Array = np.ndarray
BEFORE_AND_AFTER = {"pre": "before local training", "post": "after local training"}
COLUMNS = ("rounds", "value", "MB", "TFLOP", "seconds")


class Band(NamedTuple):
    """A curve over seeds; each [T]."""

    x: Array
    mean: Array
    std: Array  # of the sample; 0 of one seed


def course(run: Found, name: str, flops: Flops | None) -> dict[str, Array]:
    """{point: [T, 5]}, before and after local training: the columns of `COLUMNS`, those
    of the evaluated rounds.

    A score after local training has its round behind it, with all that this round sent.
    Seconds are those of the whole run, training and evaluation, in equal parts a round.
    NaN is what is not known.

    Args:
      flops: of the method; None: not known.
    """
    found: dict[str, list] = {point: [] for point in BEFORE_AND_AFTER}
    each = run.said.get("seconds", {}).get("train", np.nan) / (run.timed or np.nan)
    flops = flops if flops and any(flops) else None  # 0: none of what is counted
    after = Spent()
    for row in run.rows:
        before, after = after, after.after(row)
        for point, total in (("pre", before), ("post", after)):
            if (value := row.get(f"{point}/{name}")) is not None:
                work = (
                    np.nan
                    if (count := total.operations(flops)) is None
                    else count / 1e12
                )
                sent = report.traffic([total.traffic])["bytes"] / 1e6
                found[point].append(
                    (total.rounds, value, sent, work, total.rounds * each)
                )
    return {
        point: np.array(rows, float).reshape(-1, len(COLUMNS))
        for point, rows in found.items()
    }


def band(courses: Sequence[Array], column: str = "rounds") -> Band:
    """Mean and sample standard deviation over seeds, in the rounds that all of them
    have; `column` is the mean over seeds, too."""
    rounds = sorted(set.intersection(*(set(course[:, 0]) for course in courses)))
    # [seeds, T, 5]
    rows = np.array([course[np.isin(course[:, 0], rounds)] for course in courses])
    std = rows[:, :, 1].std(axis=0, ddof=min(1, len(rows) - 1))
    return Band(
        rows[:, :, COLUMNS.index(column)].mean(axis=0), rows[:, :, 1].mean(axis=0), std
    )


def of_clients(run: Found, name: str) -> dict[str, Array]:
    """{point: [N]}, every client's last score; NaN for one that has none."""
    last: dict[str, dict[int, float]] = {point: {} for point in BEFORE_AND_AFTER}
    for row in Rows(run.path / "scores.jsonl"):
        for point, known in last.items():
            values = row.get(point, {}).get(name, [])
            ids = row["ids"] if point == "post" and values else range(len(values))
            known |= {
                i: np.nan if x is None else x for i, x in zip(ids, values, strict=True)
            }
    count = max((i + 1 for known in last.values() for i in known), default=0)
    return {
        point: np.array([known.get(i, np.nan) for i in range(count)])
        for point, known in last.items()
    }


def sizes(run: Found) -> tuple[Array, Array]:
    """Training and test examples of each client that trains, [N] each; empty where the
    partition is not recorded."""
    try:
        with np.load(run.path / "partition.npz") as arrays:
            found = arrays["train_sizes"], arrays["test_sizes"]
    except (OSError, KeyError, ValueError):
        return np.zeros(0, int), np.zeros(0, int)
    apart = read_derived(run.path / "partition.json", schema.PARTITION).get(
        "unseen", []
    )
    return np.delete(found[0], apart), np.delete(found[1], apart)


def ranked(clients: Sequence[Array], way: str = "max") -> Band:
    """Scores from the worst client to the best, over seeds; x is the share of the
    clients, in %, up to one.

    Args:
      clients: of each seed [N], where N may differ between seeds; NaN is left out.
      way: the better value, "max" or "min".
    """
    values = [
        np.sort(found[np.isfinite(found)])[:: 1 if way == "max" else -1]
        for found in clients
    ]
    values = [found for found in values if len(found)]
    if not values:
        return Band(*np.zeros((3, 0)))
    count = max(map(len, values))
    x = (np.arange(count) + 0.5) / count
    rows = np.array(
        [
            np.interp(x, (np.arange(len(found)) + 0.5) / len(found), found)
            for found in values
        ]
    )
    return Band(
        100 * x, rows.mean(axis=0), rows.std(axis=0, ddof=min(1, len(rows) - 1))
    )


def flops(run: Found) -> Flops | None:
    """As the run counted them; None if it did not (--targets)."""
    counted = run.said.get("work", {}).get("flops_per_example")
    return Flops(**counted) if counted else None


def counted_flops(run: Found) -> Flops | None:
    """As `flops`, or counted now, for which the data must be here; None if that cannot
    be."""
    if (found := flops(run)) is not None:
        return found
    try:
        return account.flops(build.prepare(run.config))
    except InputError:
        return None
