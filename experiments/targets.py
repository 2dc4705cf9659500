"""When a run first reached a score, and what it had spent by then (rounds to a target,
as in pFedC's Table 5).

All of it is computed from the rows of metrics.jsonl, so a run directory can be asked
for any target afterwards.

What is spent: the traffic of the rounds behind the score (the round whose local
training `post` scores is counted whole, its upload included), and the clients' local
work: the steps that the settings ask of the round's participants (--epochs or --steps),
and the floating-point operations of the method's loops over their examples, 2 for a
multiply-add of a matrix product, counted in the trace of a round
(`fedjax_pfl.engine.flops`; short batches count by length). Second models, inner steps
and weights of tasks are in it; element-wise work, evaluation and what the server
computes are not: `benchmarks.cost` has the methods' times.
"""

import math
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from experiments import report, scores
from experiments.config import Config
from experiments.files import Row
from experiments.presets import PRESETS
from experiments.scores import ACCURACY, Headline
from fedjax_pfl.errors import InputError, check, choose

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # where the user names none
# see above
NOTE = (
    "steps as --epochs or --steps ask; operations of the method's matrix products on "
    "them"
)
MARK, BASELINE = (
    "*",
    "no higher than the majority baseline: always the client's most frequent class, "
    "or no",
)
_ROUNDING = 1e-6  # scores are float32: a mean of tenths may miss 0.9 by less


def given(text: str | None) -> bool:
    """Does --targets ask for the rounds to a score?"""
    return text is not None and text.lower() != "none"


def parse(text: str | None) -> tuple[str | None, tuple[float, ...]]:
    """Reads --targets: levels apart by commas, and in front the score that they are of,
    as `acc:0.8,0.9`; `none` is no text.

    Levels are in (0, 1] but for a named score that is no share of examples, as
    `reconstruction:40,30`.

    Returns:
      the score's name, None where the text has none; the levels, rising; `LEVELS` where
      there is no text.

    Raises:
      InputError: a level is not a number, or out of its range; whether a run has the
        score is for `check_score`.
    """
    if not given(text):
        return None, LEVELS
    name, colon, numbers = str(text).rpartition(":")
    try:
        found = {float(word) for word in numbers.split(",")}
    except ValueError:
        found = set()
    if not found or (colon and not name):
        raise InputError(
            f"--targets={text}: write scores in (0, 1], apart by commas, as "
            "--targets=0.8,0.9, "
            "or with the name of the score, as --targets=acc_present:0.8,0.9."
        )
    share = not name or scores.is_share(name)
    for value in found:
        check(
            "targets",
            value,
            0 if share else -math.inf,
            1 if share else math.inf,
            open_low=share,
        )
    return name or None, tuple(sorted(found))


def wanted(
    config: Config, headline: Headline = ACCURACY
) -> tuple[str, tuple[float, ...]]:
    """The score that targets are about and its levels: as --targets says, else the
    preset's headline, else `headline`.

    The preset's counts where it is of the kind of the method's own, an accuracy or not.
    """
    name, levels = parse(config.targets)
    preset, own = PRESETS.get(config.preset or ""), headline[0]
    said = preset.headline_of(config.algo).split("/")[1] if preset else own
    return name or (
        said if scores.is_share(said) == scores.is_share(own) else own
    ), levels


def check_score(text: str | None, known: Iterable[str], whose: str) -> None:
    """Raises InputError if --targets names a score that is not among the known ones, or
    the micro mean of one."""
    name, names = parse(text)[0], [x for x in known if not x.endswith("_majority")]
    # of a run that ended before its first evaluation nothing is known
    if name and names:
        choose(f"score of {whose}", name.removesuffix("_micro"), names)


def check_possible(experiment: Any) -> None:
    """Raises InputError if --targets names a score that a `build.Experiment` will not
    have."""
    c = experiment.config
    if parse(c.targets)[0]:
        check_score(c.targets, score_names(experiment), c.algo)


