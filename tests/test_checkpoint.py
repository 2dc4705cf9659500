"""Checkpoints, and that N rounds equal k rounds, a resume and N - k rounds, bit for
bit."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from experiments import (
    build,
    entry,
    figures,
    flags,
    gather,
    interrupt,
    main,
    recorded,
    runs,
    session,
    settings,
)
from fedjax_pfl import simulate
from fedjax_pfl.engine import checkpoint, memory, rounds as rounds_module
from fedjax_pfl.errors import InputError

FLAGS = [
    "--algo=fedper",
    "--dataset=digits",
    "--data_fraction=0.2",
    "--clients=4",
    "--classes_per_client=3",
]
FLAGS += [
    "--epochs=1",
    "--momentum=0.9",
    "--lr_decay=0.9",
    "--participation=0.25:0.75",
    "--width=2",
]
FLAGS += ["--eval_every=2", "--checkpoint_every=2"]
WRITTEN = (
    "metrics.jsonl",
    "metrics.csv",
    "scores.jsonl",
    "config.json",
    "partition.json",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Commands with the same settings are traced and compiled once, and nobody here
    looks at their curves."""
    options = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache"))}
    options |= {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    made, program = {}, build.Experiment.program

    def once(self, *given, **options):
        where = (repr(self.config), given, repr(options))
        if where not in made:
            made[where] = program(self, *given, **options)
        return made[where]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.Experiment, "program", once)
        patch.setattr(figures, "draw_curves", lambda *_, **__: None)
        yield
    for name, value in before.items():
        jax.config.update(name, value)


def tree():
    return {
        "server": {
            "a": jnp.arange(6.0).reshape(2, 3),
            "nothing": {},
            "hole": None,
            "empty": jnp.zeros((4, 0)),
        },
        "clients": (
            jnp.array([True, False]),
            jnp.int32(7),
            jax.random.key(3),
            jax.random.key(3, impl="rbg"),
        ),
    }


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("more", [1, toy.slow(30)])  # sixty checkpoints
def test_a_checkpoint_that_goes_while_it_is_read_gives_way_to_the_next(
    tmp_path, monkeypatch, more
):
    """A run writes on: the last one listed is deleted by the time it is opened."""
    check, left = checkpoint._check_digests, iter(range(more))

    def late(folder):
        if next(left, None) is not None:
            for step in (int(folder.name) + 1, int(folder.name) + 2):
                checkpoint.save(tmp_path, step, tree())
        check(folder)

    checkpoint.save(tmp_path, 1, tree())
    monkeypatch.setattr(checkpoint, "_check_digests", late)
    if more == 1:
        step, found = checkpoint.restore(tmp_path, tree())
        assert step == 3
        assert_equal(found, tree())
    else:
        with pytest.raises(
            InputError, match="faster than they can be read: wait for its end"
        ):
            checkpoint.restore(tmp_path, tree())


def test_a_tree_comes_back_whole(tmp_path):
    checkpoint.save(tmp_path, 5, tree())
    step, back = checkpoint.restore(tmp_path, jax.eval_shape(tree))
    assert step == 5
    assert_equal(back, tree())


@pytest.mark.parametrize(
    "nothing",
    [(), {"server": (), "clients": ()}, {"clients": np.zeros((3, 0), np.float32)}],
)
def test_a_state_without_numbers_comes_back(nothing, tmp_path):
    checkpoint.save(tmp_path, 5, nothing)
    step, back = checkpoint.restore(tmp_path, nothing)
    assert step == 5
    assert_equal(back, nothing)


def test_two_leaves_of_one_name_are_refused(tmp_path):
    with pytest.raises(InputError, match="Two leaves of the state are called /a/b"):
        checkpoint.save(tmp_path, 5, {"a/b": np.zeros(1), "a": {"b": np.ones(1)}})


def test_only_the_last_two_stay_and_torn_saves_are_removed(tmp_path):
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "20").mkdir()  # without its digests it was never finished
    for step in (3, 10, 20):
        checkpoint.save(tmp_path, step, {"a": jnp.full(2, step)})
    assert checkpoint.steps(tmp_path) == [10, 20]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "10",
        "10.sha256",
        "20",
        "20.sha256",
    ]
    assert checkpoint.restore(tmp_path, {"a": jnp.zeros(2, jnp.int32)})[1][
        "a"
    ].tolist() == [20, 20]


