"""Tests of the table of PFLlib's methods: its names exist on both sides."""

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import agreement, pfllib
from fedjax_pfl import hyperparameters
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment.config import resolve


@pytest.fixture
def checkout():
    path = os.environ.get("PFLLIB", "")
    if not Path(path, "system/main.py").is_file():
        pytest.skip("PFLLIB names no checkout of PFLlib")
    return Path(path) / "system"


@pytest.mark.parametrize("name", pfllib.METHODS)
def test_the_hyperparameters_of_the_table_are_those_of_the_method(name):
    method, known = pfllib.METHODS[name], hyperparameters.of(ALGORITHMS[name])
    named = {x for x in method.arguments.values() if isinstance(x, str)}
    assert named | set(method.hparams) <= set(known)
    hyperparameters.check(ALGORITHMS[name], method.hparams)


@pytest.mark.parametrize("name", pfllib.METHODS)
def test_the_arguments_of_the_table_are_pfllibs(name, checkout):
    method = pfllib.METHODS[name]
    known = set(re.findall(r'"--(\w+)"', (checkout / "main.py").read_text()))
    assert set(method.arguments) <= known
    server = checkout / f"flcore/servers/{method.module}.py"
    assert f"class {method.server}(Server)" in server.read_text()


def test_arguments_are_values_functions_and_hyperparameters():
    config = resolve({"algo": "fml", "lr": 0.1, "hparams": {}})
    made = pfllib.arguments(config.replace(hparams={"alpha": 0.5}))
    assert made["local_learning_rate"] == pytest.approx(0.55)
    config = config.replace(algo="fedrep", hparams={"head_epochs": 3})
    assert pfllib.arguments(config) == {"plocal_epochs": 3}
    assert "--hparam=policy=gumbel" in pfllib.flags("fedcp", "mlp")


def run(algo, rounds, **columns):
    """Returns a run with a column of scores per round."""
    import pandas as pd

    config = SimpleNamespace(algo=algo, rounds=rounds, eval_every=1)
    metrics = pd.DataFrame({"round": range(rounds + 1), **columns})
    experiment = SimpleNamespace(config=config, networks=["mlp"] * 2)
    return SimpleNamespace(experiment=experiment, metrics=metrics)


def test_scores_are_paired_by_round():
    ours = run("fedcross", 2, **{"post/acc/micro": [0.1, 0.2, None]})
    assert agreement.pairs(ours, [0.0, 0.5, 0.6])[1:] == [
        ("1", 0.1, 0.5),
        ("2", 0.2, 0.6),
    ]
    ours = run("fedphp", 1, **{"post/global_acc/micro": [0.1, None]})
    assert agreement.pairs(ours, [0.5, 0.6]) == [("0", 0.1, 0.5), ("1", None, 0.6)]
    scores = {"pre/untuned_acc/micro": [0.1, 0.2], "pre/acc/micro": [0.3, 0.4]}
    tuned = agreement.pairs(run("fedbabu", 1, **scores), [0.0, 0.5, 0.6])
    assert [x[1] for x in tuned] == [0.1, 0.2, 0.4]
    assert tuned[-1][0] == "1, fine-tuned"


def test_the_summary_has_the_means_and_deviations_over_seeds():
    ditto = {
        "0": {"here": [0.5, 0.7], "pfllib": [0.4, 0.6]},
        "3": {"here": [0.5], "pfllib": [0.46]},
    }
    corrected = {"ditto": {"0": {"here": [0.6], "pfllib": [0.61]}}}
    (row,) = agreement.summary({"ditto": ditto}, corrected)[1:]
    assert row[:4] == ("ditto", "pre/acc/micro", "48.00 ± 2.83", "55.00 ± 7.07")
    assert row[4:6] == ("7.00 ± 4.24", "-1.00")


def test_the_corrections_are_a_whole_patch():
    command = ["git", "apply", "--numstat", "benchmarks/pfllib_corrected.patch"]
    changed = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, check=True
    )
    assert len(changed.stdout.splitlines()) == 14


def test_a_seed_that_is_kept_does_not_run_again(tmp_path, monkeypatch, capsys):
    ran = []

    def compare(name, setting, *_):
        ran.append((name, setting[-1]))
        if name == "fd":
            raise InputError("no.")
        return {"here": [0.5], "pfllib": [0.5]}

    monkeypatch.setattr(agreement, "compare", compare)
    given = (["--lr=1"], "", tmp_path / "found.json")
    assert set(agreement.several(["local"], ["0"], *given)) == {"local"}
    found = agreement.several(["local", "fd"], ["0", "3"], *given)
    assert set(found) == {"local"} and set(found["local"]) == {"0", "3"}
    assert ran[1:] == [("fd", "--seed=0"), ("local", "--seed=3"), ("fd", "--seed=3")]
    assert capsys.readouterr().err == "fd: no.\nfd: no.\n"
    with pytest.raises(InputError, match="has another setting"):
        agreement.several(["local"], ["0"], ["--lr=2"], *given[1:])


def test_the_page_has_the_table():
    root = Path(__file__).parents[1]
    paths = (root / x for x in (agreement.RESULTS, agreement.CORRECTED))
    stored = [json.loads(path.read_text())["methods"] for path in paths]
    page = (root / "docs/comparison.md").read_text()
    for row in agreement.summary(*stored):
        assert f"| {' | '.join(row)} |" in page
