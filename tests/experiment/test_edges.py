"""Edge values of every setting, generated from the registries."""

import math

import pytest

from fedjax_pfl import clock, hyperparameters
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import task_options
from fedjax_pfl.experiment.config import OPTIONS, SETTINGS, resolve

EDGES = ("nan", "inf", "-inf", "-1", "1.5", "1e400", "", " ", "nosuch", "1:", ":")
EDGES += ("file:/nope", "/nope/own.py:f", "npz:/nope")
MORE = {
    "speeds": clock.SPEEDS,
    "bandwidths": clock.BANDWIDTHS,
    "malicious": task_options.ATTACKS,
}
NUMBERS = [name for name, known in SETTINGS.items() if known.kind in (int, float)]


def allowed(known, value):
    """Returns whether a number is finite, of its kind and in its range."""
    low = value > known.low if known.open_low else value >= known.low
    high = value < known.high if known.open_high else value <= known.high
    whole = known.kind is float or float(value).is_integer()
    return math.isfinite(value) and whole and low and high


def test_there_are_two_hundred_edges():
    assert len(EDGES) * len(SETTINGS) > 200 and len(NUMBERS) > 20


@pytest.mark.parametrize("name", SETTINGS)
def test_edges_of_a_setting_are_refused_or_in_range(name):
    known = SETTINGS[name]
    for text in EDGES:
        given = {"algo": "fedavg", name: text}
        try:
            value = getattr(resolve(given), name)
        except InputError as error:
            assert str(error) and "\n" not in str(error), (text, error)
            continue
        if name in NUMBERS and value is not None:
            assert allowed(known, value), (text, value)


def numbers_of_options():
    """Yields setting, name of an option and position of each of its numbers."""
    for name, options in (OPTIONS | MORE).items():
        for choice in options:
            for i, known in enumerate(options.arguments(choice)):
                if known.kind in (int, float):
                    yield name, choice, i


@pytest.mark.parametrize("name, choice, position", numbers_of_options())
def test_edges_of_an_option_are_refused_or_in_range(name, choice, position):
    options = (OPTIONS | MORE)[name]
    known = options.arguments(choice)[position]
    for edge in EDGES:
        text = ":".join([*["1"] * position, edge])  # 1 is in most ranges
        try:
            options.read(f"{choice}:{text}")
            found = hyperparameters.values(options[choice], text, options.given)
        except InputError as error:
            assert "\n" not in str(error), (text, error)
            continue
        value = found[known.name]
        assert value is None or allowed(known, value), (text, value)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_edges_of_hyperparameters_are_refused_or_in_range(algo):
    for name, known in hyperparameters.of(ALGORITHMS[algo]).items():
        for text in EDGES:
            try:
                found = resolve({"algo": algo, "hparams": {name: text}}).hparams[name]
            except InputError as error:
                assert "\n" not in str(error), (name, text, error)
                continue
            if known.kind in (int, float) and found is not None:
                assert allowed(known, found), (name, text)
