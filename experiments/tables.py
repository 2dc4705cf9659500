"""Prints finished runs as rows of a Markdown table: `python -m experiments.tables
[--targets=0.8,0.9] runs/a runs/b`.

Scores are macro means over clients in %, of the last round: `post`, right after local
training, and `pre`, before it. Of clients that did not train (--unseen) the headline
stands in columns of its own. Scores that are no accuracies stand in columns of their
own, which say where less is better, as they are. With --targets, two columns for each:
the rounds in which a score first reached it, post / pre, and the megabytes that had
travelled by then; of the run's headline score (see `experiments.targets`), or of the
one that is named, as --targets=acc_present:0.8,0.9. A run that is not complete says how
it stands in place of its rounds. Where runs deviate from their preset, or had only a
part of a data set, the last column says in what.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from experiments import (
    entry,
    flags,
    gather,
    networks,
    plain,
    published,
    report,
    scores,
    targets,
)
from experiments.config import FREE, SETTINGS
from experiments.gather import Found
from fedjax_pfl import simulate, user_code
from fedjax_pfl.algorithms.find import find

BOUND = "≤"
COLUMNS = {
    "acc post": ("post", "acc"),
    "pre": ("pre", "acc"),
    "acc_present post": ("post", "acc_present"),
    "pre ": ("pre", "acc_present"),
    "task_acc post": ("post", "task_acc"),
    "baseline": ("post", "task_acc_majority"),
    "task_bal post": ("post", "task_bal"),
    "recall post": ("post", "recall_macro"),
}


def _apart(run: Found, runs: list[Found]) -> str:
    """The settings in which the runs of a method differ, as its name ends."""
    same = [other.config for other in runs if other.config.algo == run.config.algo]
    shown = (*FREE, "model", "data_fraction", "rounds")  # or of no effect
    names = [
        n
        for n in SETTINGS
        if n not in shown and len({str(getattr(config, n)) for config in same}) > 1
    ]
    return "".join(
        f", {name}={published.shown(getattr(run.config, name))}" for name in names
    )


def row(run: Found, columns: dict[str, tuple[str, str]], apart: str = "") -> list[str]:
    """One run: method, model, share of the data, scores, seconds of training and a
    round; `apart` ends its name."""
    config, summary = run.config, run.said
    # its file may be gone
    defaults = (
        {}
        if user_code.named(config.algo)
        else simulate.hyperparameters(find(config.algo))
    )
    changed = {
        name: x
        for name, x in config.hparams.items()
        if name not in defaults or x != defaults[name]
    }
    hparams = "".join(
        f", {published.hparam(name)}={published.shown(x)}"
        for name, x in changed.items()
    )
    model = networks.label(config)
    rounds = str(summary["rounds"]) if run.complete else run.status
    cells = [config.algo + hparams + apart, model, f"{config.data_fraction:g}", rounds]
    spread = {"acc", run.headline[0]}
    for point, name in columns.values():
        score = summary["scores"].get(point, {}).get(name)
        values = (
            [score[x] for x in ("macro", *(("std",) if name in spread else ()))]
            if score
            else []
        )
        cells.append(" ± ".join(scores.shown(name, value, 2) for value in values))
    if (seconds := summary.get("seconds", {}).get("train")) is None:
        return [*cells, "", ""]
    return [*cells, f"{seconds:.0f}", f"{seconds / run.timed:.2f}" if run.timed else ""]


def _columns(runs: list[Found]) -> dict[str, tuple[str, str]]:
    """The scores' columns, {title: (point, score)}: the accuracies if a run has any,
    then all others of the runs."""
    more: dict[str, tuple[str, str]] = {}
    for run in runs:
        headline, found = run.headline, run.said["scores"].get("post", {})
        for name in scores.ordered(
            (x for x in found if not scores.is_share(x)), headline
        ):
            less = (
                " (lower is better)" if scores.better(name, headline) == "min" else ""
            )
            more |= {f"{name} post{less}": ("post", name), f"{name} pre": ("pre", name)}
        columns = {"unseen post": "unseen_post", "unseen pre": "unseen"}
        more |= {
            f"{headline[0]} {x}": (p, headline[0])
            for x, p in columns.items()
            if run.said["scores"].get(p)
        }
    known = [
        name
        for run in runs
        for point in ("pre", "post")
        for name in run.said["scores"].get(point, {})
    ]
    return (COLUMNS if not more or any(map(scores.is_share, known)) else {}) | more


class Reached(NamedTuple):
    """When a run reached its targets."""

    score: str  # what the targets are of
    cells: list[str]  # two for each level
    bound: str | None  # why its rounds are upper bounds


def _targets(run: Found, text: str) -> Reached:
    """Raises InputError if the run has not the score that `text` names."""
    targets.check_score(text, report.score_names(run.rows), str(run.path))
    score, levels = targets.wanted(run.config.replace(targets=text), run.headline)
    bound, cells = targets.bound(run.config.eval_every), []
    found = targets.reached(run.rows, score, levels, None, run.headline)
    for level in levels:
        pairs = [
            _reached(found, point, level, bound is not None)
            for point in ("post", "pre")
        ]
        cells += [" / ".join(texts) for texts in zip(*pairs, strict=True)]
    return Reached(score, cells, bound)


def _reached(
    run: targets.Reached, point: str, level: float, bounded: bool
) -> tuple[str, str]:
    """Rounds, with their marks, and megabytes."""
    found, mark = (
        run.first.get((point, level)),
        targets.MARK if run.is_baseline(point, level) else "",
    )
    if point not in run.floor:  # never evaluated there
        return "-", "-"
    if found is None:
        return f"never{mark}", "-"
    return (
        f"{BOUND if bounded and found['round'] else ''}{found['rounds']}{mark}",
        f"{found['bytes'] / 1e6:.1f}",
    )


def table(workdirs: list[Path], text: str | None = None) -> str:
    """The Markdown table of some run directories; `text` is as --targets gives it."""
    runs = list(map(gather.read, workdirs))
    columns = _columns(runs)
    head = [
        "method",
        "model",
        "data",
        "rounds",
        *(name.strip() for name in columns),
        "train s",
        "s a round",
    ]
    body, notes = [row(run, columns, _apart(run, runs)) for run in runs], []
    if any("±" in cell for cells in body for cell in cells):
        notes.append("± is the standard deviation over clients.")
    if text is not None and targets.given(text):
        found = [_targets(run, text) for run in runs]
        scores = {run.score for run in found}
        named = f" of {scores.pop()}" if len(scores) == 1 else ""
        head += [] if named else ["targets of"]
        head += [
            name
            for x in targets.parse(text)[1]
            for name in (f"rounds to {x:g}{named}", f"MB to {x:g}")
        ]
        body = [
            [*cells, *([] if named else [run.score]), *run.cells]
            for cells, run in zip(body, found, strict=True)
        ]
        notes += _notes(workdirs, found)
    done = [run.config.replace(rounds=run.said["rounds"]) for run in runs]
    said = [
        published.deviations(config, run.said.get("examples"))
        for config, run in zip(done, runs, strict=True)
    ]
    if any(said):
        head, body = (
            [*head, "deviations"],
            [[*cells, last] for cells, last in zip(body, said, strict=True)],
        )
    return "\n".join([plain.markdown([head, *body]), *(f"\n{note}" for note in notes)])


def _notes(workdirs: list[Path], found: list[Reached]) -> list[str]:
    """What the marks of the targets mean."""
    marked = any(targets.MARK in cell for run in found for cell in run.cells)
    notes = [f"`{targets.MARK}` A target {targets.BASELINE}."] if marked else []
    for bound in dict.fromkeys(run.bound for run in found if run.bound):
        names = ", ".join(
            str(path)
            for path, run in zip(workdirs, found, strict=True)
            if run.bound == bound
        )
        notes.append(f"`{BOUND}` {names}: {bound}.")
    return notes


def main(argv: list[str]) -> str:
    """The table of a command line."""
    parsed = flags.parse(argv, {"targets": flags.OF_A_RUN["targets"]}, words=True)
    return table(gather.directories(parsed.words), parsed.get("targets"))


if __name__ == "__main__":
    sys.exit(entry.enter(main, __doc__))
