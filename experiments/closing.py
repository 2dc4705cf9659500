"""What a run says when it is done: a line, some lines, or all tables."""

import functools
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console

from experiments import (
    account,
    build,
    clients as table,
    legend,
    published,
    report,
    schema,
    scores,
    targets,
)
from experiments.config import Config
from experiments.files import read_derived
from experiments.plain import plural
from experiments.runs import RunDirectory

# how much is said; HELD_OUT: of the validation examples only
HELD_OUT, ONE, SHORT, ALL = -1, 0, 1, 2


def show(
    console: Console, run: RunDirectory, experiment: build.Experiment, say: int = SHORT
) -> None:
    """Says what came out of a finished run; the table of targets, if they were asked
    for, is among it."""
    headline, found = experiment.headline, report.summary(run.rows, experiment.headline)
    summary = read_derived(run.path / "summary.json", schema.SUMMARY)
    c = experiment.config.replace(
        rounds=summary.get("rounds", experiment.config.rounds)
    )
    experiment = experiment._replace(config=c)
    ended = (
        [f"Ended after {plural(c.rounds, 'round')}: {summary['ended']['why']}."]
        if "ended" in summary
        else []
    )
    if say <= ONE:
        points = report.HELD_OUT if say == HELD_OUT else report.WITH_UNSEEN
        if say == HELD_OUT and ended and not summary["ended"]["why"].startswith("val/"):
            ended = [f"Ended after {plural(c.rounds, 'round')}."]
        # the choice may be by another score
        of = f"{headline[0]}: " if say == HELD_OUT else ""
        console.print(
            "  "
            + " ".join([of + "; ".join(_points(found, points, brief=True)), *ended])
        )
        warn(console, run.rows, experiment)
        return
    for line in ended:
        console.print(line)
    if say == ALL:
        report.tables(console, found)
        table.show(console, experiment, run.path)
        legend.show(console, found)
    else:
        for line in lines(found, run.rows, c, experiment.examples):
            console.print(line)
    warn(console, run.rows, experiment)
    if targets.given(c.targets):
        targets.show(console, run.rows, c, account.flops(experiment), headline)
    if text := published.sentence(c, experiment.examples):
        console.print(text)
    more = "" if say == ALL else "; --verbose prints all tables"
    console.print(
        f"Everything is in {run.path}: curves.png, metrics.csv, clients.csv, "
        f"summary.json, ...{more}"
    )


def warn(
    console: Console, rows: Iterable[report.Row], experiment: build.Experiment
) -> None:
    """Says which parts of the method did nothing in the last round
    (`Algorithm.idle`)."""
    parts = experiment.algorithm().idle
    if not parts:
        return
    last: report.Row = functools.reduce(
        lambda last, row: row if "loss" in row else last, rows, {}
    )
    for part in parts:
        # a number, or a matrix's extremes
        seen = [last.get(part.metric + end) for end in ("", "/min", "/max")]
        far = [abs(value - part.at) for value in seen if value is not None]
        if far and max(far) < part.within:
            moved = (
                f"{part.metric} ended within {max(far):.1g} of {part.at:g}, where they "
                "do nothing"
            )
            console.print(f"Note: the {moved}: {part.what}")


def lines(
    found: report.Row,
    rows: Iterable[report.Row],
    c: Config,
    examples: report.Row | None,
) -> Iterator[str]:
    """The results in at most seven lines, nine with unseen clients.

    Args:
      found: `report.summary`.
      rows: of the metrics.
      c: the settings; `rounds` are those that are done.
      examples: as `published.differences` takes them.
    """
    name, way = found["headline"]["score"], found["headline"]["better"]
    what = (
        "Test accuracy"
        if name == "acc"
        else f"Test {name} ({scores.direction((name, way))})"
    )
    rounds = max(_rounds_behind(found).values(), default=c.rounds)
    yield (
        f"{what} of {c.algo} after {plural(rounds, 'round')}, mean over the clients "
        "(local training: one round's):"
    )
    yield from ("  " + line for line in _points(found))
    if own := found["scores"]["pre"].get("acc_present"):
        shown = scores.labelled("acc_present", own["macro"])
        of = "" if name == "acc" else "accuracy "
        yield (
            f"  {of}among the classes that a client holds, before local training: "
            f"{shown}"
        )
    if beside := published.beside(c, examples):
        yield beside
    total = found["traffic"]["bytes"]
    clients = sum(row["participants"] for row in rows if "loss" in row)
    each = (
        f"{total / 1e6:,.1f} MB in all, {total / max(1, clients) / 1e3:,.1f} kB per "
        "client and round"
    )
    yield f"Traffic: {each}, down and up."


def _rounds_behind(found: report.Row) -> dict[str, int]:
    """The rounds behind the headline's score at each point; of a run that was stopped
    they are fewer than its own, and differ."""
    known = {
        point: of.get(found["headline"]["score"], {}).get("round")
        for point, of in found["scores"].items()
    }
    return {
        point: report.rounds_behind(point, t)
        for point, t in known.items()
        if t is not None
    }


def _points(
    found: report.Row,
    points: Mapping[str, str] = report.WITH_UNSEEN,
    brief: bool = False,
) -> Iterator[str]:
    """The headline's score before and after local training."""
    name, behind = found["headline"]["score"], _rounds_behind(found)
    most = max(behind.values(), default=0)
    for point, when in points.items():
        score, floor = (
            found["scores"][point].get(which) for which in (name, scores.baseline(name))
        )
        if score is None:
            continue
        text = f"{when} local training {scores.labelled(name, score['macro'])}"
        parts = [
            f"worst tenth of the clients {scores.labelled(name, score['worst10'])}"
        ]
        parts += [f"best tenth {scores.labelled(name, score['best10'])}"]
        parts += (
            [f"majority baseline {scores.labelled(name, floor['macro'])}"]
            if floor
            else []
        )
        late = (
            ""
            if behind.get(point, most) == most
            else f" after {plural(behind[point], 'round')}"
        )
        yield text if brief else f"{text}{late}  ({', '.join(parts)})"
