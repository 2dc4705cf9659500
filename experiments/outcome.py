"""What came of a sweep: of each method and combination the mean and the sample standard
deviation over seeds, as a table, as JSON and as Markdown; and which combination a
validation score chooses."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import (
    build,
    comparison,
    gather,
    plain,
    scores,
    tables,
    targets,
    validation,
)
from experiments.files import write_json, write_text
from experiments.grid import Member
from experiments.recorded import is_complete
from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError, choose

# a choice compares combinations on the same examples
_DATA = (*gather.DATA, "val_fraction")


class Rule(NamedTuple):
    """How a combination is chosen: by a score on validation examples."""

    score: str
    way: str  # the better value: "max" or "min"

    @property
    def name(self) -> str:
        return f"{validation.POINT}/{self.score}"


class Line(NamedTuple):
    """One method with one combination of values."""

    label: str
    members: list[Member]  # one for each seed
    runs: list[gather.Found]  # those that are complete


def rule(text: str, members: Sequence[Member]) -> Rule:
    """Reads --select=val/SCORE, and checks it before anything runs.

    Raises:
      InputError: it is no validation score, a method has not that score or no
        validation examples, or what varies are the data.
    """
    point, slash, score = text.partition("/")
    if not slash or not score:
        raise InputError(
            f"--select={text}: write a validation score, as --select=val/acc."
        )
    if point != validation.POINT:
        raise InputError(
            f"--select={text} would choose by test examples, and the scores of what it "
            "chose would be optimistic: "
            f"choose by validation examples, as --select={validation.POINT}/{score}."
        )
    if wrong := [
        name
        for name in _DATA
        if len({str(getattr(member.config, name)) for member in members}) > 1
    ]:
        raise InputError(
            f"--select chooses among runs on the same examples, but --{wrong[0]} has "
            "several values: make a sweep for "
            "each."
        )
    groups = gather.grouped(members, [member.config.algo for member in members])
    ways = [_way(score, of[0]) for of in groups.values()]
    return Rule(score, ways[0])


def _way(score: str, member: Member) -> str:
    experiment = build.prepare(member.config)
    if not validation.exists(experiment):
        raise InputError(
            f"--select={validation.POINT}/{score} needs validation examples, and "
            f"{member.label} has none: hold some "
            "out, as with --val_fraction=0.2."
        )
    choose(
        f"score of {user_code.short(member.config.algo)}",
        score,
        targets.score_names(experiment),
    )
    return scores.better(score, experiment.headline)


def lines(members: Sequence[Member]) -> list[Line]:
    """The runs of a sweep by method and combination, in their order."""
    groups = gather.grouped(
        members, [str((member.config.algo, member.varied)) for member in members]
    )
    return [
        Line(
            of[0].label,
            of,
            [gather.read(one.path) for one in of if is_complete(one.path, one.config)],
        )
        for of in groups.values()
    ]


def chosen(found: Sequence[Line], by: Rule) -> list[Line]:
    """Of each method the combination with the best mean over seeds, of those whose runs
    are all complete; of equals the first."""
    values = [
        comparison.values(line.runs, validation.POINT, by.score) for line in found
    ]
    whole = [
        (np.mean(x), line)
        for x, line in zip(values, found, strict=True)
        if len(x) == len(line.members)
    ]
    groups = gather.grouped(whole, [line.members[0].config.algo for _, line in whole])
    best = max if by.way == "max" else min
    return [best(of, key=lambda pair: pair[0])[1] for of in groups.values()]


def headline(found: Sequence[Line]) -> scores.Headline:
    """The score that decides in the runs, by the first that says it."""
    return next((run.headline for line in found for run in line.runs), scores.ACCURACY)


def statistics(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (None of fewer than two values), and the
    values."""
    return {
        "mean": float(np.mean(values)) if values else None,
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "values": list(values),
    }


class Table(NamedTuple):
    """A title, and rows of which the first is the heading."""

    title: str
    rows: list[list[str]]

    def text(self) -> str:
        """In columns, for a terminal."""
        return f"{self.title}\n{plain.columns(self.rows)}"

    def markdown(self) -> str:
        """As a Markdown table below its title."""
        return f"{self.title}\n\n{plain.markdown(self.rows)}"


