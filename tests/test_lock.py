"""One process at a time writes a run directory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import toy

from experiments import entry, lock, main, runs
from fedjax_pfl.errors import InputError

ROOT = Path(__file__).parent.parent
TINY = [
    "--algo=local",
    "--data_fraction=0.2",
    "--clients=5",
    "--model=linear",
    "--width=1",
    "--devices=1",
]
HOLD = "import sys, time; from experiments import lock; from pathlib import Path\n"
HOLD += "with lock.held(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_who_holds_it_is_named_and_a_dead_owner_does_not_block(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout.readline() == "held\n"
        named = (
            f"is being written by process {owner.pid} on {socket.gethostname()}: wait "
            "until it ends"
        )
        with pytest.raises(InputError, match=named), lock.held(tmp_path):
            pass
    finally:
        owner.kill()
        owner.communicate()
    assert (tmp_path / lock.NAME).exists()  # it had no time to remove it
    with lock.held(tmp_path):
        assert (tmp_path / lock.NAME).read_text().split()[1] == str(os.getpid())
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_none_to_wait_for(tmp_path, monkeypatch):
    def unknown(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", unknown)
    with lock.held(tmp_path), lock.held(tmp_path):
        pass


@pytest.mark.parametrize("begun", [toy.slow(True), False])
def test_a_run_directory_in_use_is_refused_and_left_as_it_is(begun, tmp_path, capsys):
    path = tmp_path / "run"
    flags = [*TINY, "--rounds=1", f"--workdir={path}"]
    if begun:
        assert main.run(flags) == 0
        flags = ["--resume", "--rounds=2", f"--workdir={path}"]
    path.mkdir(exist_ok=True)
    before = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}
    capsys.readouterr()
    with lock.held(path):
        assert main.run(flags) == entry.BAD_INPUT
        (path / lock.NAME).unlink()
        assert {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()} == before
    said = capsys.readouterr().err
    assert (
        f"is being written by process {os.getpid()}" in said and said.count("\n") == 1
    )
    assert main.run(flags) == 0 and not (path / lock.NAME).exists()


@pytest.mark.slow
@pytest.mark.parametrize("pair", range(20))
def test_two_processes_on_one_directory(pair, tmp_path):
    """One of them trains; whatever the moment, no row is there twice."""
    path, rounds = tmp_path / "run", 30
    flags = [*TINY, f"--rounds={rounds}", "--checkpoint_every=3", f"--workdir={path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    start = [sys.executable, "-m", "experiments.main"]
    if pair % 2:  # both resume what was begun
        assert (
            subprocess.run(
                [*start, *flags, "--rounds=2"], env=environment, capture_output=True
            ).returncode
            == 0
        )
        flags += ["--resume"]
    options = {
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    both = [subprocess.Popen([*start, *flags], **options) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    # the second may come when the first has ended
    assert codes in ([0, 2], [0, 0] if pair % 2 else [0, 2]), said
    rows = runs.read_rows(path / "metrics.jsonl")
    assert [row["round"] for row in rows] == list(range(rounds + 1))
    assert [row["round"] for row in runs.read_rows(path / "scores.jsonl")] == list(
        range(rounds + 1)
    )
    assert json.loads((path / "summary.json").read_text())["status"] == "complete"
    if codes == [0, 2]:  # who writes is named when it has written its name
        assert sum("is being written by" in x or "is not empty" in x for x in said) == 1