def test_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="There is no checkpoint"):
        checkpoint.restore(tmp_path / "nowhere", tree())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [flip, lambda p: p.write_bytes(p.read_bytes()[:-9]), lambda p: p.unlink()],
    ids=["flip", "cut", "delete"],
)
@pytest.mark.parametrize(
    "name", ["d/*", "ocdbt.process_0/d/*", "manifest.ocdbt", "_METADATA"]
)
def test_damage_is_said_in_a_sentence(tmp_path, harm, name):
    checkpoint.save(tmp_path, 1, tree())
    checkpoint.save(tmp_path, 2, tree())
    for path in (tmp_path / "2").glob(name):
        harm(path)
    with pytest.raises(
        InputError,
        match=(
            r"Checkpoint .*2 is damaged \(.*\): delete that folder to resume from step "
            r"1.$"
        ),
    ):
        checkpoint.restore(tmp_path, jax.eval_shape(tree))
    shutil.rmtree(tmp_path / "2")
    assert checkpoint.restore(tmp_path, jax.eval_shape(tree))[0] == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00\n" * 99,
        b"a" * 999 + b"  " + b"b" * 999,
        b"0  2/manifest.ocdbt\n",
    ],
)
def test_damaged_digests(tmp_path, content):
    checkpoint.save(tmp_path, 2, tree())
    (tmp_path / "2.sha256").write_bytes(content)
    with pytest.raises(
        InputError,
        match=r"Checkpoint .*2 is damaged \(.*\): delete that folder to start again.*$",
    ) as error:
        checkpoint.restore(tmp_path, jax.eval_shape(tree))
    assert "\n" not in str(error.value)


def test_a_save_that_is_cut_short_is_not_finished_by_older_digests(
    tmp_path, monkeypatch
):
    checkpoint.save(tmp_path, 2, tree())
    shutil.rmtree(tmp_path / "2")
    monkeypatch.setattr(checkpoint, "_write_digests", lambda _: None)
    checkpoint.save(tmp_path, 2, tree())
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"a": jnp.zeros((2, 4))}, "/a is float32[2, 3] there, but float32[2, 4] here"),
        (
            {"a": jnp.zeros((2, 3), jnp.int32)},
            "/a is float32[2, 3] there, but int32[2, 3] here",
        ),
        ({"b": jnp.zeros((2, 3))}, "/a is float32[2, 3] there, but missing here"),
        (
            {"a": jnp.zeros((2, 3)), "b": jnp.zeros(1)},
            "/b is missing there, but float32[1] here",
        ),
    ],
)
def test_a_foreign_checkpoint(tmp_path, other, sentence):
    checkpoint.save(tmp_path, 1, {"a": jnp.zeros((2, 3))})
    with pytest.raises(InputError) as error:
        checkpoint.restore(tmp_path, other)
    assert "is of another experiment" in str(error.value) and sentence in str(
        error.value
    )


def test_a_full_disk(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, tree())
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0)
    )
    with pytest.raises(OSError, match="0 are free"):
        checkpoint.save(tmp_path, 2, tree())
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**20, 0, 2**20)
    )
    # which its arrays alone would take
    with pytest.raises(OSError, match="1,048,576 are free"):
        checkpoint.save(tmp_path, 2, {"a": np.zeros(2**17)})
    assert checkpoint.steps(tmp_path) == [1]


