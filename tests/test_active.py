"""Which parts of each method have an effect at its defaults: the table, and the numbers
that are kept."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import toy
from rich.console import Console

from experiments import active, closing, describe, settings
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.types import State

ROOT = Path(__file__).parent.parent
KNOWN = json.loads(active.FILE.read_text())
# batch norm of a few rows magnifies rounding, and the tests' compiler rounds in another
# order
ROUGH = {"fedbn": 0.1}


def test_every_part_of_every_method_is_measured():
    assert active.TABLE.keys() == ALGORITHMS.keys()
    assert {name: len(found) for name, found in KNOWN.items()} == {
        n: len(row.parts) for n, row in active.TABLE.items()
    }
    assert all(bool(row.parts) != bool(row.why) for row in active.TABLE.values())


@pytest.mark.parametrize("name", active.TABLE)
def test_a_part_is_switched_off_by_another_value_or_method(name):
    row = active.TABLE[name]
    usual = settings.resolve({"algo": name} | row.settings).hparams
    for part in row.parts:
        off = settings.resolve(
            {"algo": part.method or name}
            | row.settings
            | {"hparams": dict(part.hparams)}
        ).hparams
        assert bool(part.method) != bool(part.hparams) and part.method in (
            "",
            *ALGORITHMS,
        )
        assert part.method or all(off[x] != usual[x] for x in part.hparams)


@pytest.mark.slow  # compiles a run with each part and without it
@pytest.mark.parametrize("name", [n for n in active.TABLE if active.TABLE[n].parts])
def test_the_numbers_are_those_of_today(name):
    for found, known in zip(active.measure(name), KNOWN[name], strict=True):
        share = found["score"] == "acc"
        assert found["score"] == known["score"] and active.idle(found) == active.idle(
            known
        )
        for which in ("with", "without", "mean"):
            assert found[which] == pytest.approx(
                known[which], abs=ROUGH.get(name, 0.02) if share else 0.05
            )
        assert found["parameters"] == pytest.approx(
            known["parameters"], rel=0.1, abs=1e-7
        )


def test_the_distance_is_of_what_both_have():
    ones, many = {"w": np.ones(3), "only": np.ones(1)}, {"w": np.full((4, 3), 2.0)}
    assert (
        active.distance(many, ones)
        == active.distance(ones, {"w": np.full(3, 0.5)})
        == 1
    )
    assert active.distance(ones, many) == 0.5


def test_what_a_client_has_stands_for_what_all_have():
    state = State({"body": 1.0, "head": 2.0, "stats": 3.0}, {"v": {"head": 4.0}})
    assert active.parameters(state, "server+clients.v") == {
        "['body']": 1,
        "['head']": 4,
    }


def test_what_is_idle_is_said_of_the_method(capsys):
    assert active.lines("local")[0].startswith("Nothing travels") and not active.lines(
        "own.py:ditto"
    )
    for name in ("fedprox", "mnfl", "fedamp"):
        assert "Idle at the defaults on this data." in active.lines(name)[0]
    assert "Idle" not in active.lines("ditto")[0]
    text = " ".join(describe.describe("mnfl").split())
    assert active.lines("mnfl")[0] in text and active.where("mnfl") in text


def test_the_documentation_names_all_that_is_idle():
    text = (
        (ROOT / "docs/methods/index.md")
        .read_text()
        .split("these parts are idle:")[1]
        .split(".\n")[0]
    )
    idle = {
        name for name, found in active._known().items() if any(map(active.idle, found))
    }
    assert set(re.findall(r"`(\w+)`", text)) == idle


def ended(method, low, high, capsys):
    class Experiment:
        algorithm = staticmethod(lambda: ALGORITHMS[method](toy.task()))

    rows = [
        {"round": 0, "loss": 1.0, "coefficients/min": low, "coefficients/max": high},
        {"round": 1, "pre/acc": 0.5},
    ]
    closing.warn(Console(soft_wrap=True), rows, Experiment())
    return capsys.readouterr().out


@pytest.mark.parametrize("method", ["mnfl", "mnfl_het"])
def test_a_run_whose_coefficients_stayed_says_so(method, capsys):
    still = ended(method, 1 / toy.N - 1e-5, 1 / toy.N, capsys)
    assert (
        still.startswith("Note: the coefficients ended within 1e-05 of")
        and "--hparam=lam=N" in still
    )
    assert (
        ended(method, 1 / toy.N - 0.002, 1 / toy.N, capsys)
        == ended(method, 1 / toy.N, 0.9, capsys)
        == ""
    )
    assert (
        ended("fedmd", 1 / toy.N, 1 / toy.N, capsys)
        == ended(method, None, None, capsys)
        == ""
    )
