"""Measured results and the pages that are generated from them."""

import importlib
import json
import re
import sys

import pytest
from documents import ROOT

from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.experiment.presets import PRESETS

sys.path.append(str(ROOT / "docs"))
generator = importlib.import_module("result_pages")
FILES = sorted(set(generator.FOLDER.glob("*.json")) - {generator.leaderboard.BOARD})


def test_the_pages_are_those_that_the_results_generate():
    written = {file.name: file.read_text() for file in generator.DOCS.glob("*.md")}
    assert written == generator.pages(), "run python docs/result_pages.py"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_are_complete(file):
    """Every table has its circumstances, and every number a method."""
    assert file.stem in PRESETS
    for table in json.loads(file.read_text())["tables"]:
        fields = {"table", "settings", "seeds", "rounds", "share", "machine", "commit"}
        assert fields | {"command", "rows"} <= set(table)
        assert all(
            line.startswith("python -m ") for line in table["command"].split("\n")
        )
        assert 0 < table["share"] <= 1 and table["rounds"] != 0 and table["seeds"]
        for row in table["rows"]:
            assert row["method"] in ALGORITHMS and row["scores"]
            assert "label" in row or row["method"] in generator.METHODS
            several = len(table["seeds"]) > 1
            for score in row["scores"].values():
                assert several or score["std"] is None


def test_findings_are_five_lines_of_one_sentence_at_most():
    by_page = {}
    for file in FILES:
        found = json.loads(file.read_text())["findings"]
        by_page.setdefault(PRESETS[file.stem].paper, []).extend(found)
    assert all(len(found) <= 5 for found in by_page.values())
    assert all(
        len(line) < 200 and "\n" not in line for x in by_page.values() for line in x
    )
    assert len((generator.DOCS.parent / "findings.md").read_text().split()) <= 600


def test_published_numbers_and_differences_stand_beside_the_measured():
    page = generator.pages()["fedcp.md"]
    row = re.search(r"^\| FedCP \|.*89\.06 \(249\).*$", page, re.MULTILINE)[0]
    assert "91.30 ± 0.17" in row and "| -2.2 |" in row
    assert "rounds 250 of 2000" in page


def test_the_leaderboard_shows_settings_that_all_methods_have(monkeypatch):
    def row(gain):
        accuracies = [80 + gain + x for x in (0, 1, -1, 0.5, 0)]
        names = ("before", "after", "before10", "after10")
        reach = {"MB to reach": [1.5, None, None, None, 2.5]}
        reach["steps to reach"] = [1.0, 2.0, 3.0, None, None]
        tuned = {"lr": 0.1, "hparams": {"mu": 0.5}, "rounds": [5, 10, 15, 20, 25]}
        return tuned | dict.fromkeys(names, accuracies) | reach

    rows = {"local": row(0), "fedavg": row(0.5), "fedavg_ft": row(1), "ditto": row(2)}
    board = {"few": rows, "skewed": rows | {"ditto": {"reason": "no"}}, "mild": {}}
    monkeypatch.setattr(generator.leaderboard, "ALGORITHMS", rows)
    monkeypatch.setattr(generator.leaderboard, "board", lambda: board)
    page = generator.pages()["leaderboard.md"]
    few = page.split("## few")[1]
    cells = "lr=0.1, mu=0.5 | 15 | 82.1 ± 0.7 | 82.1 ± 0.7 | 82.1 ± 0.7 | 82.1 ± 0.7"
    assert f"| `ditto` | {cells} | - | 3 |" in few
    assert few.index("`ditto`") < few.index("`fedavg_ft`") < few.index("`local`")
    assert "* `ditto`: no" in page and "all methods: mild, rotated." in page
