"""Presets: the tables as printed, cells, and how a run differs from a paper's setting."""

import pytest

from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.experiment import presets
from fedjax_pfl.experiment.config import SETTINGS
from fedjax_pfl.experiment.presets import PRESETS

BASELINES = ("fedavg", "per_fedavg", "pfedme", "fedbn", "fedrep", "fedfomo")


def config(preset, algo, hparams=None, **settings):
    """Settings of a run as a preset has them."""
    known = PRESETS[preset].settings_of(algo) | settings
    own = PRESETS[preset].hparams.get(algo, {}) | (hparams or {})
    return known | {"algo": algo, "preset": preset, "hparams": own}


def number(preset, algo="pfedc", hparams=None, **settings):
    """The published mean for these settings."""
    return float(
        presets.published(config(preset, algo, hparams, **settings)).split()[0]
    )


@pytest.mark.parametrize("name", PRESETS)
def test_names_are_known(name):
    preset = PRESETS[name]
    assert set(preset.settings) <= set(SETTINGS)
    named = {*preset.published, *preset.headlines, *preset.hparams, *preset.methods}
    cells = {
        method for cell in preset.cells for method in (*cell.numbers, *cell.rounds)
    }
    assert named | cells | set(preset.own) <= set(ALGORITHMS)
    assert preset.description and "/" in preset.headline


def test_pfedc_table_1_pfedc_is_best_everywhere_and_fedavg_worst_on_cifar():
    for data in ("mnist", "emnist", "cifar10", "cifar100"):
        more = {"hparams": {"tasks": "superclass"}} if data == "cifar100" else {}
        others = [number(f"pfedc_{data}", algo) for algo in BASELINES]
        assert number(f"pfedc_{data}", **more) > max(others)
        assert "cifar" not in data or number(f"pfedc_{data}", "fedavg") == min(others)


def test_pfedc_table_2_pfedc_is_best_in_all_cells_but_one():
    lost = []
    for data in ("mnist", "emnist", "cifar10", "cifar100"):
        for alpha in (0.05, 0.1, 1.0):
            others = {
                x: number(f"pfedc_{data}_dirichlet", x, alpha=alpha) for x in BASELINES
            }
            if number(f"pfedc_{data}_dirichlet", alpha=alpha) < max(others.values()):
                lost.append((data, alpha, max(others, key=others.get)))
    assert lost == [("emnist", 0.05, "pfedme")]


def test_pfedc_tables_3_to_6():
    by_alpha = [number("pfedc_cifar100_sampled", alpha=x) for x in (0.05, 0.1, 1.0)]
    assert by_alpha == [84.03, 89.25, 90.98]
    assert (
        number("pfedc_cifar100_tasks", hparams={"tasks": "class"}, alpha=0.05) == 62.48
    )
    tasks = ("single", "consecutive:10", "superclass", "class")
    for alpha in (0.05, 0.1, 1.0):
        cells = [
            PRESETS["pfedc_cifar100_tasks"].cell(
                config("pfedc_cifar100_tasks", "pfedc", {"tasks": name}, alpha=alpha)
            )
            for name in tasks
        ]
        rounds = [cell.rounds["pfedc"] for cell in cells]
        assert rounds == sorted(rounds, reverse=True) and len(set(rounds)) == 4
    assert number("pfedc_cifar10_dirichlet", "pfedma", alpha=0.1) == 75.15
    assert number("pfedc_cifar10_linear", "mocha") == 64.75


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("fedcp")])
def test_fedcp_is_first_in_every_column_of_its_tables(name):
    columns = [cell.numbers for cell in PRESETS[name].cells] + [PRESETS[name].published]
    for numbers in (column for column in columns if len(column) > 1):
        means = {method: float(text.split()[0]) for method, text in numbers.items()}
        assert max(means, key=means.get) == "fedcp" and 10 <= len(means) <= 12


def test_fedcps_lambda_of_5_is_best_and_50_collapses():
    lam = [{"lam": x} for x in (1.0, 2.0, 5.0, 10.0, 50.0)]
    row = [number("fedcp_tiny_imagenet", "fedcp", x, alpha=0.5) for x in lam]
    assert row == [24.95, 26.55, 27.66, 26.95, 4.54]


@pytest.mark.parametrize(
    "name", [name for name in PRESETS if name.startswith(("pfedafm", "mnfl"))]
)
def test_the_own_method_of_pfedafm_and_mnfl_is_first(name):
    preset = PRESETS[name]
    for numbers in (preset.published, *(cell.numbers for cell in preset.cells)):
        means = {method: float(text.split()[0]) for method, text in numbers.items()}
        assert not means or max(means, key=means.get) == preset.own[0]


def test_templates_and_defaults_merge_entry_by_entry():
    small = PRESETS["feddva_classify_mnist_small"]
    assert small.hparams["feddva"] == {
        "latent": 8,
        "personal": 8,
        "head": "personal",
        "hidden": 128,
    }
    assert small.settings["epochs"] == 2 and small.settings["lr"] == 0.001
    assert PRESETS["pfedc_mnist"].settings_of("fedbn")["model"] == "lenet_bn"
    assert PRESETS["pfedc_mnist"].headline_of("fedavg") == "pre/acc"
    assert PRESETS["mnfl_cifar10"].published["fedmd"] == "39.14 and 35.56"


@pytest.mark.parametrize(
    "algo, changed, expected",
    [
        ("pfedc", {}, ""),
        ("fedavg", {}, "reduced: rounds 40 of 1000"),
        ("fedavg", {"rounds": 1000}, ""),
        (
            "pfedc",
            {"rounds": 3, "lr": 0.1},
            "reduced: rounds 3 of 40; changed: lr 0.1, not 0.005",
        ),
        ("pfedc", {"rounds": 50}, "changed: rounds 50, not 40"),
        (
            "pfedc",
            {"participation": "1.0", "momentum": 0.5},
            "changed: momentum 0.5, not 0.0",
        ),
        ("pfedc", {"seed": 5, "eval_every": 9}, ""),
    ],
)
def test_deviations(algo, changed, expected):
    defaults = {"momentum": 0.0, "participation": "1", "seed": 0}
    run = defaults | config("pfedc_mnist", algo, **changed)
    assert presets.deviations(run, defaults) == expected
    assert presets.deviations(run | {"preset": None}, defaults) == ""
    assert presets.published(run | {"preset": None}) is None


def test_a_cell_is_part_of_the_papers_setting():
    run = config(
        "fedcp_cifar100", "ditto", clients=50, participation="0.5:1", unseen=0.0
    )
    assert presets.published(run) == "49.78 ± 0.36" and presets.deviations(run) == ""
    other = run | {"clients": 49}
    assert presets.published(other) == "52.87 ± 0.64"
    assert presets.deviations(other) == "changed: clients 49, not 20"
