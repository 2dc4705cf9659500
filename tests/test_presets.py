"""The presets of the papers' tables: what is published, what a run is compared with,
and that they can be run."""

import numpy as np
import pytest
import toy
from experiments.presets import PRESETS
from experiments.presets.pfedc import PFEDC

from experiments import account, build, describe, published, settings
from fedjax_pfl.data import datasets, tfds

BASELINES = ("fedavg", "per_fedavg", "pfedme", "fedbn", "fedrep", "fedfomo")


def config(preset, algo="pfedc", hparams=None, **user):
    return settings.resolve(
        {"preset": preset, "algo": algo, "hparams": hparams or {}, **user}
    )


def number(preset, algo="pfedc", hparams=None, **user):
    """The published mean for these settings."""
    made = config(preset, algo, hparams, **user)
    return float(published.cell(PRESETS[preset], made).numbers[algo].split()[0])


def image_set(name, data_dir=None, seed=0):
    """A data set of the named one's shape and classes, small."""
    classes = 100 if name == "cifar100" else 10
    shape = (28, 28, 1) if "mnist" in name else (32, 32, 3)
    made = datasets.synthetic(12 * classes, classes, shape)
    return made._replace(
        name=name, superclass=np.arange(classes) % 20 if classes == 100 else None
    )


# --- the tables as transcribed: what the paper says of them holds


def test_table_1_pfedc_is_best_everywhere_and_fedavg_worst_on_cifar():
    for name in ("pfedc_mnist", "pfedc_emnist", "pfedc_cifar10", "pfedc_cifar100"):
        others = [number(name, algo) for algo in BASELINES]
        assert number(name) > max(others) and (
            "cifar" not in name or number(name, "fedavg") == min(others)
        )
    assert (number("pfedc_mnist", "fedfomo"), number("pfedc_cifar100")) == (
        98.61,
        93.49,
    )


def test_table_2_pfedc_is_best_in_all_cells_but_one():
    lost = []
    for name in ("mnist", "emnist", "cifar10", "cifar100"):
        for alpha in (0.05, 0.1, 1.0):
            preset = f"pfedc_{name}_dirichlet"
            others = {algo: number(preset, algo, alpha=alpha) for algo in BASELINES}
            if number(preset, alpha=alpha) < max(others.values()):
                lost.append((name, alpha, max(others, key=others.get)))
    assert lost == [("emnist", 0.05, "pfedme")]
    assert number("pfedc_cifar100_dirichlet", "fedrep", alpha=1.0) == 82.25


def test_tables_3_to_6():
    by_alpha = [
        number("pfedc_cifar100_sampled", alpha=alpha) for alpha in (0.05, 0.1, 1.0)
    ]
    assert by_alpha == sorted(by_alpha) == [84.03, 89.25, 90.98]
    assert (
        number("pfedc_cifar100_sampled", "fedrep", partition="pathological_subset")
        == 56.47
    )
    order = ("single", "consecutive:10", "superclass", "class")
    for where, rounds in (
        ({}, None),
        *(({"alpha": alpha}, alpha) for alpha in (0.05, 0.1, 1.0)),
    ):
        preset = "pfedc_cifar100_tasks" if where else "pfedc_cifar100"
        found = [
            published.cell(
                PRESETS[preset], config(preset, hparams={"tasks": name}, **where)
            )
            for name in order
        ]
        # fewer, the more tasks
        assert np.all(np.diff([cell.rounds["pfedc"] for cell in found]) < 0), rounds
    assert (
        number("pfedc_cifar100_tasks", hparams={"tasks": "class"}, alpha=0.05) == 62.48
    )
    assert number("pfedc_cifar10_dirichlet", "pfedma", alpha=0.1) == 75.15
    assert number("pfedc_cifar10_linear", "mocha") == 64.75
    assert number("pfedc_mnist_epochs", epochs=5) == 96.86


FEDCP_TABLES = [
    *(
        ("fedcp_mnist_pathological", {}),
        ("fedcp_cifar10_pathological", {}),
        ("fedcp_cifar100_pathological", {}),
    ),
    *(("fedcp_mnist", {}), ("fedcp_cifar10", {}), ("fedcp_cifar100", {})),  # Table 2
    *(("fedcp_tiny_imagenet", {"alpha": alpha}) for alpha in (0.01, 0.1, 0.5)),  # and 4
    # 4
    *(
        ("fedcp_cifar100", {"clients": clients})
        for clients in (10, 30, 50, 100, 200, 500)
    ),
    *(("fedcp_cifar100", {"clients": 50, "unseen": part}) for part in (0.8, 0.4)),  # 5
    *(("fedcp_cifar10", {"epochs": epochs}) for epochs in (5, 10, 20, 40)),  # 6
    # 7
    *(
        ("fedcp_cifar100", {"clients": 50, "participation": some})
        for some in ("0.5:1", "0.1:1")
    ),
]


