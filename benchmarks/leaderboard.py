"""Rows of the leaderboard: methods on fixed settings, each with a learning rate of its
own.

    python -m benchmarks.leaderboard --setting=digits [--algo=fedavg,ditto] [--root=DIR]

A method is trained with every rate of RATES on seed 0; the accuracy on validation
examples, a fifth of each client's training examples, chooses. The chosen rate is run
with the other seeds; if one diverges, the next best rate is taken. Rows of finished
methods are kept and new ones added to `experiments/results/leaderboard.json`, the rates
to the presets' `tuned.json`. A row whose method has changed since has `stale`, what
changed. `python docs/result_pages.py` writes the page. Runs are resumed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from absl import flags

from benchmarks import report
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.experiment import presets, results, sweep

FLAGS = flags.FLAGS
SETTINGS = {
    "digits": "digits",
    "mnist": "leaderboard_mnist",
    "cifar10": "leaderboard_cifar10",
    "fashion_mnist": "leaderboard_fashion_mnist",
}  # -> preset
RATES = (0.3, 0.1, 0.03, 0.01, 0.003)
SEEDS = (0, 1, 2)
ROOT = Path(__file__).parent.parent
BOARD = ROOT / "experiments" / "results" / "leaderboard.json"
# methods without a row -> the reason that the page gives
ABSENT = {
    "feddva": "models the images, and is scored by their ELBO",
    "hetlora": "needs a frozen base; these settings train all weights",
    "fedsa_lora": "needs a frozen base; these settings train all weights",
}
PUBLIC = {  # setting -> public examples of the methods that need them
    "digits": "digits:200",
    "mnist": "fashion_mnist:1000",
    "cifar10": "cifar100:1000",
    "fashion_mnist": "mnist:1000",
}
MORE = {  # a network it can train; a first split or warm-up within the run
    "cfl": ["--hparam=first=5"],
    "mocha": ["--model=linear"],
    "fedl2g": ["--hparam=warmup=1"],
}
# methods whose learning rates are hyperparameters of their own: `lr` changes nothing
OWN_RATES = ("mocha", "pfedhn")
NEEDS_PUBLIC = ("feddf", "fedmd", "mnfl_het", "pfeddf", "sim_pfd", "topk_pfd")
COLUMNS = {  # column -> point, score, statistic over clients
    "before": ("pre", "acc", "macro"),
    "after": ("post", "acc", "macro"),
    "before, worst tenth": ("pre", "acc", "worst10"),
    "after, worst tenth": ("post", "acc", "worst10"),
}


def chosen(table: pd.DataFrame) -> float:
    """Returns the learning rate with the best validation accuracy on the first seed,
    among those at which no seed diverged.

    Raises:
      InputError: there is none.
    """
    stable = table.groupby("lr")["status"].transform(lambda x: (x != "diverged").all())
    own = (table["point"] == "val") & (table["score"] == "acc")
    own &= (table["seed"] == SEEDS[0]) & table["macro"].notna()
    scores = table[stable & own]
    if scores.empty:
        raise InputError("Some seed diverges at every learning rate.")
    return float(scores.loc[scores["macro"].idxmax(), "lr"])


def row(table: pd.DataFrame, lr: float) -> dict[str, Any]:
    """Returns a row: accuracies in % with the deviation over the seeds that are
    complete, MB, seconds."""
    found = table[(table["lr"] == lr) & (table["status"] == "complete")]
    result: dict[str, Any] = {"lr": lr, "seeds": int(found["seed"].nunique())}
    for column, (point, score, statistic) in COLUMNS.items():
        rows = found[(found["point"] == point) & (found["score"] == score)]
        values = 100 * rows[statistic]
        result[column] = [round(values.mean(), 2), round(values.std(), 2)]
    spent = found.groupby("run")[["megabytes", "seconds"]].max().mean()
    return result | {"MB": round(spent.iloc[0], 2), "seconds": round(spent.iloc[1], 1)}


def add(setting: str, algo: str, root: Path) -> dict[str, Any]:
    """Runs what is missing of a method and returns its row.

    Raises:
      InputError: the method has no accuracy, cannot run in the setting, or diverges at
        every rate.
    """
    if algo in ABSENT:
        raise InputError(ABSENT[algo])
    folder = root / setting / algo
    given = [f"--preset={SETTINGS[setting]}", f"--algo={algo}"]
    given += ["--val_fraction=0.2", "--eval_every=1000", "--width=1", "--devices=1"]
    given += [f"--public={PUBLIC[setting]}"] if algo in NEEDS_PUBLIC else []
    given += MORE.get(algo, [])
    tuned = algo not in OWN_RATES
    first = [f"--seed={SEEDS[0]}"]
    first += [f"--lr={','.join(map(str, RATES))}"] * tuned
    sweep.sweep([*given, *first, f"--root={folder}"])
    others = ",".join(map(str, SEEDS[1:]))
    while True:
        folders = [folder, *folder.glob("others-lr=*")]
        table = results.last(results.frame(results.find(folders)))
        lr = chosen(table)
        found = row(table, lr)
        if found["seeds"] == len(SEEDS):
            return found
        own = folder / f"others-lr={lr}"
        rest = [f"--seed={others}", *[f"--lr={lr}"] * tuned]
        sweep.sweep([*given, *rest, f"--root={own}"])


def keep(setting: str, algo: str, found: dict[str, Any]) -> None:
    """Writes a row to the leaderboard, and its learning rate to the tuned values."""
    for path, values in (
        (BOARD, {setting: {algo: found}}),
        (presets.TUNED, {SETTINGS[setting]: {algo: found.get("lr")}}),
    ):
        known = json.loads(path.read_text()) if path.exists() else {}
        for name, own in values.items():
            rows = known.get(name, {}) | {n: x for n, x in own.items() if x is not None}
            known[name] = dict(sorted(rows.items()))
        path.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


def main(argv: list[str]) -> None:
    """Adds the rows that the flags ask for; a method that cannot run has a reason."""
    del argv
    for algo in FLAGS.algo or ALGORITHMS:
        choose("method", algo, ALGORITHMS)
        try:
            found = add(FLAGS.setting, algo, Path(FLAGS.root))
        except InputError as error:
            found = {"reason": str(error).splitlines()[0]}
            print(f"{algo}: {error}", file=sys.stderr)
        keep(FLAGS.setting, algo, found)


if __name__ == "__main__":
    flags.DEFINE_enum("setting", "digits", list(SETTINGS), "data and clients")
    flags.DEFINE_list("algo", [], "methods; all unless given")
    flags.DEFINE_string("root", "runs/leaderboard", "directory of the runs")
    report.run(main)
