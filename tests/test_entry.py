"""The command lines as processes: exit codes, where they write, and what they say of
this machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy

from experiments import entry, main, session, sweep, tables
from fedjax_pfl.errors import InputError

ROOT = Path(__file__).parent.parent


def command(module, *flags, **environment):
    given = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    words = [sys.executable, "-m", f"experiments.{module}", *flags]
    return subprocess.run(
        words, env=given, capture_output=True, text=True, check=False, timeout=120
    )


# the others begin as export does, and the bad commands of all are tested within one
# process
@pytest.mark.parametrize(
    "module", ["export", *map(toy.slow, ["sweep", "tables", "within"])]
)
def test_every_command_has_help_and_exits_with_2_on_bad_input(module):
    found = command(module, "--help")
    assert (
        found.returncode == 0
        and f"experiments.{module}" in found.stdout
        and not found.stderr
    )
    found = command(module, "--algo=fedavgg", "--targets=2", "/nowhere")
    assert found.returncode == 2 and found.stderr.count("\n") == 1 and not found.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "said"),
    [
        ("cuda", "pip install 'fedjax_pfl[cuda]'"),
        toy.slow("tpu", "fedjax_pfl[tpu]"),
        toy.slow("cdua", "did you mean 'cuda'?"),
    ],
)
def test_a_platform_that_is_not_there_is_said_with_the_extra_that_brings_it(
    platform, said, tmp_path
):
    found = command(
        "main", "--algo=local", f"--workdir={tmp_path / 'run'}", JAX_PLATFORMS=platform
    )
    *_, last = found.stderr.splitlines()
    assert found.returncode == 2 and said in last and "Traceback" not in found.stderr, (
        found.stderr
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", [1.0, *map(toy.slow, [0.3, 2.0])])
def test_ctrl_c_during_the_imports_is_one_sentence(seconds, tmp_path):
    words = [
        sys.executable,
        "-m",
        "experiments.main",
        "--algo=local",
        f"--workdir={tmp_path / 'run'}",
    ]
    given = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        words, env=given, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1].strip()
    assert process.returncode == 130 and "Traceback" not in said
    assert "nothing to resume" in said or "go on with" in said


def refused(capsys, *flags):
    assert main.run(list(flags)) == entry.BAD_INPUT
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_directory_of_nobody_is_one_sentence(capsys):
    assert "There is no user '~nobody_here'" in refused(
        capsys, "--algo=local", "--workdir=~nobody_here/x"
    )


def test_what_cannot_be_written_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = [
        "--algo=fedavg",
        "--val_fraction=0.2",
        "--select=val/acc",
        f"--root={tmp_path / 'file' / 'root'}",
    ]
    assert entry.guarded(lambda: sweep.run(words)) == entry.BAD_INPUT
    assert (
        entry.guarded(lambda: (tmp_path / "file" / "x").write_text(""))
        == entry.UNWRITABLE
    )
    first, last = capsys.readouterr().err.splitlines()[-2:]
    assert (
        first.startswith(f"{tmp_path / 'file' / 'root'} cannot be written")
        and "--root" in first
    )
    assert last.startswith(
        f"Cannot read or write {tmp_path / 'file' / 'x'} (Not a directory)"
    )


def test_a_value_where_none_may_be(capsys):
    assert "--nodrop_last=1 does not take an argument" in refused(
        capsys, "--algo=local", "--nodrop_last=1"
    )


@pytest.mark.parametrize(
    "flag",
    ["--batch_size=1000000000000", "--epochs=10000000000", "--steps=10000000000"],
)
def test_huge_numbers_have_a_range_and_its_reason(flag, tmp_path, capsys):
    said = refused(capsys, "--algo=local", flag, f"--workdir={tmp_path / 'run'}")
    assert "must be in" in said and "it is counted in 32 bits" in said


def test_a_resume_asks_for_its_directory(capsys):
    assert "--resume needs --workdir=DIRECTORY" in refused(capsys, "--resume")


def test_a_flag_in_capitals_is_understood(capsys):
    assert "did you mean --rounds?" in refused(capsys, "--algo=local", "--ROUNDS=3")
    assert "did you mean 'fedavg'?" in refused(capsys, "--algo=FedAvg")


@pytest.mark.slow  # a run of its own
def test_what_the_user_named_is_printed_as_it_is(tmp_path, capsys):
    path = tmp_path / ":smile:" / "run"
    tiny = [
        "--data_fraction=0.2",
        "--clients=5",
        "--width=99",
        "--devices=1",
        "--model=linear",
        "--rounds=1",
    ]
    assert main.run(["--algo=local", *tiny, f"--workdir={path}"]) == 0
    assert f"Everything is in {path}: curves.png" in capsys.readouterr().out
    assert entry.directory(str(path)) == path and str(path) in session.command(path)
    # there are no more clients
    assert '"width": 5,' in (path / "layout.json").read_text()
    assert str(path) in refused(capsys, "--algo=local", f"--workdir={path}")
    said = refused(capsys, "--resume", "--devices=99", f"--workdir={path}")
    assert "`devices` must be in [1, " in said and "JAX finds so many here" in said


def test_a_run_s_curves_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    from experiments import build, runs, settings

    def torn(_, file, format):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    made = build.prepare(
        settings.resolve({"algo": "local", "model": "linear", "hparams": {}})
    )
    monkeypatch.setattr(Figure, "savefig", torn)
    (tmp_path / "curves.png").write_bytes(b"whole")
    with pytest.raises(OSError, match="No space"):
        runs.RunDirectory(tmp_path, made).tables()
    assert (tmp_path / "curves.png").read_bytes() == b"whole"


def test_a_path_of_a_user_that_is_none():
    with pytest.raises(InputError, match="There is no user"):
        entry.directory("~nobody_here")


def test_an_output_that_nobody_reads_ends_nothing():
    """As of `| head`."""
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments.main", "--list"]
    done = subprocess.run(
        command, env=environment, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_flag_of_a_run_means_nothing_to_the_other_commands(tmp_path):
    with pytest.raises(InputError, match="Unknown flag --hparam"):
        tables.main(["--hparam=mu=1", str(tmp_path)])


def test_the_help_shows_defaults_that_are_zero(capsys):
    assert main.run(["--help"]) == 0
    said = capsys.readouterr().out
    assert (
        "(default: 0.0)" in said
        and "(default: 0)" in said
        and "(default: False)" in said
    )
