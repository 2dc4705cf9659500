"""Rows of the leaderboard: every method with tuned hyperparameters in fixed settings.

    python -m benchmarks.leaderboard --setting=skewed [--algo=fedavg,ditto] [--again]

A setting is a preset of SETTINGS; a new one takes an entry there. A method has eight
trials on seed 0, judged by the accuracy on validation examples, a fifth of each
client's training examples: five learning rates with its other hyperparameters at their
defaults, then three values of OWN at the best rate, or three rates near it. The best is
run with all SEEDS; if a seed diverges, the next best is taken. A run is evaluated every
5 rounds, ends when the validation accuracy has not improved for 20, after at most 100,
and is scored where it was highest. Rounds before all stages of a method have begun
(`Method.stages`) do not count.

Finished rows are kept in `experiments/results/leaderboard.json` at once, and not
measured again without --again; chosen values go to the presets' `tuned.json`.
`python docs/result_pages.py` writes the page.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np
import pandas as pd
from absl import flags

from benchmarks import report
from fedjax_pfl import local_training, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine.batch import lowered
from fedjax_pfl.engine.flops import flops_of_step
from fedjax_pfl.errors import DivergenceError, InputError, choose
from fedjax_pfl.experiment import config as settings, presets, significance
from fedjax_pfl.experiment.build import build, room
from fedjax_pfl.experiment.types import Experiment

FLAGS = flags.FLAGS
SETTINGS = {
    "skewed": "leaderboard_skewed",
    "rotated": "leaderboard_rotated",
    "few": "leaderboard_few",
    "mild": "leaderboard_mild",
}  # -> preset
SEEDS = (0, 1, 2, 3, 4)
RATES = (1.0, 0.3, 0.1, 0.03, 0.01)
NEAR = (0.5, 0.7, 1.5)  # further rates of methods without an entry in OWN
BASELINES = ("local", "fedavg_ft")
ROOT = Path(__file__).parent.parent
BOARD = ROOT / "experiments" / "results" / "leaderboard.json"
FINDINGS = BOARD.with_name("leaderboard.toml")
# methods without a row -> the reason that the page gives
ABSENT = {
    "feddva": "models the images, and is scored by their ELBO",
    "hetlora": "needs a frozen base; these settings train all weights",
    "fedsa_lora": "needs a frozen base; these settings train all weights",
    "flora": "needs a frozen base; these settings train all weights",
}
# values that change no score, which all runs have
PLAIN: dict[str, dict[str, Any]] = {"privacy_pfedc": {"backend": "plain"}}
# method -> the hyperparameter tuned in place of `lr`, which it does not read
RATE = {
    "pfedhn": ("inner_lr", (0.05, 0.02, 0.01, 0.005, 0.002)),
    "mocha": ("lam", (10.0, 1.0, 0.1, 0.01, 0.001)),
}


def values(name: str, *others: Any) -> list[dict[str, Any]]:
    """Returns trials of one hyperparameter."""
    return [{name: x} for x in others]


_TASKS = [
    {"weighting": "mgda_ub"},
    {"head": "group_binary"},
    {"head_weighting": "data"},
]
OWN = {
    "fedavg_ft": values("fine_tune_epochs", 1, 5, 10),
    "fedprox": values("mu", 0.01, 0.1, 1.0),
    "scaffold": values("server_lr", 0.3, 0.5, 2.0),
    "per_fedavg": values("alpha", 0.01, 0.03, 0.1),
    "pfedme": values("inner_lr", 0.003, 0.03, 0.1),
    "fedrep": values("head_epochs", 2, 5, 10),
    "fedbabu": values("fine_tune_epochs", 1, 2, 10),
    "pfedma": values("fine_tune_epochs", 1, 5, 10),
    "fedrod": values("gamma", 0.1, 0.5, 2.0),
    "ditto": values("lam", 0.1, 0.3, 3.0),
    "apfl": values("alpha", 0.25, 0.75, 0.9),
    "fedamp": values("alpha", 10.0, 100.0, 10000.0),
    "fedphp": values("mu0", 0.5, 0.7, 0.99),
    "fedala": values("percent", 20.0, 50.0, 100.0),
    "fedfomo": values("received", 3, 10, 19),
    "pfedhn": values("hyper_lr", 0.001, 0.003, 0.03),
    "mocha": values("frac", 0.25, 1.0, 2.0),
    "fedproto": values("lam", 0.1, 0.3, 3.0),
    "fd": values("gamma", 0.1, 0.3, 3.0),
    "fml": values("alpha", 0.1, 0.3, 0.9),
    "fedapen": values("lam", 0.1, 0.3, 0.9),
    "mnfl": values("coef_lr", 0.001, 0.1, 1.0),
    "mnfl_het": values("coef_lr", 0.001, 0.1, 1.0),
    "fedmd": values("temperature", 2.0, 5.0, 10.0),
    "sim_pfd": values("temperature", 2.0, 5.0, 10.0),
    "topk_pfd": values("neighbours", 2, 10, 15),
    "feddf": values("student_lr", 0.0001, 0.0003, 0.01),
    "pfeddf": values("student_lr", 0.0001, 0.0003, 0.01),
    "fedem": values("components", 2, 4, 5),
    "fedcp": values("lam", 0.1, 0.5, 1.0),
    "pfedc": _TASKS,
    "privacy_pfedc": _TASKS,
    "pfedafm": values("lr_alpha", 0.1, 0.3, 3.0),
    "moon": values("mu", 0.1, 5.0, 10.0),
    "feddyn": values("alpha", 0.001, 0.03, 0.1),
    "fedlc": values("tau", 0.1, 0.3, 0.5),
    "fedntd": values("beta", 0.1, 0.3, 3.0),
    "feddbe": values("kappa", 0.1, 1.0, 10.0),
    "knn_per": values("lam", 0.25, 0.75, 0.9),
    "fedadmm": values("rho", 0.001, 0.1, 1.0),
    "fedgh": values("server_lr", 0.001, 0.03, 0.1),
    "fedpac": values("lam", 0.1, 0.3, 3.0),
    "fedas": values("align_lr", 0.001, 0.03, 0.1),
    "fedtgp": values("lam", 0.1, 1.0, 30.0),
    "pfedsim": values("warmup", 0.2, 0.3, 0.4),
    "fedcac": values("tau", 0.1, 0.3, 0.9),
    "gpfl": values("lam", 0.001, 0.1, 1.0),
    "fedgen": values("alpha", 0.1, 0.3, 10.0),
    "fedpcl": values("tau", 0.02, 0.2, 0.5),
    "apple": values("coef_lr", 0.0001, 0.01, 0.1),
    "ccvr": values("server_lr", 0.01, 0.03, 0.3),
    "cfl": values("eps1", 0.2, 0.8, 1.6),
    "fedl2g": values("server_lr", 0.01, 0.03, 0.3),
    "fedsr": values("l2r", 0.001, 0.1, 1.0),
    "pfl_da": values("lam", 0.1, 0.3, 3.0),
    "fedcross": values("alpha", 0.5, 0.8, 0.95),
    "pfedlora": values("mu", 0.1, 0.3, 0.9),
    "pfedfda": values("ridge", 0.01, 0.1, 10.0),
    "floco": values("rho", 0.01, 0.3, 1.0),
    "fedap": values("lam", 0.1, 0.3, 0.9),
    "pfedla": values("hyper_lr", 0.5, 5.0, 500.0),
    "pefll": values("hyper_lr", 0.00002, 0.001, 0.005),
    "fedssa": values("mu", 0.1, 0.3, 0.9),
    "flute": values("server_lr", 0.01, 0.1, 0.3),
}
_BYTES = ("down", "up", "ints", "public_data")  # traffic of 4 bytes


class Values(NamedTuple):
    """Tuned values of a method."""

    lr: float | None  # None: not read
    hparams: dict[str, Any]


def rates(algo: str) -> Iterator[Values]:
    """Yields the values of the first trials."""
    name, grid = RATE.get(algo, ("lr", RATES))
    for x in grid:
        yield Values(x, {}) if name == "lr" else Values(None, {name: x})


def search(
    algo: str, score: Callable[[Values], float]
) -> list[tuple[float, int, Values]]:
    """Returns scores and values of all trials, the best first."""
    found: list[tuple[float, int, Values]] = []

    def trial(one: Values) -> None:
        found.append((score(one), -len(found), one))

    for one in rates(algo):
        trial(one)
    best = max(found, key=lambda x: x[:2])[2]
    for own in OWN.get(algo, []):
        trial(best._replace(hparams=best.hparams | own))
    for factor in () if algo in OWN else NEAR:
        trial(best._replace(lr=round(factor * (best.lr or 0), 4)))
    return sorted(found, key=lambda x: x[:2], reverse=True)


class Runs:
    """Runs of a method in a setting, compiled once for all numeric values and seeds."""

    def __init__(self, setting: str, algo: str):
        self._given = {"preset": SETTINGS[setting], "algo": algo, "width": "1"}
        self._given["devices"] = "1"
        self._plain = PLAIN.get(algo, {})
        usual = Values(None, {})
        self._room = room([self._config(usual, seed) for seed in SEEDS])
        self._built: dict[str, tuple[Experiment, str]] = {}
        self._compiled: dict[str, simulate.Compiled] = {}

    def _config(self, chosen: Values, seed: int) -> settings.Config:
        hparams = self._plain | chosen.hparams
        given = self._given | {"seed": str(seed), "hparams": hparams}
        return settings.resolve(given | ({"lr": chosen.lr} if chosen.lr else {}))

    def experiment(self, chosen: Values, seed: int) -> tuple[Experiment, str]:
        """Returns an experiment, with any learning rate, and a digest of what it
        compiles."""
        key = f"{seed} {chosen.hparams}"
        if key not in self._built:
            e = build(self._config(chosen, seed), self._room)
            placed = e.program.context(e.key, e.federation).federation
            self._built[key] = e, lowered(e.program, placed)
        return self._built[key]

    def run(self, chosen: Values, seed: int) -> pd.DataFrame | None:
        """Returns the evaluations of a run by round; None if it diverged."""
        e, digest = self.experiment(chosen, seed)
        c, sizes = e.config, np.asarray(e.federation.test.size)
        lr = {} if chosen.lr is None else {"lr": chosen.lr}
        program = e.program._replace(traced=e.program.traced | lr)
        given, often = (program, e.key, e.federation), {"eval_every": c.eval_every}
        often["state_every"] = c.rounds
        if digest not in self._compiled:
            self._compiled[digest] = simulate.compiled(*given, **often)
        rows: list[dict[str, Any]] = []
        made = ALGORITHMS[c.algo](e.task, **c.hparams)
        megabytes, first = 0.0, max([1, *(stage.first for stage in made.stages)])
        try:
            for result in simulate.rounds(
                *given,
                functions=self._compiled[digest],
                rounds=c.rounds,
                until=lambda: _ends(rows, c.patience * c.eval_every),
                **often,
            ):
                row = simulate.record(result, sizes)
                counts = [row.get(f"traffic/{name}", 0) for name in _BYTES]
                megabytes += (4 * sum(counts) + row.get("traffic/encrypted", 0)) / 1e6
                if result.pre and result.metrics and result.round >= first:
                    rows.append(_evaluation(row) | {"MB": megabytes})
        except DivergenceError:
            return None
        return pd.DataFrame(rows).set_index("round")


def _ends(rows: list[dict[str, Any]], patience: int) -> bool:
    """Returns whether the validation accuracy has not improved for too long."""
    if not rows:
        return False
    best = max(rows, key=lambda row: row["val"])
    return rows[-1]["round"] - best["round"] >= patience


def _evaluation(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the accuracies of an evaluated round in %, before and after local
    training."""
    return {
        "round": row["round"],
        "val": 100 * row["pre/val/acc"],
        "before": 100 * row["pre/acc"],
        "after": 100 * row["post/acc"],
        "before10": 100 * row["pre/acc/worst10"],
        "after10": 100 * row["post/acc/worst10"],
    }