@pytest.mark.parametrize("name, where", FEDCP_TABLES)
def test_fedcp_is_first_in_every_column_of_its_tables(name, where):
    made = config(name, "fedcp", **where)
    assert published.deviations(made) == ""
    found = (
        published.cell(PRESETS[name], made).numbers
        if where
        else PRESETS[name].published
    )
    means = {method: float(text.split()[0]) for method, text in found.items()}
    assert max(means, key=means.get) == "fedcp" and 10 <= len(means) <= 12


def test_fedcps_lambda_of_5_is_the_best_and_50_collapses():
    row = [
        number("fedcp_tiny_imagenet", "fedcp", {"lam": lam}, alpha=0.5)
        for lam in ("1", "2", "5", "10", "50")
    ]
    assert row == [24.95, 26.55, 27.66, 26.95, 4.54]
    assert published.deviations(
        config("fedcp_tiny_imagenet", "fedcp", {"lam": "2"}, alpha=0.01)
    ) == ("changed: lam 2, not 5")


PFEDAFM, MNFL = (
    tuple(name for name in PRESETS if name.startswith(paper))
    for paper in ("pfedafm_", "mnfl_")
)
SIZES = (
    {},
    {"clients": 50, "participation": "0.2"},
    {"clients": 100, "participation": "0.1"},
)


@pytest.mark.parametrize(
    "name, to_others, to_small_models",
    [
        ("pfedafm_cifar10", (0.23, 1.21, 3.19), (16.56, 19.32, 22.47)),
        ("pfedafm_cifar100", (4.71, 5.24, 7.93), (24.07, 23.68, 24.39)),
        ("pfedafm_cifar10_same", (0.34, 1.33, 3.09), (1.43, 3.27, 5.44)),
        ("pfedafm_cifar100_same", (3.38, 5.08, 7.76), (6.22, 10.01, 11.70)),
    ],
)
def test_pfedafm_is_ahead_by_what_its_tables_say(name, to_others, to_small_models):
    for where, ahead, of_small in zip(SIZES, to_others, to_small_models, strict=True):
        found = published.cell(PRESETS[name], config(name, "pfedafm", **where)).numbers
        assert (
            published.cell(PRESETS[name], config(name, "local", **where)).numbers
            == found
            or not where
        )
        row = dict(PRESETS[name].published if not where else found)
        ours = float(row.pop("pfedafm"))
        best = [
            max(float(row[m]) for m in of if m in row)
            for of in (row, ("fml", "fedkd", "fedapen"))
        ]
        np.testing.assert_allclose(
            [ours - x for x in best], [ahead, of_small], atol=1e-9
        )


def test_mnfl_is_first_and_fedmd_last_in_both_columns():
    for name in ("mnfl_fashion_mnist", "mnfl_cifar10"):
        rows = {
            m: [float(x) for x in text.split(" and ")]
            for m, text in PRESETS[name].published.items()
        }
        for column in range(2):
            order = sorted(rows, key=lambda method: rows[method][column])
            assert (order[:2], order[-1]) == (["fedmd", "feddf"], "mnfl_het")
    assert published.comparison(config("mnfl_cifar10", "feddf"))["compare"] == "pre/acc"


def test_mnfl_of_one_architecture_is_first_with_few_and_with_many_clients():
    for name, few, many in (
        ("mnfl_fashion_mnist_same", 93.93, 90.37),
        ("mnfl_cifar10_same", 66.96, 58.29),
    ):
        for where, ours in (({}, few), (SIZES[2], many)):
            row = {
                method: number(name, method, **where)
                for method in PRESETS[name].published
            }
            assert max(row, key=row.get) == "mnfl" and row["mnfl"] == ours
        assert {
            PRESETS[name].headline_of(method) for method in PRESETS[name].published
        } == {"pre/acc"}
    assert (
        number("mnfl_fashion_mnist_ablations", "mnfl_het", public="emnist/letters")
        == 88.76
    )


def test_mnfls_ablations_are_found_by_what_is_varied():
    find = lambda name, user=None, **hparams: number(
        name, "mnfl_het", hparams, **(user or {})
    )
    for name, base, few, rho, passes, epochs in (
        ("mnfl_fashion_mnist_ablations", 89.14, 50.80, 89.30, 88.08, 88.73),
        ("mnfl_cifar10_ablations", 58.40, 39.08, 58.52, 58.91, 58.30),
    ):
        assert (
            find(name) == base
            and find(name, public_size="10") == few
            and find(name, rho="0.3") == rho
        )
        assert find(name, passes="5") == passes and find(name, {"epochs": 5}) == epochs


