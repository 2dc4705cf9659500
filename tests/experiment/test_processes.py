"""One run by several processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from toy import assert_close

from experiment.runs import SMALL, run

ROOT = Path(__file__).parent.parent.parent
ONE = [*SMALL[:-2], "--width=1"]


def together(folder: Path, *flags: str) -> list[tuple[int, str, str]]:
    """Runs a command in two processes of a device each, in one directory.

    Returns:
      exit code, stdout and stderr of each.
    """
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-m", "experiments.main", *flags, "--num_processes=2"]
    command += [f"--coordinator=localhost:{port}", "--workdir=run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = []
    for i in range(2):
        given = [*command, f"--process_id={i}"]
        both += [subprocess.Popen(given, cwd=folder, env=env, **pipes)]
    try:
        outputs = [process.communicate(timeout=300) for process in both]
    finally:
        for process in both:
            process.kill()
    codes = [process.returncode for process in both]
    return [(code, *texts) for code, texts in zip(codes, outputs, strict=True)]


def rows(path: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def test_two_processes_run_what_one_runs(tmp_path):
    flags = ["--algo=scaffold", *ONE, "--rounds=2"]
    (code, out, error), (other, quiet, _) = together(tmp_path, *flags)
    assert code == other == 0, error
    assert "round 2/2" in out and "round" not in quiet
    assert run(*flags, "--devices=1", f"--workdir={tmp_path / 'alone'}") == 0
    for name in ("metrics.jsonl", "scores.jsonl"):
        found = rows(tmp_path / "run", name)
        assert_close(found, rows(tmp_path / "alone", name), 1e-5)


@pytest.mark.slow
def test_two_processes_resume_the_run_of_one(tmp_path):
    flags = ["--algo=pfedc", *ONE, "--participation=0.6", "--unseen=0.2"]
    path = tmp_path / "run"
    assert run(*flags, "--rounds=2", "--devices=1", f"--workdir={path}") == 0
    results = together(tmp_path, "--resume", "--rounds=4", "--devices=all")
    for code, _, error in results:
        assert code == 0, error
    alone = f"--workdir={tmp_path / 'alone'}"
    assert run(*flags, "--rounds=4", "--devices=1", alone) == 0
    assert_close(*(rows(p, "metrics.jsonl") for p in (path, tmp_path / "alone")), 1e-5)
