"""What the user sees: a progress bar or occasional lines while it works, and tables and a summary at the end."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Row = dict[str, Any]
STATISTICS = {"macro": "", "micro": "_micro", "std": "_std", "worst10": "_worst10", "best10": "_best10"}
POINTS = {"pre": "before", "post": "after", "post_latest": "latest after"}  # local training
_SUFFIXES = (*(suffix for suffix in STATISTICS.values() if suffix), "_clients")
_HEADLINES = ("acc", "acc_present", "task_acc")
_TRIVIAL = {"acc_present": "acc_trivial", "acc_groups": "acc_trivial", "recall_macro": "recall_trivial"}
_TAIL = 10  # evaluations that a mean is taken of, if there are so many
_LINES = 20  # at most, where the output is no terminal
_BYTES = 4  # of a float32 or an int32


class Reporter:
    """Shows the rounds as they come: a bar on a terminal, else some lines."""

    def __init__(self, console: Console, start: int, rounds: int):
        self._console, self._rounds = console, rounds
        self._seen: Row = {}
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
        title, shown = f"round {done}/{self._rounds}", self._text(self._rounds - done)
        self._bar.update(self._task, completed=done, description=title, shown=shown)
        every = max(1, self._rounds // _LINES)
        if not self._console.is_terminal and "loss" in row and (done % every == 0 or done in (1, self._rounds)):
            self._console.print(f"{title}  {shown}")

    def _text(self, left: int) -> str:
        parts = [f"loss {self._seen['loss']:.3g}"] if "loss" in self._seen else []
        acc = [f"{self._seen[name]:.1%}" for name in ("pre/acc", "post/acc") if name in self._seen]
        return "  ".join([*parts, *(["acc " + " → ".join(acc)] if acc else []), f"{left} left"])


def score_names(rows: list[Row]) -> list[str]:
    """The scores of a run, in its own order."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(("pre/", "post/")))
    found = dict.fromkeys(name.split("/")[1] for name in names if not name.endswith(_SUFFIXES))
    return [*(name for name in _HEADLINES if name in found), *(name for name in found if name not in _HEADLINES)]


def trivial(name: str) -> str:
    """What beside a score says how always answering no, or with the client's majority class, would do, if recorded."""
    return _TRIVIAL.get(name, f"{name}_trivial")


def last(rows: list[Row], point: str, name: str) -> Row | None:
    """The statistics of a score in the last round that has it: {"round": t, "clients": how many, "macro": ..., ...}."""
    key = f"{point}/{name}"
    names = [key + suffix for suffix in STATISTICS.values()]
    row = next((row for row in reversed(rows) if all(row.get(name) is not None for name in names)), None)
    if row is None:
        return None
    return {"round": row["round"], "clients": row.get(f"{key}_clients")} | {
        title: row[key + suffix] for title, suffix in STATISTICS.items()
    }


def course(rows: list[Row], point: str, name: str) -> Row | None:
    """Last, best and mean of the last ten evaluations of a score (macro), each with what it is."""
    series = [(row["round"], row[f"{point}/{name}"]) for row in rows if row.get(f"{point}/{name}") is not None]
    if not series:
        return None
    best = max(series, key=lambda pair: pair[1])  # the first of equals
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


def summary(rows: list[Row]) -> Row:
    """The results of a run: {point: {score: statistics in its last round, and its course}}, and the traffic."""
    names, scores = score_names(rows), {}
    for point in POINTS:
        found = {name: last(rows, point, name) for name in names}
        scores[point] = {n: row | {"course": course(rows, point, n)} for n, row in found.items() if row}
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    return {"loss": losses[-1] if losses else None, "scores": scores, "traffic": traffic(rows)}


def tables(console: Console, rows: list[Row]) -> None:
    """Prints the closing tables."""
    names = [name for name in score_names(rows) if not name.endswith("_trivial")]
    if not names:
        return
    console.print(_clients_table(rows, names))
    console.print(_course_table(rows, [name for name in names if name in _HEADLINES]))
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


def _clients_table(rows: list[Row], names: list[str]) -> Table:
    """Statistics over clients, and beside them the macro mean of the `trivial` score."""
    everybody = next(row["round"] for row in reversed(rows) if any(name.startswith("pre/") for name in row))
    title = f"Clients' test scores in %, before local training (after {everybody} rounds) and after it"
    titles = ["clients", "macro\nmean", "micro\nmean", "std", "worst\n10 %", "best\n10 %", "trivial\nmacro"]
    table = plain_table(title, ["score", "local\ntraining"], titles)
    for name, point, shown in _points(rows, names):
        found, floor = last(rows, point, name) or {}, last(rows, point, trivial(name))
        values = [_percent(found[statistic]) for statistic in STATISTICS]
        clients = str(found.get("clients") or "")
        table.add_row(shown, POINTS[point], clients, *values, _percent(floor["macro"]) if floor else "")
    return table


def _course_table(rows: list[Row], names: list[str]) -> Table:
    title = "Macro mean in the run, in % (best: chosen on the test examples, so optimistic)"
    columns = ["last\nround", f"mean of\nlast {_TAIL}", "evalu-\nations", "best\nround", "which\nround"]
    table = plain_table(title, ["score", "local\ntraining"], columns)
    for name, point, shown in _points(rows, names):
        found = course(rows, point, name) or {}
        end, mean, best = (_percent(found[key]["value"]) for key in ("last", "mean_of_last", "best"))
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


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
