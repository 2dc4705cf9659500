"""Several processes: one run whose results are those of a single process, read and
written by process 0 alone."""

import contextlib
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hosts_worker
import jax
import numpy as np
import pytest
from hosts_worker import ONE, UNSEEN
from toy import assert_close

from experiments import entry, main, runs
from fedjax_pfl.engine import multihost
from fedjax_pfl.errors import InputError

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def started(process: int, port: int, folder: Path, what: str) -> subprocess.Popen:
    """One process of two, with two devices and a directory of its own."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(ROOT / "tests" / "hosts_worker.py")]
    command += [
        f"localhost:{port}",
        str(process),
        "2",
        str(folder / f"out{process}.npz"),
        what,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder / f"disk{process}", env=env, **pipes)


def alone(folder: Path, *flags: str) -> Path:
    assert main.run([*flags, "--devices=1", f"--workdir={folder}"]) == 0
    return folder


@contextlib.contextmanager
def two(folder: Path, what: str) -> Iterator[None]:
    """Two processes that do what hosts_worker.py says, beside what this one does
    meanwhile."""
    port = free_port()
    both = [started(i, port, folder, what) for i in range(2)]
    try:
        yield
        for i, process in enumerate(both):
            said, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            (
                (folder / f"stdout{i}").write_text(said),
                (folder / f"stderr{i}").write_text(errors),
            )
    finally:
        for process in both:
            process.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Runs by two processes, and the same by this one alone."""
    folder = tmp_path_factory.mktemp("hosts")
    for i in range(2):
        (folder / f"disk{i}").mkdir()
        # not the same on both disks
        x = np.arange(400, dtype=np.float32).reshape(200, 2) + i
        np.savez(folder / f"disk{i}" / "both.npz", x=x, y=np.arange(200) % 2)
    shutil.copy(folder / "disk0" / "both.npz", folder / "disk0" / "data.npz")
    fedavg = alone(
        folder / "fedavg", "--algo=fedavg", *ONE, "--rounds=3", "--checkpoint_every=2"
    )
    shutil.copytree(
        fedavg,
        folder / "disk0" / "half",
        ignore=shutil.ignore_patterns("3", "3.sha256"),
    )
    with two(folder, "runs"):
        alone(folder / "ditto", "--algo=ditto", *ONE, "--rounds=4")
    return folder


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """A run with clients that do not train, whose width is tried out, and a program
    from Python."""
    folder = tmp_path_factory.mktemp("more")
    for i in range(2):
        (folder / f"disk{i}").mkdir()
    with two(folder, "more"):
        alone(folder / "pfedc", *UNSEEN)
    return folder


def results(folder: Path, process: int) -> dict[str, np.ndarray]:
    with np.load(folder / f"out{process}.npz") as file:
        return dict(file)


def assert_same_run(path: Path, other: Path) -> None:
    """Rows, scores and the last state, to rounding."""
    for name in ("metrics", "scores"):
        mine, theirs = (runs.read_rows(p / f"{name}.jsonl") for p in (path, other))
        assert len(mine) == len(theirs) > 3
        assert_close(mine, theirs, 1e-5)
    a, b = runs.load(path), runs.load(other)
    assert a.round == b.round
    assert_close(a.state, b.state, 1e-5)


@pytest.mark.slow  # a run of one process that goes on over two is below
def test_a_run_over_processes_is_the_run_of_one(more):
    assert_same_run(more / "disk0" / "pfedc", more / "pfedc")
    layout = runs.read_layout(more / "disk0" / "pfedc")
    assert layout.devices.count == 4


def test_a_run_of_one_process_goes_on_over_two_that_share_no_disk(pair):
    assert_same_run(pair / "disk0" / "half", pair / "fedavg")


def test_whichever_process_is_asked_all_stop_after_the_same_round_and_one_goes_on(pair):
    path = pair / "disk0" / "ditto"
    assert runs.read_json(path / "summary.json")["status"] == "interrupted"
    assert len(runs.read_rows(path / "metrics.jsonl")) == 2
    assert_same_run(alone(path, "--resume"), pair / "ditto")


def test_process_0_alone_writes_and_talks(pair):
    assert sorted(p.name for p in (pair / "disk1").iterdir()) == ["both.npz"]
    # Gloo's threads write their sentence in parts, so those of two may mix
    gloo = (
        r" is connected to | peer ranks\. Expected number of connected peer ranks is : "
        r"|\[Gloo\] Rank |\d+"
    )
    said = re.sub(gloo, "", (pair / "stdout1").read_text())
    assert not said.strip()
    assert "4 x cpu of 2 processes" in (pair / "stdout0").read_text()


