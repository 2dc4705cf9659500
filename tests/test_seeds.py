"""`experiments.main` with several seeds: a run directory for each, and mean and
deviation at the end."""

import json
import shutil

import numpy as np
import pytest
from experiments.recorded import own_files

from experiments import grid, main, many, outcome, runs, session, settings
from fedjax_pfl.errors import InputError

TINY = [
    "--algo=fedavg",
    "--data_fraction=0.2",
    "--clients=5",
    "--width=1",
    "--epochs=1",
    "--model=linear",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("seeds")


@pytest.fixture(scope="module")
def said(folder):
    """What three seeds from 4 on print. Its tests are slow: several seeds of one
    setting, of which some are missing, are also in test_grid.py."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert (
            main.run(
                [*TINY, "--rounds=1", "--seed=4", "--seeds=3", f"--workdir={folder}"]
            )
            == 0
        )
    return out.getvalue()


@pytest.mark.slow
def test_they_end_with_mean_and_sample_deviation_over_seeds(folder, said):
    last = [
        runs.read_rows(folder / f"seed{k}" / "metrics.jsonl")[-1]["pre/acc"]
        for k in (4, 5, 6)
    ]
    assert f"{100 * np.mean(last):.1f} ± {100 * np.std(last, ddof=1):.1f}" in said
    [line] = json.loads((folder / "comparison.json").read_text())["lines"]
    assert line["seeds"] == [4, 5, 6] and line["scores"]["pre/acc"]["values"] == last
    assert (folder / "comparison.png").is_file() and len(set(last)) > 1


@pytest.mark.slow
def test_each_is_a_run_of_its_own_that_resumes_alone(folder, said, capsys, tmp_path):
    # which the other tests read, in any order
    folder = shutil.copytree(folder, tmp_path / "seeds")
    assert runs.read_config(folder / "seed5").seed == 5
    assert main.run(["--resume", f"--workdir={folder / 'seed5'}", "--rounds=2"]) == 0
    assert "Resuming after round 1 of 2" in capsys.readouterr().out
    rounds = {
        k: len(runs.read_rows(folder / f"seed{k}" / "metrics.jsonl")) - 1
        for k in (4, 5, 6)
    }
    assert rounds == {4: 1, 5: 2, 6: 1}


def test_of_a_file_that_was_changed_a_complete_run_is_not_taken(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from fedjax_pfl.algorithms.fedavg import fedavg as mine\n"
    )
    config = settings.resolve({"algo": f"{tmp_path / 'mine.py'}:mine"})
    known = {"partition": "", "data": ""} | own_files(config, config.clients)
    (tmp_path / "partition.json").write_text(json.dumps(known))
    many._check_files(tmp_path, config)
    (tmp_path / "mine.py").write_text(
        "from fedjax_pfl.algorithms.ditto import ditto as mine\n"
    )
    with pytest.raises(InputError, match="The file of the method is not the one that"):
        many._check_files(tmp_path, config)


def test_the_files_of_networks_and_of_a_partition_say_how_many_clients_there_are(
    tmp_path,
):
    (tmp_path / "nets.txt").write_text("linear\n" * 4)
    config = settings.resolve(
        {"algo": "local", "model": f"file:{tmp_path / 'nets.txt'}", "clients": 4}
    )
    known = {"partition": "", "data": ""} | own_files(config, 4)
    (tmp_path / "partition.json").write_text(json.dumps(known))
    runs.write_json(tmp_path / "config.json", runs.signed(config))
    many._check_files(tmp_path, config.replace(clients=None))


@pytest.mark.slow
def test_more_rounds_by_default_are_more_rounds(folder, said):
    """A resume takes what is not given from the run."""
    config = runs.read_config(folder / "seed4")
    member = grid.Member({}, config.replace(rounds=7), {}, folder / "seed4")
    assert many._more(member) == {"stop_at": "none", "patience": 0, "rounds": 7}
    assert "rounds" not in many._more(member._replace(config=config))


@pytest.mark.slow
def test_the_same_command_runs_what_is_missing(
    folder, said, monkeypatch, capsys, tmp_path
):
    folder, started = shutil.copytree(folder, tmp_path / "seeds"), []
    assert main.run(["--resume", f"--workdir={folder / 'seed5'}", "--rounds=2"]) == 0
    monkeypatch.setattr(
        session, "train_into", lambda given, *_: started.extend(given) or 0
    )
    command = [*TINY, "--seed=4", "--seeds=4", f"--workdir={folder}"]
    assert (
        main.run([*command, "--rounds=1"]) == 2
        and "a run of 2 rounds" in capsys.readouterr().err
        and not started
    )
    assert main.run([*command, "--rounds=2"]) == 0
    found = [(workdir, resume) for _, workdir, resume in started]
    assert found == [(str(folder / f"seed{k}"), k < 7) for k in (4, 6, 7)]


@pytest.mark.parametrize("step", ["run", "show"])
def test_ctrl_c_between_or_after_the_runs_says_that_the_same_command_goes_on(
    step, tmp_path, monkeypatch, capsys
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(many, "run", lambda *_: (0, False))
    monkeypatch.setattr(many if step == "run" else outcome, step, interrupted)
    assert main.run([*TINY, "--seeds=2", f"--workdir={tmp_path}"]) == 130
    assert capsys.readouterr().err == f"{many.GOES_ON}\n"


@pytest.mark.parametrize(
    "words, why",
    [
        (["--seeds=0"], "`seeds` must be in"),
        (["--seeds=2", "--seed=4294967295"], "`seed` must be in"),
        (["--seeds=2", "--resume"], "leave --resume out"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, why, capsys, tmp_path):
    assert main.run([*TINY, *words, f"--workdir={tmp_path / 'x'}"]) == 2
    assert why in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.slow
def test_the_directory_of_one_run_is_none_of_several(folder, said, capsys):
    assert main.run([*TINY, "--seeds=2", f"--workdir={folder / 'seed4'}"]) == 2
    assert "is that of one run" in capsys.readouterr().err