def score_names(experiment: Any, point: str = "pre") -> list[str]:
    """The names of the scores that a `build.Experiment` will have before (`pre`) or
    after (`post`) local training; nothing is compiled."""
    program = experiment.program(rounds=experiment.config.rounds)
    arguments = (
        experiment.key,
        program.traced,
        experiment.federation,
        experiment.state_shapes(),
        np.int32(0),
    )
    headline, networks = experiment.headline[0], dict.fromkeys(experiment.network_names)
    each = (
        [f"{headline}{scores.OF}{name}" for name in networks]
        if len(networks) > 1
        else []
    )
    if point == "post":
        return [
            *jax.eval_shape(program.round, *arguments, np.bool_(True))[1].post,
            *each,
        ]
    return [*jax.eval_shape(program.evaluate, *arguments), *each]


def is_reached(name: str, value: float, level: float, headline: Headline) -> bool:
    """Is a score at least a level? At most, where less of it is better."""
    sign = -1 if scores.better(name, headline) == "min" else 1
    return sign * value >= sign * level - _ROUNDING * max(1, abs(level))


def bound(eval_every: int) -> str | None:
    """Why rounds to a target are upper bounds; None where every round was evaluated."""
    if eval_every == 1:
        return None
    if eval_every == 0:
        return "evaluated after the last round only, so rounds are upper bounds"
    return (
        f"evaluated every {eval_every} rounds only, so rounds are upper bounds, up to "
        f"{eval_every - 1} too many"
    )


class Flops(NamedTuple):
    """Floating-point operations of a method for each example of the clients' local
    work."""

    first: float  # in the first round, with what some methods do before it
    later: float


class Spent(NamedTuple):
    """What some rounds took."""

    rounds: int = 0
    traffic: Row = MappingProxyType({})  # type: ignore[assignment]  # as the entries of a row
    steps: int = 0  # of the clients
    examples: int = 0
    opening: int = 0  # examples of the first round

    def after(self, row: Row) -> "Spent":
        """With one row more; the closing one took nothing."""
        if "loss" not in row:
            return self
        names = [name for name in (*self.traffic, *row) if name.startswith("traffic/")]
        sent = {name: self.traffic.get(name, 0) + row.get(name, 0) for name in names}
        steps, examples = (
            self.steps + row.get("work/steps", 0),
            self.examples + row.get("work/examples", 0),
        )
        return Spent(
            self.rounds + 1,
            sent,
            steps,
            examples,
            self.opening if self.rounds else examples,
        )

    def total(self, flops: Flops | None) -> Row:
        """What `report.traffic` has, client_steps and client_flops; the last is None if
        not known.

        Args:
          flops: of the method, see `account.flops`; None: not counted.
        """
        return report.traffic([self.traffic]) | {
            "client_steps": self.steps,
            "client_flops": self.operations(flops),
        }

    def operations(self, flops: Flops | None) -> int | None:
        """Floating-point operations of the clients; None if not known."""
        return flops and round(
            self.opening * flops.first + (self.examples - self.opening) * flops.later
        )


class Reached(NamedTuple):
    """What the rows say of a score and some levels of it."""

    first: dict[tuple[str, float], Row]  # of point and level, where it was reached
    # of every evaluated point: the last `scores.baseline` score, if recorded
    floor: dict[str, float | None]
    # that score where a level was reached: of other participants
    floor_there: dict[tuple[str, float], float]

    def is_baseline(self, point: str, level: float) -> bool:
        """Is a level no more than the majority baseline, where it was reached or else
        in the end?"""
        floor = self.floor_there.get((point, level), self.floor.get(point))
        return floor is not None and floor >= level - _ROUNDING


