"""When a run first reached a score, and what it had spent by then (rounds to a target, as in pFedC's Table 5).

All of it is computed from the rows of metrics.jsonl, so a run directory can be asked for any target afterwards.

What is spent: the traffic of the rounds behind the score (the round whose local training `post` scores is counted
whole, its upload included), and the clients' local work: the steps that the settings ask of the round's participants
(--epochs or --steps), and the floating-point operations of the model on their examples, forward and backward, 2 for a
multiply-add of a matrix product (`models.flops`; a short last batch counts as long as it is). What a method computes
beside that (a second model, inner steps, weights of tasks, fine-tuning before prediction) or in its place (MOCHA's
coordinate steps) is not in it: `benchmarks.cost` has the methods' times.
"""

from typing import Any

from rich.console import Console

from experiments import report
from experiments.presets import PRESETS
from fedjax_pfl.checks import BadInput, check

Row = dict[str, Any]
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # where the user names none
NOTE = "client work as --epochs or --steps ask"  # see above for what is not in it
_ROUNDING = 1e-6  # scores are float32: a mean of tenths may miss 0.9 by less


def levels(text: str | None) -> tuple[float, ...]:
    """Reads --targets: scores in (0, 1], apart by commas, as a rising tuple; None: `LEVELS`.

    Raises:
      BadInput: one of them is not a number, or out of its range.
    """
    if text is None:
        return LEVELS
    found = set()
    for word in text.split(","):
        try:
            found.add(float(word))
        except ValueError:
            raise BadInput(
                f"--targets={text}: write scores in (0, 1], apart by commas, as --targets=0.8,0.9."
            ) from None
    for value in found:
        check("targets", value, 0, 1, open_low=True)
    return tuple(sorted(found))


def headline(config: Row) -> str:
    """The score that targets are about: that of the preset's published numbers, else `acc`."""
    preset = PRESETS.get(config["preset"] or "")
    return preset.headline_of(config["algo"]).split("/")[1] if preset else "acc"


def spent(rows: list[Row], flops: int) -> Row:
    """Totals of some rounds: traffic, the clients' steps and their floating-point operations.

    Args:
      rows: of the metrics.
      flops: of the model on one example, forward and backward.

    Returns:
      down, up, ints, messages, encrypted, bytes, client_steps, client_flops; the last two None where a row does not
      know (a run begun by an earlier version).
    """
    trained = [row for row in rows if "loss" in row]
    known = all("work/steps" in row for row in trained)
    steps, examples = (sum(row[f"work/{name}"] for row in trained) if known else None for name in ("steps", "examples"))
    work = {"client_steps": steps, "client_flops": None if examples is None else examples * flops}
    return report.traffic(trained) | work


def reached(rows: list[Row], point: str, name: str, level: float, flops: int) -> Row | None:
    """The first evaluated round whose mean (macro; micro of a name that ends in _micro) is at least `level`, or None.

    Returns:
      round (of the row), rounds (communicated until then: `pre` is scored before its round, the others after its local
      training), value, and what was `spent`.
    """
    key = f"{point}/{name}"
    row = next((row for row in rows if row.get(key) is not None and row[key] >= level - _ROUNDING), None)
    if row is None:
        return None
    before = [r for r in rows if r["round"] < row["round"] + (point != "pre") and "loss" in r]
    return {"round": row["round"], "rounds": len(before), "value": row[key]} | spent(before, flops)


def summary(rows: list[Row], config: Row, flops: int) -> Row:
    """For summary.json: {"score": name, "levels": [{"target": ..., point: `reached`}]}."""
    name = headline(config)
    points = [point for point in report.POINTS if any(row.get(f"{point}/{name}") is not None for row in rows)]
    found = [
        {"target": level} | {point: reached(rows, point, name, level, flops) for point in points}
        for level in levels(config["targets"])
    ]
    return {"score": name, "levels": found}


def show(console: Console, rows: list[Row], config: Row, flops: int) -> None:
    """Prints the table of targets: those asked for, or of the usual ones those that were reached."""
    found = summary(rows, config, flops)
    shown = [row for row in found["levels"] if config["targets"] or any(isinstance(x, dict) for x in row.values())]
    if not shown or len(shown[0]) == 1:
        return
    name = found["score"].removesuffix("_micro")
    mean = f"{'macro' if name == found['score'] else 'micro'} mean of {name}"
    title = f"Rounds until the {mean} first reached a target, and what they took ({NOTE})"
    numbers = ["rounds", "scalars\ndown", "scalars\nup", "MB", "client\nsteps", "client\nTFLOP"]
    table = report.plain_table(title, ["target", "local\ntraining"], numbers)
    for row in shown:
        points = [point for point in report.POINTS if point in row]
        for point in points:
            label = f"{row['target']:g}" if point == points[0] else ""
            table.add_row(label, report.POINTS[point], *_cells(row[point]))
    console.print(table)


def _cells(found: Row | None) -> list[str]:
    if found is None:
        return ["never", *[""] * 5]
    work = ["", ""]
    if found["client_steps"] is not None:
        work = [f"{found['client_steps']:,}", _short(found["client_flops"] / 1e12)]
    scalars = [_short(found[name]) for name in ("down", "up")]
    return [str(found["rounds"]), *scalars, _short(found["bytes"] / 1e6), *work]


def _short(value: float) -> str:
    """A number in three digits, or with all that stand before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