@pytest.mark.slow  # so does that of a killed run, below
def test_a_state_goes_on_bit_for_bit(tmp_path, cache):
    e = build.prepare(
        settings.resolve(flags.parse([*FLAGS, "--rounds=4"], flags.OF_A_RUN).settings())
    )
    program = e.program(width=2)
    for result in simulate.rounds(program, e.key, e.federation, rounds=4):
        if result.round == 1:
            checkpoint.save(tmp_path, 2, result.state)
    start, state = checkpoint.restore(tmp_path, e.state_shapes())
    *_, again = simulate.rounds(
        program, e.key, e.federation, rounds=4, start=start, state=state
    )
    assert_equal(again.state, result.state)
    assert_equal(again.pre, result.pre)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """Six rounds without interruption."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert main.run([*FLAGS, "--rounds=6", f"--workdir={path}"]) == 0
    return path


def assert_same_run(a, b):
    for name in WRITTEN:
        assert (a / name).read_text() == (b / name).read_text(), name
    for name in ("targets", "work"):  # targets where they are asked for
        assert runs.read_json(a / "summary.json").get(name) == runs.read_json(
            b / "summary.json"
        ).get(name)
    like = build.prepare(runs.read_config(a)).state_shapes()
    (step_a, state_a), (step_b, state_b) = (
        checkpoint.restore(path / "checkpoints", like) for path in (a, b)
    )
    assert step_a == step_b
    assert_equal(state_a, state_b)


def test_a_grown_run_equals_a_long_one(whole, tmp_path):
    assert main.run([*FLAGS, "--rounds=4", f"--workdir={tmp_path / 'run'}"]) == 0
    short = runs.read_rows(tmp_path / "run" / "metrics.jsonl")
    assert (
        "pre/acc" in short[3]
        and "pre/acc" not in runs.read_rows(whole / "metrics.jsonl")[3]
    )  # evaluated as the last
    assert main.run(["--resume", "--rounds=6", f"--workdir={tmp_path / 'run'}"]) == 0
    assert_same_run(whole, tmp_path / "run")


def test_a_killed_run_goes_on(whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    shutil.rmtree(path / "checkpoints" / "6")  # its digests stay: not a checkpoint
    rows = (path / "metrics.jsonl").read_text()
    # a torn line in round 5
    (path / "metrics.jsonl").write_text(rows[: len(rows) // 6 * 5])
    assert main.run(["--resume", f"--workdir={path}"]) == 0
    assert_same_run(whole, path)


@pytest.mark.parametrize("rounds", [6, toy.slow(8)])
def test_a_run_that_is_killed_as_it_goes_on_is_not_complete(
    rounds, whole, tmp_path, monkeypatch
):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    summary = runs.read_json(path / "summary.json")
    runs.write_json(
        path / "summary.json",
        summary | {"ended": {"why": "reached", "stop_at": "acc:0.5", "patience": 0}},
    )

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.train, "train", killed)
    assert main.run(["--resume", f"--rounds={rounds}", f"--workdir={path}"]) == 130
    assert len(runs.read_rows(path / "metrics.jsonl")) == 6  # without the closing row
    assert runs.read_json(path / "summary.json") == summary | {"status": "running"}
    assert not recorded.is_complete(path, runs.read_config(path))
    assert gather.read(path).status == "running or killed after 6 rounds"


def test_a_run_without_a_checkpoint_starts_again(whole, tmp_path):
    shutil.copytree(
        whole, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints")
    )
    assert main.run(["--resume", f"--workdir={tmp_path / 'run'}"]) == 0
    assert_same_run(whole, tmp_path / "run")


def test_ctrl_c_keeps_a_resumable_run(whole, tmp_path, monkeypatch, capsys):
    path = tmp_path / "run"
    rounds = simulate.rounds

    def interrupted(*args, **kwargs):
        for result in rounds(*args, **kwargs):
            if result.round == 2:
                signal_and_wait()
            yield result

    with monkeypatch.context() as patch:
        patch.setattr(simulate, "rounds", interrupted)
        # else it stops after those that were begun with this one
        patch.setattr(rounds_module, "SECONDS", 0.0)
        assert main.run([*FLAGS, "--rounds=6", f"--workdir={path}"]) == 130
    said = capsys.readouterr()
    assert (
        "Stopped after 3 rounds; go on with" in said.err
        and f"--resume --workdir={path}" in said.err
    )
    assert "Stopping after this round" in said.out
    assert checkpoint.steps(path / "checkpoints") == [2, 3]
    assert json.loads((path / "summary.json").read_text())["status"] == "interrupted"
    assert main.run([*FLAGS, "--rounds=6", "--resume", f"--workdir={path}"]) == 0
    assert_same_run(whole, path)


def signal_and_wait():
    """Ctrl-C, and the time for the watching thread to see it."""
    import os
    import signal
    import time

    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)


def test_a_second_ctrl_c_aborts_at_once():
    import subprocess
    import sys

    script = (
        "import os, signal, time; from experiments.interrupt import Interrupt\n"
        "with Interrupt(lambda: print('once', flush=True), 'Aborted.') as i:\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(.3); print(i.asked, "
        "flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (130, ["once", "2"])
    assert "Aborted." in done.stderr


def test_signals_are_as_before_afterwards():
    import signal

    before = [signal.getsignal(number) for number in interrupt.SIGNALS]
    with interrupt.Interrupt(lambda: None, ""):
        assert [signal.getsignal(number) for number in interrupt.SIGNALS] != before
    assert [signal.getsignal(number) for number in interrupt.SIGNALS] == before


def refused(capsys, *flags):
    assert main.run(list(flags)) == entry.BAD_INPUT
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


def test_other_settings_are_refused_by_name(whole, capsys):
    said = refused(
        capsys,
        "--resume",
        f"--workdir={whole}",
        "--lr=0.3",
        "--seed=1",
        "--algo=fedrep",
    )
    assert (
        "algo (recorded fedper, now fedrep), lr (recorded 0.1, now 0.3), seed "
        "(recorded 0, now 1)" in said
    )
    assert "rounds=3 is less than the recorded 6" in refused(
        capsys, "--resume", f"--workdir={whole}", "--rounds=3"
    )
    assert "has no hyperparameters" in refused(
        capsys, "--resume", f"--workdir={whole}", "--hparam", "mu=1"
    )


@pytest.mark.slow  # what a resume takes is also tested without a run, in test_main.py
def test_what_may_change_may(whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    changes = [
        "--width=auto",
        "--checkpoint_every=5",
        "--participation=0.25:0.75",
        "--model=auto",
    ]
    changes += ["--targets=0.01,1", "--data_dir=/moved"]
    laid = runs.read_json(path / "layout.json")
    runs.write_json(path / "layout.json", laid | {"conv": "fused"})
    config = runs.read_json(path / "config.json")
    for content in (config, config["digests"]):
        del content["clip"]  # settings that came later have their defaults
    runs.write_json(path / "config.json", config)
    assert main.run(["--resume", f"--workdir={path}", *changes]) == 0
    kept = runs.read_json(path / "layout.json")
    # as recorded
    assert (kept["width"], kept["conv"], runs.load(path).layout.conv) == (
        2,
        "fused",
        "fused",
    )
    assert (path / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    # from the rows of the first session
    levels = runs.read_json(path / "summary.json")["targets"]["levels"]
    assert [level["target"] for level in levels] == [0.01, 1.0] and levels[0]["pre"][
        "rounds"
    ] == 0
    assert (
        levels[0]["post"]["down"]
        == runs.read_rows(path / "metrics.jsonl")[0]["traffic/down"]
    )
    assert [
        session["round"]
        for session in runs.read_json(path / "versions.json")["resumed"]
    ] == [6]


def laid(path):
    """The recorded layout, and what the settings say of it."""
    found, config = runs.read_layout(path), runs.read_config(path)
    return (found.width, found.conv, found.devices.count), tuple(
        getattr(config, name) for name in ("width", "conv", "devices")
    )


@pytest.mark.slow  # the choice itself is tested in test_layout.py
def test_a_resume_takes_the_layout_that_is_named_and_says_so(whole, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    assert laid(path) == ((2, "winograd", 3), ("2", "auto", "auto"))
    resume = ["--resume", f"--workdir={path}"]
    assert main.run([*resume, "--width=1", "--conv=matmul", "--devices=1"]) == 0
    changes = "width 2 -> 1, conv winograd -> matmul, devices 3 -> 1"
    assert f"The layout changes ({changes}): " in capsys.readouterr().out.replace(
        "\n", " "
    )
    assert main.run(resume) == 0
    said = capsys.readouterr().out
    assert "width 1 on 1 x cpu" in said and "The layout" not in said
    assert laid(path) == ((1, "matmul", 1), ("1", "matmul", "1"))
    assert runs.load(path).layout.conv == "matmul"
    assert [
        x.get("layout") for x in runs.read_json(path / "versions.json")["resumed"]
    ] == [changes, None]
    rows = [runs.read_rows(p / "metrics.jsonl")[-1] for p in (path, whole)]
    np.testing.assert_allclose(
        list(rows[0].values()), list(rows[1].values()), rtol=1e-5
    )


@pytest.mark.slow  # as in test_main.py, where a run begins
def test_a_layout_that_cannot_be_is_refused_before_anything_is_written(
    whole, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    resume = ["--resume", f"--workdir={path}"]
    assert "devices=99 is outside its range" in refused(capsys, *resume, "--devices=99")
    monkeypatch.setattr(memory, "machine", lambda: (2**10, 2**10))
    assert "less than --width=3" in refused(capsys, *resume, "--width=3", "--devices=1")
    assert (path / "config.json").read_text() == (whole / "config.json").read_text()


@pytest.mark.slow
def test_another_partition_or_data_set_is_refused(whole, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    for name, sentence in (
        ("partition", "The partition is not the one"),
        ("data", "The data set digits is not the"),
    ):
        hashes = runs.read_json(whole / "partition.json")
        runs.write_json(path / "partition.json", hashes | {name: "0"})
        assert sentence in refused(capsys, "--resume", f"--workdir={path}")


@pytest.mark.slow  # of rows and of checkpoints, both also tested alone
def test_damage_to_a_run_directory_is_said_in_a_sentence(whole, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    rows = (path / "scores.jsonl").read_text().splitlines(keepends=True)
    (path / "scores.jsonl").write_text("".join(rows[:2] + rows[3:]))
    assert "scores.jsonl does not hold the rounds 0 to 5" in refused(
        capsys, "--resume", f"--workdir={path}"
    )
    for file in (path / "checkpoints" / "6").rglob("d/*"):
        flip(file)
    assert "delete that folder to resume from step 4" in refused(
        capsys, "--resume", f"--workdir={path}"
    )
    assert "is not a run directory" in refused(
        capsys, "--resume", f"--workdir={tmp_path / 'none'}"
    )


@pytest.mark.parametrize("name", ["config", *map(toy.slow, ["partition", "layout"])])
def test_a_damaged_json_file_is_said_in_a_sentence(whole, tmp_path, capsys, name):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    for content in (b"{}", b"[]", b"{", b"\x80"):
        (path / f"{name}.json").write_bytes(content)
        assert f"{name}.json is damaged" in refused(
            capsys, "--resume", f"--workdir={path}"
        )


def contents(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.slow  # rows that cannot be read are refused likewise, below
@pytest.mark.parametrize(
    ("kept", "way"),
    [(5, "folders 6 in .* to resume from step 4"), (1, "folders 4, 6 in .* 0")],
)
@pytest.mark.parametrize("name", ["metrics", "scores"])
def test_missing_rows_offer_the_earlier_checkpoint_or_a_fresh_start(
    whole, tmp_path, capsys, name, kept, way
):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    rows = (path / f"{name}.jsonl").read_text().splitlines(keepends=True)
    (path / f"{name}.jsonl").write_text("".join(rows[:kept]))
    before = contents(path)
    said = refused(capsys, "--resume", f"--workdir={path}")
    assert re.search(way, said) and contents(path) == before
    for step in ("4", "6")[kept == 5 :]:
        shutil.rmtree(path / "checkpoints" / step)
    assert main.run(["--resume", f"--workdir={path}"]) == 0
    assert_same_run(whole, path)


@pytest.mark.parametrize(
    "row",
    [
        *map(toy.slow, [{"loss": "low"}, {"pre/acc": [1]}, {"round": 2.0}]),
        {"loss": True},
    ],
)
def test_a_row_with_a_value_of_a_wrong_type_is_refused(whole, tmp_path, capsys, row):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    rows = [
        json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()
    ]
    rows[2] |= row
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = contents(path)
    assert "but only the first 2" in refused(capsys, "--resume", f"--workdir={path}")
    assert contents(path) == before


WRONG_KINDS = [
    ("config", {"rounds": "six"}, "rounds is 'six', not a whole number from 0"),
    ("config", {"lr": [0.1]}, r"lr is \[0.1\], not a number"),
    ("config", {"hparams": None}, "hparams is None, not an object"),
    ("config", {"algo": "fedperr", "digests": None}, "digests is None, not an object"),
    ("layout", {"width": "two"}, "width is 'two', not a whole number from 1"),
    ("layout", {"width": 0}, "width is 0, not a whole number from 1"),
    ("layout", {"width": True}, "width is True, not"),
    ("layout", {"conv": "fft"}, "conv is 'fft', not one of auto, fused"),
    ("layout", {"devices": 3}, "devices is 3, not an object"),
    (
        "layout",
        {"devices": {"count": 1.5, "kind": "", "platform": ""}},
        "devices.count is 1.5, not a whole number",
    ),
    ("partition", {"data": 7}, "data is 7, not text"),
]


@pytest.mark.parametrize(("name", "change", "sentence"), WRONG_KINDS)
def test_a_value_of_a_wrong_type_is_named(
    whole, tmp_path, capsys, name, change, sentence
):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    file = path / f"{name}.json"
    runs.write_json(file, runs.read_json(file) | change)
    said = refused(capsys, "--resume", f"--workdir={path}")
    assert re.search(rf"{name}.json is damaged \({sentence}", said), said


@pytest.mark.parametrize(
    "change",
    [{"lr": 0.2}, {"rounds": 5}, {"hparams": {"mu": 1.0}}, {"seed": 1}, {"clip": 1.0}],
)
def test_an_edited_setting_is_named(whole, tmp_path, capsys, change):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    runs.write_json(path / "config.json", runs.read_json(path / "config.json") | change)
    said = refused(capsys, "--resume", f"--workdir={path}")
    assert f"config.json was edited ({next(iter(change))})" in said
    with pytest.raises(InputError, match="was edited"):
        runs.load(path)


@pytest.mark.parametrize(
    "content",
    [
        *map(toy.slow, ["{", "[]", '{"seconds": 7}']),
        '{"seconds": {"train": "x"}, "resumed": [7]}',
    ],
)
def test_a_damaged_derived_file_is_written_anew(whole, tmp_path, content):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    for name in ("summary", "versions"):
        (path / f"{name}.json").write_text(content)
    assert main.run(["--resume", f"--workdir={path}"]) == 0
    assert_same_run(whole, path)
    assert runs.read_json(path / "versions.json")["resumed"][0]["round"] == 6


def test_a_damaged_file_of_the_partition_is_written_anew(whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    (path / "partition.npz").write_bytes(b"torn")
    (path / "partition.png").unlink()
    assert main.run(["--resume", f"--workdir={path}"]) == 0
    for name in ("partition.npz", "partition.png"):
        assert (path / name).read_bytes() == (whole / name).read_bytes()


def test_a_lost_file_is_named(whole, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    (path / "layout.json").unlink()
    said = refused(capsys, "--resume", f"--workdir={path}")
    assert said == f"{path} has no layout.json: start a new run with another --workdir."


def test_any_clients_model_can_be_had_again(whole):
    run = runs.load(whole)
    assert (
        run.round == 6
        and run.config.algo == "fedper"
        and len(run.metrics) == len(run.scores) == 7
    )
    p, dataset = run.experiment.partition, run.experiment.dataset
    for client in (0, 3):
        rows = p.test[client, : p.test_sizes[client]]
        answers = np.argmax(run.predictor(client)(dataset.x[rows]), axis=1)
        assert np.mean(answers == dataset.y[rows]) == pytest.approx(
            run.scores[-1]["pre"]["acc"][client]
        )
    with pytest.raises(InputError, match=r"client=4 is outside its range \[0, 3\]"):
        run.predictor(4)


def test_a_finished_checkpoint_stays_and_so_does_what_is_none(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for step, value in ((1, 1.0), (1, 9.0), (2, 2.0), (3, 3.0), (3, 9.0)):
        checkpoint.save(tmp_path, step, {"a": np.float32(value)})
    assert (
        checkpoint.steps(tmp_path) == [2, 3]
        and (tmp_path / "notes.txt").read_text() == "mine"
    )
    assert checkpoint.restore(tmp_path, {"a": np.float32(0)})[1]["a"] == 3
