"""Run directories as frames: values, aggregation, selection and tables."""

import numpy as np
import pandas as pd
import pytest

from experiment import made
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import results


@pytest.fixture
def sweep(tmp_path):
    """Two seeds of two methods; Local gains nothing."""
    for seed in (0, 1):
        made.run(tmp_path / f"a{seed}", seed=seed, gain=0.1 + 0.02 * seed)
        made.run(tmp_path / f"b{seed}", "local", seed, gain=0.0)
    return results.find([tmp_path])


def at(table, **wanted):
    """The rows with these values."""
    for name, value in wanted.items():
        table = table[table[name] == value]
    return table


def test_the_frame_has_a_row_per_round_point_and_score(sweep):
    table = results.frame(sweep)
    one = at(table, run=str(sweep[0].path), score="acc")
    assert list(at(one, point="pre")["completed"]) == [0, 1, 2, 3]
    assert list(at(one, point="post")["completed"]) == [1, 2, 3]
    np.testing.assert_allclose(at(one, point="pre")["macro"], [0.5, 0.6, 0.7, 0.8])
    np.testing.assert_allclose(at(one, point="pre")["megabytes"], np.arange(4) * 0.006)
    np.testing.assert_allclose(at(one, point="post")["seconds"], [2, 4, 6])
    last = at(one, point="post").iloc[-1]
    assert (last["examples"], last["first_examples"]) == (120, 40)
    wanted = {"algo": "fedavg", "seed": 0, "batch_size": 10, "clients": 20}
    assert {name: last[name] for name in wanted} == wanted


def test_the_worst_tenth_follows_what_is_better(tmp_path, monkeypatch):
    run = made.run(tmp_path / "a")
    run.summary["headline"]["better"] = "min"
    rows = at(results.frame([run]), point="pre", score="acc", completed=0)
    np.testing.assert_allclose(rows[["worst10", "best10"]], [[0.6, 0.4]])


def test_mean_and_deviation_are_over_seeds(sweep):
    seeds = results.over_seeds(results.last(results.frame(sweep)))
    found = seeds.loc["fedavg", "pre", "acc"]
    np.testing.assert_allclose(found["macro", "mean"], (0.8 + 0.86) / 2)
    np.testing.assert_allclose(found["macro", "std"], np.std([0.8, 0.86], ddof=1))
    assert found["run", "count"] == 2
    by_round = results.over_seeds(results.frame(sweep), ["completed"])
    assert ("fedavg", "pre", "acc", 2) in by_round.index


def test_labels_name_what_differs(tmp_path):
    runs = [
        made.run(tmp_path / "a", "ditto", hparams={"lam": 0.5}),
        made.run(tmp_path / "b", "ditto", hparams={"lam": 2.0}, seed=1, width="2"),
        made.run(tmp_path / "c", "local", lr=0.1),
    ]
    found = list(results.labels(runs).values())
    assert found == ["ditto, lam=0.5", "ditto, lam=2.0", "local"]
    more = [
        made.run(tmp_path / "e", "ditto", adapt="lora:4"),
        made.run(tmp_path / "f", "ditto"),
    ]
    found = list(results.labels(more).values())
    assert found == ["ditto, adapt=lora:4", "ditto"]
    other = made.run(tmp_path / "d", "local", lr=0.1, dataset="synthetic")
    assert (
        results.labels([*runs[2:], other])[str(other.path)]
        == "local, dataset=synthetic"
    )


def test_the_best_round_is_by_validation_examples(sweep):
    table = results.frame(sweep)
    chosen = at(
        results.best(table, "val/acc"), point="pre", score="acc", label="fedavg"
    )
    assert set(chosen["completed"]) == {1}  # of 0.5, 0.7, 0.7, 0.5 the first best
    with pytest.raises(InputError, match="val/loss"):
        results.best(table, "val/loss")


def test_rounds_to_a_target(sweep):
    table = results.frame(sweep)
    found = results.to_target(table, 0.7, "pre/acc")
    assert list(
        found.loc[[str(run.path) for run in sweep], "completed"].fillna(-1)
    ) == [
        2,
        2,
        -1,
        -1,
    ]
    np.testing.assert_allclose(found.loc[str(sweep[0].path), "megabytes"], 0.012)
    after = results.to_target(table, 0.7, "post/acc")
    assert after.loc[str(sweep[0].path), "completed"] == 2
    micro = results.to_target(table, 0.71, "pre/acc/micro")
    assert micro.loc[str(sweep[0].path), "completed"] == 2
    text = results.rounds_to(table, [0.7, 0.84], "pre/acc")
    assert text.loc["fedavg", "rounds to 70.0 %"] == "2"
    assert text.loc["fedavg", "rounds to 84.0 %"] == "never"  # one of two seeds
    assert text.loc["local", "MB to 70.0 %"] == "never"


