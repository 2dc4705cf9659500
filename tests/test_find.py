"""A user's own method, named on the command line by its file."""

import json

import pytest

from experiments import entry, main, runs, show
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.errors import InputError

OWN = '''"""A method of one's own."""

from fedjax_pfl.averaging import partial_averaging, split


def mine(task, *, mu: float = 0.1):
    """FedProx by another name."""
    return partial_averaging(task, split(task), mu=mu)
'''
TINY = [
    "--data_fraction=0.2",
    "--clients=5",
    "--epochs=1",
    "--model=linear",
    "--width=1",
    "--devices=1",
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def rows(path):
    return [
        json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow  # that one runs is tested below, changed files in test_own.py
def test_it_runs_resumes_and_is_the_method_it_says(file, tmp_path, capsys):
    own, fedprox = tmp_path / "own", tmp_path / "fedprox"
    for path, algo in ((own, f"{file}:mine"), (fedprox, "fedprox")):
        assert (
            main.run(
                [
                    f"--algo={algo}",
                    "--hparam=mu=0.5",
                    "--rounds=2",
                    *TINY,
                    f"--workdir={path}",
                ]
            )
            == 0
        )
    assert rows(own) == rows(fedprox)
    assert runs.load(own).config.algo == f"{file}:mine"
    assert (
        main.run(["--resume", "--rounds=3", f"--workdir={own}"]) == 0
        and len(rows(own)) == 4
    )

    file.write_text(OWN + "# changed\n")
    capsys.readouterr()
    assert main.run(["--resume", "--rounds=4", f"--workdir={own}"]) == entry.BAD_INPUT
    assert "The file of the method is not the one that" in capsys.readouterr().err


def test_it_is_described(file, capsys):
    assert main.run([f"--describe={file}:mine"]) == 0
    said = capsys.readouterr().out
    assert (
        "FedProx by another name." in said
        and "mu=0.1" in said
        and f"From {file}:" in said
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere.py:mine", r"there is no such file\.$"),
        ("{file}:other", r"there is no function 'other', only .*mine"),
        ("no.such.module:mine", r"'no.such.module' cannot be imported"),
        ("ditta", r"did you mean 'ditto'"),
    ],
)
def test_what_is_not_there_is_one_sentence(file, name, sentence):
    with pytest.raises(InputError, match=sentence):
        find(name.format(file=file))


def test_a_file_that_cannot_be_imported_is_one_sentence(file):
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(
        InputError, match=r"own.py cannot be imported \(ModuleNotFoundError"
    ):
        find(f"{file}:mine")


@pytest.mark.slow
def test_a_run_is_read_without_the_file_of_its_method(file, tmp_path, capsys):
    path = tmp_path / "run"
    assert (
        main.run([f"--algo={file}:mine", "--rounds=1", *TINY, f"--workdir={path}"]) == 0
    )
    file.unlink()
    assert "after local training" in show.main([str(path)])
    capsys.readouterr()
    assert main.run(["--resume", "--rounds=2", f"--workdir={path}"]) == entry.BAD_INPUT
    assert "there is no such file" in capsys.readouterr().err
