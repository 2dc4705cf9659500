"""Options NAME:VALUE:VALUE... and their reader."""

from typing import Annotated, Literal

import pytest
from annotated_types import Ge

from fedjax_pfl import clock, user_code
from fedjax_pfl.data.shifts import SHIFTS
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import task_options
from fedjax_pfl.models.adapted import ADAPTATIONS
from fedjax_pfl.options import Options


def draw(n: int, low: Annotated[float, Ge(0)], kind: Literal["a", "b"] = "a"):
    return n, low, kind


def none():
    return "none"


def own(function, n):
    return function(n)


MADE = Options("draw", {"draw": draw, "none": none}, given=("n",), own=own)


def test_values_are_the_arguments_in_their_order(tmp_path):
    assert MADE.read("draw:2")(n=3) == (3, 2.0, "a")
    assert MADE.read("draw:0.5:b")(n=3) == (3, 0.5, "b")
    assert MADE.read("none")(n=3) == "none"
    assert MADE.forms() == ["draw:LOW:a", "none"]
    (tmp_path / "mine.py").write_text("def twice(n):\n    return 2 * n\n")
    assert MADE.read(f"{tmp_path}/mine.py:twice")(n=3) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drow:1", "Unknown draw 'drow': did you mean 'draw'"),
        ("draw", "--draw=draw: must have LOW:KIND, got none."),
        ("draw:", "--draw=draw:: `low` must be a number, got ''."),
        ("draw:-1", r"--draw=draw:-1: `low` must be in \[0, inf\), got -1.0."),
        ("draw:nan", r"must be in \[0, inf\), got nan"),
        ("draw:inf", r"must be in \[0, inf\), got inf"),
        ("draw:1:c", "Unknown kind 'c'"),
        ("draw:1:a:2", "Unknown kind 'a:2'"),
        ("none:1", "--draw=none:1: must have no value, got 1."),
    ],
)
def test_other_values_are_refused_in_one_line(text, message):
    with pytest.raises(InputError, match=message) as found:
        MADE.read(text)
    assert "\n" not in str(found.value)


REGISTRIES = [
    *(task_options.LOSSES, task_options.MIXES, task_options.SCHEDULES),
    *(task_options.SAMPLINGS, task_options.STALENESS, task_options.RULES),
    *(clock.SPEEDS, clock.BANDWIDTHS, SHIFTS, ADAPTATIONS),
]


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda x: x.kind)
def test_every_option_is_annotated_and_documented(registry):
    for name, factory in registry.items():
        assert getattr(factory, "__doc__", ""), name
        for known in registry.arguments(name):
            assert known.kind in (int, float, str), (name, known)


def test_names_of_files_and_modules():
    for name in ("own.py:f", "/a b/own.py:f", "package.module:f", "module:f"):
        assert user_code.named(name)
    for name in ("focal:2", "npz:digits", "natural:speaker", "dirichlet:0.3", "cnn"):
        assert not user_code.named(name)


@pytest.mark.parametrize(
    "options",
    [task_options.ATTACKS, task_options.COMPRESSIONS, ADAPTATIONS, task_options.RULES],
    ids=lambda x: x.kind,
)
def test_what_an_own_factory_returns_is_checked(options, tmp_path):
    file = tmp_path / f"{options.kind}.py"
    file.write_text(
        "def some(*given):\n    return 1\n\ndef none(x, y):\n    return 1\n"
    )
    given = {"staleness": None} if options.given == ("staleness",) else {}
    with pytest.raises(InputError, match=r"some: It must return .*, got int"):
        options.read(f"{file}:some")(**given)
    with pytest.raises(InputError, match=r"none fails \(TypeError: "):
        options.read(f"{file}:none")(**given)