# --- what a run is compared with


def test_the_papers_number_stands_beside_what_is_comparable():
    say = published.sentence
    assert (
        say(config("pfedc_mnist", seed=4))
        == "The paper's pfedc: 99.44 ± 0.41 % (compare post/task_acc)."
    )
    assert say(config("pfedc_mnist", "fedavg", rounds=1000)) == (
        "The paper's fedavg: 91.94 ± 0.76 % (compare pre/acc)."
    )
    assert say(
        config(
            "pfedc_mnist",
            "fedrep",
            {"head_epochs": "9"},
            data_fraction=0.2,
            rounds=3,
            lr=0.1,
        )
    ) == (
        "The paper's fedrep: 97.85 ± 0.15 % (compare post/acc). This run is not the "
        "paper's: reduced: "
        "data_fraction 0.2 of 1, rounds 3 of 1000; changed: lr 0.1, not 0.005; "
        "head_epochs 9, not 1."
    )
    assert (
        say(config("pfedc_mnist", "ditto", rounds=1000))
        == "The paper has no number of ditto at these settings."
    )
    assert say(config("pfedc_mnist", partition="file:p.npz", clients=20)).endswith(
        "changed: partition file:p.npz, not pathological_subset."
    )
    assert say(
        config("pfedc_cifar100_tasks", hparams={"tasks": "consecutive:10"}, alpha=0.05)
    ) == (
        "The paper's pfedc: 97.30 % (compare post/task_acc). The paper's pfedc "
        "converged in 58 rounds."
    )
    assert say(config("pfedc_cifar100_tasks", alpha=0.3)) == (
        "The paper has no number of pfedc at these settings. This run is not the "
        "paper's: changed: alpha 0.3, not 0.1."
    )
    assert (
        say(config("pfedc_mnist_epochs", epochs=20))
        == "The paper has no number of pfedc at these settings."
    )
    assert (
        say(config("digits", "fedavg", rounds=1)) is None
        and say(config(None, "fedavg", dataset="mnist")) is None
    )


@pytest.mark.parametrize("name", PFEDC)
def test_both_methods_of_the_paper_share_its_settings(name):
    own, private = config(name), config(name, "privacy_pfedc")
    assert all(
        private.hparams[n] == x for n, x in own.hparams.items() if n in private.hparams
    )
    assert published.comparison(private)["compare"] == "post/task_acc"
    assert published.differences(private) == []
    assert published.deviations(config(name, "fedavg")) == "reduced: rounds 40 of 1000"
    before = "compare fedavg, per_fedavg, fedma, pfedma, mocha with pre/acc"
    compared = f"{before}; pfedc, privacy_pfedc with post/task_acc; the others with"
    assert compared in " ".join(describe.describe(name).split())


def test_a_setting_of_the_papers_is_no_change_where_it_has_no_number_of_the_method():
    say = published.sentence
    made = config("pfedc_cifar100_sampled", partition="pathological_subset")
    assert say(made) == "The paper has no number of pfedc at these settings."
    assert say(config("pfedc_mnist_dirichlet", "ditto", alpha=0.05, rounds=1000)) == (
        "The paper has no number of ditto at these settings."
    )
    assert published.cell(
        PRESETS["pfedc_cifar10_dirichlet"], config("pfedc_cifar10_dirichlet", "fedem")
    ).numbers


def test_more_rounds_are_longer_and_more_of_anything_else_is_a_change():
    made = config("pfedc_cifar100_tasks", rounds=250, clients=30)
    assert (
        published.deviations(made)
        == "longer: rounds 250, not 40; changed: clients 30, not 20"
    )
    assert published.deviations(config("pfedc_mnist", "fedavg", rounds=1000)) == ""
    assert (
        published.deviations(config("pfedc_mnist", "fedavg", rounds=2000))
        == "longer: rounds 2000, not 1000"
    )


