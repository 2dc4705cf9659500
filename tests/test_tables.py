"""Tables of the documentation that are generated from the code."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
TABLES = runpy.run_path(str(DOCS / "tables.py"))


@pytest.mark.parametrize("page", TABLES["PAGES"])
def test_tables_are_those_of_the_code(page):
    text = (DOCS / page).read_text()
    assert TABLES["filled"](text) == text, "run python docs/tables.py"


def test_every_table_is_on_a_page():
    pages = "".join((DOCS / page).read_text() for page in TABLES["PAGES"])
    for name in TABLES["TABLES"]:
        assert pages.count(f"<!-- {name} -->") == 2