def test_the_share_of_clients_above_local(sweep):
    found = results.above_local(sweep)
    assert found and set(found.values()) == {1.0}
    table = results.comparison(sweep, results.last(results.frame(sweep)))
    assert table.loc["fedavg", results.ABOVE] == "100.0"


def test_the_comparison_has_the_best_first_and_the_baseline(sweep):
    table = results.comparison(sweep, results.last(results.frame(sweep)))
    assert list(table.index) == ["fedavg", "local", "majority baseline"]
    first = table.loc["fedavg"]
    assert (
        first["acc (%) before"] == "83.0 ± 4.2" and first["worst 10 %"] == "73.0 ± 4.2"
    )
    assert (first["runs"], first["rounds"], first["seconds"]) == ("2", "3", "6")
    floor = table.loc["majority baseline"]
    assert floor["acc (%) before"] == "25.0 ± 0.0" and floor["rounds"] == ""


def test_a_preset_shows_its_published_number_and_headline(tmp_path):
    settings = {"preset": "fedcp_cifar10", "dataset": "cifar10", "data_fraction": 0.1}
    run = made.run(tmp_path / "a", "fedcp", **settings)
    row = results.comparison([run], results.last(results.frame([run]))).loc["fedcp"]
    assert (
        row["paper's score"] == "pre/acc/micro" and row["published"] == "91.30 ± 0.17"
    )
    assert row["measured"] == "81.0"  # of acc_micro, not of acc
    assert "data_fraction 0.1 of 1.0, " in row["not the paper's"]
    assert "rounds 3 of 2000" in row["not the paper's"]


def test_statistics_are_of_every_score(sweep):
    table = results.statistics(results.last(results.frame(sweep[:1])), ("acc", "max"))
    row = table.loc["fedavg", "acc (%)", "before"]
    assert list(row[["mean", "mean over examples", "std over clients"]]) == [
        "80.0",
        "81.0",
        "5.0",
    ]
    assert row["majority baseline"] == "25.0"
    assert not any("majority" in score for _, score, _ in table.index)


@pytest.mark.parametrize(
    "style, part",
    [
        ("latex", r"a\_b & 1 $\pm$ 2"),
        ("csv", "a_b,1 ± 2"),
        ("markdown", "| a_b "),
        ("html", "<td>a_b</td>"),
    ],
)
def test_formats(style, part):
    table = pd.DataFrame({"x": ["1 ± 2"]}, index=pd.Index(["a_b"], name="method"))
    assert part in results.render(table, style)


def test_rows_of_nan_logits_are_counted(tmp_path):
    run = made.run(tmp_path / "a")
    assert results.notes([run]) == []
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "pre/nan_rows": 1.5, "pre/nan_rows/clients": 2}\n')
    (note,) = results.notes([results.load(run.path)])
    assert ": 3 test rows of 2 clients have NaN logits" in note


@pytest.mark.parametrize("value, shown", [(0.5, "50.0 %"), (None, "undefined")])
def test_the_round_that_early_stopping_kept_is_named(tmp_path, value, shown):
    run = made.run(tmp_path / "a")
    run.summary["best"] = {"watch": "val/auc", "round": 1, "value": value}
    (note,) = results.notes([run])
    assert note == f"{run.path}: Scores are after 1 round: val/auc {shown}."


def test_unfinished_and_torn_runs_are_read_as_far_as_they_go(tmp_path):
    run = made.run(tmp_path / "a", status="running")
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "pre/')
    assert len(results.load(run.path).metrics) == 4
    assert results.notes([run]) == [f"{run.path}: running."]
    (run.path / "summary.json").unlink()
    bare = results.load(run.path)
    assert (bare.status, bare.headline) == ("running", ("acc", "max"))
    assert at(results.frame([bare]), completed=3)["seconds"].isna().all()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"config.json"):
        results.find([tmp_path / "nothing"])
    with pytest.raises(InputError, match="Name run directories"):
        results.find([])
    run = made.run(tmp_path / "a")
    (run.path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="no evaluated round"):
        results.frame([run.path])


def test_scores_have_every_client(tmp_path):
    run = made.run(tmp_path / "a")
    rows = at(run.scores, point="post", round=2)
    np.testing.assert_allclose(rows["value"], 0.8 + np.linspace(-0.1, 0.1, 4))
    assert list(rows["client"]) == [0, 1, 2, 3]
