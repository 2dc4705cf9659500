"""Prints finished runs as rows of a Markdown table: `python -m experiments.tables [--targets=0.8,0.9] runs/a runs/b`.

Scores are macro means over clients in %, of the last round: `post`, right after local training, and `pre`, before it.
With --targets, two columns for each: the rounds in which the run's headline score (see `experiments.targets`) first
reached it, post / pre, and the megabytes that had travelled by then. A run that is not complete says
how it stands in place of its rounds. Where runs deviate from their
preset, or had a part of a data set only, the last column says in what.
"""

import sys
from pathlib import Path
from typing import Any

from experiments import published, runs, targets
from experiments.files import read_json, read_rows
from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.checks import BadInput

Row = dict[str, Any]
COLUMNS = {
    "acc post": ("post", "acc"),
    "pre": ("pre", "acc"),
    "acc_present post": ("post", "acc_present"),
    "pre ": ("pre", "acc_present"),
    "task_acc post": ("post", "task_acc"),
    "always no": ("post", "task_acc_trivial"),
    "task_bal post": ("post", "task_bal"),
    "recall post": ("post", "recall_macro"),
}


def row(workdir: Path, levels: tuple[float, ...] = ()) -> list[str]:
    """One run: method, model, share of the data, scores, seconds of training and a round, targets, deviations."""
    summary = read_json(workdir / "summary.json")
    config = runs.read_config(workdir)
    defaults = simulate.hyperparameters(ALGORITHMS[config["algo"]])
    hparams = "".join(f", {name}={published.shown(x)}" for name, x in config["hparams"].items() if x != defaults[name])
    cells = [config["algo"] + hparams, config["model"], f"{config['data_fraction']:g}", _rounds(summary)]
    for point, name in COLUMNS.values():
        score = summary["scores"][point].get(name)
        cells.append(
            f"{100 * score['macro']:.2f}" + (f" ± {100 * score['std']:.2f}" if name == "acc" else "") if score else ""
        )
    seconds = summary["seconds"]["train"]
    cells += [f"{seconds:.0f}", f"{seconds / max(summary['rounds'], 1):.2f}"]
    metrics, score = read_rows(workdir / "metrics.jsonl") if levels else [], targets.headline(config)
    for level in levels:
        post, pre = (targets.reached(metrics, point, score, level, 0) for point in ("post", "pre"))
        rounds, sent = zip(*map(_reached, (post, pre)), strict=True)
        cells += [" / ".join(rounds), " / ".join(sent)]
    return [*cells, published.deviations(config | {"rounds": summary["rounds"]}, summary.get("examples"))]


def _rounds(summary: Row) -> str:
    """The rounds of a complete run; of any other how it stands, as `diverged after 12 rounds`."""
    done, status = summary["rounds"], summary["status"]
    if status == "complete":
        return str(done)
    return f"{'running or killed' if status == 'running' else status} after {done} rounds"


def _reached(found: dict | None) -> tuple[str, str]:
    return (str(found["rounds"]), f"{found['bytes'] / 1e6:.1f}") if found else ("never", "-")


def table(workdirs: list[Path], levels: tuple[float, ...] = ()) -> str:
    """The Markdown table of some run directories."""
    head = ["method", "model", "data", "rounds", *(name.strip() for name in COLUMNS), "train s", "s a round"]
    head += [name for level in levels for name in (f"rounds to {level:g}", f"MB to {level:g}")]
    body = [row(path, levels) for path in workdirs]
    if any(cells[-1] for cells in body):
        head.append("deviations")
    rows = [head, ["---"] * len(head), *(cells[: len(head)] for cells in body)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def main(argv: list[str]) -> str:
    """The table of a command line."""
    texts = [word.removeprefix("--targets=") for word in argv if word.startswith("--targets=")]
    return table([Path(word) for word in argv if not word.startswith("--")], targets.levels(texts[-1]) if texts else ())


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except BadInput as error:
        sys.exit(str(error))
