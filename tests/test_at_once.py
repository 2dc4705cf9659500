"""Runs that are trained as one program: what each directory holds is that of the run
alone."""

import contextlib
import io
import json

import jax
import numpy as np
import pytest
import toy

from experiments import (
    at_once,
    build,
    closing,
    interrupt,
    lock,
    main,
    many,
    outcome,
    runs,
    session,
    settings,
    sweep,
    train,
)
from fedjax_pfl.data import federate
from fedjax_pfl.errors import InputError
from fedjax_pfl.simulate import Compiled

TINY = [
    "--data_fraction=0.2",
    "--clients=5",
    "--width=1",
    "--epochs=1",
    "--model=linear",
    "--val_fraction=0.2",
]
RUN = [
    "--algo=ditto",
    *TINY,
    "--rounds=4",
    "--eval_every=2",
    "--checkpoint_every=2",
    "--seeds=2",
]


class Asked(interrupt.Interrupt):
    """A Ctrl-C that has come already."""

    def __enter__(self):
        self.asked = 2
        return self

    def __exit__(self, *_):
        pass


def rows(path):
    return runs.read_rows(path / "metrics.jsonl")


def assert_same_rows(first, second):
    assert [row.keys() for row in first] == [row.keys() for row in second]
    for one, other in zip(first, second, strict=True):
        numbers = [
            name for name, value in one.items() if isinstance(value, int | float)
        ]
        np.testing.assert_allclose(
            [one[n] for n in numbers], [other[n] for n in numbers], rtol=1e-5, atol=1e-6
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs alone, and runs at once that were stopped after the first round and went on.
    Its tests are slow: that results are those of runs alone is tested without files in
    test_vectorized.py."""
    folder, said = tmp_path_factory.mktemp("runs"), io.StringIO()
    words = [*RUN, "--runs_at_once=all", f"--workdir={folder / 'at_once'}"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(train, "Interrupt", Asked)
        assert main.run(words) == 130
    assert "Stopped after 1 round; the same command goes on." in said.getvalue()
    assert [len(rows(folder / "at_once" / seed)) for seed in ("seed0", "seed1")] == [
        1,
        1,
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main.run(words) == 0
    assert said.getvalue().count("Resuming after round 1 of 4") == 2
    assert main.run([*RUN, f"--workdir={folder / 'alone'}"]) == 0
    return folder


@pytest.mark.slow
def test_each_has_the_rows_of_the_run_alone(folder):
    for seed in ("seed0", "seed1"):
        assert_same_rows(rows(folder / "at_once" / seed), rows(folder / "alone" / seed))
        summary = runs.read_json(folder / "at_once" / seed / "summary.json")
        assert summary["status"] == "complete" and "val" in summary["scores"]
        assert {path.name for path in (folder / "at_once" / seed).iterdir()} == {
            path.name for path in (folder / "alone" / seed).iterdir()
        }
    assert [
        runs.read_layout(folder / name / "seed0").runs for name in ("at_once", "alone")
    ] == [2, 1]


@pytest.mark.slow
def test_one_of_them_goes_on_alone(folder, capsys):
    path = folder / "at_once" / "seed1"
    assert main.run(["--resume", f"--workdir={path}", "--rounds=5"]) == 0
    said = capsys.readouterr().out
    assert (
        "The layout changes (runs 2 -> 1)" in said
        and "Resuming after round 4 of 5" in said
    )
    assert len(rows(path)) == 6 and len(rows(folder / "at_once" / "seed0")) == 5


@pytest.mark.slow  # as in test_vectorized.py
def test_values_are_a_batch_axis_too_and_one_that_diverges_is_alone_in_it(
    tmp_path, capsys
):
    words = [
        "--algo=ditto",
        *TINY,
        "--rounds=2",
        "--lr=0.1,1e38",
        "--hparam=lam=0.5,2",
        f"--root={tmp_path}",
    ]
    assert sweep.run([*words, "--runs_at_once=3"]) == 3
    found = capsys.readouterr()
    assert (
        "Runs 1 to 3 of 4, ditto, lr=0.1, lam=0.5; ditto, lr=0.1, lam=2; ditto, "
        "lr=1e+38, lam=0.5" in found.out
    )
    assert (
        "Run 4 of 4, ditto, lr=1e+38, lam=2, seed 0:" in found.out
        and found.err.count("is not finite") == 2
    )
    status = {
        p.parent.name: json.loads(p.read_text())["status"]
        for p in tmp_path.glob("*/summary.json")
    }
    assert sorted(status.values()) == ["complete", "complete", "diverged", "diverged"]
    one, two = (
        rows(tmp_path / f"ditto-lr=0.1-lam={lam}-seed0")[-1]["pre/acc"]
        for lam in ("0.5", "2")
    )
    assert one != two


# that it is said, and what follows, is also seen where runs were taken further
@pytest.mark.slow
def test_other_programs_run_one_after_another(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        build, "lowered", lambda experiment: str(experiment.config.seed)
    )
    assert (
        main.run([*RUN, "--rounds=1", "--runs_at_once=all", f"--workdir={tmp_path}"])
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "One after another: their partitions make other programs of them." in said
        and "Run 2 of 2" in said
    )
    assert runs.read_layout(tmp_path / "seed1").runs == 1


@pytest.mark.parametrize(
    "words, why",
    [
        ({"patience": 1}, "each ends by itself with --stop_at or --patience"),
        (
            {"client_memory": "host", "participation": "0.4"},
            "the clients' rows in the devices' memory",
        ),
        ({"devices": "2"}, "that needs one device"),
    ],
)
def test_what_cannot_be_one_program_is_said_before_anything_is_written(
    words, why, tmp_path
):
    user = {
        "algo": "local",
        "clients": 5,
        "model": "linear",
        "val_fraction": 0.2,
        "hparams": {},
    } | words
    given = [
        session.Given(user | {"seed": seed}, str(tmp_path / str(seed)))
        for seed in (0, 1)
    ]
    with pytest.raises(at_once.ApartError, match=why):
        session.train_into(given, federate.ROOM, closing.ONE)
    assert not list(tmp_path.iterdir())


def test_clients_in_training_of_other_networks_are_no_one_program(monkeypatch):
    """Which of them --unseen leaves in training differs between seeds."""
    user = {
        "algo": "local",
        "clients": 6,
        "model": "linear,mlp",
        "unseen": 0.3,
        "partition": "iid",
        "hparams": {},
    }
    made = [build.prepare(settings.resolve(user | {"seed": seed})) for seed in (2, 3)]
    # the programs are the same
    monkeypatch.setattr(build, "lowered", lambda experiment: "")
    with pytest.raises(
        at_once.ApartError, match="their clients in training have other networks"
    ):
        at_once.check(made, 1)
    at_once.check(made[:1] * 2, 1)


@pytest.mark.slow  # as one a little later does, below
def test_ctrl_c_in_the_last_round_of_a_run_ends_the_sweep(tmp_path, monkeypatch):
    """The run itself is complete."""
    monkeypatch.setattr(train, "Interrupt", Asked)
    assert (
        main.run(
            ["--algo=local", *TINY, "--rounds=1", "--seeds=2", f"--workdir={tmp_path}"]
        )
        == 130
    )
    assert runs.read_json(tmp_path / "seed0" / "summary.json")["status"] == "complete"
    assert not (tmp_path / "seed1").exists()


def test_what_has_no_room_is_halved(tmp_path, monkeypatch, capsys):
    asked = []

    def train_into(given, *_):
        asked.append([one.user["seed"] for one in given])
        if len(given) > 2:
            raise at_once.TooManyError("There is no room.")
        return 0

    monkeypatch.setattr(session, "train_into", train_into)
    words = [
        "--algo=local",
        *TINY,
        "--seeds=5",
        "--runs_at_once=all",
        f"--workdir={tmp_path}",
    ]
    assert main.run(words) == 0
    assert asked == [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4], [2], [3, 4]]
    assert (
        "There is no room. Half of them at once, then the others."
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "backend, devices, most", [("cpu", 1, 1), ("gpu", 1, None), ("gpu", 2, 1)]
)
def test_auto_is_all_on_a_single_accelerator(backend, devices, most, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert (
        many._most("auto") == most
        and many._most("all") is None
        and many._most("3") == 3
    )


def test_how_many_is_a_number_or_a_word(tmp_path, monkeypatch):
    for text in ("0", "two", "-1", "²"):
        with pytest.raises(
            InputError,
            match=f"--runs_at_once={text} must be a number from 1 on, all, or auto",
        ):
            sweep.run(["--algo=ditto", f"--runs_at_once={text}", f"--root={tmp_path}"])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="is for a single process"):
        sweep.run(["--algo=ditto", "--runs_at_once=all", f"--root={tmp_path}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "other",
    [
        {"rounds": 30},
        {"checkpoint_every": 3},
        {"client_memory": "host"},
        {"devices": "2"},
    ],
)
def test_runs_that_recorded_other_rounds_or_memory_are_no_one_program(other):
    config = settings.resolve({"algo": "local", "hparams": {}})
    with pytest.raises(
        at_once.ApartError,
        match="begun with other rounds, checkpoints, devices or memory",
    ):
        at_once.check_settings([config, config.replace(**other)])


@pytest.mark.slow  # three runs; that there is no room stops no other, below
def test_what_is_wrong_with_one_stops_no_other(tmp_path, capsys):
    (tmp_path / "seed0").mkdir()
    words = [
        "--algo=local",
        *TINY,
        "--rounds=1",
        "--seeds=2",
        "--runs_at_once=all",
        f"--workdir={tmp_path}",
    ]
    with lock.held(tmp_path / "seed0"):
        assert main.run(words) == 2
    found = capsys.readouterr()
    assert "One after another: one cannot run as it is (The run directory" in found.out
    assert "seed0 is being written by process" in found.err
    assert runs.read_json(tmp_path / "seed1" / "summary.json")["status"] == "complete"
    assert not runs.is_run(tmp_path / "seed0")


@pytest.fixture
def alone(monkeypatch):
    """Runs that were asked to train alone; they train nothing."""
    asked, together = [], session.train_into

    def train_into(given, *rest):
        return together(given, *rest) if len(given) > 1 else asked.extend(given) or 0

    monkeypatch.setattr(session, "train_into", train_into)
    monkeypatch.setattr(outcome, "show", lambda *_, **__: None)
    return asked


def test_runs_that_another_process_took_further_go_on_one_by_one(
    alone, monkeypatch, capsys, tmp_path
):
    words = [
        "--algo=local",
        *TINY,
        "--seeds=2",
        "--runs_at_once=all",
        f"--workdir={tmp_path}",
    ]
    starts = iter([2, 1])
    monkeypatch.setattr(
        session, "compiled", lambda *_: train.Batch(*[None] * 5, Compiled(*[None] * 4))
    )
    monkeypatch.setattr(session, "begin", lambda *_: (next(starts), None))
    assert main.run(words) == 0 and len(alone) == 2
    assert (
        "One after another: they go on from different rounds."
        in capsys.readouterr().out
    )


def test_runs_without_room_after_they_began_go_on_halved(
    alone, tmp_path, monkeypatch, capsys
):
    begun = []

    def into(places, *_):
        begun.extend(path for path, *_ in places)
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."
        )

    monkeypatch.setattr(session, "_into", into)
    monkeypatch.setattr(runs, "is_run", begun.__contains__)
    monkeypatch.setattr(many, "_more", lambda _: {})
    monkeypatch.setattr(many, "_layout", lambda _: None)
    words = [
        "--algo=local",
        *TINY,
        "--seeds=2",
        "--runs_at_once=all",
        f"--workdir={tmp_path}",
    ]
    assert main.run(words) == 0 and [given.resume for given in alone] == [True, True]
    assert (
        "There is no room for 2 runs as one program. Half of them at once"
        in capsys.readouterr().out
    )


def test_a_run_without_room_is_one_sentence_and_stops_no_other(
    tmp_path, monkeypatch, capsys
):
    asked = []

    def into(places, *_):
        asked.append(places[0][1].seed)
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."
        )

    monkeypatch.setattr(session, "_into", into)
    words = [
        "--algo=local",
        *TINY,
        "--seeds=2",
        "--runs_at_once=1",
        f"--workdir={tmp_path}",
    ]
    assert main.run(words) == 2 and asked == [0, 1]
    said = capsys.readouterr().err
    assert (
        f"The device has no memory left for {tmp_path / 'seed1'}: take a smaller "
        "--width" in said
    )


@pytest.mark.slow
@pytest.mark.parametrize("several", [toy.slow("1"), "all"])
def test_ctrl_c_while_the_last_checkpoint_is_written_ends_the_sweep(
    several, tmp_path, monkeypatch
):
    """The runs themselves are complete."""

    class Later(Asked):
        def __enter__(self):
            asking.append(self)
            return self

    def save(self, step, state):
        keep(self, step, state)
        asking[-1].asked = 2

    asking, keep = [], runs.RunDirectory.save
    monkeypatch.setattr(train, "Interrupt", Later)
    monkeypatch.setattr(runs.RunDirectory, "save", save)
    words = [
        "--algo=local",
        *TINY,
        "--rounds=1",
        "--seeds=2",
        f"--runs_at_once={several}",
        f"--workdir={tmp_path}",
    ]
    assert main.run(words) == 130
    done = [
        runs.read_json(path)["status"] for path in tmp_path.glob("seed*/summary.json")
    ]
    assert done == ["complete"] * (2 if several == "all" else 1)
