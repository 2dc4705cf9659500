"""Shows runs in the terminal: `python -m experiments.show RUN ...`.

RUN is a run directory, or the directory of a sweep, which stands for all runs in it, or
for those that --select chose. One run is shown with its settings, what it said at its
end, and all tables of scores; several as one table, their methods the best first, with
mean and sample standard deviation over seeds, rounds, megabytes sent and seconds of
training. A run that goes on or was interrupted is shown with what it has; its data need
not be here.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from experiments import (
    closing,
    comparison,
    courses,
    entry,
    flags,
    gather,
    published,
    report,
    schema,
    targets,
)
from experiments.config import FREE, SETTINGS, Config
from experiments.files import read_derived
from experiments.gather import Found
from experiments.plain import plural
from experiments.report import Row

# of those that may change on a resume
_SHOWN = ("targets", "stop_at", "patience", "unseen_rounds")


def settings(c: Config, said: Callable[[Any], str] = published.shown) -> dict[str, str]:
    """The settings of a run in words, by name; the hyperparameters of its method are
    among them."""
    values = {
        name: getattr(c, name)
        for name in SETTINGS
        if name not in FREE or name in _SHOWN
    }
    hparams = {
        f"{name} of {c.algo}" if name in values else name: x
        for name, x in c.hparams.items()
    }
    return {name: said(x) for name, x in (values | hparams).items() if x is not None}


def versions(run: Found) -> Row:
    """Software and device of a run's start; empty if that is not recorded."""
    known = read_derived(run.path / "versions.json", schema.VERSIONS)
    return {name: value for name, value in known.items() if isinstance(value, str)}


def about(run: Found) -> Iterator[str]:
    """What a run is: setting, settings, software."""
    yield f"{run.path}: {comparison.title([run])}"
    yield "Settings: " + ", ".join(
        f"{name} {value}" for name, value in settings(run.config).items()
    )
    if known := versions(run):
        yield "Software and device: " + ", ".join(
            f"{name} {value}" for name, value in known.items()
        )


def ending(run: Found) -> Iterator[str]:
    """How a run stands, and what it said at its end."""
    done, said = run.config.replace(rounds=run.said["rounds"]), run.said
    seconds = said.get("seconds", {})
    spent = "; ".join(
        f"{seconds[name]:,.1f} s {what}"
        for name, what in _SECONDS.items()
        if name in seconds
    )
    spent += (
        f" (of {plural(run.timed, 'round')})"
        if spent and run.timed < said["rounds"]
        else ""
    )
    unfinished = "" if run.complete else f" of {run.config.rounds}"
    yield f"{run.status.capitalize()}{unfinished}{'; ' * bool(spent)}{spent}."
    if run.complete and "ended" in said:
        yield (
            f"Ended after {said['rounds']} of {plural(run.config.rounds, 'round')}: "
            f"{said['ended']['why']}."
        )
    if not any(said["scores"].values()):
        known = report.score_names(run.rows)
        yield (
            "No score is finite at the last evaluation."
            if known
            else "No evaluation is recorded yet."
        )
        return
    yield from closing.lines(said, run.rows, done, said.get("examples"))
    if text := published.sentence(done, said.get("examples")):
        yield text


_SECONDS = {"train": "of training and evaluation", "compile": "of compilation"}


def one(console: Console, run: Found) -> None:
    """Prints one run."""
    for line in (*about(run), *ending(run)):
        console.print(line)
    console.print()
    report.tables(console, run.said)
    if targets.given(run.config.targets):
        targets.show(console, run.rows, run.config, courses.flops(run), run.headline)


def main(argv: list[str]) -> str:
    """What is shown of the runs of a command line."""
    words = flags.parse(argv, {}, words=True).words
    paths = gather.directories(words)
    if len(paths) > 1:
        return comparison.table(paths)
    console = entry.terminal()
    with console.capture() as printed:
        one(console, gather.read(paths[0]))
    return printed.get().rstrip()


if __name__ == "__main__":
    sys.exit(entry.enter(main, __doc__))
