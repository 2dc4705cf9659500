"""What a run of several architectures records, prints and draws for each of them."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from experiments import (
    drawing,
    export,
    figures,
    main,
    many,
    networks,
    report,
    runs,
    within,
)
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import State

MIXED = [
    "--algo=local",
    "--model=linear,mlp,linear",
    "--data_fraction=0.2",
    "--clients=7",
    "--epochs=1",
]
OF = np.array(["linear", "mlp", "linear"])[np.arange(7) % 3]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "mixed"
    flags = [
        "--rounds=3",
        "--participation=0.6",
        "--targets=acc@mlp:0.01",
        "--width=1",
        "--devices=1",
    ]
    assert main.run([*MIXED, *flags, f"--workdir={path}"]) == 0
    read = lambda name: [
        json.loads(line) for line in (path / f"{name}.jsonl").read_text().splitlines()
    ]
    return path, read("metrics"), read("scores")


@pytest.mark.slow
def test_the_headline_of_each_architecture_is_the_mean_of_its_clients(mixed):
    _, rows, scores = mixed
    for row, score in zip(rows, scores, strict=True):
        of = {"pre": OF, "post": OF[score.get("ids", [])]}
        for point in [point for point in of if point in score]:
            for kind in set(OF):
                own = [
                    x
                    for x, k in zip(score[point]["acc"], of[point], strict=True)
                    if k == kind
                ]
                assert row.get(f"{point}/acc@{kind}_clients", 0) == len(own)
                np.testing.assert_allclose(
                    row.get(f"{point}/acc@{kind}", 0), np.mean(own or 0), rtol=1e-6
                )
    assert "acc@mlp" not in scores[0]["pre"] and "pre/acc_present@mlp" not in rows[0]


def test_targets_of_an_architecture(mixed, capsys):
    found = json.loads((mixed[0] / "summary.json").read_text())["targets"]
    assert found["score"] == "acc@mlp" and found["levels"][0]["pre"] is not None
    assert main.run([*MIXED, "--targets=acc@lenet:0.5"]) == 2
    assert (
        "Choose one of acc, acc_present, acc@linear, acc@mlp."
        in capsys.readouterr().err
    )


def test_table_summary_and_curves_have_it(mixed, monkeypatch):
    path, rows, _ = mixed
    summary = json.loads((path / "summary.json").read_text())["scores"]
    assert [summary["pre"][f"acc@{kind}"]["clients"] for kind in ("linear", "mlp")] == [
        5,
        2,
    ]
    assert summary["post_latest"]["acc@linear"]["course"]["last"]["round"] == 2
    console = Console(file=io.StringIO(), width=200)
    report.tables(console, report.summary(rows))
    lines = map(str.split, console.file.getvalue().splitlines())
    first = [line[0] for line in lines if line and line[0].startswith("acc")]
    assert first == [
        "acc",
        "acc@linear",
        "acc@mlp",
        "acc_present",
        "acc",
        "acc_present",
    ]

    drawn = []
    monkeypatch.setattr(drawing, "save", lambda figure, _: drawn.append(figure))
    figures.draw_curves(rows, path / "curves.png")
    axes = drawn[0].axes[1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "linear (5 clients)",
        "mlp (2 clients)",
    ]
    np.testing.assert_allclose(
        axes.lines[2].get_ydata(), [row["pre/acc@mlp"] for row in rows]
    )


@pytest.mark.slow
def test_of_a_single_architecture_nothing_is_added(tmp_path):
    assert (
        main.run(
            [
                *MIXED[:1],
                "--model=linear,linear",
                *MIXED[2:],
                "--rounds=1",
                f"--workdir={tmp_path / 'a'}",
            ]
        )
        == 0
    )
    assert "@" not in (tmp_path / "a" / "metrics.jsonl").read_text()


def test_architectures_in_blocks():
    names, of = networks.architectures("blocks:lenet,alexnet,mlp", 7)
    assert names == ["lenet", "alexnet", "mlp"]
    np.testing.assert_array_equal(of, [0, 0, 0, 1, 1, 2, 2])
    names, of = networks.architectures("mlp,mlp,linear", 6)
    # one architecture however often named
    assert names == ["mlp", "linear"] and of.tolist() == [0, 0, 1, 0, 0, 1]
    with pytest.raises(InputError, match="has 3 networks for 2 clients"):
        networks.architectures("blocks:lenet,alexnet,mlp", 2)


@pytest.mark.slow  # test_seeds.py has the check alone
def test_the_file_of_the_networks_may_not_change_under_a_run(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    file, path, resume = (
        tmp_path / "nets.txt",
        tmp_path / "run",
        ["--resume", f"--workdir={tmp_path / 'run'}"],
    )
    file.write_text("mlp linear mlp linear")
    words = [
        "--algo=local",
        "--model=file:nets.txt",
        "--clients=4",
        "--data_fraction=0.2",
        "--width=1",
        "--epochs=1",
    ]
    assert main.run([*words, "--rounds=1", f"--workdir={path}"]) == 0
    config, known = runs.read_config(path), runs.read_json(path / "partition.json")
    file.write_text("mlp mlp linear linear")  # the same networks, of other clients
    assert main.run([*resume, "--rounds=2"]) == 2
    assert (
        "The file of the clients' networks is not the one that"
        in capsys.readouterr().err
    )
    with pytest.raises(
        InputError, match="The file of the clients' networks is not the one that"
    ):
        many._check_files(path, config)
    del known["networks"]  # as of a run that was begun before they were recorded
    runs.write_json(path / "partition.json", known)
    many._check_files(path, config)
    assert main.run([*resume, "--rounds=1"]) == 0


@pytest.mark.slow  # a network for every prediction
def test_each_client_predicts_with_its_own_row(tmp_path, monkeypatch):
    """Rows lie by architecture where clients train, and by client id in a run
    directory."""
    flags = [
        "--algo=fedapen",
        "--model=linear,mlp,linear",
        "--features=8",
        "--shared_model=mlp",
        "--clients=5",
    ]
    flags += [
        "--data_fraction=0.2",
        "--epochs=1",
        "--rounds=1",
        "--width=1",
        "--devices=1",
    ]
    assert main.run([*flags, f"--workdir={tmp_path / 'run'}"]) == 0
    run = runs.load(tmp_path / "run")
    # how much of the own network
    x, own = run.experiment.dataset.x[:4], np.linspace(0, 1, 5, dtype=np.float32)
    mixed = lambda lam: run._replace(
        state=State(run.state.server, run.state.clients | {"lam": lam})
    )
    for k in range(5):
        wanted = mixed(np.full(5, own[k])).predictor(k)(x)
        np.testing.assert_allclose(
            mixed(own).predictor(k)(x), wanted, rtol=1e-5, atol=1e-6
        )
        assert (
            export._predicted(mixed(own), k, x, networks=False)["client"]["lam"]
            == own[k]
        )
    e, hits = run.experiment, []
    for k, rows in enumerate(e.partition.test):
        index = rows[: e.partition.test_sizes[k]]
        hits.append(
            np.mean(
                np.argmax(mixed(own).predictor(k)(e.dataset.x[index]), axis=-1)
                == e.dataset.y[index]
            )
        )
    monkeypatch.setattr(within.runs, "load", lambda _: mixed(own))
    np.testing.assert_allclose(
        within.scores(tmp_path / "run", "consecutive:2")["acc"], hits, rtol=1e-6
    )
