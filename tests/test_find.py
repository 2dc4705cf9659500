"""Tests of the user's own methods, by the name of their file."""

import pytest

from fedjax_pfl.algorithms.find import find
from fedjax_pfl.errors import InputError

OWN = '''
from fedjax_pfl import ALGORITHMS

def mine(task, *, rate: float = 1.0):
    """FedAvg under another name."""
    return ALGORITHMS["fedavg"](task)
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:mine", "FileNotFoundError"),
        ("{file}:mime", "there is no function 'mime'"),
        ("no.such.module:mine", "ModuleNotFoundError"),
        ("ditta", "did you mean 'ditto'"),
    ],
)
def test_a_wrong_name_is_one_message(file, name, message):
    assert find(f"{file}:mine").__name__ == "mine"
    with pytest.raises(InputError, match=message):
        find(name.format(file=file))


def test_a_file_that_cannot_be_imported_is_one_message(file):
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(InputError, match=r"own.py:mine fails \(ModuleNotFoundError"):
        find(f"{file}:mine")
