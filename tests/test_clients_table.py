"""What is said of every client, and of the words of the tables."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from experiments import legend, main, report, runs

ROOT = Path(__file__).parent.parent
RUN = [
    "--algo=fedproto",
    "--model=mlp,linear",
    "--features=16",
    "--data_fraction=0.2",
    "--clients=8",
    "--unseen=0.25",
]
RUN += [
    "--rounds=3",
    "--eval_every=2",
    "--participation=0.5",
    "--epochs=1",
    "--width=1",
    "--devices=1",
    "--verbose",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run, and what it printed."""
    import contextlib
    import io

    path, out = tmp_path_factory.mktemp("runs") / "run", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main.run([*RUN, f"--workdir={path}"]) == 0
    return path, out.getvalue()


@pytest.fixture(scope="module")
def table(done):
    with open(done[0] / "clients.csv", newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows, name):
    return [None if row[name] == "" else float(row[name]) for row in rows]


def test_a_row_for_each_client_with_its_last_scores(done, table):
    path, _ = done
    scores, run = runs.read_rows(path / "scores.jsonl"), runs.load(path)
    train = [row for row in table if row["client"]]
    assert [row["client"] for row in train] == list(
        map(str, range(len(train)))
    ) and len(table) == 8
    for name in ("acc", "acc_present", "proto_acc"):
        assert numbers(train, f"pre/{name}") == scores[-1]["pre"][name]
        last = next(row for row in reversed(scores) if "post" in row)
        found = {
            i: x for i, x in enumerate(numbers(train, f"post/{name}")) if x is not None
        }
        assert found == dict(
            sorted(zip(last["ids"], last["post"][name], strict=True))
        ) and len(found) < len(train)
    assert {row["architecture"] for row in train} == {"mlp", "linear"}
    assert [
        row["architecture"] for row in train
    ] == run.experiment.network_names.tolist()


def test_sizes_and_classes_are_the_partitions(done, table):
    e = runs.load(done[0]).experiment
    p, y = e.everybody, e.dataset.y
    for row in table:
        i = int(row["row"])
        assert [int(row[part]) for part in ("train", "test")] == [
            p.train_sizes[i],
            p.test_sizes[i],
        ]
        assert int(row["classes"]) == len(
            set(y[p.train[i, : p.train_sizes[i]]].tolist())
        )


def test_clients_that_did_not_train_come_last(done, table):
    scores, unseen = runs.read_rows(done[0] / "scores.jsonl"), table[-2:]
    assert [row["client"] for row in unseen] == ["", ""] and len(
        {row["row"] for row in table}
    ) == 8
    assert [
        row["architecture"] for row in sorted(table, key=lambda row: int(row["row"]))
    ] == ["mlp", "linear"] * 4
    assert numbers(unseen, "unseen/acc") == scores[-1]["unseen"]["acc"]
    assert (
        numbers(table[:-2], "unseen/acc")
        == [None] * 6
        == numbers(table[:-2], "unseen_post/acc")
    )


def test_the_terminals_table_begins_with_the_client_served_worst(done, table):
    out = (
        done[1]
        .split("Clients by acc in %")[1]
        .split("Words of the tables")[0]
        .splitlines()
    )
    first = next(line for line in out if re.match(r" ?(\d|unseen)", line)).split()
    worst = min(float(row["pre/acc"] or row["unseen/acc"]) for row in table)
    assert f"{100 * worst:.1f}" in first
    assert sum(bool(re.match(r" ?(\d|unseen)", line)) for line in out) == 8


def test_every_word_of_the_tables_is_explained(done, monkeypatch):
    path, out = done
    run = runs.load(path)
    found, tables = report.summary(run.metrics, run.experiment.headline), []
    monkeypatch.setattr(
        report, "plain_table", lambda *a: tables.append(a) or original(*a)
    )
    report.tables(type("Console", (), {"print": lambda *_: None})(), found)
    words = legend.words(found)
    for _, _, columns in tables:
        for column in columns:
            assert column.replace("-\n", "").replace("\n", " ") in words
    names = {
        name
        for values in found["scores"].values()
        for name in values
        if not name.endswith("_majority")
    }
    assert len(tables) == 2 and names <= words.keys()
    assert {
        report.WITH_UNSEEN[point] for point, values in found["scores"].items() if values
    } <= words.keys()
    assert all(f"  {word} " in out for word in words)


original = report.plain_table


def test_every_point_has_a_meaning():
    assert set(report.WITH_UNSEEN.values()) <= legend.POINTS.keys()


def test_a_score_is_known_by_its_name():
    assert legend.of_score("acc@lenet").endswith(
        "of the clients whose network is lenet"
    )
    assert legend.of_score("untuned_acc_present").endswith(
        legend.OTHER_MODELS["untuned_"]
    )
    assert (
        legend.of_score("my_own_score") is None and legend.of_score("own_score") is None
    )


def test_a_run_that_is_still_on_has_no_table_yet(done, monkeypatch):
    from experiments import clients, recorder

    run, written = runs.load(done[0]), []
    monkeypatch.setattr(clients, "write", lambda *_: written.append(1))
    monkeypatch.setattr(recorder.Recorder, "_summarise", lambda *_: None)
    directory = type(
        "Directory", (), {"path": done[0], "rows": (), "tables": lambda _: None}
    )()
    one = recorder.Recorder(directory, run.experiment, run.layout, None, None, None)
    one.show("running")
    assert not written
    one.show("interrupted")
    assert written and np.all(written)