def test_what_one_process_lacks_is_one_sentence_and_ends_all(pair):
    done, sigterm = 0, 128 + 15
    for process in range(2):
        codes = [done, entry.BAD_INPUT, entry.BAD_INPUT, entry.BAD_INPUT, sigterm]
        assert results(pair, process)["codes"].tolist() == codes
    errors, others = ((pair / f"stderr{i}").read_text() for i in range(2))
    assert "Process 1: There is no file 'data.npz'" in errors
    assert (
        "Process 1: The data set npz:both.npz is not the one that process 0 has."
        in errors
    )
    assert "`devices` must be a multiple of the 2 processes, got 3." in errors
    assert "There is no" not in others and "`devices`" not in others


@pytest.mark.slow
def test_a_program_from_python_with_a_step_on_the_host(more):
    """FedMA's matching runs on one host, and its result reaches all."""
    expected = hosts_worker.library("fedma", 1)
    for process in range(2):
        leaves = [
            x for name, x in results(more, process).items() if name.startswith("leaf")
        ]
        assert_close(leaves, [np.asarray(x) for x in expected], 1e-5)


@pytest.fixture
def network(tmp_path):
    """Two hosts with a network between them, as far as Linux's namespaces are that: the
    words that start a command on each. Given the wrong names, each takes its own for
    127.0.0.1, as many systems do."""
    tools = ("ip", "unshare", "mount", "hostname")
    if os.name != "posix" or os.geteuid() or not all(map(shutil.which, tools)):
        pytest.skip(f"network namespaces need root and {', '.join(tools)}")
    names = [f"fedjax{os.getpid()}{side}" for side in "ab"]
    (tmp_path / "wrong").write_text(
        "127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {name}\n" for name in names)
    )
    link = f"ip link add {names[0]} type veth peer name {names[1]}"
    setup = [f"ip netns add {name}" for name in names] + [link]
    for i, name in enumerate(names):
        (tmp_path / name).write_text(f"127.0.0.1 localhost\n10.77.0.{i + 1} {name}\n")
        inside = f"ip -n {name}"
        setup += [
            f"ip link set {name} netns {name}",
            f"{inside} addr add 10.77.0.{i + 1}/24 dev {name}",
        ]
        setup += [f"{inside} link set {name} up", f"{inside} link set lo up"]

    def inside(i: int, right: bool) -> list[str]:
        enter = (
            f"mount --bind {tmp_path / (names[i] if right else 'wrong')} /etc/hosts && "
            f'hostname {names[i]} && exec "$@"'
        )
        return [
            "ip",
            "netns",
            "exec",
            names[i],
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            enter,
            "sh",
        ]

    try:
        for command in setup:
            done = subprocess.run(
                command.split(), capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(
                    f"no network namespaces here: {command}: {done.stderr.strip()}"
                )
        yield inside
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "delete", name], capture_output=True, check=False
            )


