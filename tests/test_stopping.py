"""Runs that end before their last round: --stop_at and --patience."""

import shutil

import numpy as np
import pytest
from experiments.config import Config

from experiments import (
    build,
    main,
    many,
    recorded,
    runs,
    settings,
    stopping,
    validation,
)
from fedjax_pfl.errors import InputError

TINY = [
    "--data_fraction=0.2",
    "--clients=5",
    "--width=1",
    "--epochs=1",
    "--model=linear",
    "--val_fraction=0.3",
]
# several rounds go to the devices at once: 1, then 2 and 3, and 5
RUN = ["--algo=fedavg", *TINY, "--rounds=6", "--eval_every=2", "--checkpoint_every=6"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert main.run([*RUN, f"--workdir={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def goal(whole):
    """A score that is first reached in round 2."""
    scores = [
        row["pre/acc"]
        for row in runs.read_rows(whole / "metrics.jsonl")
        if "pre/acc" in row
    ]
    assert scores[0] < scores[1]
    return f"--stop_at=pre/acc:{scores[1]:.6f}"


@pytest.fixture(scope="module")
def ended(whole, goal):
    path = whole.parent / "ended"
    assert main.run([*RUN, goal, f"--workdir={path}"]) == 0
    return path


def test_the_validation_scores_are_of_the_validation_examples(whole):
    run = runs.load(whole)
    p, (x, y) = run.experiment.partition, run.experiment.dataset[1:3]
    right = np.argmax(run.predictor(0)(x), axis=1) == y  # by the one model of FedAvg
    found = [float(right[p.val[i, :size]].mean()) for i, size in enumerate(p.val_sizes)]
    assert (
        run.scores[-1]["val"]["acc"]
        == pytest.approx(found)
        != run.scores[-1]["pre"]["acc"]
    )
    assert run.metrics[-1]["val/acc_micro"] == pytest.approx(
        np.average(found, weights=p.val_sizes)
    )


def test_it_ends_after_the_first_evaluated_round_that_reaches_the_score(whole, ended):
    rows = [runs.read_rows(path / "metrics.jsonl") for path in (ended, whole)]
    # rounds 0 to 2, and the closing scores after them
    assert rows[0][:3] == rows[1][:3] and len(rows[0]) == 4
    assert (
        rows[0][3]["round"] == 3
        and "loss" not in rows[0][3]
        and "pre/acc" in rows[0][3]
    )
    summary = runs.read_json(ended / "summary.json")
    assert (summary["status"], summary["rounds"]) == ("complete", 3)
    assert (
        "pre/acc has reached" in summary["ended"]["why"]
        and "after 2 rounds" in summary["ended"]["why"]
    )
    assert "ended" not in runs.read_json(whole / "summary.json")


def test_it_does_not_go_on_by_accident(ended, capsys):
    before = (ended / "metrics.jsonl").read_bytes()
    assert main.run(["--resume", f"--workdir={ended}", "--rounds=8"]) == 0
    assert (
        "has ended after 3 of 8 rounds: pre/acc has reached" in capsys.readouterr().out
    )
    assert (ended / "metrics.jsonl").read_bytes() == before
    config = runs.read_config(ended)
    assert config.rounds == 6 and recorded.is_complete(ended, config)
    assert not recorded.is_complete(ended, config.replace(stop_at=None))


def test_an_ended_run_is_scored_by_other_targets(ended, tmp_path):
    # which the other tests read, in any order
    path = shutil.copytree(ended, tmp_path / "ended")
    assert main.run(["--resume", f"--workdir={path}", "--targets=acc:0.01"]) == 0
    summary = runs.read_json(path / "summary.json")
    assert (
        summary["targets"]["score"] == "acc"
        and summary["rounds"] == 3
        and "ended" in summary
    )
    assert (path / "metrics.jsonl").read_bytes() == (
        ended / "metrics.jsonl"
    ).read_bytes()


def test_a_whole_run_that_would_have_ended_before_is_not_mixed_with_others(
    whole, ended, goal
):
    config = runs.read_config(whole).replace(stop_at=goal.removeprefix("--stop_at="))
    with pytest.raises(
        InputError,
        match="of 6 rounds, which would have ended after 3: pre/acc has reached",
    ):
        many._found(whole, config)
    assert (
        many._found(whole, config.replace(stop_at="pre/acc:1"))
        == many._found(ended, config)
        == (True, True)
    )
    with pytest.raises(
        InputError, match="of 3 rounds, which would have ended after 1: pre/acc has"
    ):
        many._found(ended, config.replace(stop_at="pre/acc:0.01"))


@pytest.mark.slow  # test_checkpoint.py has a run that grows
def test_with_another_end_it_goes_on_as_if_it_had_not_ended(
    whole, ended, monkeypatch, tmp_path
):
    """As a sweep has it, where the flag is left out."""
    # which the other tests read, in any order
    ended = shutil.copytree(ended, tmp_path / "ended")
    monkeypatch.setattr(many, "_found", lambda path, config: (False, True))
    config = runs.read_config(ended).replace(stop_at=None)
    member = many.Member({"hparams": {}}, config, {}, ended)
    assert many.run([member]) == (0, False)
    assert (ended / "metrics.jsonl").read_bytes() == (
        whole / "metrics.jsonl"
    ).read_bytes()
    assert runs.read_json(ended / "summary.json")["rounds"] == 6


def row(t, value, point="val", name="acc"):
    return {"round": t, "loss": 1.0, f"{point}/{name}": value}


def why(config, rows, headline=("acc", "max")):
    found = stopping.progress(config, headline, rows)
    return found and found.why()


@pytest.mark.parametrize(
    "values, way, ends",
    [
        ((0.5, 0.4, 0.4), "max", True),
        ((0.5, 0.4, 0.6), "max", False),
        ((0.5, 0.5, 0.5), "max", True),  # the same is no better
        ((0.5, 0.4, 0.3), "min", False),
        ((0.3, 0.4, 0.5), "min", True),
        ((0.5, None, None), "max", True),  # nor is one that is not finite
        ((None, 0.5, None), "max", False),
    ],
)
def test_patience_counts_evaluations_without_a_better_validation_score(
    values, way, ends
):
    config = Config(algo="fedavg", patience=2)
    # which is not evaluated
    rows = [row(2 * t, x) for t, x in enumerate(values)] + [{"round": 5, "loss": 1.0}]
    assert bool(why(config, rows, ("acc", way))) == ends
    assert not why(config, [{**x, "val/acc": None} for x in rows], ("acc", way))
    assert why(config.replace(patience=0), rows) is None


@pytest.mark.parametrize(
    "values, rounds",
    [((0.5, 0.4, 0.4, 0.4, 0.6), 5), ((0.5, 0.6), None), ((0.5, 0.4, 0.4), 5)],
)
def test_the_first_end_counts_also_where_the_score_improves_after_it(values, rounds):
    rows = [row(2 * t, x) for t, x in enumerate(values)]
    found = stopping.first_end(Config(algo="fedavg", patience=2), ("acc", "max"), rows)
    assert (found and found.rounds) == rounds


@pytest.mark.slow  # two runs
# the deviation of an infinite score
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_run_with_an_infinite_validation_score_can_be_resumed(tmp_path, monkeypatch):
    apart = validation.apart

    def infinite(found):
        result, held_out = apart(found)
        return result, {
            point: {n: np.where(np.arange(5), x, np.inf) for n, x in of.items()}
            for point, of in held_out.items()
        }

    monkeypatch.setattr(validation, "apart", infinite)
    path = tmp_path / "run"
    assert main.run([*RUN, "--rounds=2", f"--workdir={path}"]) == 0
    first = runs.read_rows(path / "metrics.jsonl")[0]
    assert (
        first["val/acc"] is None
        and first["val/acc_clients"] == 4
        and first["pre/acc"] is not None
    )
    assert main.run(["--resume", "--rounds=3", f"--workdir={path}"]) == 0


def test_a_goal_is_at_the_point_of_the_preset_and_in_the_direction_of_the_score():
    # whose headline is post/acc
    config = Config(algo="fedrep", preset="pfedc_mnist", stop_at="acc:0.9")
    assert why(config, [row(0, 0.95, "pre")]) is None
    assert why(config, [row(0, 0.95, "post")]) and why(
        config.replace(preset=None), [row(0, 0.95, "pre")]
    )
    assert why(config.replace(algo="fedavg"), [row(0, 0.95, "pre")])  # but FedAvg's
    less = Config(algo="feddva", stop_at="pre/reconstruction:40")
    assert why(less, [row(3, 41.0, "pre", "reconstruction")]) is None
    assert "after 4 rounds" in why(
        less, [row(t, 44.0 - t, "pre", "reconstruction") for t in range(6)]
    )
    closing = {"round": 5, "pre/acc": 0.95}
    assert why(config.replace(preset=None), [closing]) is None


@pytest.mark.slow  # that a run ends is tested above, goals below
def test_a_goal_may_be_of_the_validation_examples_of_one_network(tmp_path, capsys):
    words = [
        "--algo=local",
        *TINY,
        "--model=linear,mlp",
        "--rounds=3",
        "--stop_at=val/acc@linear:0.001",
    ]
    assert main.run([*words, f"--workdir={tmp_path / 'x'}"]) == 0
    assert (
        "Ended after 1 round: val/acc@linear has reached 0.1%"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (["--stop_at=acc"], "write a score and its value"),
        (["--stop_at=nowhere/acc:0.9"], "one of pre, post, val"),
        (["--stop_at=acc:90"], "`stop_at` must be in (0, 1], got 90.0"),
        (["--stop_at=accc:0.9"], "did you mean 'acc'"),
        (
            ["--stop_at=post/untuned_acc:0.5", "--algo=fedbabu"],
            "score of fedbabu at post 'untuned_acc'",
        ),
        (
            ["--stop_at=mixed_acc:0.5", "--algo=fedfomo"],
            "score of fedfomo at pre 'mixed_acc'",
        ),
        (
            ["--stop_at=val/acc:0.9", "--val_fraction=0"],
            "--stop_at=val/acc:0.9 needs validation examples",
        ),
        (
            ["--patience=2", "--val_fraction=0"],
            "--patience=2 needs validation examples",
        ),
        (
            ["--patience=2", "--eval_every=0"],
            "--patience=2 needs evaluations before the last round",
        ),
        (["--patience=-1"], "`patience` must be in"),
    ],
)
def test_an_end_that_cannot_be_is_refused(words, said, tmp_path, capsys):
    assert (
        main.run(
            [
                "--algo=fedavg",
                *TINY,
                "--rounds=2",
                *words,
                f"--workdir={tmp_path / 'x'}",
            ]
        )
        == 2
    )
    assert said in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "user",
    [
        {"algo": "fedfomo", "stop_at": "post/mixed_acc:0.9"},
        {"algo": "fedbabu", "stop_at": "untuned_acc_micro:0.9"},
    ],
)
def test_a_goal_may_be_a_score_of_its_point_alone(user):
    small = {
        "data_fraction": 0.2,
        "clients": 5,
        "model": "linear",
        "val_fraction": 0.2,
        "hparams": {},
    }
    stopping.check_possible(build.prepare(settings.resolve(small | user)))


def test_none_is_no_goal():
    assert stopping.parse("none") is stopping.parse(None) is None
    with pytest.raises(InputError):
        stopping.parse("nothing")
