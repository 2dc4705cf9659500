"""Run directories that no training made."""

import json
from pathlib import Path

import numpy as np

from fedjax_pfl import hyperparameters
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.experiment import results
from fedjax_pfl.experiment.config import Config

CLIENTS = 4
SHARES = {"acc": 0.5, "acc_majority": 0.25, "acc_present": 0.75}


def statistics(point, score, mean):
    """The columns of a score whose clients have mean - 0.1 to mean + 0.1."""
    values = {"": mean, "/micro": mean + 0.01, "/std": 0.05, "/clients": CLIENTS}
    values |= {"/worst10": mean - 0.1, "/best10": mean + 0.1}
    return {f"{point}/{score}{ending}": value for ending, value in values.items()}


def row(index, gain, trained=True):
    """A round: `pre` rises by `gain` a round, `post` is one round ahead."""
    found = {"round": index}
    if trained:
        found |= {"loss": 1 / (1 + index), "participants": CLIENTS}
        found |= {"traffic/down": 1000, "traffic/up": 500, "work/examples": 40}
    for score, start in SHARES.items():
        rising = gain * (score != "acc_majority")
        found |= statistics("pre", score, start + rising * index)
        found |= statistics("val", score, start + rising * index * (3 - index))
        if trained:
            found |= statistics("post", score, start + rising * (index + 1))
    return found


def run(path, algo="fedavg", seed=0, rounds=3, gain=0.1, status="complete", **settings):
    """Writes and loads a run directory of `rounds` rounds."""
    path = Path(path)
    path.mkdir(parents=True)
    hparams = hyperparameters.defaults(find(algo)) | settings.pop("hparams", {})
    config = Config(algo=algo, seed=seed, rounds=rounds, hparams=hparams, **settings)
    summary = {"status": status, "rounds": rounds, "seconds": {"train": 6.0}}
    summary["headline"] = {"score": "acc", "better": "max"}
    rows = [row(t, gain, t < rounds) for t in range(rounds + 1)]
    spread = np.linspace(-0.1, 0.1, CLIENTS)
    scores = [
        {"round": r["round"], "ids": list(range(CLIENTS))}
        | {
            p: {"acc": (r[f"{p}/acc"] + spread).tolist()}
            for p in ("pre", "post")
            if f"{p}/acc" in r
        }
        for r in rows
    ]
    for name, content in (("config", config.flat()), ("summary", summary)):
        (path / f"{name}.json").write_text(json.dumps(content))
    for name, lines in (("metrics", rows), ("scores", scores)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (path / f"{name}.jsonl").write_text(text)
    return results.load(path)
