"""Prints finished runs as rows of a Markdown table: `python -m experiments.tables runs/a runs/b ...`.

Scores are macro means over clients in %, of the last round: `post`, right after local training, and `pre`, before it.
"""

import json
import sys
from pathlib import Path

from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS

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


def row(workdir: Path) -> list[str]:
    """One run: method, model, share of the data, scores, seconds of training and a round."""
    config, summary = (
        json.loads((workdir / f"{name}.json").read_text(encoding="utf-8")) for name in ("config", "summary")
    )
    defaults = simulate.hyperparameters(ALGORITHMS[config["algo"]])
    hparams = "".join(f", {name}={x}" for name, x in config["hparams"].items() if x != defaults[name])
    cells = [config["algo"] + hparams, config["model"], f"{config['data_fraction']:g}", str(summary["rounds"])]
    for point, name in COLUMNS.values():
        score = summary["scores"][point].get(name)
        cells.append(
            f"{100 * score['macro']:.2f}" + (f" ± {100 * score['std']:.2f}" if name == "acc" else "") if score else ""
        )
    seconds = summary["seconds"]["train"]
    return [*cells, f"{seconds:.0f}", f"{seconds / max(summary['rounds'], 1):.2f}"]


def table(workdirs: list[Path]) -> str:
    """The Markdown table of some run directories."""
    head = ["method", "model", "data", "rounds", *(name.strip() for name in COLUMNS), "train s", "s a round"]
    rows = [head, ["---"] * len(head), *(row(path) for path in workdirs)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


if __name__ == "__main__":
    print(table([Path(path) for path in sys.argv[1:]]))
