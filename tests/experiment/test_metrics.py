"""Names, order and formatting of scores."""

import json

import pytest

from fedjax_pfl.engine.results import Score, columns
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import metrics
from fedjax_pfl.experiment.config import read
from fedjax_pfl.experiment.groups import Evaluation


@pytest.mark.parametrize(
    "name, expected",
    [
        ("pre/acc", ("pre", "acc", "macro")),
        ("post/acc/micro", ("post", "acc", "micro")),
        ("post_latest/recall_macro/std", ("post_latest", "recall_macro", "std")),
        ("val/acc@lenet/clients", ("val", "acc@lenet", "clients")),
        ("pre/acc_std", ("pre", "acc_std", "macro")),
    ],
)
def test_columns_are_read(name, expected):
    assert metrics.split(name) == expected
    rows = [Score(0, *expected, 0.5)]
    assert columns(rows) == {name: 0.5}


@pytest.mark.parametrize("name", ["acc", "pre/", "pre/acc/nothing", "traffic/down"])
def test_what_is_no_score_is_refused(name):
    with pytest.raises(InputError, match="POINT/SCORE"):
        metrics.split(name)


def test_rows_of_an_earlier_version_are_read():
    old = {"round": 1, "pre/acc": 0.5, "pre/acc_micro": 0.6, "pre/recall_macro": 0.7}
    new = {"round": 1, "pre/acc": 0.5, "pre/acc/micro": 0.6, "pre/recall_macro": 0.7}
    assert metrics.renamed(old) == new
    today = {"pre/acc_std": 0.1, "pre/acc_std/clients": 3}
    assert metrics.renamed(today) == today


def test_units_and_directions():
    shares = ("acc", "task_acc", "recall_macro", "task_bal", "acc@own_loss")
    assert all(map(metrics.is_share, shares))
    assert not any(map(metrics.is_share, ("elbo", "global_loss", "kl_z")))
    assert metrics.better("kl_z") == metrics.better("perplexity") == "min"
    assert metrics.better("mse") == metrics.better("mae") == metrics.better("ece")
    assert metrics.better("mse_mean") == metrics.better("ece") == "min"
    assert metrics.better("benign_own", ("own", "min")) == "min"
    assert metrics.better("acc") == metrics.better("elbo") == "max"
    assert metrics.better("acc", ("acc", "min")) == "min"
    assert metrics.baseline("acc_present") == "acc_majority"
    assert metrics.baseline("task_acc") == "task_acc_majority"


def test_the_headline_and_its_architectures_come_first():
    found = metrics.ordered(["elbo", "task_acc", "acc", "b", "b@x"], ("b", "max"))
    assert found == ["b", "b@x", "acc", "task_acc", "elbo"]


def test_values_are_formatted():
    assert metrics.mean_std("acc", 0.9125, 0.01) == "91.2 ± 1.0"
    assert metrics.mean_std("elbo", -115.6, float("nan")) == "-115.6"
    assert metrics.text("acc", float("nan")) == "" and metrics.label("acc") == "acc (%)"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, ("elbo", "max")),
        ({"metrics": "acc"}, ("acc", "max")),
        ({"metrics": "auc,acc"}, ("auc", "max")),
        ({"metrics": "auc", "watch": "val/ece"}, ("ece", "min")),
    ],
)
def test_the_watched_score_is_the_given_one(given, expected):
    assert metrics.watched(Evaluation(**given), ("elbo", "max")) == expected


@pytest.mark.parametrize("score, expected", [("acc", "acc"), ("elbo", None)])
def test_the_default_of_an_earlier_run_is_not_given(tmp_path, score, expected):
    (tmp_path / "config.json").write_text(json.dumps({"metrics": "acc"}))
    headline = {"headline": {"score": score, "better": "max"}}
    (tmp_path / "summary.json").write_text(json.dumps(headline))
    assert read(tmp_path / "config.json").metrics == expected