def chosen(runs: Runs, algo: str) -> tuple[Values, list[pd.DataFrame]]:
    """Returns the best values at which no seed diverges, and the runs of all seeds.

    Raises:
      InputError: some seed diverges at all values.
    """
    kept: dict[str, pd.DataFrame | None] = {}

    def score(one: Values) -> float:
        kept[str(one)] = found = runs.run(one, SEEDS[0])
        return -1.0 if found is None else found["val"].max()

    for value, _, one in search(algo, score):
        if value < 0:
            break
        found = [kept[str(one)]]
        for seed in SEEDS[1:]:
            found.append(runs.run(one, seed))
            if found[-1] is None:
                break
        if all(x is not None for x in found):
            return one, found  # type: ignore[return-value]  # none is None
    raise InputError("Some seed diverges with all values.")


def row(setting: str, algo: str, level: list[float] | None) -> dict[str, Any]:
    """Measures a row of the board.

    Args:
      level: accuracy of fine-tuned FedAvg of each seed, to be reached; None: its own.

    Returns:
      the tuned values; by seed the rounds, the accuracies in % and the MB of all
      clients, and the MB and the thousand local steps of a client to reach the level
      (None if never); seconds. A step is as much arithmetic as one of FedAvg's.
    """
    begin = time.perf_counter()
    runs = Runs(setting, algo)
    values, found = chosen(runs, algo)
    best = [table.loc[table["val"].idxmax()] for table in found]
    result: dict[str, Any] = values._asdict() | {"rounds": [int(x.name) for x in best]}
    for name in best[0].index.drop("val"):
        result[name] = [round(float(x[name]), 2) for x in best]
    point = point_of(result)
    level = level or result[point]
    first = [_first(table, point, x) for table, x in zip(found, level, strict=True)]
    steps = _steps(runs, values)
    pairs = list(zip(found, first, strict=True))
    result["MB to reach"] = [
        None if t is None else round(float(table.loc[t, "MB"]), 2) for table, t in pairs
    ]
    result["steps to reach"] = [
        None if t is None else round(t * steps / 1000, 3) for t in first
    ]
    return result | {"seconds": round(time.perf_counter() - begin, 1)}


