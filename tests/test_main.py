"""The command line: what it prints, what it leaves behind, and what it refuses."""

import csv
import inspect
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import build, describe, main, report, runs, settings
from experiments.presets import DEFAULT_PRESETS, PRESETS
from experiments.versions import compile_clock
from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.checks import BadInput
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.sources import DATASETS
from fedjax_pfl.models import MODELS
from fedjax_pfl.simulate import hyperparameters

pytestmark = pytest.mark.xdist_group("main")

TINY = ["--data_fraction=0.2", "--clients=5", "--width=1", "--epochs=1", "--model=linear", "--participation=0.5"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run and what it printed."""
    import contextlib
    import io

    path, out = tmp_path_factory.mktemp("runs") / "run", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main.run(["--algo=fedprox", *TINY, "--rounds=3", "--hparam=mu=2", f"--workdir={path}"]) == 0
    return path, out.getvalue()


def test_the_run_directory_is_complete(done):
    path, _ = done
    files = {
        "metrics.jsonl",
        "metrics.csv",
        "scores.jsonl",
        "curves.png",
        "partition.npz",
        "partition.png",
        "checkpoints",
    }
    files |= {f"{name}.json" for name in ("config", "versions", "layout", "partition", "summary")}
    assert {p.name for p in path.iterdir()} == files
    config = json.loads((path / "config.json").read_text())
    assert config.keys() == settings.SETTINGS.keys() | {"hparams"}
    assert (config["preset"], config["lr"], config["rounds"], config["clients"]) == ("digits", 0.1, 3, 5)
    assert config["hparams"] == {"mu": 2.0}
    versions = json.loads((path / "versions.json").read_text())
    assert versions["jax"] == jax.__version__ and {"python", "flax", "git", "device"} <= versions.keys()
    assert json.loads((path / "layout.json").read_text())["width"] == 1
    assert re.fullmatch("[0-9a-f]{64}", json.loads((path / "partition.json").read_text())["partition"])


def test_the_rows_of_a_run(done):
    path, _ = done
    rows, scores = runs.read_rows(path / "metrics.jsonl"), runs.read_rows(path / "scores.jsonl")
    assert [row["round"] for row in rows] == [row["round"] for row in scores] == [0, 1, 2, 3]
    assert "loss" not in rows[3] and "post/acc" not in rows[3] and "pre/acc_std" in rows[3]  # the closing row
    assert len(scores[0]["pre"]["acc"]) == 5 and len(scores[0]["post"]["acc"]) == len(scores[0]["ids"]) == 2
    assert rows[0]["pre/acc"] == pytest.approx(np.mean(scores[0]["pre"]["acc"]))
    latest = {}
    for row, score in zip(rows[:3], scores, strict=False):
        latest |= dict(zip(score["ids"], score["post"]["acc"], strict=True))
        assert row["post_latest/acc"] == pytest.approx(np.mean(list(latest.values())))
    with open(path / "metrics.csv") as file:
        table = list(csv.DictReader(file))
    assert float(table[2]["pre/acc"]) == rows[2]["pre/acc"] and table[3]["loss"] == ""


def test_the_summary_says_what_each_number_is(done):
    path, out = done
    rows, summary = runs.read_rows(path / "metrics.jsonl"), json.loads((path / "summary.json").read_text())
    assert summary["status"] == "complete" and summary["rounds"] == 3
    assert summary["seconds"]["compile"] > 0 and summary["seconds"]["train"] > 0
    acc = summary["scores"]["pre"]["acc"]
    series = [row["pre/acc"] for row in rows]
    assert acc["macro"] == acc["course"]["last"]["value"] == series[-1]
    assert acc["course"]["best"]["value"] == max(series) and "optimistic" in acc["course"]["best"]["note"]
    assert acc["course"]["mean_of_last"] == {"evaluations": 4, "value": pytest.approx(np.mean(series))}
    assert summary["traffic"]["down"] == sum(row["traffic/down"] for row in rows[:3]) == 3 * 2 * 650
    assert "round 3/3" in out and "latest after" in out and "mean of last" in out and "optimistic" in out


def test_a_second_run_does_not_overwrite_the_first(done, capsys):
    assert main.run(["--algo=ditto", f"--workdir={done[0]}"]) == 2
    assert "is not empty: continue it with --resume, or choose another --workdir" in capsys.readouterr().err


def test_list_names_everything(capsys):
    assert main.run(["--list"]) == 0
    out = capsys.readouterr().out
    for name in (*ALGORITHMS, *DATASETS, *PARTITIONS, *MODELS, *PRESETS):
        assert re.search(rf"^  {re.escape(name)}  +\S", out, re.MULTILINE), name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_describe_shows_paper_defaults_and_ranges(name, capsys):
    assert main.run([f"--describe={name}"]) == 0
    out = capsys.readouterr().out
    assert inspect.getdoc(ALGORITHMS[name]).splitlines()[0] in out
    if name != "local":  # which is nobody's
        assert "Reference" in out
    rows = describe.hyperparameters(ALGORITHMS[name])
    assert rows.keys() == hyperparameters(ALGORITHMS[name]).keys()
    for hparam, row in rows.items():
        assert f"{hparam}={row['default']} (" in out
        assert re.search(r"[\[(][\d.]+, [\w. ]+[\])]|one of|true or false", row["text"]), f"{hparam} has no range"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings(name, capsys):
    preset = PRESETS[name]
    assert preset.settings.keys() <= settings.SETTINGS.keys()
    assert main.run([f"--describe={name}"]) == 0
    out = capsys.readouterr().out
    assert preset.description in out and all(number in out for number in preset.published.values())
    config = settings.resolve({"algo": "fedavg", "preset": name})
    assert all(config[key] == value for key, value in preset.settings.items() if key != "algo")
    assert settings.resolve({"algo": "fedavg", "preset": name, "lr": 7.0})["lr"] == 7.0
    assert set(DEFAULT_PRESETS.values()) <= PRESETS.keys()


def test_help_shows_every_flag(capsys):
    assert main.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{name}" in out or f"--[no]{name}" in out for name in (*settings.SETTINGS, "hparam", "resume"))


def method(task, *, lam: float = 1.0, k: int | None = None, n: int = 3, fast: bool = False, kind: str = "a"):
    """A factory with every type of hyperparameter."""


def test_hyperparameters_are_typed_by_the_factory():
    texts = {"lam": "2", "k": "4", "n": "-1", "fast": "True", "kind": "7"}
    assert settings.typed_all(method, texts) == {"lam": 2.0, "k": 4, "n": -1, "fast": True, "kind": "7"}
    assert type(settings.typed_all(method, {"lam": "2"})["lam"]) is float
    assert settings.typed_all(method, {"k": "none"}) == {"k": None}


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ({"lan": "2"}, "Unknown hyperparameter of method 'lan': did you mean 'lam'?"),
        ({"lam": "two"}, "--hparam lam=two must be a number"),
        ({"n": "1.5"}, "--hparam n=1.5 must be a whole number"),
        ({"n": "none"}, "--hparam n=none must be a whole number"),
        ({"fast": "1"}, "--hparam fast=1 must be true or false"),
    ],
)
def test_wrong_hyperparameters(texts, sentence):
    with pytest.raises(BadInput) as error:
        settings.typed_all(method, texts)
    assert sentence in str(error.value)


def test_the_optimizer_is_pytorchs():
    """Clip, then decay, then momentum: two steps by hand."""
    lr, momentum, decay, clip = 0.1, 0.9, 0.01, 1.0
    w, g = np.array([1.0, -2.0]), np.array([3.0, 4.0])
    optimizer = build.optimizer(momentum, decay, clip)(lr)
    params, state, buffer = jnp.asarray(w), optimizer.init(jnp.asarray(w)), 0
    for _ in range(2):
        updates, state = optimizer.update(jnp.asarray(g), state, params)
        params = optax.apply_updates(params, updates)
        buffer = momentum * buffer + g * clip / np.linalg.norm(g) + decay * w
        w = w - lr * buffer
    np.testing.assert_allclose(params, w, rtol=1e-6)


def test_a_run_directory_is_named_after_what_was_asked():
    def named(*flags):
        user = settings.given(settings.parse(list(flags)))
        return settings.default_workdir(user, settings.resolve(user))

    assert named("--algo=pfedc") == "runs/pfedc-digits-pathological-seed0"
    assert named("--algo=ditto", "--hparam=lam=2", "--lr=0.2", "--seed=3", "--rounds=9") == (
        "runs/ditto-digits-pathological-seed3-lr=0.2-lam=2"
    )
    assert "/" not in named("--algo=fedavg", "--dataset=npz:/a/b.npz").removeprefix("runs/")


def test_steps_take_the_place_of_epochs():
    config = settings.resolve({"algo": "fedavg", "steps": 7})
    assert (config["steps"], config["epochs"]) == (7, None)


def test_a_schedule_over_rounds_cannot_grow(monkeypatch):
    def scheduled(task, *, scale: float = 1.0):
        method = ALGORITHMS["local"](task._replace(lr=task.lr * scale / task.rounds))
        return method

    monkeypatch.setitem(ALGORITHMS, "scheduled", scheduled)
    for algo in ("scheduled", "fedavg"):
        experiment = build.prepare(settings.resolve({"algo": algo, "model": "linear", "rounds": 6}))
        build.check_growth(experiment, 6)
        if algo == "fedavg":
            build.check_growth(experiment, 4)
            continue
        with pytest.raises(
            BadInput, match="scheduled has a schedule over the rounds, so rounds cannot grow from 4 to 6"
        ):
            build.check_growth(experiment, 4)


def test_a_diverging_run_keeps_what_it_wrote(tmp_path, capsys):
    path = tmp_path / "run"
    assert main.run(["--algo=fedavg", *TINY, "--rounds=3", "--lr=1e38", f"--workdir={path}"]) == main.DIVERGED
    said = capsys.readouterr().err
    assert "is not finite in round" in said and f"kept in {path}" in said and "Traceback" not in said
    assert json.loads((path / "summary.json").read_text())["status"] == "diverged"


def test_an_unwritable_file_ends_the_run_with_a_sentence(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs.RunDirectory, "append", full)
    monkeypatch.setattr(simulate, "rounds", lambda *_, **__: iter([simulate.Result(0, None, {}, None)]))
    assert main.run(["--algo=fedavg", *TINY, f"--workdir={tmp_path / 'run'}"]) == main.UNWRITABLE
    said = capsys.readouterr().err
    assert "No space left on device" in said and "make room, then go on with" in said and "--resume" in said


def test_compile_time_is_the_union_of_its_spans():
    with compile_clock() as seconds:
        for start, end in ((0, 2), (1, 1.5), (4, 5), (4.5, 6)):
            jax.monitoring.record_event_time_span("/jax/core/compile/x", start, end)
        jax.monitoring.record_event_time_span("/jax/other", 0, 100)
        assert seconds() == 4


def test_the_course_of_a_score():
    rows = [{"round": t, "pre/acc": value} for t, value in enumerate((0.1, 0.9, 0.9, None, 0.5))]
    course = report.course(rows, "pre", "acc")
    assert course["last"] == {"round": 4, "value": 0.5} and course["best"]["round"] == 1
    assert course["mean_of_last"] == {"evaluations": 4, "value": pytest.approx(0.6)}
    assert report.course(rows, "post", "acc") is None


BAD = [
    ("", "Say which method to run with --algo=NAME: one of local, fedavg"),
    ("--algo=fedavgg", "Unknown algo 'fedavgg': did you mean 'fedavg'?"),
    ("--algo=fedavg --dataset=digit", "Unknown data set 'digit': did you mean 'digits'?"),
    ("--algo=fedavg --model=lenett", "Unknown model 'lenett': did you mean 'lenet'?"),
    ("--algo=fedavg --partition=dirichlett", "Unknown partition 'dirichlett': did you mean 'dirichlet'?"),
    ("--algo=fedavg --preset=pfedc_mnst", "Unknown preset 'pfedc_mnst': did you mean 'pfedc_mnist'?"),
    ("--algo=ditto --hparam=lamda=1", "Unknown hyperparameter of ditto 'lamda': did you mean 'lam'?"),
    ("--algo=ditto --hparam=lam", "--hparam=lam: write it as --hparam name=value"),
    ("--algo=ditto --hparam=lam=-1", "lam=-1.0 is outside its range [0, inf)"),
    ("--algo=ditto --hparam=lam=nan", "lam=nan is outside its range"),
    ("--algo=fedavg --hparam=mu=1", "fedavg has no hyperparameters"),
    ("--algo=fedavg --learning_rate=1", "Unknown flag --learning_rate"),
    ("--algo=fedavg --epoch=1", "Unknown flag --epoch: did you mean --epochs?"),
    ("--algo=fedavg --rounds=1.5", "--rounds=1.5 must be a whole number"),
    ("--algo=fedavg --lr=fast", "--lr=fast must be a number"),
    ("--algo=fedavg rounds=5", "Unexpected argument 'rounds=5': write settings as --name=value"),
    ("--algo=fedavg --lr=0", "lr=0.0 is outside its range (0, inf)"),
    ("--algo=fedavg --lr_decay=0", "lr_decay=0.0 is outside its range (0, inf)"),
    ("--algo=fedavg --momentum=1", "momentum=1.0 is outside its range [0, 1)"),
    ("--algo=fedavg --weight_decay=-1", "weight_decay=-1.0 is outside its range"),
    ("--algo=fedavg --clip=0", "clip=0.0 is outside its range (0, inf)"),
    ("--algo=fedavg --batch_size=0", "batch_size=0 is outside its range"),
    ("--algo=fedavg --rounds=-1", "rounds=-1 is outside its range"),
    ("--algo=fedavg --epochs=1 --steps=2", "give exactly one of the two"),
    ("--algo=fedavg --participation=0", "participation=0.0 is outside its range (0, 1]"),
    ("--algo=fedavg --participation=1:0.5", "write it as 0.5:1.0"),
    ("--algo=fedavg --participation=half", "--participation=half must be a number, or a range as 0.1:1"),
    ("--algo=fedavg --width=wide", "--width=wide must be a whole number, or auto"),
    ("--algo=fedavg --width=0", "width=0 is outside its range"),
    ("--algo=fedavg --checkpoint_every=0", "checkpoint_every=0 is outside its range"),
    ("--algo=fedavg --eval_every=-1", "eval_every=-1 is outside its range"),
    ("--algo=fedavg --seed=-1", "seed=-1 is outside its range"),
    ("--algo=fedavg --partition=dirichlet --alpha=0", "alpha=0.0 is outside its range"),
    ("--algo=fedavg --classes_per_client=11", "classes_per_client=11 is outside its range [1, 10]"),
    ("--algo=fedavg --clients=5000", "clients=5000 is outside its range"),
    ("--algo=fedavg --data_fraction=0", "data_fraction=0.0 is outside its range (0, 1]"),
    ("--algo=fedavg --val_fraction=1", "val_fraction=1.0 is outside its range [0, 1)"),
    ("--algo=fedavg --test_split=mine", "Unknown test_split 'mine'"),
    ("--algo=fedavg --test_split=official", "digits has no official test set"),
    ("--algo=fedavg --bn_stats=global", "Unknown bn_stats 'global'"),
    ("--algo=fedavg --model=cnn", "needs images of at least 16x16 pixels, got 8x8"),
    ("--algo=fedavg --dataset=npz:nowhere.npz", "There is no file 'nowhere.npz'"),
    ("--algo=fedavg --dataset=mnist --data_dir=/nowhere", "is not prepared in /nowhere: run "),
    ("--algo=fedavg --partition=file:nowhere.npz", "There is no file 'nowhere.npz'"),
    ("--algo=pfedc --hparam=tasks=consecutive:11", "consecutive needs a number of tasks from 1 to 10"),
    ("--algo=fedavg --resume --workdir=/nowhere", "/nowhere is not a run directory"),
    ("--describe=dito", "Unknown method or preset 'dito': did you mean 'ditto'?"),
]


@pytest.mark.parametrize(("flags", "sentence"), BAD, ids=[flags or "nothing" for flags, _ in BAD])
def test_bad_input_is_one_sentence_and_compiles_nothing(flags, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    events = []
    listen = lambda name, _start, _end, **_: events.append(name)
    jax.monitoring.register_event_time_span_listener(listen)
    try:
        assert main.run(flags.split()) == main.BAD_INPUT
    finally:
        jax.monitoring.unregister_event_time_span_listener(listen)
    out, said = capsys.readouterr()
    assert sentence in said and said.count("\n") == 1 and "Traceback" not in said
    assert not out and not list(tmp_path.iterdir())
    assert "/jax/core/compile/backend_compile_duration" not in events
