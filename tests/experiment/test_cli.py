import json
import subprocess
import sys

import pytest

from experiment.runs import SMALL, run
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import cli


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--join_ratio=1"], "Did you mean --participation"),
        (["--num_clients=1"], "Did you mean --clients"),
        (["--lam=1"], "Did you mean --hparam=lam=VALUE"),
        (["--raunds=1"], "Did you mean --rounds"),
        (["--rounds=many"], "rounds=many"),
        (["--lr=0.1,0.2"], "Lists of values are for `sweep`"),
        (["--hparam=lam"], "must be NAME=VALUE"),
    ],
)
def test_wrong_flags_have_a_hint(argv, message):
    with pytest.raises(InputError, match=message):
        cli.parse(argv, cli.SETTING_FLAGS).settings()


def test_flags_have_the_types_of_the_settings():
    argv = ["--lr=0.5", "--marks", "--clients=3", "--hparam=a=1", "--hparam=b=x=y"]
    parsed = cli.parse([*argv, "word"], cli.SETTING_FLAGS)
    wanted = {"lr": 0.5, "marks": True, "clients": 3}
    assert parsed.settings() == wanted | {"hparams": {"a": "1", "b": "x=y"}}
    assert parsed.words == ["word"]


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as end:
        cli.parse(["--help"], cli.SETTING_FLAGS, "What it does.")
    text = capsys.readouterr().out
    assert end.value.code == 0 and "What it does." in text
    assert all(f"--{name}\n" in text or f"]{name}\n" in text for name in cli.HELP)
    assert text.index("Most used:") < text.index("--algo") < text.index("Data:")
    assert "default: 0.1" in text and "krum" in text and "crop_flip" in text


def test_list_and_describe(capsys):
    assert (
        run("--list") == run("--describe=ditto") == run("--describe=pfedc_mnist") == 0
    )
    text = capsys.readouterr().out
    assert all(x in text for x in ("Ditto", "--hparam=lam=1.0", "dirichlet_hsu"))
    assert run("--describe=dito") == cli.BAD_INPUT


def test_describe_a_table(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("site,age,on,label\n1,2,true,0\n2,,,1\n")
    assert run(f"--describe=table:{path}") == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:4] for row in rows] == [
        ["site", "identifier", "0", "2"],
        ["age", "number", "1", "1"],
        ["on", "boolean", "1", "1"],
        ["label", "label", "0", "2"],
    ]
    assert run(f"--describe=table:{path}", "--partition=natural:x") == cli.BAD_INPUT
    assert "must have a column x, got site, age, on" in capsys.readouterr().err


def test_exit_codes(tmp_path, capsys):
    def lost():
        raise PermissionError("not here")

    def interrupted():
        raise KeyboardInterrupt

    assert cli.guarded(lambda: 0) == 0
    assert cli.guarded(lost) == cli.UNWRITABLE
    assert cli.guarded(interrupted) == cli.INTERRUPTED
    assert run("--algo=nothing") == cli.BAD_INPUT
    (tmp_path / "file").write_text("not empty")
    assert run("--algo=fedavg", *SMALL, f"--workdir={tmp_path}") == cli.BAD_INPUT
    assert "not an empty directory" in capsys.readouterr().err


@pytest.mark.slow
def test_diverging_run_names_the_clients(tmp_path, capsys):
    path = tmp_path / "run"
    argv = ["--algo=fedavg", *SMALL, "--rounds=3", "--lr=3e38", f"--workdir={path}"]
    assert run(*argv) == 3
    assert "is not finite in round" in capsys.readouterr().err
    assert json.loads((path / "summary.json").read_text())["status"] == "diverged"


def test_a_list_that_nobody_reads_on_ends_quietly():
    code = "from fedjax_pfl.experiment import cli; cli.show('x' * 10**6)"
    command = f'{sys.executable} -c "{code}" | head -c 1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("x", "")