def point_of(row: dict[str, Any]) -> str:
    """Returns the point whose mean accuracy is higher: before or after local
    training."""
    return max("before", "after", key=lambda x: statistics.fmean(row[x]))


def _first(table: pd.DataFrame, point: str, level: float) -> int | None:
    """Returns the first evaluated round with an accuracy."""
    reached = table.index[table[point] >= level - 0.005]
    return int(reached[0]) if len(reached) else None


def _steps(runs: Runs, values: Values) -> float:
    """Returns local steps of a client and round, in FedAvg's arithmetic."""
    e, _ = runs.experiment(values, SEEDS[0])
    given = e.task, e.federation
    work = flops_of_step(ALGORITHMS[e.config.algo], *given, e.config.hparams)
    usual = flops_of_step(ALGORITHMS["fedavg"], *given)
    steps, _ = local_training.planned(e.task, e.task.sizes)
    return float(steps.mean()) * work / usual


def keep(setting: str, algo: str, found: dict[str, Any]) -> None:
    """Writes a row to the leaderboard, and its values to the tuned ones."""
    lr = {} if found.get("lr") is None else {"lr": found["lr"]}
    own = {} if "reason" in found else lr | found["hparams"]
    # settings may be measured by several processes
    with filelock.FileLock(Path(tempfile.gettempdir()) / "leaderboard.lock"):
        for path, name, entry in (
            (BOARD, setting, found),
            (presets.TUNED, SETTINGS[setting], own),
        ):
            known = json.loads(path.read_text())
            rows = known.get(name, {}) | ({algo: entry} if entry else {})
            known[name] = dict(sorted(rows.items()))
            path.write_text(_lines(known), encoding="utf-8")


