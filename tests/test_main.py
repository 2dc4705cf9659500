"""The command line: what it prints, what it leaves behind, and what it refuses."""

import csv
import inspect
import json
import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

from experiments import (
    account,
    build,
    describe,
    entry,
    flags,
    layouts,
    main,
    networks,
    recorder,
    report,
    runs,
    session,
    settings,
    tables,
    values,
    versions,
)
from experiments.config import SETTINGS, Config
from experiments.presets import DEFAULT_PRESETS, PRESETS
from experiments.recorded import Devices, Layout
from experiments.versions import compile_clock
from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data.datasets import DATASETS
from fedjax_pfl.data.partitioners import PARTITIONS
from fedjax_pfl.engine import autotune, memory
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import MODELS
from fedjax_pfl.simulate import hyperparameters

MORE = ["--rounds=3", "--hparam=mu=2", "--targets=0.5,0.9", "--verbose"]
TINY = [
    "--data_fraction=0.2",
    "--clients=5",
    "--width=1",
    "--epochs=1",
    "--model=linear",
    "--participation=0.5",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run and what it printed."""
    import contextlib
    import io

    path, out = tmp_path_factory.mktemp("runs") / "run", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main.run(["--algo=fedprox", *TINY, *MORE, f"--workdir={path}"]) == 0
    return path, out.getvalue()


def test_the_run_directory_is_complete(done):
    path, out = done
    files = {
        "metrics.jsonl",
        "metrics.csv",
        "clients.csv",
        "scores.jsonl",
        "curves.png",
        "partition.npz",
        "partition.png",
        "checkpoints",
    }
    files |= {
        f"{name}.json"
        for name in ("config", "versions", "layout", "partition", "summary")
    }
    assert {p.name for p in path.iterdir()} == files
    config = json.loads((path / "config.json").read_text())
    assert config.keys() == SETTINGS.keys() | {"hparams", "digests"}
    assert (config["preset"], config["lr"], config["rounds"], config["clients"]) == (
        "digits",
        0.1,
        3,
        5,
    )
    assert config["hparams"] == {"mu": 2.0}
    software = json.loads((path / "versions.json").read_text())
    assert (
        software["jax"] == jax.__version__
        and {"python", "flax", "git", "device"} <= software.keys()
    )
    laid = json.loads((path / "layout.json").read_text())
    assert laid["width"] == 1 and 0 < laid["memory"]["peak"] < laid["memory"]["free"]
    assert f"; {memory.say(memory.Memory(**laid['memory']))}" in out.replace("\n", " ")
    hashes = json.loads((path / "partition.json").read_text())
    assert re.fullmatch("[0-9a-f]{64}", hashes["partition"]) and hashes["moved"] == 0


def test_the_rows_of_a_run(done):
    path, _ = done
    rows, scores = (
        runs.read_rows(path / "metrics.jsonl"),
        runs.read_rows(path / "scores.jsonl"),
    )
    assert (
        [row["round"] for row in rows]
        == [row["round"] for row in scores]
        == [0, 1, 2, 3]
    )
    # the closing row
    assert (
        "loss" not in rows[3] and "post/acc" not in rows[3] and "pre/acc_std" in rows[3]
    )
    assert (
        len(scores[0]["pre"]["acc"]) == 5
        and len(scores[0]["post"]["acc"]) == len(scores[0]["ids"]) == 2
    )
    assert rows[0]["pre/acc"] == pytest.approx(np.mean(scores[0]["pre"]["acc"]))
    assert (rows[0]["pre/acc_clients"], rows[0]["post/acc_clients"]) == (5, 2)
    latest = {}
    for row, score in zip(rows[:3], scores, strict=False):
        latest |= dict(zip(score["ids"], score["post"]["acc"], strict=True))
        assert row["post_latest/acc"] == pytest.approx(np.mean(list(latest.values())))
        assert row["post_latest/acc_clients"] == len(latest)
    with open(path / "metrics.csv") as file:
        table = list(csv.DictReader(file))
    assert float(table[2]["pre/acc"]) == rows[2]["pre/acc"] and table[3]["loss"] == ""


def test_the_summary_says_what_each_number_is(done):
    path, out = done
    rows, summary = (
        runs.read_rows(path / "metrics.jsonl"),
        json.loads((path / "summary.json").read_text()),
    )
    assert summary["status"] == "complete" and summary["rounds"] == 3
    assert summary["seconds"]["compile"] > 0 and summary["seconds"]["train"] > 0
    acc = summary["scores"]["pre"]["acc"]
    series = [row["pre/acc"] for row in rows]
    assert acc["macro"] == acc["course"]["last"]["value"] == series[-1]
    assert (
        acc["course"]["best"]["value"] == max(series)
        and "optimistic" in acc["course"]["best"]["note"]
    )
    assert acc["course"]["mean_of_last"] == {
        "evaluations": 4,
        "value": pytest.approx(np.mean(series)),
    }
    assert (
        summary["traffic"]["down"]
        == sum(row["traffic/down"] for row in rows[:3])
        == 3 * 2 * 650
    )
    assert [
        summary["scores"][point]["acc"]["clients"] for point in ("pre", "post")
    ] == [5, 2]
    assert re.search(r"^ acc +before +5 .*\n +after +2 ", out, re.MULTILINE)  # clients
    # evaluations
    assert re.search(
        r"^ acc +before +([\d.]+ +){2}4 .*\n +after +([\d.]+ +){2}3 ", out, re.MULTILINE
    )
    assert (
        "round 3/3" in out
        and "latest after" in out
        and "last 10" in out
        and "optimistic" in out
    )


def test_the_run_says_when_it_reached_its_targets_and_what_that_took(done):
    path, out = done
    rows, summary = (
        runs.read_rows(path / "metrics.jsonl"),
        json.loads((path / "summary.json").read_text()),
    )
    sizes = np.load(path / "partition.npz")["train_sizes"]
    scores = runs.read_rows(path / "scores.jsonl")
    for row, score in zip(rows[:3], scores, strict=False):  # one epoch in batches of 10
        assert row["work/steps"] == sum(-(-sizes[i] // 10) for i in score["ids"])
        assert row["work/examples"] == sum(sizes[i] for i in score["ids"])
    assert "work/steps" not in rows[3]
    assert summary["targets"]["score"] == "acc"  # of the digits preset
    assert summary["work"]["client_flops"] == 2 * 2 * 640 * sum(
        row["work/examples"] for row in rows[:3]
    )
    for level in summary["targets"]["levels"]:
        over = [row for row in rows if row["pre/acc"] >= level["target"]]
        assert bool(over) == (level["pre"] is not None)
        if over:
            assert level["pre"]["rounds"] == level["pre"]["round"] == over[0]["round"]
            assert level["pre"]["down"] == sum(
                row["traffic/down"] for row in rows[: over[0]["round"]]
            )
    assert summary["targets"]["levels"][0]["post"]["rounds"] >= 1
    assert re.search(
        r"Rounds until the macro mean of acc first reached a target.*\n.*\n.*\n.*\n "
        r"0.5 +before ",
        out,
        re.S,
    )
    assert (
        summary["preset"]["name"] == "digits"
        and "reduced: data_fraction 0.2 of 1" in summary["preset"]["deviations"]
    )


def test_a_second_run_does_not_overwrite_the_first(done, capsys):
    assert main.run(["--algo=ditto", f"--workdir={done[0]}"]) == 2
    assert (
        "is not empty: continue it with --resume, or choose another --workdir"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("thesis.tex", "is not empty and holds no run: choose another"),
        ("layout.json", None),
        ("config.json.part", None),
    ],
)
def test_only_what_a_killed_start_left_is_overwritten(tmp_path, name, sentence):
    (tmp_path / name).write_text("")
    if sentence is None:
        return runs.check_free(tmp_path)
    with pytest.raises(InputError, match=sentence):
        runs.check_free(tmp_path)


@pytest.mark.parametrize("place", ["/dev/null/run", "x" * 300])
def test_an_unusable_run_directory_is_found_before_anything_is_measured(
    place, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layouts, "choose", None)
    assert main.run(["--algo=fedavg", f"--workdir={place}"]) == entry.BAD_INPUT
    said = capsys.readouterr().err
    assert "cannot be used (" in said and said.strip().endswith(
        "choose another --workdir."
    )


def test_a_run_that_cannot_fit_is_refused_before_it_begins(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(memory, "machine", lambda: (2**10, 2**10))
    assert (
        main.run(
            ["--algo=fedavg", *TINY, "--devices=2", f"--workdir={tmp_path / 'run'}"]
        )
        == entry.BAD_INPUT
    )
    said = capsys.readouterr().err
    assert said.startswith("The run would take about ") and said.endswith(
        ": take less than --devices=2.\n"
    )
    assert not list((tmp_path / "run").iterdir())


def test_a_partition_file_says_how_many_clients(done, tmp_path, monkeypatch, capsys):
    """Saved with 5 clients; the settings that the file decides are recorded as none of
    the user's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "p.npz").write_bytes((done[0] / "partition.npz").read_bytes())
    user = {
        "algo": "fedavg",
        "partition": "file:~/p.npz",
        "data_fraction": 0.2,
        "model": "linear",
    }
    config = build.prepare(settings.resolve(user)).config
    assert config.clients == 5 and config.test_split is None and config.alpha is None
    again = build.prepare(
        settings.resumed(config, {"hparams": {}, "clients": 5})
    ).config
    assert again == config
    with pytest.raises(
        InputError,
        match=r"`clients` must be 5, as in partition=file:.*p.npz, got 4",
    ):
        build.prepare(settings.resolve(user | {"clients": 4}))


def test_ctrl_c_says_whether_there_is_something_to_resume(
    done, tmp_path, monkeypatch, capsys
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "prepare", interrupted)
    assert (
        main.run(["--algo=fedavg", f"--workdir={tmp_path / 'new'}"])
        == entry.INTERRUPTED
    )
    assert (
        "Interrupted before the first round: nothing to resume."
        in capsys.readouterr().err
    )
    assert main.run(["--resume", f"--workdir={done[0]}"]) == entry.INTERRUPTED
    assert (
        f"Interrupted; go on with {session.command(done[0])}" in capsys.readouterr().err
    )


def test_list_names_everything(capsys):
    assert main.run(["--list"]) == 0
    out = capsys.readouterr().out
    for name in (*ALGORITHMS, *DATASETS, *PARTITIONS, *MODELS, *PRESETS):
        assert re.search(rf"^  {re.escape(name)}  +\S", out, re.MULTILINE), name


NO_UNSEEN = (
    "fedamp",
    "fedfomo",
    "pfedhn",
    "mocha",
    "fd",
    "mnfl",
    "mnfl_het",
    "fedmd",
    "sim_pfd",
    "topk_pfd",
)
NO_UNSEEN += ("privacy_pfedc",)


# seconds to trace, for what is said of unseen clients
LONG = (
    "feddva",
    "pfedafm",
    "fml",
    "fedapen",
    "fedcp",
    "fedkd",
    "fedem",
    "pfedhn",
    "privacy_pfedc",
)


@pytest.mark.parametrize(
    "name", [toy.slow(name) if name in LONG else name for name in ALGORITHMS]
)
def test_describe_shows_paper_defaults_and_ranges(name, capsys):
    assert main.run([f"--describe={name}"]) == 0
    out = capsys.readouterr().out
    assert inspect.getdoc(ALGORITHMS[name]).splitlines()[0] in out
    assert (
        describe.arguments(inspect.getdoc(ALGORITHMS[name])).keys()
        == hyperparameters(ALGORITHMS[name]).keys()
    )
    if name != "local":  # which is nobody's
        assert "Reference" in out
    way = (
        "no way; "
        if name in NO_UNSEEN
        else "a round of their own under the trained server.\n"
    )
    assert f"Unseen clients (--unseen): {way}" in out
    rows = describe.hyperparameters(ALGORITHMS[name])
    assert rows.keys() == hyperparameters(ALGORITHMS[name]).keys()
    for hparam, row in rows.items():
        listed = row["type"].startswith("one of") and all(
            x in row["text"] for x in row["type"][7:].split(", ")
        )
        assert (
            "\n  "
            f"{hparam}={row['default']}{'' if listed else ' (' + row['type'] + ')'}  "
            in out
        )
        assert re.search(
            r"[\[(]-?(?:[\d.]+|inf), [\w. ]+[\])]|one of|true or false", row["text"]
        ), f"{hparam} has no range"


def test_both_methods_of_pfedc_name_every_map_of_tasks(capsys):
    for name in ("pfedc", "privacy_pfedc"):
        assert main.run([f"--describe={name}"]) == 0
        row = capsys.readouterr().out.split("\n  tasks=")[1].split("\n  head=")[0]
        assert all(
            choice in row
            for choice in (
                "class",
                "single",
                "consecutive:T",
                "superclass",
                "file:PATH",
                "map:",
            )
        )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings(name, capsys):
    preset = PRESETS[name]
    assert preset.settings.keys() <= SETTINGS.keys()
    assert main.run([f"--describe={name}"]) == 0
    out = capsys.readouterr().out
    assert preset.description in out and f"--preset={name}" in out
    for cell in (preset.published, *(cell.numbers for cell in preset.cells)):
        assert all(number in out for number in cell.values())
    config = settings.resolve({"algo": "fedavg", "preset": name, "hparams": {}})
    assert all(
        getattr(config, key) == value
        for key, value in preset.settings.items()
        if key != "algo"
    )
    assert settings.resolve({"algo": "fedavg", "preset": name, "lr": 7.0}).lr == 7.0
    assert set(DEFAULT_PRESETS.values()) <= PRESETS.keys()


def test_help_shows_every_flag(capsys):
    assert main.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(
        f"--{name}" in out or f"--[no]{name}" in out
        for name in (*SETTINGS, "hparam", "resume")
    )


def method(
    task,
    *,
    lam: float = 1.0,
    k: int | None = None,
    n: int = 3,
    fast: bool = False,
    kind: str = "a",
):
    """A factory with every type of hyperparameter."""


def test_hyperparameters_are_typed_by_the_factory():
    texts = {"lam": "2", "k": "4", "n": "-1", "fast": "True", "kind": "7"}
    assert values.typed_all(method, texts) == {
        "lam": 2.0,
        "k": 4,
        "n": -1,
        "fast": True,
        "kind": "7",
    }
    assert type(values.typed_all(method, {"lam": "2"})["lam"]) is float
    assert values.typed_all(method, {"k": "none"}) == {"k": None}


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
    with pytest.raises(InputError) as error:
        values.typed_all(method, texts)
    assert sentence in str(error.value)


def test_the_optimizer_is_pytorchs():
    """Clip, then decay, then momentum: two steps by hand."""
    lr, momentum, decay, clip = 0.1, 0.9, 0.01, 1.0
    w, g = np.array([1.0, -2.0]), np.array([3.0, 4.0])
    optimizer = networks.optimizer(momentum, decay, clip)(lr)
    params, state, buffer = jnp.asarray(w), optimizer.init(jnp.asarray(w)), 0
    for _ in range(2):
        updates, state = optimizer.update(jnp.asarray(g), state, params)
        params = optax.apply_updates(params, updates)
        buffer = momentum * buffer + g * clip / np.linalg.norm(g) + decay * w
        w = w - lr * buffer
    np.testing.assert_allclose(params, w, rtol=1e-6)


def test_a_run_directory_is_named_after_what_was_asked():
    def named(*given):
        user = flags.parse(list(given), flags.OF_A_RUN).settings()
        return settings.default_workdir(user, settings.resolve(user))

    assert named("--algo=pfedc") == "runs/pfedc-digits-dirichlet_hsu-seed0"
    assert named(
        "--algo=ditto", "--hparam=lam=2", "--lr=0.2", "--seed=3", "--rounds=9"
    ) == ("runs/ditto-digits-dirichlet_hsu-seed3-lr=0.2-lam=2")
    name = named(
        "--algo=fedavg", "--dataset=npz:/a/b.npz", "--participation=0.1:1"
    ).removeprefix("runs/")
    assert "/" not in name and ":" not in name


def test_steps_take_the_place_of_epochs_and_epochs_of_steps(monkeypatch):
    config = settings.resolve({"algo": "fedavg", "steps": 7})
    assert (config.steps, config.epochs) == (7, None)
    preset = PRESETS["digits"]
    monkeypatch.setitem(
        PRESETS, "digits", preset._replace(settings={**preset.settings, "steps": 9})
    )
    config = settings.resolve({"algo": "fedavg", "epochs": 2})
    assert (config.steps, config.epochs) == (None, 2)


def test_clients_without_a_full_batch_are_named(caplog):
    user = {
        "algo": "fedavg",
        "model": "linear",
        "drop_last": True,
        "clients": 5,
        "data_fraction": 0.2,
    }
    sizes = build.prepare(settings.resolve(user)).partition.train_sizes
    build.prepare(settings.resolve(user | {"batch_size": int(sizes.max())}))
    short = (sizes < sizes.max()).sum()
    assert (
        short
        and f"{short} of 5 clients have fewer than {sizes.max()} examples"
        in caplog.text
    )


def test_examples_that_were_moved_are_said():
    user = {
        "algo": "fedavg",
        "model": "linear",
        "partition": "dirichlet_class",
        "alpha": 0.01,
        "clients": 50,
    }
    experiment = build.prepare(settings.resolve(user))
    assert (
        f"; {experiment.partition.moved} examples moved to clients below the minimum)"
        in account.describe(experiment)
    )


def test_a_width_that_was_not_given_is_said_to_be_chosen():
    laid = Layout(4, "xla", Devices("cpu", "cpu", 1))
    assert (
        layouts.say(laid, True) == "width 4 (chosen here; --width=N sets it) on 1 x cpu"
    )
    assert layouts.say(laid, False) == "width 4 on 1 x cpu"


def test_what_is_tried_is_said_by_whoever_starts():
    logger = logging.getLogger(autotune.__name__)
    logger.setLevel(logging.NOTSET)
    main.start(flags.parse([], {}))
    assert logger.isEnabledFor(logging.INFO)


@pytest.mark.parametrize(
    ("recorded", "accepted"), [("mlp", True), ("cnn", True), ("lenet", False)]
)
def test_an_automatic_model_is_the_recorded_one(recorded, accepted):
    config = settings.resolve({"algo": "fedavg", "model": recorded})
    if accepted:
        assert settings.resumed(config, {"hparams": {}, "model": "auto"}) == config
        return
    with pytest.raises(InputError, match=r"differ: model \(recorded lenet, now auto\)"):
        settings.resumed(config, {"hparams": {}, "model": "auto"})


@pytest.mark.parametrize(
    ("name", "differs"),
    [("git", True), ("optax", True), ("platform", False), ("python", False)],
)
def test_other_software_is_noticed(name, differs):
    now = versions.versions()
    assert not versions.changed(now, now)
    assert versions.changed(now | {name: "old"}, now) == (
        [f"{name} old -> {now[name]}"] if differs else []
    )


@pytest.mark.parametrize(
    "name", ["jax_default_prng_impl", "jax_threefry_partitionable"]
)
def test_other_random_numbers_are_refused(name):
    now = versions.versions()
    versions.check_draws(now)
    versions.check_draws({})  # of a version that did not record it
    assert not versions.changed(
        {x: value for x, value in now.items() if x != name}, now
    )
    with pytest.raises(InputError, match=f"so set {name.upper()}=rbg"):
        versions.check_draws(now | {name: "rbg"})


@pytest.mark.slow  # a process of its own
def test_an_output_without_arrows_gets_a_question_mark():
    code = (
        "import sys; sys.argv[1:] = ['--describe=ditto']; from experiments import "
        "main; main.main()"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env=environment,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0 and b"(?)" in done.stdout


def test_compilations_are_kept_where_the_user_says_or_with_the_decoded_data(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    try:
        for given in (None, str(tmp_path / "mine")):
            jax.config.update("jax_compilation_cache_dir", given)
            autotune.keep_compilations()
            kept = jax.config.jax_compilation_cache_dir
            assert (
                kept == given if given else kept.startswith(str(tmp_path / "compiled"))
            )
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.slow
def test_a_schedule_over_rounds_cannot_grow(monkeypatch):
    def scheduled(task, *, scale: float = 1.0):
        method = ALGORITHMS["local"](task._replace(lr=task.lr * scale / task.rounds))
        return method

    monkeypatch.setitem(ALGORITHMS, "scheduled", scheduled)
    for algo in ("scheduled", "fedavg"):
        experiment = build.prepare(
            settings.resolve({"algo": algo, "model": "linear", "rounds": 6})
        )
        build.check_growth(experiment, 6)
        if algo == "fedavg":
            build.check_growth(experiment, 4)
            continue
        with pytest.raises(
            InputError,
            match=(
                "scheduled has a schedule over the rounds, so rounds cannot grow from "
                "4 to 6"
            ),
        ):
            build.check_growth(experiment, 4)


@pytest.mark.parametrize(
    "flags, what",
    [("fedavg --lr=1e38", "loss"), toy.slow("ditto --hparam=lam=1e30", "state")],
)
def test_a_diverging_run_keeps_what_it_wrote(flags, what, tmp_path, capsys):
    """Ditto's loss is that of the global model, and its clients predict with another
    one."""
    path = tmp_path / "run"
    assert (
        main.run([*f"--algo={flags}".split(), *TINY, "--rounds=3", f"--workdir={path}"])
        == entry.DIVERGED
    )
    said = capsys.readouterr().err
    assert re.match(rf"The {what} .*of clients? \d.* is not finite in round", said)
    assert f"kept in {path}" in said and "Traceback" not in said
    summary = json.loads((path / "summary.json").read_text())
    assert summary["status"] == "diverged"
    # of the preset, not of the 3 that were asked for
    rounds = f"rounds {summary['rounds']} of 20"
    assert summary["rounds"] < 3 and rounds in summary["preset"]["deviations"]
    table = tables.table([path])
    assert f"| diverged after {summary['rounds']} rounds |" in table and rounds in table


def test_an_unwritable_file_ends_the_run_with_a_sentence(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs.RunDirectory, "append", full)
    monkeypatch.setattr(
        simulate, "rounds", lambda *_, **__: iter([simulate.Result(0, None, {}, None)])
    )
    assert (
        main.run(["--algo=fedavg", *TINY, f"--workdir={tmp_path / 'run'}"])
        == entry.UNWRITABLE
    )
    said = capsys.readouterr().err
    assert (
        "No space left on device" in said
        and "make room, then go on with" in said
        and "--resume" in said
    )
    assert session.stopped(OSError(5, "Input/output error"), [tmp_path]) == 4
    said = capsys.readouterr().err
    assert "Input/output error" in said and said.strip().endswith(": start again")


def test_work_beside_the_rounds_takes_a_twentieth_of_the_time(monkeypatch):
    """Rounds of 0.1 seconds, beside which work of half a second is asked for after
    each."""
    clock = [0.0]
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(
        recorder.layouts,
        "program",
        lambda *_: SimpleNamespace(unplace=lambda state: state),
    )
    saved, shown = [], []

    def show(_):
        shown.append(len(saved))
        clock[0] += 0.5

    run = SimpleNamespace(rows=[], save=lambda done, _: saved.append(done))
    experiment = SimpleNamespace(config=Config(), headline=("acc", "max"))
    one = recorder.Recorder(run, experiment, None, None, None, None)
    monkeypatch.setattr(one, "show", show)
    for t in range(1000):
        one.keep("running", t, None)
        clock[0] += 0.1
    assert len(saved) == 1000 and shown[0] == 1
    assert 0.5 * len(shown) / clock[0] == pytest.approx(recorder.SHARE, abs=0.01)
    one.keep("interrupted", 1000, None)
    assert shown[-1] == 1001


def test_compile_time_is_the_union_of_its_spans():
    with compile_clock() as seconds:
        for start, end in ((0, 2), (1, 1.5), (4, 5), (4.5, 6)):
            jax.monitoring.record_event_time_span("/jax/core/compile/x", start, end)
        jax.monitoring.record_event_time_span("/jax/other", 0, 100)
        assert seconds() == 4


def test_the_course_of_a_score():
    keys = [
        f"{point}/acc{suffix}"
        for point in ("pre", "val")
        for suffix in report.STATISTICS.values()
    ]
    rows = [
        {"round": t} | dict.fromkeys(keys, value)
        for t, value in enumerate((0.1, 0.9, 0.9, None, 0.5))
    ]
    results = report.summary(iter(rows))["scores"]  # read once
    course = results["pre"]["acc"]["course"]
    assert course["last"] == {"round": 4, "value": 0.5} and course["best"]["round"] == 1
    assert course["mean_of_last"] == {"evaluations": 4, "value": pytest.approx(0.6)}
    assert not results["post"]
    notes = [
        results[point]["acc"]["course"]["best"]["note"] for point in ("pre", "val")
    ]
    assert notes == [
        "chosen on the test examples, so optimistic",
        "chosen on the validation examples",
    ]


BAD = [
    ("", "Say which method to run with --algo=NAME: one of local, fedavg"),
    ("--algo=fedavgg", "Unknown algo 'fedavgg': did you mean 'fedavg'?"),
    (
        "--algo=fedavg --dataset=digit",
        "Unknown data set 'digit': did you mean 'digits'?",
    ),
    ("--algo=fedavg --model=lenett", "Unknown model 'lenett': did you mean 'lenet'?"),
    (
        "--algo=fedavg --partition=dirichlett",
        "Unknown partition 'dirichlett': did you mean 'dirichlet'?",
    ),
    (
        "--algo=fedavg --preset=pfedc_mnst",
        "Unknown preset 'pfedc_mnst': did you mean 'pfedc_mnist'?",
    ),
    (
        "--algo=ditto --hparam=lamda=1",
        "Unknown hyperparameter of ditto 'lamda': did you mean 'lam'?",
    ),
    ("--algo=ditto --hparam=lam", "--hparam=lam: write it as --hparam name=value"),
    ("--algo=ditto --hparam=lam=-1", "lam=-1.0 is outside its range [0, inf)"),
    ("--algo=ditto --hparam=lam=nan", "lam=nan is outside its range"),
    ("--algo=fedavg --hparam=mu=1", "fedavg has no hyperparameters"),
    (
        "--algo=fedmd --public=digits:50",
        "digits is the clients' own data set, whose test examples would be among",
    ),
    ("--algo=own.py", "Unknown algo 'own.py': did you mean 'own.py:NAME'?"),
    (
        "--algo=fedavg --dataset=g.npz",
        "Unknown data set 'g.npz': did you mean 'npz:g.npz'?",
    ),
    (
        "--algo=fedavg --partition=p.npz",
        "Unknown partition 'p.npz': did you mean 'file:p.npz'?",
    ),
    ("--algo=fedavg --learning_rate=1", "Unknown flag --learning_rate"),
    ("--algo=fedavg --epoch=1", "Unknown flag --epoch: did you mean --epochs?"),
    (
        "--algo=fedavg,ditto",
        "--algo=fedavg,ditto names several methods; values apart by commas are for "
        "experiments.sweep",
    ),
    (
        "--algo=fedavg --seed=1,2",
        "must be a whole number; values apart by commas are for experiments.sweep",
    ),
    (
        "--algo=ditto --hparam=lam=1,2",
        "lam=1,2 must be a number; values apart by commas are for experiments.sweep",
    ),
    ("--algo=fedavg --root=x", "Unknown flag --root: the run directory is --workdir"),
    ("--algo=fedavg --verbose=a,b", "--verbose=a,b must be true or false."),
    ("--algo=fedavg --rounds=1.5", "--rounds=1.5 must be a whole number"),
    ("--algo=fedavg --lr=fast", "--lr=fast must be a number"),
    (
        "--algo=fedavg rounds=5",
        "Unexpected argument 'rounds=5': write settings as --name=value",
    ),
    ("--algo=fedavg --lr=0", "lr=0.0 is outside its range (0, inf)"),
    ("--algo=fedavg --lr_decay=0", "lr_decay=0.0 is outside its range (0, inf)"),
    ("--algo=fedavg --momentum=1", "momentum=1.0 is outside its range [0, 1)"),
    ("--algo=fedavg --weight_decay=-1", "weight_decay=-1.0 is outside its range"),
    ("--algo=fedavg --clip=0", "clip=0.0 is outside its range (0, inf)"),
    ("--algo=fedavg --batch_size=0", "batch_size=0 is outside its range"),
    ("--algo=fedavg --rounds=-1", "rounds=-1 is outside its range"),
    ("--algo=fedavg --epochs=1 --steps=2", "give exactly one of the two"),
    (
        "--algo=fedavg --participation=0",
        "participation=0.0 is outside its range (0, 1]",
    ),
    ("--algo=fedavg --participation=1:0.5", "write it as 0.5:1.0"),
    (
        "--algo=fedavg --participation=half",
        "--participation=half must be a number, or a range as 0.1:1",
    ),
    (
        "--algo=fedavg --conv=winogrand",
        "Unknown conv 'winogrand': did you mean 'winograd'?",
    ),
    ("--algo=fedavg --width=wide", "--width=wide must be a whole number, or auto"),
    ("--algo=fedavg --width=0", "width=0 is outside its range"),
    ("--algo=fedavg --client_memory=disk", "Unknown client_memory 'disk'"),
    (
        "--algo=fedavg --client_memory=host",
        "with participation=1 all 100 are: leave it out",
    ),
    (
        "--algo=fedavg --devices=many",
        "--devices=many must be a whole number, auto or all",
    ),
    ("--algo=fedavg --devices=0", "devices=0 is outside its range"),
    ("--algo=fedavg --checkpoint_every=0", "checkpoint_every=0 is outside its range"),
    ("--algo=fedavg --targets=80", "targets=80.0 is outside its range (0, 1]"),
    (
        "--algo=fedavg --targets=0.8;0.9",
        "--targets=0.8;0.9: write scores in (0, 1], apart by commas",
    ),
    (
        "--algo=pfedc --hparam=tasks=file:/nowhere",
        "The task map '/nowhere' cannot be read (No such file or directory)",
    ),
    (
        "--algo=pfedc --hparam=tasks=map:0,1",
        "The task map has 2 entries for 10 classes",
    ),
    ("--algo=fedavg --eval_every=-1", "eval_every=-1 is outside its range"),
    ("--algo=fedavg --unseen=1", "unseen=1.0 is outside its range [0, 1)"),
    (
        "--algo=fedavg --unseen=0.999",
        "--unseen=0.999 of 100 clients (of one network) leaves none to train",
    ),
    ("--algo=fedavg --unseen_rounds=0", "unseen_rounds=0 is outside its range"),
    (
        "--algo=fedamp --unseen=0.2",
        "fedamp cannot personalise unseen clients: its server keeps a part for each "
        "client",
    ),
    ("--algo=fedavg --seed=-1", "seed=-1 is outside its range"),
    ("--algo=fedavg --partition=dirichlet --alpha=0", "alpha=0.0 is outside its range"),
    (
        "--algo=fedavg --partition=pathological --classes_per_client=11",
        "classes_per_client=11 is outside its range [1, 10]",
    ),
    ("--algo=fedavg --clients=5000", "clients=5000 is outside its range"),
    (
        "--algo=fedavg --data_fraction=0",
        "data_fraction=0.0 is outside its range (0, 1]",
    ),
    ("--algo=fedavg --val_fraction=1", "val_fraction=1.0 is outside its range [0, 1)"),
    ("--algo=fedavg --test_split=mine", "Unknown test_split 'mine'"),
    (
        "--algo=fedavg --test_split=official",
        "at most 0, the size of the official test set",
    ),
    ("--algo=fedavg --bn_stats=global", "Unknown bn_stats 'global'"),
    ("--algo=fedavg --model=cnn", "needs images of at least 16x16 pixels, got 8x8"),
    ("--algo=fedavg --dataset=npz:nowhere.npz", "There is no file 'nowhere.npz'"),
    (
        "--algo=fedavg --dataset=mnist --data_dir=/nowhere",
        "is not prepared in /nowhere: run ",
    ),
    (
        "--algo=fedavg --dataset=mnist --data_dir=~nobody_here",
        "is not prepared in ~nobody_here: run ",
    ),
    ("--algo=fedavg --partition=file:nowhere.npz", "There is no file 'nowhere.npz'"),
    (
        "--algo=fedavg --partition=file:p.npz --alpha=1",
        "--alpha means nothing with --partition=file:p.npz",
    ),
    (
        "--algo=fedavg --partition=file:p.npz --val_fraction=0.1",
        "which says everything: leave it out",
    ),
    (
        "--algo=fedavg --partition=file:p.npz --test_split=pool",
        "--test_split means nothing with",
    ),
    (
        "--algo=fedavg --partition=file:p.npz --classes_per_client=3",
        "--classes_per_client means nothing with",
    ),
    (f"--algo=fedavg --dataset=npz:{300 * 'x'}", "There is no file 'xxx"),
    ("--algo=fedavg --lr=inf", "lr=inf is outside its range (0, inf)"),
    ("--algo=fedavg --clip=inf", "clip=inf is outside its range (0, inf)"),
    (
        "--algo=fedavg --weight_decay=inf",
        "weight_decay=inf is outside its range [0, inf)",
    ),
    ("--algo=ditto --hparam=lam=inf", "lam=inf is outside its range [0, inf)"),
    (
        "--algo=fedavg --drop_last --batch_size=1000",
        "drop_last with batches of 1000 leaves nothing to train on",
    ),
    (
        "--algo=pfedc --hparam=tasks=consecutive:11",
        "consecutive needs a number of tasks from 1 to 10",
    ),
    (
        "--algo=pfedc --hparam=tasks=consecutive:²",
        "consecutive needs a number of tasks from 1 to 10",
    ),
    (
        "--algo=feddf --public=synthetic:²",
        "--public=synthetic:²: write how many examples",
    ),
    (
        "--algo=fd --model=file:~nobody_here/nets.txt",
        "--model=file:~nobody_here/nets.txt cannot be read",
    ),
    ("--algo=fedavg --resume --workdir=/nowhere", "/nowhere is not a run directory"),
    ("--describe=dito", "Unknown method or preset 'dito': did you mean 'ditto'?"),
]


@pytest.mark.parametrize(
    ("flags", "sentence"), BAD, ids=[flags or "nothing" for flags, _ in BAD]
)
def test_bad_input_is_one_sentence_and_compiles_nothing(
    flags, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    events = []
    listen = lambda name, _start, _end, **_: events.append(name)
    jax.monitoring.register_event_time_span_listener(listen)
    try:
        assert main.run(flags.split()) == entry.BAD_INPUT
    finally:
        jax.monitoring.unregister_event_time_span_listener(listen)
    out, said = capsys.readouterr()
    assert sentence in said and said.count("\n") == 1 and "Traceback" not in said
    assert not out and not list(tmp_path.iterdir())
    assert "/jax/core/compile/backend_compile_duration" not in events
