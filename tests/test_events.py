"""Event files for TensorBoard, read back."""

import sys

import pytest

from experiments import events, main, runs, settings
from fedjax_pfl.errors import InputError

TINY = [
    "--algo=fedavg",
    "--data_fraction=0.2",
    "--clients=5",
    "--width=1",
    "--epochs=1",
    "--model=linear",
]
REASON = "pip install -e '.[tensorboard]'"


def read(path):
    """{tag: [(step, value)]} of the event files of a run directory."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason=REASON
    )
    found = accumulator.EventAccumulator(
        str(path), size_guidance={"scalars": 0}
    ).Reload()
    return {
        tag: [(x.step, pytest.approx(x.value)) for x in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def expected(path):
    """The same of the rows of its metrics."""
    found: dict = {}
    for row in runs.read_rows(path / "metrics.jsonl"):
        for name in (
            "loss",
            *(f"{point}/{score}" for point in ("pre", "post") for score in scores(row)),
        ):
            if name in row:
                found.setdefault(name, []).append((row["round"], row[name]))
    return found


def scores(row):
    return [
        key[4:-8] for key in row if key.startswith("pre/") and key.endswith("_clients")
    ]


@pytest.mark.slow  # a run and its resume
def test_event_files_hold_every_round_once_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard", reason=REASON)
    path = tmp_path / "run"
    assert main.run([*TINY, "--rounds=2", "--tensorboard", f"--workdir={path}"]) == 0
    known = expected(path)
    assert known.keys() >= {"loss", "pre/acc", "post/acc", "pre/acc_present"}
    assert [step for step, _ in known["pre/acc"]] == [0, 1, 2] and read(path) == known
    # the setting is recorded
    assert main.run([f"--workdir={path}", "--resume", "--rounds=4"]) == 0
    assert [step for step, _ in expected(path)["pre/acc"]] == [0, 1, 2, 3, 4] and read(
        path
    ) == expected(path)


def test_without_the_flag_there_are_none(tmp_path):
    with events.written(tmp_path, [], False, pytest.fail) as add:
        add({"round": 0, "loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_only_means_over_clients_are_written():
    row = {
        "round": 3,
        "loss": 0.5,
        "participants": 4,
        "traffic/down": 9,
        "pre/acc": 0.25,
        "pre/acc_std": 0.1,
    }
    row |= {
        "pre/acc_worst10": 0.0,
        "pre/acc_clients": 4,
        "post/acc": None,
        "unseen/acc": 0.75,
    }
    assert events.scalars(row) == {"loss": 0.5, "pre/acc": 0.25, "unseen/acc": 0.75}


def test_a_missing_library_is_said_before_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        sys.modules, "tensorboard.summary.writer.event_file_writer", None
    )
    assert main.run([*TINY, "--tensorboard", f"--workdir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "fedjax_pfl[tensorboard]" in said
        and not (tmp_path / "run").exists()
    )
    recorded = settings.resolve({"algo": "fedavg"})
    with pytest.raises(InputError, match="--tensorboard=false"):
        settings.resumed(recorded, {"tensorboard": True, "hparams": {}})
    kept = settings.resumed(
        recorded.replace(tensorboard=True), {"tensorboard": False, "hparams": {}}
    )
    assert not kept.tensorboard


@pytest.mark.parametrize("fails", ["EventFileWriter", "add_event", "close"])
def test_what_cannot_be_written_does_not_stop_a_run(tmp_path, monkeypatch, fails):
    module = pytest.importorskip(
        "tensorboard.summary.writer.event_file_writer", reason=REASON
    )

    def fail(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(
        *(
            (module, fails)
            if fails == "EventFileWriter"
            else (module.EventFileWriter, fails)
        ),
        fail,
    )
    said: list = []
    with events.written(
        tmp_path, [{"round": 0, "loss": 1.0}], True, said.append
    ) as add:
        for t in (1, 2):
            assert add(row := {"round": t, "loss": 1.0}) is row
    (sentence,) = said
    assert "No space left on device" in sentence and "the run goes on" in sentence