def _lines(tables: dict[str, dict[str, Any]]) -> str:
    """Returns tables as JSON with a line per row."""
    parts = []
    for name, rows in tables.items():
        lines = [f'  "{x}": {json.dumps(value)}' for x, value in rows.items()]
        parts.append(f' "{name}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def board() -> dict[str, dict[str, Any]]:
    """Returns the rows by setting and method."""
    found: dict[str, dict[str, Any]] = json.loads(BOARD.read_text())
    return found


def complete(board: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the settings with an entry for every method, in the order of
    SETTINGS."""
    return {x: board[x] for x in SETTINGS if board.get(x, {}).keys() >= {*ALGORITHMS}}


def score(row: dict[str, Any]) -> float:
    """Returns the mean accuracy over seeds at its point."""
    return statistics.fmean(row[point_of(row)])


def scores(complete: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Returns accuracies: a row per setting and seed, a column per method that all
    settings have a row of."""
    parts = {
        setting: pd.DataFrame(
            {name: x[point_of(x)] for name, x in rows.items() if "reason" not in x},
            index=pd.Index(SEEDS, name="seed"),
        )
        for setting, rows in complete.items()
    }
    return pd.concat(parts, names=["setting"], join="inner")


def ranks(complete: dict[str, dict[str, Any]]) -> significance.Ranks:
    """Returns Friedman's test of the methods over settings and seeds."""
    table = scores(complete)
    blocks = [f"{setting} {seed}" for setting, seed in table.index]
    return significance.friedman(table.set_axis(pd.Index(blocks, name="setting")))


def ahead(rows: dict[str, Any]) -> set[str]:
    """Returns the methods of a setting whose mean paired differences to both baselines
    are above two standard errors."""
    own = {name: np.array(x[point_of(x)]) for name, x in rows.items() if "lr" in x}

    def above(name: str, baseline: str) -> bool:
        gain = own[name] - own[baseline]
        error = gain.std(ddof=1) / np.sqrt(len(gain))
        return bool(gain.mean() > 2 * error)

    return {name for name in own if all(above(name, x) for x in BASELINES)}


def main(argv: list[str]) -> None:
    """Measures the rows that are missing; a method that cannot run has a reason."""
    del argv
    setting = FLAGS.setting
    for algo in [*BASELINES, *(FLAGS.algo or ALGORITHMS)]:
        choose("method", algo, ALGORITHMS)
        known = board().get(setting, {})
        asked = FLAGS.again and algo in FLAGS.algo
        if algo in known and not asked:
            continue
        usual = known.get("fedavg_ft")
        try:
            if algo in ABSENT:
                raise InputError(ABSENT[algo])
            level = usual[point_of(usual)] if usual else None
            found = row(setting, algo, level)
            print(algo, found[point_of(found)], found["seconds"], flush=True)
        except InputError as error:
            found = {"reason": str(error).splitlines()[0]}
            print(f"{algo}: {error}", file=sys.stderr)
        keep(setting, algo, found)


if __name__ == "__main__":
    flags.DEFINE_enum("setting", "skewed", list(SETTINGS), "data and clients")
    flags.DEFINE_list("algo", [], "methods; all unless given")
    flags.DEFINE_bool("again", False, "measure given methods again")
    report.run(main)
