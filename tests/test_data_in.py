"""Damaged and odd files: refused in one line with the place, or read with the right
values, and never a traceback."""

from pathlib import Path

import pytest

import fedjax_pfl as pfl
from fedjax_pfl.errors import InputError
from tests import data_in

CASES = {case.name: case for case in data_in.cases()}


@pytest.mark.parametrize("name", CASES)
def test_file(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path / "cache"))
    case = CASES[name]
    path = case.write(tmp_path / "in")
    before = sorted(tmp_path.rglob("*"))
    if not isinstance(case.expected, str):
        case.expected(pfl.load(f"{case.kind}:{path}", **case.options), path)
        return
    with pytest.raises(InputError, match=case.expected) as error:
        pfl.load(f"{case.kind}:{path}", **case.options)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before  # nothing was executed


def test_names_are_unique_and_the_table_is_fresh():
    assert len(CASES) == len(data_in.cases())
    table = Path(data_in.__file__).with_name("TABLE.md")
    assert table.read_text() == data_in.table()
