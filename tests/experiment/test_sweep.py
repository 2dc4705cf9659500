from pathlib import Path

import pytest

from experiment.runs import SMALL, rows, run
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import sweep

LENGTH = ["--rounds=2", "--checkpoint_every=1"]


def members(**given):
    hparams = given.pop("hparams", {})
    return sweep.members(
        given | {"hparams": hparams}, Path("root"), given.pop("n", None)
    )


def test_every_combination_is_a_run():
    found = members(algo="local,ditto", lr="0.1,0.2", hparams={"ditto:lam": "1,2"})
    names = [member.directory.path.name for member in found]
    assert names[:2] == ["local-lr=0.1-seed0", "local-lr=0.2-seed0"]
    assert len(found) == 2 + 4 and names[-1] == "ditto-lr=0.2-lam=2-seed0"
    assert found[-1].config.hparams["lam"] == 2.0 and found[-1].config.lr == 0.2


def test_values_with_commas_are_separated_by_semicolons():
    found = members(algo="fd", model="mlp;linear,mlp")
    assert [x.config.model.name for x in found] == ["mlp", "linear,mlp"]
    assert members(algo="fd", model="linear,mlp")[0].config.model.name == "linear,mlp"


def test_hyperparameters_of_a_method_by_its_printed_name(tmp_path):
    (tmp_path / "mine.py").write_text("from fedjax_pfl.algorithms import ditto as own")
    own = f"{tmp_path}/mine.py:own"
    found = members(algo=f"fedavg,{own}", hparams={"own:lam": "1,2"})
    assert [x.config.hparams.get("lam") for x in found] == [None, 1.0, 2.0]
    with pytest.raises(InputError, match="'dittto': did you mean 'ditto'"):
        members(algo="ditto", hparams={"dittto:lam": "1,2"})


def test_a_setting_is_given_to_the_methods_that_read_it():
    found = members(algo="fedavg,mocha", momentum="0.9", model="linear")
    assert [x.config.momentum for x in found] == [0.9, 0.0]
    with pytest.raises(InputError, match="no effect with --algo=mocha"):
        members(algo="mocha", momentum="0.9")


def test_a_setting_is_given_to_the_values_that_read_it():
    given = {"partition": "iid,dirichlet_class", "alpha": "0.1,1"}
    found = members(algo="fedavg", **given)
    names = [x.directory.path.name for x in found]
    assert len(names) == 3 and names[0] == "fedavg-partition=iid-seed0"
    assert [x.config.alpha for x in found[1:]] == [0.1, 1.0]
    with pytest.raises(InputError, match="--alpha needs"):
        members(algo="fedavg", partition="iid", alpha="0.1,1")
    given = {"server_optimizer": "fedadam;fedyogi", "server_lr": "0.01,0.1"}
    assert len(members(algo="fedavg", **given)) == 4
    given = {"dp": "client,adaptive", "dp_noise": "1", "bn_stats": "local"}
    assert len(members(algo="fedavg", **given)) == 2
    with pytest.raises(InputError, match="no effect with any"):
        members(algo="fedavg", partition="iid,pathological", alpha="0.1,1")


@pytest.mark.parametrize(
    "given",
    [
        {"lr": "0.1,0.1"},
        {"lr": "0.1,a"},
        {"width": "1,2"},
        {"preset": "digits,synthetic"},
    ],
)
def test_wrong_values(given):
    with pytest.raises(InputError):
        members(algo="fedavg", **given)


@pytest.mark.slow
def test_seeds_at_once_are_the_runs_one_by_one(tmp_path, capsys):
    argv = ["--algo=ditto", *SMALL, *LENGTH, "--seeds=2"]
    for how in ("all", "1"):
        given = [f"--runs_at_once={how}", f"--workdir={tmp_path / how}"]
        assert run(*argv, *given) == 0
    for seed in ("seed0", "seed1"):
        assert rows(tmp_path / "all" / seed) == rows(tmp_path / "1" / seed)
    assert "±" in capsys.readouterr().out
    before = rows(tmp_path / "all" / "seed0")
    again = [*argv, "--runs_at_once=all", f"--workdir={tmp_path / 'all'}"]
    assert run(*again, "--rounds=3") == 0  # all go on
    assert rows(tmp_path / "all" / "seed0")[0].startswith(before[0][:100])
    assert len(rows(tmp_path / "all" / "seed1")[0].splitlines()) == 4


@pytest.mark.slow
def test_a_validation_score_chooses(tmp_path, capsys):
    argv = ["--algo=fedavg", *SMALL, *LENGTH, "--lr=0.0001,0.1", f"--root={tmp_path}"]
    given = ["--val_fraction=0.2", "--select"]
    assert run(*argv, *given, command=sweep.sweep) == 0
    text = capsys.readouterr().out
    assert "Chosen by val/acc: fedavg, lr=0.1." in text
    shown = text.partition("lr=0.1 of 0.0001, 0.1.")[2]
    assert shown and "lr=0.0001" not in shown and "round 1/2" not in text
    assert text.startswith("run 1 of 2, ") and "\nrun 2 of 2: fedavg-lr=0.1-" in text
    assert run(*argv, *given, command=sweep.sweep) == 0  # nothing is left to run
    other = [*argv, *given, "--epochs=2"]
    assert run(*other, command=sweep.sweep) == 2
    assert "recorded" in capsys.readouterr().err
    assert run(*argv, "--select=post/acc", command=sweep.sweep) == 2


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, capsys):
    argv = ["--algo=fedavg", *SMALL, *LENGTH, "--lr=3e38,0.1", f"--root={tmp_path}"]
    assert run(*argv, "--runs_at_once=all", command=sweep.sweep) == 3
    text = capsys.readouterr()
    assert "is not finite" in text.err and "lr=0.1-seed0" in text.out
    assert (tmp_path / "fedavg-lr=0.1-seed0" / "metrics.csv").exists()
