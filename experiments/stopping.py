"""When a run ends before its last round: --stop_at, where a score is reached, and
--patience, where the validation score no longer improves.

Both look at rounds that are evaluated, after the round's local training, and need
nothing but the rows of metrics.jsonl: a run that goes on finds again what it knew.
"""

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from experiments import build, report, schema, scores, targets, unseen, validation
from experiments.config import Config
from experiments.files import Row, read_derived
from experiments.plain import plural
from experiments.presets import PRESETS
from experiments.scores import Headline
from fedjax_pfl.errors import InputError, check, choose

_POINTS = ("pre", "post", validation.POINT)


class Goal(NamedTuple):
    """A score to reach."""

    point: str | None  # None: as `_goal` finds it
    score: str
    value: float


def parse(text: str | None) -> Goal | None:
    """Reads --stop_at=[POINT/]SCORE:VALUE; None for no text and for `none`.

    Raises:
      InputError: it is not of that form, or a share of examples is outside (0, 1].
    """
    if text is None or not targets.given(text):
        return None
    place, colon, number = text.rpartition(":")
    point, slash, score = place.rpartition("/")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not colon or not score or (slash and point not in _POINTS) or math.isnan(value):
        raise InputError(
            f"--stop_at={text}: write a score and its value, as --stop_at=acc:0.9, or "
            "with the point in front, one of "
            f"{', '.join(_POINTS)}, as --stop_at=val/acc:0.9."
        )
    share = scores.is_share(score)
    check(
        "stop_at",
        value,
        0 if share else -math.inf,
        1 if share else math.inf,
        open_low=share,
    )
    return Goal(point or None, score, value)


def _goal(config: Config) -> Goal | None:
    """The goal at its point: where none is said that of the preset's headline, else
    `pre`."""
    goal = parse(config.stop_at)
    if goal is None or goal.point is not None:
        return goal
    preset = PRESETS.get(config.preset or "")
    return goal._replace(
        point=preset.headline_of(config.algo).partition("/")[0] if preset else "pre"
    )


def check_possible(experiment: build.Experiment) -> None:
    """Raises InputError where what is asked for cannot be: a score that the method has
    not, no validation examples, or no evaluation before the end."""
    c = experiment.config
    goal = _goal(c)
    flags = [f"--stop_at={c.stop_at}"] * bool(goal) + [
        f"--patience={c.patience}"
    ] * bool(c.patience)
    if flags and not c.eval_every:
        raise InputError(
            f"{flags[0]} needs evaluations before the last round: take an --eval_every "
            "from 1 on."
        )
    if (
        c.patience or (goal and goal.point == validation.POINT)
    ) and not validation.exists(experiment):
        raise InputError(
            f"{flags[-1]} needs validation examples, and there are none: hold some "
            "out, as with --val_fraction=0.2."
        )
    if goal:
        # `val` has those of `pre`
        known = targets.score_names(
            experiment, "post" if goal.point == "post" else "pre"
        )
        choose(
            f"score of {c.algo} at {goal.point}",
            goal.score.removesuffix("_micro"),
            known,
        )


class Progress(NamedTuple):
    """What the evaluated rounds so far say."""

    goal: Goal | None
    patience: int
    headline: Headline
    best: tuple[int, float] | None = None  # round and validation score
    since: int = 0  # evaluated rounds since then
    reached: tuple[int, float] | None = None  # the goal: round and score

    def after(self, row: Row) -> "Progress":
        """With one row more; the closing one and those without scores change
        nothing."""
        if "loss" not in row:
            return self
        now, (name, way) = self, self.headline
        if (key := f"{validation.POINT}/{name}") in row:
            # null for one that is not finite: it is no better
            value, best = row[key], self.best
            better = value is not None and (
                best is None or (value < best[1] if way == "min" else value > best[1])
            )
            now = (
                now._replace(best=(row["round"], value), since=0)
                if better
                else now._replace(since=self.since + 1)
            )
        if self.goal and self.reached is None:
            value = row.get(f"{self.goal.point}/{self.goal.score}")
            if value is not None and targets.is_reached(
                self.goal.score, value, self.goal.value, self.headline
            ):
                now = now._replace(reached=(row["round"], value))
        return now

    def why(self) -> str | None:
        """Why the run is to end, in words; None: it goes on."""
        if self.goal and self.reached:
            (t, value), name = self.reached, f"{self.goal.point}/{self.goal.score}"
            wanted, found = (
                scores.labelled(self.goal.score, x) for x in (self.goal.value, value)
            )
            return (
                f"{name} has reached {wanted} {_after(self.goal.point, t)}, with "
                f"{found}"
            )
        if self.best and self.patience and self.since >= self.patience:
            name, (t, value) = self.headline[0], self.best
            best = f"the {scores.labelled(name, value)} {_after(validation.POINT, t)}"
            since = plural(self.since, "evaluation")
            return (
                f"{validation.POINT}/{name} has not been better than {best} in {since}"
            )
        return None


def _after(point: str | None, t: int) -> str:
    """How many rounds stand behind a score of the row of round t."""
    return f"after {plural(report.rounds_behind(str(point), t), 'round')}"


def progress(
    config: Config, headline: Headline, rows: Iterable[Row]
) -> Progress | None:
    """What the rows of a run say so far; None if it has no such end."""
    goal = _goal(config)
    if goal is None and not config.patience:
        return None
    return functools.reduce(
        Progress.after, rows, Progress(goal, config.patience, headline)
    )


class End(NamedTuple):
    """After how many rounds a run is to end, and why."""

    rounds: int
    why: str


def first_end(config: Config, headline: Headline, rows: Iterable[Row]) -> End | None:
    """Where a run with these rows is to end; None: nowhere among them."""
    if (now := progress(config, headline, ())) is None:
        return None
    for row in rows:
        now = now.after(row)
        if why := now.why():
            return End(row["round"] + 1, why)
    return None


def ended(path: Path, config: Config) -> str | None:
    """What is said of a run that has ended by just these settings, and so does not go
    on; None of any other, and of one whose unseen clients are to be scored after other
    rounds."""
    said = read_derived(path / "summary.json", schema.SUMMARY)
    found = said.get("ended")
    if (
        not found
        or found != {"why": found["why"], **given(config)}
        or not unseen.as_asked(config, said)
    ):
        return None
    return (
        f"{path} has ended after {said['rounds']} of {plural(config.rounds, 'round')}: "
        f"{found['why']}. It goes on with "
        "other values, as --stop_at=none --patience=0."
    )


def given(config: Config) -> Row:
    """What a run is to end by, as settings that say it even where that is nothing."""
    return {
        "stop_at": config.stop_at if parse(config.stop_at) else "none",
        "patience": config.patience,
    }