def on_two_hosts(
    inside, right: bool, folder: Path, *flags: str
) -> list[tuple[int, str]]:
    """The exit code and the errors of a command on each host, with a disk of its
    own."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_PLATFORMS": "cpu",
    }
    command = [
        sys.executable,
        "-m",
        "experiments.main",
        *flags,
        "--workdir=run",
        "--coordinator=10.77.0.1:12345",
    ]
    both = []
    for i in range(2):
        (folder / f"host{i}").mkdir()
        given = [*inside(i, right), *command, "--num_processes=2", f"--process_id={i}"]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        both.append(subprocess.Popen(given, cwd=folder / f"host{i}", env=env, **pipes))
    try:
        return [
            (process.wait(), errors)
            for process in both
            for _, errors in [process.communicate(timeout=300)]
        ]
    finally:
        for process in both:
            process.kill()


@pytest.mark.slow  # two processes more
def test_two_hosts_that_share_a_network_only(network, tmp_path):
    flags = ["--algo=ditto", *ONE, "--rounds=3"]
    for code, errors in on_two_hosts(network, True, tmp_path, *flags):
        assert code == 0, errors
    assert not list((tmp_path / "host1").iterdir())
    assert_same_run(tmp_path / "host0" / "run", alone(tmp_path / "alone", *flags))


@pytest.mark.slow  # they try for a minute
def test_hosts_that_take_their_own_names_for_the_loopback_are_told_so(
    network, tmp_path
):
    """By whoever gives up first; if that is process 0, JAX ends the other."""
    ended = on_two_hosts(network, False, tmp_path, "--algo=ditto", *ONE)
    assert all(code for code, _ in ended)
    assert any(
        code == entry.LOST and "each host's own name must stand for an" in errors
        for code, errors in ended
    ), ended


def ended(
    folder: Path, ready: Callable[[], Any], process: int, by: signal.Signals
) -> tuple[list[int], str]:
    """The exit codes of a long run of two processes, one of which gets a signal once
    they are ready, and the errors of process 0."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_PLATFORMS": "cpu",
    }
    words = [
        "--algo=fedavg",
        *ONE,
        "--rounds=100000",
        "--workdir=run",
        f"--coordinator=localhost:{free_port()}",
    ]
    command = [sys.executable, "-m", "experiments.main", *words, "--num_processes=2"]
    with (folder / "out").open("w") as said, (folder / "errors").open("w") as wrong:
        pipes = {"stdout": said, "stderr": wrong}
        both = [
            subprocess.Popen(
                [*command, f"--process_id={i}"], cwd=folder, env=env, **pipes
            )
            for i in range(2)
        ]
        try:
            while all(one.poll() is None for one in both) and not ready():
                time.sleep(0.1)
            both[process].send_signal(by)
            codes = [both[0].wait(50), both[1].wait(100)]  # JAX would wait for a minute
        finally:
            for one in both:
                one.kill(), one.wait()
    return codes, (folder / "errors").read_text()


@pytest.mark.slow  # two processes more
def test_a_process_that_is_killed_ends_the_run_at_once(tmp_path):
    codes, errors = ended(
        tmp_path, (tmp_path / "run" / "checkpoints").exists, 1, signal.SIGKILL
    )
    assert codes[0] == entry.LOST
    assert "Lost another process" in errors and "--resume --workdir=run" in errors


@pytest.mark.slow  # two processes more
def test_ctrl_c_before_the_first_round_ends_all(tmp_path):
    compiling: Callable[[], bool] = lambda: (
        "fedavg on digits" in (tmp_path / "out").read_text()
    )
    codes, errors = ended(tmp_path, compiling, 0, signal.SIGINT)
    assert codes[0] == entry.INTERRUPTED and codes[1]
    assert "Interrupted" in errors


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            (None, 2, None),
            "--num_processes and --process_id need --coordinator=HOST:PORT",
        ),
        (
            ("localhost", 2, 0),
            "--coordinator=localhost must be HOST:PORT, where process 0 listens, or "
            "auto",
        ),
        (
            ("localhost:1234", None, 0),
            "needs --num_processes=N and --process_id=0 to N-1 as well",
        ),
        (
            ("localhost:1234", 2, 2),
            "--process_id=2 is not one of the 2 processes: they count from 0",
        ),
        (("localhost:99999", 2, 0), "--coordinator=localhost:99999 must be HOST:PORT"),
    ],
)
def test_coordinators_that_cannot_be(given, sentence):
    with pytest.raises(InputError) as error:
        multihost.connect(*given)
    assert sentence in str(error.value)


def test_an_environment_that_is_wrong_is_said_by_its_name(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "x")
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *_, **__: int(os.environ["SLURM_NTASKS"])
    )
    sentence = (
        r"--coordinator=auto does not work here \(SLURM_NTASKS=x is not a whole "
        r"number\): --help says"
    )
    with pytest.raises(InputError, match=sentence):
        multihost.connect("auto")


def test_a_port_that_is_taken_is_said_by_process_0():
    """JAX would crash."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            InputError,
            match=rf"--coordinator=localhost:{port} cannot be used \(.*: choose another",
        ):
            multihost.connect(f"localhost:{port}", 2, 0)


def test_a_single_process_only_does_its_work():
    assert not multihost.several() and multihost.largest(7) == 7
    multihost.connect(None)
    assert multihost.run_on_all(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        multihost.run_on_all(divmod, 7, 0)
    tree = multihost.fetch({"key": jax.random.key(0), "x": jax.numpy.ones(2)})
    assert isinstance(tree["x"], np.ndarray)


def test_a_message_that_cannot_be_read_is_an_error_of_its_step():
    function, args = multihost._read(b"no pickle")
    with pytest.raises(pickle.UnpicklingError):
        function(*args)