def _table(
    what: str,
    found: Sequence[Line],
    name: str,
    points: dict[str, str],
    best: Sequence[Line] = (),
) -> Table:
    """Mean and deviation of a score: a row for each line, a column for each point,
    {point: title}; `best` are marked."""
    rows = [["method", *points.values(), "runs", *(["chosen"] if best else [])]]
    shown = functools.partial(scores.shown, name, digits=2)
    for line in found:
        runs = f"{len(line.runs)} of {len(line.members)}"
        cells = [
            comparison.mean_std(comparison.values(line.runs, point, name), shown)
            for point in points
        ]
        rows.append(
            [
                line.label,
                *cells,
                runs,
                *(["yes" if line in best else ""] if best else []),
            ]
        )
    unit = " in %" if scores.is_share(name) else ""
    over = (
        "mean ± sample standard deviation over seeds"
        if max(len(line.members) for line in found) > 1
        else "one seed"
    )
    return Table(
        f"{what}{name}{unit}, mean over clients, after the last round; {over}:", rows
    )


class Outcome(NamedTuple):
    """What a sweep comes to."""

    lines: list[Line]
    by: Rule | None
    best: list[Line]  # the chosen lines; all without a rule

    def tables(self) -> list[Table]:
        """All lines by what chooses, and the test scores of the chosen; or of all."""
        score, test = (
            headline(self.lines)[0],
            {"pre": "before local training", "post": "after it"},
        )
        if self.by is None:
            return [_table("Test ", self.lines, score, test)]
        held_out = {validation.POINT: "before local training"}
        every = _table("Validation ", self.lines, self.by.score, held_out, self.best)
        return [
            every,
            *([_table("Test ", self.best, score, test)] if self.best else []),
        ]

    def said(self) -> str:
        """Which lines were chosen, and of which methods none."""
        assert self.by is not None
        every, found = (
            {user_code.short(line.members[0].config.algo) for line in of}
            for of in (self.lines, self.best)
        )
        parts = [
            f"Chosen by {self.by.name}: "
            f"{'; '.join(line.label for line in self.best) or 'nothing'}."
        ]
        parts += [
            f"Of {name} no combination is complete." for name in sorted(every - found)
        ]
        return " ".join(parts)

    def content(self) -> dict[str, Any]:
        """What comparison.json holds."""
        name, better = headline(self.lines)
        said: dict[str, Any] = {"headline": {"score": name, "better": better}}
        if self.by is not None:
            said["select"] = {
                "score": self.by.name,
                "better": self.by.way,
                "chosen": [x.label for x in self.best],
            }
        return said | {"lines": [self._line(line, name) for line in self.lines]}

    def _line(self, line: Line, name: str) -> dict[str, Any]:
        """A line; without test scores where another was chosen."""
        places = [] if self.by is None else [(validation.POINT, self.by.score)]
        places += [("pre", name), ("post", name)] if line in self.best else []
        done = [run.path for run in line.runs]
        return {
            "method": line.members[0].config.algo,
            **({} if self.by is None else {"chosen": line in self.best}),
            "varied": line.members[0].varied,
            "seeds": [run.config.seed for run in line.runs],  # those of the values
            "runs": [path.name for path in done],
            "incomplete": [
                member.path.name for member in line.members if member.path not in done
            ],
            "complete": len(done),
            "scores": {
                f"{p}/{x}": statistics(comparison.values(line.runs, p, x))
                for p, x in places
            },
        }

    def write(self, root: Path) -> None:
        """Writes comparison.json and comparison.md."""
        write_json(root / "comparison.json", self.content())
        first, *rest = [table.markdown() for table in self.tables()]
        parts = [first, *([self.said()] if self.by else []), *rest]
        write_text(root / "comparison.md", "\n\n".join(parts) + "\n")


def read(members: Sequence[Member], by: Rule | None) -> Outcome:
    """What the run directories of a sweep hold."""
    found = lines(members)
    return Outcome(found, by, found if by is None else chosen(found, by))


def begin(members: Sequence[Member], root: Path, by: Rule | None) -> None:
    """Records before the first run of a sweep with --select that nothing is chosen yet,
    so that no command shows test scores of all its runs."""
    if by is not None and gather.selection(root) is None:
        with gather.writing(root, "--root"):
            root.mkdir(parents=True, exist_ok=True)
            (root / "comparison.md").unlink(missing_ok=True)
            write_json(
                root / "comparison.json", Outcome(lines(members), by, []).content()
            )


def show(
    members: Sequence[Member], root: Path, by: Rule | None = None, verbose: bool = False
) -> None:
    """Prints and writes what came of the runs, of those that have something to say."""
    found = read(members, by)
    paths = [member.path for line in found.best for member in line.members]
    finished = [path for path in paths if (path / "summary.json").exists()]
    if not finished and by is None:
        return
    found.write(root)
    if by is not None:
        print(f"{found.tables()[0].text()}\n{found.said()}")
    if finished and verbose:
        print(tables.table(finished))
    elif finished and by is None and any(member.varied for member in members):
        print(found.tables()[0].text())
    elif finished:
        print(comparison.table(finished))
    if finished:
        print(f"Picture: {comparison.draw(finished, root)}")
