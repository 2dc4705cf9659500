"""Every pair of two options' values in some run: it runs, or is refused in one line.
Of what is accepted, layout and resumption change nothing.

`pytest -m pairs tests/test_pairs.py` runs them, in about half an hour on 2 cores.
"""

import random

import numpy as np
import pandas as pd
import pytest
import toy
from allpairspy import AllPairs

from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import config, results, run_directory
from fedjax_pfl.experiment.build import build
from fedjax_pfl.experiment.train import run

# at most four values each; None leaves the default
OPTIONS = {
    "algo": ["ditto", "scaffold", "pfedc", "fedfomo"],
    "partition": ["dirichlet_class", "pathological", "iid"],
    "model": ["mlp", "linear", "cnn"],
    "optimizer": [None, "adam"],
    "loss": [None, "focal:2"],
    "participation": [None, "0.5", "0.3:0.8"],
    "unseen": [None, 0.3],
    "server_optimizer": [None, "fedadam", "sgd"],
    "dp": [None, "client", "adaptive", "example"],
    "aggregate": [None, "krum", "trimmed_mean"],
    "malicious": [None, "0.3:label_flip", "0.3:sign_flip:2"],
    "compress": [None, "top_k:0.3", "qsgd:2", "low_rank:1"],
    "asynchronous": [None, "fedasync:0.6", "fedbuff:2:1"],
    "adapt": [None, "lora:2"],
    "client_memory": [None, "host"],
    "devices": ["1", "2"],
    "width": ["1", "3"],
    "seed": [0, 1],
    "resume": [False, True],
}
# methods of every kind take the place of the first four, one array of pairs each
KINDS = [
    ["ditto", "scaffold", "pfedc", "fedfomo"],
    ["fedavg", "fedper", "feddf", "cfl"],
    ["fedprox", "fedproto", "pfedsim", "ccvr"],
    ["apfl", "pfedme", "fedpac", "fedamp"],
    ["fedrep", "fednova", "fedcac", "fedmtl"],
    ["fedbabu", "feddyn", "floco", "pfedhn"],
    ["fedrod", "moon", "pefll", "apple"],
    ["fedcp", "fedala", "fedgen", "fedcross"],
    ["feddbe", "fedas", "gpfl", "fedphp"],
    ["knn_per", "fedadmm", "fedtgp", "pfl_da"],
    ["fedavg_ft", "lg_fedavg", "fedem", "fd"],
]
SMALL = {
    "dataset": "digits", "data_fraction": 0.15, "clients": 6, "rounds": 2, "epochs": 1,
    "eval_every": 1, "lr": 0.02, "batch_size": 16,
}  # fmt: skip
# an option that needs another one
NEEDED = {
    "server_optimizer": {"server_lr": 0.1},
    "dp": {"dp_noise": 0.5, "bn_stats": "local"},
    "algo": {},
}


def cases() -> list:
    """Returns settings in which every pair of values occurs, for each row of KINDS."""
    found = []
    for i, methods in enumerate(KINDS):
        values = list((OPTIONS | {"algo": methods}).values())
        random.Random(i).shuffle(values[-1])
        found += [dict(zip(OPTIONS, row, strict=True)) for row in AllPairs(values)]
    return found


def settings(case: dict) -> dict:
    given = {name: x for name, x in case.items() if x is not None and name != "resume"}
    for name in list(given):
        given |= NEEDED.get(name, {})
    if case["algo"] == "feddf":
        given |= {"public": "digits:50", "hparams": {"public_size": 20}}
    if case["algo"] in ("floco", "pfedsim", "cfl"):
        given |= {"hparams": {"cfl": {"first": 1}}.get(case["algo"], {"warmup": 0.5})}
    return SMALL | given


def rows(given: dict, path, resume: bool) -> list:
    """Runs the settings, and returns the rows of metrics.jsonl."""
    if resume:
        assert run(given | {"rounds": 1}, str(path)) == 0
        assert run({"rounds": 2}, str(path), resume=True) == 0
    else:
        assert run(given, str(path)) == 0
    return list(run_directory.RunDirectory(path).rows("metrics.jsonl"))


# given up in this order until a run is accepted
LEAST = (
    *("asynchronous", "adapt", "client_memory", "aggregate", "dp", "server_optimizer"),
    *("compress", "malicious", "loss", "optimizer", "unseen", "model", "participation"),
)


def accepted(case: dict) -> dict:
    """Returns the settings of a case without the options that are refused."""
    left = list(LEAST)
    while True:
        try:
            build(config.resolve(settings(case)))
            return settings(case)
        except InputError:
            case = case | {left.pop(0): None}


@pytest.mark.pairs
@pytest.mark.parametrize(
    "case", cases()[::8], ids=lambda case: "-".join(map(str, case.values()))
)
def test_layout_and_resumption_change_nothing(case, tmp_path):
    given = accepted(case) | {"rounds": 4, "width": "1", "devices": "1"}
    for name, change in (("one", {}), ("other", {"width": "3", "devices": "2"})):
        assert run(given | change, str(tmp_path / name)) == 0
    one, other = (results.load(tmp_path / name) for name in ("one", "other"))
    toy.assert_close(other.state(), one.state(), 2e-4)
    assert run(given | {"rounds": 2}, str(tmp_path / "resumed")) == 0
    try:
        assert run({"rounds": 4}, str(tmp_path / "resumed"), resume=True) == 0
    except InputError as error:  # such as APPLE's penalty, which falls over all rounds
        assert "has a schedule over --rounds=2" in str(error)
        return
    resumed = results.load(tmp_path / "resumed")
    pd.testing.assert_frame_equal(resumed.metrics, one.metrics)
    toy.assert_same(resumed.state(), one.state())


@pytest.mark.pairs
@pytest.mark.parametrize(
    "case", cases(), ids=lambda case: "-".join(map(str, case.values()))
)
def test_a_pair_of_options_runs_or_is_refused(case, tmp_path):
    try:
        found = rows(settings(case), tmp_path / "run", case["resume"])
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 400, error
        return
    assert [row["round"] for row in found] == [0, 1, 2]
    for row in found:
        for name, x in row.items():
            if name in ("pre/acc", "post/acc", "pre/acc_present"):
                assert x is None or 0 <= x <= 1, (name, x)
        assert row.get("loss") is None or np.isfinite(row["loss"])
