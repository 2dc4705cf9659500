"""Tests of the comparison with the authors' code, without PyTorch or a checkout."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import originals
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError

SOURCE = """
import missing

class Client(Base):
    @staticmethod
    def twice(x):
        return 2 * np.asarray(x)

def added(x):
    return x + one
"""
ROOT = Path(__file__).parent.parent


def test_what_is_cut_needs_no_imports_of_its_file(tmp_path):
    path = tmp_path / "code.py"
    path.write_text(SOURCE)
    assert originals.cut(path, "added", {"one": 1})(2) == 3
    twice = originals.cut(path, "Client.twice", {"np": np, "Base": object})
    np.testing.assert_array_equal(twice([1, 2]), [2, 4])
    with pytest.raises(InputError, match=r"has no Client\.thrice"):
        originals.cut(path, "Client.thrice", {})
    with pytest.raises(InputError, match="There is no file"):
        originals.cut(tmp_path / "other.py", "added", {})


def test_differences_are_relative_to_the_largest_entry():
    assert originals.difference([1.0, -4.0], [1.0, -3.0]) == 0.25
    assert originals.difference(np.zeros(2), np.zeros(2)) == 0
    with pytest.raises(InputError, match="differ"):
        originals.difference(np.zeros(2), np.zeros(3))


def test_every_check_has_a_row_and_every_row_a_check():
    files = (ROOT / "benchmarks").glob("original_*.py")
    source = "\n".join(file.read_text() for file in files)
    checks = re.findall(r'^@check\(\s*"(\w+)"', source, re.M)
    rows = json.loads((ROOT / originals.RESULTS).read_text())
    assert sorted(checks) == sorted(rows)


def test_the_page_has_the_results():
    rows = json.loads((ROOT / originals.RESULTS).read_text())
    assert set(rows) <= set(ALGORITHMS)
    assert originals.table(rows) in (ROOT / "docs/comparison.md").read_text()
    for found in rows.values():
        assert found["difference"] == max(found["each"].values()) < 1e-4
