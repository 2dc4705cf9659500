"""What the user sees: a progress bar or occasional lines while it works, and tables and a summary at the end."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments import scores
from experiments.scores import ACCURACY, Headline

Row = dict[str, Any]
STATISTICS = {"macro": "", "micro": "_micro", "std": "_std", "worst10": "_worst10", "best10": "_best10"}
POINTS = {"pre": "before", "post": "after", "post_latest": "latest after"}  # local training
_SUFFIXES = (*(suffix for suffix in STATISTICS.values() if suffix), "_clients")
_TRIVIAL = {"acc_present": "acc_trivial", "acc_groups": "acc_trivial", "recall_macro": "recall_trivial"}
_TAIL = 10  # evaluations that a mean is taken of, if there are so many
_LINES = 20  # at most, where the output is no terminal
_BYTES = 4  # of a float32 or an int32


class Reporter:
    """Shows the rounds as they come: a bar on a terminal, else some lines."""

    def __init__(self, console: Console, start: int, rounds: int, headline: Headline = ACCURACY):
        self._console, self._rounds, self._score = console, rounds, headline[0]
        self._seen: Row = {}
        self._first: tuple[int, float] | None = None  # rounds done when one was first seen here, and when that was
        columns = ("[bold]{task.description}", BarColumn(bar_width=12), "{task.fields[shown]}")
        texts = [TextColumn(column) if isinstance(column, str) else column for column in columns]
        hide = not console.is_terminal
        self._bar = Progress(
            *texts, TimeRemainingColumn(compact=True, elapsed_when_finished=True), console=console, disable=hide
        )
        self._task = self._bar.add_task(f"round {start}/{rounds}", total=rounds, completed=start, shown="compiling ...")

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, style="yellow")

    def update(self, row: Row) -> None:
        """Shows one round's row; scores stay shown until newer ones come."""
        self._seen |= {name: value for name, value in row.items() if value is not None}
        done = row["round"] + ("loss" in row)
        title, shown = f"round {done}/{self._rounds}", self._text(self._rounds - done, self._seconds(done))
        self._bar.update(self._task, completed=done, description=title, shown=shown)
        every = max(1, self._rounds // _LINES)
        if not self._console.is_terminal and "loss" in row and (done % every == 0 or done in (1, self._rounds)):
            self._console.print(f"{title}  {shown}")

    def _seconds(self, done: int) -> float | None:
        """How long the rest takes, by the rounds since the first that was seen here."""
        now = time.monotonic()
        if self._first is None:
            self._first = done, now
        begin, since = self._first
        return (now - since) / (done - begin) * (self._rounds - done) if done > begin else None

    def _text(self, left: int, seconds: float | None) -> str:
        parts = [f"loss {self._seen['loss']:.3g}"] if "loss" in self._seen else []
        name = self._score
        found = [scores.labelled(name, self._seen[key]) for key in (f"pre/{name}", f"post/{name}") if key in self._seen]
        return "  ".join(
            [*parts, *([f"{name} " + " → ".join(found)] if found else []), f"{left} left{_duration(seconds)}"]
        )


def _duration(seconds: float | None) -> str:
    """The rest of a run in words, where it is worth a word."""
    if seconds is None or seconds < 10:
        return ""
    size, unit = next((s, u) for s, u in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= 2 * s or s == 1)
    return f", about {seconds / size:.0f} {unit}"


def score_names(rows: list[Row], headline: Headline = ACCURACY) -> list[str]:
    """The scores of a run, in its own order but for the first ones, see `scores.ordered`."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(("pre/", "post/")))
    found = dict.fromkeys(name.split("/")[1] for name in names if not name.endswith(_SUFFIXES))
    return scores.ordered(found, headline)


def trivial(name: str) -> str:
    """What beside a score says how always answering no, or with the client's majority class, would do, if recorded."""
    return _TRIVIAL.get(name, f"{name}_trivial")


def last(rows: list[Row], point: str, name: str, headline: Headline = ACCURACY) -> Row | None:
    """The statistics of a score in the last round that has it: {"round": t, "clients": how many, "macro": ..., ...}.

    The worst tenth of a score of which less is better are its highest values (in the rows `worst10` is the lowest).
    """
    key = f"{point}/{name}"
    names = [key + suffix for suffix in STATISTICS.values()]
    row = next((row for row in reversed(rows) if all(row.get(name) is not None for name in names)), None)
    if row is None:
        return None
    suffixes = STATISTICS
    if scores.better(name, headline) == "min":
        suffixes = STATISTICS | {"worst10": STATISTICS["best10"], "best10": STATISTICS["worst10"]}
    return {"round": row["round"], "clients": row.get(f"{key}_clients")} | {
        title: row[key + suffix] for title, suffix in suffixes.items()
    }


def course(rows: list[Row], point: str, name: str, headline: Headline = ACCURACY) -> Row | None:
    """Last, best and mean of the last ten evaluations of a score (macro), each with what it is."""
    series = [(row["round"], row[f"{point}/{name}"]) for row in rows if row.get(f"{point}/{name}") is not None]
    if not series:
        return None
    choose = min if scores.better(name, headline) == "min" else max
    best = choose(series, key=lambda pair: pair[1])  # the first of equals
    tail = [value for _, value in series[-_TAIL:]]
    return {
        "last": {"round": series[-1][0], "value": series[-1][1]},
        "best": {"round": best[0], "value": best[1], "note": "chosen on the test examples, so optimistic"},
        "mean_of_last": {"evaluations": len(tail), "value": float(np.mean(tail))},
    }


def traffic(rows: list[Row]) -> dict[str, int]:
    """Totals over clients and rounds: scalars down and up, integers, messages, bytes of ciphertexts, and bytes in all,
    at four a number."""
    names = ("down", "up", "ints", "messages", "encrypted")
    totals = {name: sum(row.get(f"traffic/{name}", 0) for row in rows) for name in names}
    return totals | {"bytes": _BYTES * (totals["down"] + totals["up"] + totals["ints"]) + totals["encrypted"]}


def summary(rows: list[Row], headline: Headline = ACCURACY) -> Row:
    """The results of a run: {point: {score: statistics in its last round, and its course}}, and the traffic."""
    names, results = score_names(rows, headline), {}
    for point in POINTS:
        found = {name: last(rows, point, name, headline) for name in names}
        results[point] = {n: row | {"course": course(rows, point, n, headline)} for n, row in found.items() if row}
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    said = {"score": headline[0], "better": headline[1]}
    return {"loss": losses[-1] if losses else None, "headline": said, "scores": results, "traffic": traffic(rows)}


def tables(console: Console, rows: list[Row], headline: Headline = ACCURACY) -> None:
    """Prints the closing tables: of scores in %, and of the others."""
    names = [name for name in score_names(rows, headline) if not name.endswith("_trivial")]
    if not names:
        return
    for share in (True, False):
        if kind := [name for name in names if scores.is_share(name) == share]:
            console.print(_clients_table(rows, kind, headline))
    for share in (True, False):
        leading = [name for name in names if not share or name in (headline[0], *scores.LEADING)]
        if kind := [name for name in leading if scores.is_share(name) == share]:
            console.print(_course_table(rows, kind, headline))
    total = traffic(rows)
    parts = [f"{total[name]:,} {name}" for name in ("down", "up", "ints", "messages")]
    secret = f", of them {total['encrypted'] / 1e6:,.1f} MB ciphertexts" if total["encrypted"] else ""
    console.print(f"Traffic: scalars {', '.join(parts)}; {total['bytes'] / 1e6:,.1f} MB{secret}.")


def _points(rows: list[Row], names: list[str]) -> Iterator[tuple[str, str, str]]:
    """The lines of a table: (score, point, the score's name where it is shown)."""
    for name in names:
        present = [point for point in POINTS if last(rows, point, name)]
        for i, point in enumerate(present):
            yield name, point, "" if i else name


def _clients_table(rows: list[Row], names: list[str], headline: Headline) -> Table:
    """Statistics over clients, and beside them the macro mean of the `trivial` score; all shares, or none."""
    everybody = next(row["round"] for row in reversed(rows) if any(name.startswith("pre/") for name in row))
    shares = scores.is_share(names[0])
    unit = " in %" if shares else f" ({scores.directions(names, headline)})"
    title = f"Clients' test scores{unit}, before local training (after {everybody} rounds) and after it"
    titles = ["cli-\nents", "macro\nmean", "micro\nmean", "std", "worst\n10 %", "best\n10 %"]
    titles += ["trivial\nmacro"] if shares else []
    table = plain_table(title, ["score", "local\ntraining"], titles)
    for name, point, shown in _points(rows, names):
        found, floor = last(rows, point, name, headline) or {}, last(rows, point, trivial(name))
        values = [scores.shown(name, found[statistic]) for statistic in STATISTICS]
        values += [scores.shown(name, floor["macro"]) if floor else ""] if shares else []
        table.add_row(shown, POINTS[point], str(found.get("clients") or ""), *values)
    return table


def _course_table(rows: list[Row], names: list[str], headline: Headline) -> Table:
    unit = "in %" if scores.is_share(names[0]) else scores.directions(names, headline)
    title = f"Macro mean in the run, {unit} (best: chosen on the test examples, so optimistic)"
    columns = ["last\nround", f"mean of\nlast {_TAIL}", "evalu-\nations", "best\nround", "which\nround"]
    table = plain_table(title, ["score", "local\ntraining"], columns)
    for name, point, shown in _points(rows, names):
        found = course(rows, point, name, headline) or {}
        end, mean, best = (scores.shown(name, found[key]["value"]) for key in ("last", "mean_of_last", "best"))
        evaluations, which = str(found["mean_of_last"]["evaluations"]), str(found["best"]["round"])
        table.add_row(shown, POINTS[point], end, mean, evaluations, best, which)
    return table


def plain_table(title: str, names: list[str], numbers: list[str]) -> Table:
    """An empty table: columns of names at the left, of numbers at the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
