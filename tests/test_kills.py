"""Runs that are killed at random moments, again and again, end byte for byte as the run
that was left alone.

`python tests/test_kills.py CASE KILLS [SECONDS [SEED]]` does it KILLS times, or as the
time allows. Each run is a child that is forked when everything is imported and JAX has
not started, so that a kill takes a second or two.
"""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
ROUNDS = 12
TINY = (
    "--data_fraction=0.2 --clients=6 --model=linear --epochs=1 --width=2 "
    f"--rounds={ROUNDS} --eval_every=2"
)
CASES = {
    "full": (
        "--algo=fedavg --participation=1 --devices=1 --checkpoint_every=3 "
        "--momentum=0.9"
    ),
    "sampled": "--algo=fedper --participation=0.3:0.8 --devices=1 --checkpoint_every=1",
    "host": (
        "--algo=ditto --participation=0.5 --client_memory=host --devices=1 "
        "--checkpoint_every=2"
    ),
    "devices": (
        "--algo=scaffold --participation=0.7 --devices=2 --checkpoint_every=4 "
        "--lr_decay=0.99"
    ),
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
KILLS = 50


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_killed_ends_as_one_that_is_not(case, tmp_path):
    own = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
    }
    own |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}  # on one core, too
    own |= {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    words = [sys.executable, __file__, case, str(KILLS)]
    done = subprocess.run(
        words, env=os.environ | own, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def forked(said, function, *args):
    """The process id of a child that calls a function; what it says goes to a file."""
    import orbax.checkpoint  # noqa: F401  (else each child takes two seconds for it)

    from experiments import main  # noqa: F401

    sys.stdout.flush(), sys.stderr.flush()
    # until the child is past what is of this test
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if child:
        return child
    code = 1
    try:
        file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        function(*args)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def command(flags):
    from experiments import main

    sys.argv = ["main", *flags]
    main.main()


def ended(child):
    """The exit code of a child, negative for a signal; it must end."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def running(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def wait(child, path, rng, typical):
    """Until a random moment of the run: of its whole time, or shortly behind one of its
    rounds."""
    until = time.monotonic() + rng.uniform(0, typical)
    if rng.random() < 0.7:
        rows, wanted = path / "metrics.jsonl", rng.randrange(ROUNDS)
        while running(child) and not (
            rows.exists() and rows.read_bytes().count(b"\n") > wanted
        ):
            time.sleep(0.001)
        until = time.monotonic() + rng.expovariate(50)
    while running(child) and time.monotonic() < until:
        time.sleep(0.001)


def contents(path):
    """Rows, tables, settings, and which checkpoint is the last."""
    names = (
        "metrics.jsonl",
        "scores.jsonl",
        "metrics.csv",
        "config.json",
        "partition.json",
        "partition.npz",
    )
    found = {name: (path / name).read_bytes() for name in names}
    # the one before the last may be of a stop
    found["step"] = max(
        int(file.stem) for file in (path / "checkpoints").glob("*.sha256")
    )
    summary = json.loads((path / "summary.json").read_text())
    return found | {
        "summary": {
            name: value
            for name, value in summary.items()
            if name not in ("seconds", "timed")
        }
    }


def state(path, file):
    """Writes the arrays of the last checkpoint to a file."""
    from fedjax_pfl.engine import checkpoint

    folder = path / "checkpoints"
    np.savez(file, **checkpoint._read(folder / str(checkpoint.steps(folder)[-1])))


def end(path, folder):
    """What must be the same."""
    file = folder / "state.npz"
    assert ended(forked(folder / "said", state, path, file)) == 0, (
        folder / "said"
    ).read_text()
    return contents(path) | {"state": file.read_bytes()}


def main(case, kills, seconds=3600, seed=0):
    rng, folder = random.Random(f"{case} {seed}"), Path(tempfile.mkdtemp())
    flags, counts, finished = (
        [*shlex.split(TINY), *shlex.split(CASES[case])],
        dict.fromkeys(SIGNALS, 0),
        0,
    )
    whole, path, said = folder / "whole", folder / "run", folder / "said"
    for _ in range(2):  # the second finds what was compiled
        shutil.rmtree(whole, ignore_errors=True)
        begin = time.monotonic()
        assert ended(forked(said, command, [*flags, f"--workdir={whole}"])) == 0, (
            said.read_text()
        )
        typical = time.monotonic() - begin
    wanted = end(whole, folder)
    print(f"{case}: left alone {typical:.1f} s", flush=True)
    begin, done = time.monotonic(), 0
    while (done < kills and time.monotonic() - begin < seconds) or (
        path / "config.json"
    ).exists():
        last = done >= kills or time.monotonic() - begin > seconds
        how = ["--resume"] if (path / "config.json").exists() else flags
        child, number = (
            forked(said, command, [*how, f"--workdir={path}"]),
            rng.choice(SIGNALS),
        )
        if not last:
            wait(child, path, rng, typical)
            if running(child):
                os.kill(child, number)
                counts[number], done = counts[number] + 1, done + 1
        code, text = ended(child), said.read_text()
        assert code in (0, -number, 128 + number) and "Traceback" not in text, (
            code,
            number,
            text,
        )
        if code == 0:
            found = end(path, folder)
            assert found == wanted, [
                name for name in wanted if found[name] != wanted[name]
            ]
            finished += 1
            shutil.rmtree(path)
            print(f"{done} kills, {finished} runs ended alike", flush=True)
    shown = ", ".join(f"{count} {number.name}" for number, count in counts.items())
    print(
        f"{case}: {done} kills ({shown}), {finished} runs ended alike, "
        f"{time.monotonic() - begin:.0f} s",
        flush=True,
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
