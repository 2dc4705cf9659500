"""What the user sees: a progress bar or occasional lines while it works, and tables and
a summary at the end."""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments import entry, phases, scores
from experiments.files import Row
from experiments.plain import plural
from experiments.scores import ACCURACY, Headline
from fedjax_pfl.engine.contract import ENDINGS

T = TypeVar("T")
STATISTICS = {
    "macro": "",
    "micro": "_micro",
    "std": "_std",
    "worst10": "_worst10",
    "best10": "_best10",
}
# local training
POINTS = {"pre": "before", "post": "after", "post_latest": "latest after"}
# of the examples that --val_fraction holds out
HELD_OUT = {"val": "validation, before"}
# clients not in training
WITH_UNSEEN = (
    POINTS | HELD_OUT | {"unseen": "unseen before", "unseen_post": "unseen after"}
)
_TAIL = 10  # evaluations that a mean is taken of, if there are so many
_BEST, _BEST_HELD_OUT = (
    "chosen on the test examples, so optimistic",
    "chosen on the validation examples",
)
_LINES = 20  # at most, where the output is no terminal
_BYTES = 4  # of a float32 or an int32


class Reporter:
    """Shows the rounds as they come: a bar on a terminal, else some lines."""

    def __init__(
        self, console: Console, start: int, rounds: int, headline: Headline = ACCURACY
    ):
        self._console, self._rounds, self._score = console, rounds, headline[0]
        self._seen: Row = {}
        self._done = start
        # is a long round said? Only after a line was printed
        self._due = not console.is_terminal
        # rounds done when one was first seen here, and when that was
        self._first: tuple[int, float] | None = None
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            f"round {start}/{rounds}", total=rounds, completed=start, shown="..."
        )

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, style="yellow")

    def wrong(self, text: str) -> None:
        """Prints a line to standard error; the bar comes back with the next row, if
        there is one."""
        self._bar.stop()
        entry.errors().print(text)

    def update(self, row: Row) -> None:
        """Shows one round's row; on the bar scores stay shown until newer ones come."""
        self._bar.start()
        known = {name: value for name, value in row.items() if value is not None}
        self._seen = self._seen | known if self._console.is_terminal else known
        done = self._done = row["round"] + ("loss" in row)
        title, shown = (
            f"round {done}/{self._rounds}",
            self._text(self._rounds - done, self._seconds(done)),
        )
        self._bar.update(self._task, completed=done, description=title, shown=shown)
        every = max(1, self._rounds // _LINES)
        self._due = (
            not self._console.is_terminal
            and "loss" in row
            and (done % every == 0 or done in (1, self._rounds))
        )
        if self._due:
            self._console.print(f"{title}  {shown}")

    def watched(self, results: Iterable[T]) -> Iterator[T]:
        """The results of rounds; without a bar it is said what is being done while one
        takes long."""
        left = iter(results)
        while True:
            what = (
                f"round {self._done + 1}/{self._rounds}: evaluating and training "
                "clients"
            )
            what = (
                what
                if self._done < self._rounds
                else "Evaluating all clients after the last round"
            )
            with (
                phases.said(self._console, what)
                if self._due
                else contextlib.nullcontext()
            ):
                found = next(left, None)
            if found is None:
                return
            yield found

    def _seconds(self, done: int) -> float | None:
        """How long the rest takes, by the rounds since the first that was seen here."""
        now = time.monotonic()
        if self._first is None:
            self._first = done, now
        begin, since = self._first
        return (
            (now - since) / (done - begin) * (self._rounds - done)
            if done > begin
            else None
        )

    def _text(self, left: int, seconds: float | None) -> str:
        parts = [f"loss {self._seen['loss']:.3g}"] if "loss" in self._seen else []
        name = self._score
        found = [
            scores.labelled(name, self._seen[key])
            for key in (f"pre/{name}", f"post/{name}")
            if key in self._seen
        ]
        parts += [f"{name} " + " → ".join(found)] if found else []
        return "  ".join([*parts, f"{plural(left, 'round')} left{_duration(seconds)}"])


def _duration(seconds: float | None) -> str:
    """The rest of a run in words, where it is worth a word."""
    if seconds is None or seconds < 10:
        return ""
    size, unit = next(
        (s, u) for s, u in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= 2 * s
    )
    return f", about {seconds / size:.0f} {unit}"


def score_names(rows: Iterable[Row]) -> list[str]:
    """The scores of a run, in its own order but for the first ones, see
    `scores.ordered`."""
    found = dict.fromkeys(
        place for row in rows for key in row if (place := _place(key))
    )
    return scores.ordered(name for point, name in found if point != "post_latest")


@functools.cache
def _place(key: str) -> tuple[str, str] | None:
    """The point and the score of which a row's entry is the macro mean; None if it is
    something else."""
    point, slash, name = key.partition("/")
    return (
        (point, name)
        if slash and point in WITH_UNSEEN and not name.endswith(ENDINGS)
        else None
    )


def rounds_behind(point: str, t: int) -> int:
    """The rounds behind a score in the row of round t, which counts from 0: `post` and
    `post_latest` have the local training of that round, too."""
    return t + (point in ("post", "post_latest"))


class _Course(NamedTuple):
    """What stays of the evaluations of a score: rounds and macro means."""

    best: tuple[int, float]
    tail: tuple[tuple[int, float], ...]  # the last `_TAIL`

    def said(self, point: str) -> Row:
        """The last, the best and the mean of the last ten at a point, each with what it
        is."""
        values, note = (
            [value for _, value in self.tail],
            _BEST_HELD_OUT if point in HELD_OUT else _BEST,
        )
        return {
            "last": {"round": self.tail[-1][0], "value": values[-1]},
            "best": {"round": self.best[0], "value": self.best[1], "note": note},
            "mean_of_last": {
                "evaluations": len(values),
                "value": float(np.mean(values)),
            },
        }


def _longer(course: _Course | None, here: tuple[int, float], way: str) -> _Course:
    """The course with one evaluation more."""
    if course is None:
        return _Course(here, (here,))
    # of equals the first
    better = here[1] < course.best[1] if way == "min" else here[1] > course.best[1]
    return _Course(here if better else course.best, (*course.tail, here)[-_TAIL:])


def _statistics(row: Row, point: str, name: str, headline: Headline) -> Row | None:
    """The statistics of a score in a row: {"round": t, "clients": how many, "macro":
    ..., ...}; None if one is missing.

    The worst tenth of a score of which less is better are its highest values (in the
    rows `worst10` is the lowest).
    """
    key, suffixes = f"{point}/{name}", STATISTICS
    if scores.better(name, headline) == "min":
        suffixes = STATISTICS | {
            "worst10": STATISTICS["best10"],
            "best10": STATISTICS["worst10"],
        }
    found = {title: row.get(key + suffix) for title, suffix in suffixes.items()}
    if None in found.values():
        return None
    return {"round": row["round"], "clients": row.get(f"{key}_clients")} | found


def traffic(rows: Iterable[Row]) -> dict[str, int]:
    """Totals over clients and rounds: scalars down and up, integers, messages, bytes of
    ciphertexts, scalars of public examples, and bytes in all, at four a number."""
    totals = dict.fromkeys(
        ("down", "up", "ints", "messages", "encrypted", "public_data"), 0
    )
    for row in rows:
        for name in totals:
            totals[name] += row.get(f"traffic/{name}", 0)
    numbers = sum(totals[name] for name in ("down", "up", "ints", "public_data"))
    return totals | {"bytes": _BYTES * numbers + totals["encrypted"]}


def summary(rows: Iterable[Row], headline: Headline = ACCURACY) -> Row:
    """The results of a run: {point: {score: statistics in its last round, and its
    course}}, and the traffic.

    The rows are read one after another, and none is kept but the last of each score;
    one that is infinite at its last evaluation has no result.
    """
    loss, ends, courses = (
        None,
        dict[tuple[str, str], Row](),
        dict[tuple[str, str], _Course](),
    )
    for row in rows:
        loss = row["loss"] if row.get("loss") is not None else loss
        for point, name in filter(None, map(_place, row)):
            ends.pop((point, name), None)
            if found := _statistics(row, point, name, headline):
                ends[point, name] = found
            if (value := row[f"{point}/{name}"]) is not None:
                way = scores.better(name, headline)
                courses[point, name] = _longer(
                    courses.get((point, name)), (row["round"], value), way
                )
    names = scores.ordered(
        (name for point, name in courses if point != "post_latest"), headline
    )
    results = {
        point: {
            n: ends[point, n] | {"course": courses[point, n].said(point)}
            for n in names
            if (point, n) in ends
        }
        for point in WITH_UNSEEN
    }
    said = {"score": headline[0], "better": headline[1]}
    return {"loss": loss, "headline": said, "scores": results, "traffic": traffic(rows)}


def tables(console: Console, found: Row) -> None:
    """Prints the closing tables of a `summary`: of scores in %, and of the others."""
    headline = found["headline"]["score"], found["headline"]["better"]
    results, total = found["scores"], found["traffic"]
    known = scores.ordered(
        (name for point in ("pre", "post") for name in results[point]), headline
    )
    names = [name for name in known if not name.endswith("_majority")]
    if not names:
        return
    for share in (True, False):
        if kind := [name for name in names if scores.is_share(name) == share]:
            console.print(_clients_table(results, kind, headline))
    for share in (True, False):
        leading = [
            name
            for name in names
            if not share or name in (headline[0], *scores.LEADING)
        ]
        if kind := [name for name in leading if scores.is_share(name) == share]:
            console.print(_course_table(results, kind, headline))
    parts = [f"{total[name]:,} {name}" for name in ("down", "up", "ints", "messages")]
    secret = (
        f", of them {total['encrypted'] / 1e6:,.1f} MB ciphertexts"
        if total["encrypted"]
        else ""
    )
    parts += (
        [f"{total['public_data']:,} of public examples"] if total["public_data"] else []
    )
    console.print(
        f"Traffic: scalars {', '.join(parts)}; {total['bytes'] / 1e6:,.1f} MB{secret}."
    )


def _points(
    results: Row, names: list[str], points: Iterable[str]
) -> Iterator[tuple[str, str, str]]:
    """The lines of a table: (score, point, the score's name where it is shown)."""
    for name in names:
        present = [point for point in points if name in results[point]]
        for i, point in enumerate(present):
            yield name, point, "" if i else name


def _clients_table(results: Row, names: list[str], headline: Headline) -> Table:
    """Statistics over clients, and beside them the macro mean of the majority baseline;
    all shares, or none."""
    everybody = max(
        found["round"] for found in (results["pre"] or results["post"]).values()
    )
    shares = scores.is_share(names[0])
    unit = " in %" if shares else f" ({scores.directions(names, headline)})"
    title = (
        f"Clients' test scores{unit}, before local training (after "
        f"{plural(everybody, 'round')}) and after it"
    )
    titles = [
        "cli-\nents",
        "macro\nmean",
        "micro\nmean",
        "std",
        "worst\n10 %",
        "best\n10 %",
    ]
    titles += ["majority\nbaseline"] if shares else []
    table = plain_table(title, ["score", "local\ntraining"], titles)
    for name, point, shown in _points(results, names, WITH_UNSEEN):
        found, floor = results[point][name], results[point].get(scores.baseline(name))
        values = [scores.shown(name, found[statistic]) for statistic in STATISTICS]
        values += (
            [scores.shown(name, floor["macro"]) if floor else ""] if shares else []
        )
        table.add_row(shown, WITH_UNSEEN[point], str(found["clients"] or ""), *values)
    return table


def _course_table(results: Row, names: list[str], headline: Headline) -> Table:
    unit = "in %" if scores.is_share(names[0]) else scores.directions(names, headline)
    title = f"Macro mean in the run, {unit} (best: {_BEST})"
    columns = [
        "last\nround",
        f"mean of\nlast {_TAIL}",
        "evalu-\nations",
        "best\nround",
        "after\nrounds",
    ]
    table = plain_table(title, ["score", "local\ntraining"], columns)
    for name, point, shown in _points(results, names, POINTS):
        found = results[point][name]["course"]
        end, mean, best = (
            scores.shown(name, found[key]["value"])
            for key in ("last", "mean_of_last", "best")
        )
        evaluations, behind = (
            found["mean_of_last"]["evaluations"],
            rounds_behind(point, found["best"]["round"]),
        )
        table.add_row(
            shown, POINTS[point], end, mean, str(evaluations), best, str(behind)
        )
    return table


def plain_table(title: str, names: list[str], numbers: list[str]) -> Table:
    """An empty table: columns of names at the left, of numbers at the right."""
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