def reached(
    rows: Iterable[Row],
    name: str,
    levels: Sequence[float],
    flops: Flops | None,
    headline: Headline = ACCURACY,
) -> Reached:
    """When a score (macro mean; micro of a name that ends in _micro) was first at least
    each of the levels; at most, where less of it is better. The rows are read once, and
    none is kept.

    Returns:
      `first`: round (of the row), rounds (communicated until then: `pre` is scored
      before its round, the others after its local training), value, and what was
      `Spent`.
    """
    first, there = dict[tuple[str, float], Row](), dict[tuple[str, float], float]()
    floors, seen, spent = dict[str, float](), set[str](), Spent()
    for row in rows:
        before, spent = spent, spent.after(row)
        for point in report.POINTS:
            if (floor := row.get(f"{point}/{scores.baseline(name)}")) is not None:
                floors[point] = floor
            if (value := row.get(f"{point}/{name}")) is None:
                continue
            seen.add(point)
            total = before if point == "pre" else spent
            left = [level for level in levels if (point, level) not in first]
            for level in [x for x in left if is_reached(name, value, x, headline)]:
                here = {"round": row["round"], "rounds": total.rounds, "value": value}
                first[point, level] = here | total.total(flops)
                there |= {} if floor is None else {(point, level): floor}
    return Reached(
        first,
        {point: floors.get(point) for point in report.POINTS if point in seen},
        there,
    )


def summary(
    rows: Iterable[Row],
    config: Config,
    flops: Flops | None,
    headline: Headline = ACCURACY,
) -> Row:
    """For summary.json: {"score": name, "bound": `bound`, "baseline": {point: the
    majority baseline}, "levels": [{"target": ..., "baseline": is it no more than that
    at some point?, point: what `reached` says, None: never}]}."""
    name, levels = wanted(config, headline)
    found = reached(rows, name, levels, flops, headline)
    said = [
        {
            "target": level,
            "baseline": any(found.is_baseline(point, level) for point in found.floor),
        }
        | {point: found.first.get((point, level)) for point in found.floor}
        for level in levels
    ]
    return {
        "score": name,
        "bound": bound(config.eval_every),
        "baseline": found.floor,
        "levels": said,
    }


def show(
    console: Console,
    rows: Iterable[Row],
    config: Config,
    flops: Flops | None,
    headline: Headline = ACCURACY,
) -> None:
    """Prints the table of the targets that were asked for."""
    found = summary(rows, config, flops, headline)
    shown, points = found["levels"], [*found["baseline"]]
    if not points:
        return
    name = found["score"].removesuffix("_micro")
    mean = f"{'macro' if name == found['score'] else 'micro'} mean of {name}"
    mean += " (lower is better)" if scores.better(name, headline) == "min" else ""
    title = (
        f"Rounds until the {mean} first reached a target, and what they took ({NOTE})"
    )
    numbers = [
        "rounds",
        "scalars\ndown",
        "scalars\nup",
        "MB",
        "client\nsteps",
        "client\nTFLOP",
    ]
    table = report.plain_table(title, ["target", "local\ntraining"], numbers)
    for row in shown:
        label = f"{row['target']:g}{MARK if row['baseline'] else ''}"
        for point in points:
            table.add_row(
                label if point == points[0] else "",
                report.POINTS[point],
                *_cells(row[point]),
            )
    console.print(table)
    if any(row["baseline"] for row in shown):
        console.print(f"{MARK} Before or after local training this is {BASELINE}.")
    if found["bound"]:
        console.print(f"Targets: {found['bound']}.")


def _cells(found: Row | None) -> list[str]:
    if found is None:
        return ["never", *[""] * 5]
    counted = found["client_flops"]
    work = [
        f"{found['client_steps']:,}",
        "not counted" if counted is None else _short(counted / 1e12),
    ]
    scalars = [_short(found[name]) for name in ("down", "up")]
    return [str(found["rounds"]), *scalars, _short(found["bytes"] / 1e6), *work]


def _short(value: float) -> str:
    """A number in three digits, or with all that stand before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
