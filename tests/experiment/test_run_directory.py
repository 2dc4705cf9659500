import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiment.runs import SMALL, run
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import cli
from fedjax_pfl.experiment.build import build
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.run_directory import RunDirectory

CONFIG = Config(
    algo="scaffold", clients=5, data_fraction=0.2, model="linear", width="1"
)


@pytest.fixture(scope="module")
def experiment():
    return build(CONFIG.replace(devices="1", rounds=9))


@pytest.fixture
def begun(experiment, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.open(experiment)
    for t in range(6):
        directory.append({"round": t, "pre/acc": t / 10}, {"round": t, "pre": {}})
    return directory


def test_a_new_run_is_described_by_its_files(experiment, begun):
    assert begun.config == experiment.config
    recorded = begun.read("partition.json")
    assert len(recorded["data"]) == len(recorded["partition"]) == 64
    assert begun.read("versions.json")["jax"] == jax.__version__
    assert begun.summary["headline"] == {"score": "acc", "better": "max"}
    assert begun.last == {"round": 5, "pre/acc": 0.5}


def test_a_directory_holds_one_run_and_nothing_else(begun, tmp_path):
    with pytest.raises(InputError, match="--resume continues it"):
        begun.check_free()
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(InputError, match="not an empty directory"):
            RunDirectory(path).check_free()
    RunDirectory(tmp_path / "new").check_free()


def test_a_run_without_a_finished_round_is_taken_again(experiment, begun):
    for name in ("metrics.jsonl", "scores.jsonl"):
        (begun.path / name).write_text('{"round": 0, "lo')
    begun.write("partition.json", {"data": "other"})
    assert begun.open(experiment) == (0, None)
    assert not (begun.path / "metrics.jsonl").exists()


def test_a_refused_run_leaves_no_directory(tmp_path, capsys):
    argv = ["--algo=fedavg", *SMALL, f"--workdir={tmp_path}/a"]
    for wrong in ("--speeds=file:/nowhere", "--init_from=/nowhere", "--drop_last"):
        more = "--batch_size=5000" if wrong == "--drop_last" else "--rounds=1"
        assert run(*argv, wrong, more) == cli.BAD_INPUT
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert not (tmp_path / "a").exists()


def test_one_process_writes(begun):
    with pytest.raises(InputError, match="Another process writes"):
        RunDirectory(begun.path).lock()


def test_a_state_is_the_same_after_a_checkpoint(experiment, begun):
    assert begun.restore(experiment) == (0, None)
    program = experiment.program
    state = experiment.fetch(program.init(experiment.key, program.traced))
    for step in (2, 4, 6):
        begun.save(step, state)
    assert sorted(path.name for path in (begun.path / "checkpoints").iterdir()) == [
        "4",
        "6",
    ]
    step, found = RunDirectory(begun.path).restore(experiment)
    assert step == 6
    jax.tree.map(np.testing.assert_array_equal, found, state)


def test_a_hyperparameter_that_was_not_recorded_is_named(tmp_path, caplog):
    begun, experiment = RunDirectory(tmp_path), build(CONFIG.replace(algo="fedprox"))
    for recorded, warned in (({"mu": 0.001}, False), ({}, True)):
        begun.open(experiment)
        begun.append({"round": 0, "pre/acc": 0.5}, {"round": 0, "pre": {}})
        content = begun.read("config.json")
        begun.write("config.json", content | {"hparams": recorded})
        begun.open(experiment)
        found = "mu was not recorded, its default is 0.001." in caplog.text
        assert found == warned


def test_a_state_may_hold_random_keys_and_empty_leaves(begun):
    key = jax.random.key(3)
    state = {
        "key": key,
        "empty": np.zeros((0, 2), np.float32),
        "x": np.arange(3, dtype=np.int32),
    }

    class Experiment:
        def state_shapes(self):
            return jax.eval_shape(lambda: state)

    begun.save(1, state)
    _, found = begun.restore(Experiment())
    assert jax.random.key_data(found["key"]).tolist() == [0, 3]
    assert found["empty"].shape == (0, 2) and found["x"].tolist() == [0, 1, 2]


def test_a_resume_drops_later_rows_and_a_torn_line(experiment, begun):
    program = experiment.program
    begun.save(4, experiment.fetch(program.init(experiment.key, program.traced)))
    with open(begun.path / "metrics.jsonl", "a") as file:
        file.write('{"round": 6, "pre/a')
    begun.unlock()
    directory = RunDirectory(begun.path)
    start, state = directory.open(experiment)
    assert start == 4 and state is not None
    assert [row["round"] for row in directory.rows("metrics.jsonl")] == [0, 1, 2, 3]
    assert [row["round"] for row in directory.rows("scores.jsonl")] == [0, 1, 2, 3]
    assert directory.last["pre/acc"] == 0.3
    assert directory.read("versions.json")["resumed"][0]["round"] == 4


def test_missing_rows_and_other_data_are_refused(experiment, begun):
    program = experiment.program
    begun.save(4, experiment.fetch(program.init(experiment.key, program.traced)))
    (begun.path / "scores.jsonl").write_text(json.dumps({"round": 0}) + "\n")
    with pytest.raises(InputError, match="lacks rows before round 4"):
        begun.open(experiment)
    recorded = begun.read("partition.json")
    begun.write("partition.json", recorded | {"data": "other"})
    with pytest.raises(InputError, match="begun with other data"):
        begun.open(experiment)


def test_other_code_is_named(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def constant(staleness):\n    return 1.0\n")
    given = {"asynchronous": "fedasync", "staleness": f"{file}:constant"}
    config = CONFIG.replace(algo="fedavg", devices="1", participation="0.5", **given)
    directory, e = RunDirectory(tmp_path / "run"), build(config)
    directory.open(e)
    directory.append({"round": 0}, {"round": 0})
    file.write_text("def constant(staleness):\n    return 0.5\n")
    with pytest.raises(InputError, match=r"other code of options \(.*own\.py\)"):
        directory.open(e)


def test_a_run_that_grows_forgets_its_last_evaluation(experiment, begun):
    rows = begun._rewound("metrics.jsonl", 6, 2, experiment.config.rounds - 1)
    assert ["pre/acc" in row for row in rows] == [True, False] * 3


def test_a_full_disk_leaves_the_last_checkpoint(experiment, begun, monkeypatch):
    program = experiment.program
    state = experiment.fetch(program.init(experiment.key, program.traced))
    begun.save(2, state)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="No space left on device for a checkpoint of"):
        begun.save(4, state)
    assert RunDirectory(begun.path).restore(experiment)[0] == 2


@pytest.mark.parametrize("name", ["partition.json", "config.json", "checkpoints"])
def test_a_damaged_file_is_one_clear_error(experiment, begun, name):
    program = experiment.program
    begun.save(4, experiment.fetch(program.init(experiment.key, program.traced)))
    path = begun.path / name
    if path.is_dir():
        shutil.rmtree(path / "4" / "default")
        directory = RunDirectory(begun.path)
        with pytest.raises(InputError, match="4 cannot be read, delete it"):
            directory.restore(experiment)
        return
    path.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        begun.open(experiment), begun.config