def test_a_part_of_a_data_set_is_a_reduction(monkeypatch):
    """Which data_fraction is beside, and which of the user's own data nobody can
    say."""
    # 120 images
    monkeypatch.setattr(
        datasets, "load", lambda name, *_: image_set(name)._replace(name=name)
    )
    small = {"clients": 5, "rounds": 1000, "model": "linear", "data_fraction": 0.5}
    part = build.prepare(config("pfedc_mnist", "fedavg", **small))
    used = len(part.dataset.y)
    assert 50 < used < 70 and part.examples == {
        "used": used,
        "available": 120,
        "of": 70_000,
    }
    assert published.sentence(part.config, part.examples).endswith(
        f"reduced: data_fraction 0.5 of 1, clients 5 of 20, examples {used} of 70000; "
        "changed: model linear, not lenet."
    )
    assert (
        published.comparison(part.config, part.examples)["differs"][-1]["preset"]
        == 70_000
    )
    assert "on mnist (120 of its 70,000 examples): 5 clients" in account.describe(part)
    own = build.prepare(config(None, "fedavg", dataset="npz:x", **small))
    assert own.examples == {"used": used, "available": 120, "of": 120}
    assert published.deviations(
        own.config, own.examples
    ) == "" and "examples" not in account.describe(own)
    # without a preset, too
    part = build.prepare(config(None, "fedavg", dataset="cifar10", **small))
    assert (
        published.deviations(part.config, part.examples)
        == f"reduced: examples {used} of 60000"
    )


def test_the_sizes_of_the_data_sets_are_those_that_are_described():
    assert tfds.SIZES.keys() == tfds.DESCRIPTIONS.keys()
    for name, size in tfds.SIZES.items():
        assert f"{size:,} " in tfds.DESCRIPTIONS[name.removesuffix("_coarse")]


def test_a_fraction_of_clients_written_otherwise_is_the_same_cell():
    found = {
        text: number("fedcp_cifar100", "fedcp", clients=50, participation=text)
        for text in ("1", "1.0")
    }
    assert found == {"1": 55.43, "1.0": 55.43}


def test_a_long_value_is_cut():
    made = config("pfedc_cifar100", hparams={"tasks": "map:" + ",".join("0" * 100)})
    assert published.deviations(made).endswith(
        "changed: tasks map:0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0..., not superclass"
    )


def test_the_summary_names_every_setting_that_is_not_the_presets():
    found = published.comparison(
        config("pfedc_cifar100_sampled", clients=50, rounds=3, alpha=1.0, batch_size=8)
    )
    assert found == {
        "name": "pfedc_cifar100_sampled",
        "compare": "post/task_acc",
        "published": "90.98",
        "published_rounds": None,
        "deviations": "reduced: clients 50 of 100, rounds 3 of 40; changed: batch_size 8, not 16",
        "differs": [
            {"setting": "clients", "value": 50, "preset": 100},
            {"setting": "rounds", "value": 3, "preset": 40},
            {"setting": "batch_size", "value": 8, "preset": 16},
        ],
    }
    # for which LeNet has no batch norm
    fedbn = published.comparison(config("pfedc_mnist", "fedbn", rounds=1000))
    assert fedbn["deviations"] == "changed: model lenet_bn, not lenet"
    assert published.comparison(config(None, "fedavg", dataset="mnist")) is None


# --- they run at any size


# seconds to trace
RESNETS = [name for name in PFEDC if PRESETS[name].settings["model"] == "resnet18"]
SMALL = [name for name in PFEDC if name not in RESNETS]
FEDCP = [
    name
    for name in PRESETS
    if name.startswith("fedcp_") and name != "fedcp_cifar100_pathological"
]


@pytest.mark.parametrize(
    "name",
    [
        *SMALL[:2],
        "fedcp_cifar100_pathological",
        *map(toy.slow, [*SMALL[2:], *RESNETS, *PFEDAFM, *MNFL, *FEDCP]),
    ],
)
def test_a_preset_can_be_built_at_a_small_size(name, monkeypatch):
    """With the network of the paper, up to the program that would be compiled."""
    monkeypatch.setattr(datasets, "load", image_set)
    # who hold all classes
    least = (
        10
        if name.startswith(("pfedafm_cifar100", "fedcp_cifar100_pathological"))
        else 5
    )
    # of each architecture
    clients = max(least, len(PRESETS[name].settings["model"].split(",")))
    small = {"clients": clients, "data_fraction": 0.5, "rounds": 1}
    experiment = build.prepare(config(name, PRESETS[name].settings["algo"], **small))
    assert experiment.config.clients == clients and experiment.program().round
    assert published.deviations(experiment.config).startswith(
        "reduced: data_fraction 0.5 of 1"
    )


def test_a_preset_says_how_many_steps_a_round_takes():
    assert PRESETS["pfedc_mnist"].steps == 8200
    assert (
        "Work: 8,200 client steps per round on all of the data."
        in describe.describe("pfedc_mnist")
    )


def test_what_has_no_effect_is_no_deviation():
    assert (
        published.deviations(config("fedcp_cifar10_pathological", "fedavg", alpha=0.5))
        == ""
    )
