"""Hyperparameters have one source, the factory's signature: what is read of it, and
what of it is refused."""

import functools
import inspect
import math
import re
from typing import Annotated, Any, Literal

import jax
import numpy as np
import pytest
import toy
from annotated_types import Ge, Gt, Interval, Le, Lt

from fedjax_pfl import hyperparameters, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError
from fedjax_pfl.hyperparameters import Hyperparameter, typed

INF = math.inf
FREE_TEXT = ("tasks",)  # whose grammar class_groups checks


def read(annotation: Any, default: Any = 1) -> Hyperparameter:
    def factory(task, *, x=default):
        """A factory of one hyperparameter."""

    if annotation is not None:
        factory.__annotations__["x"] = annotation
    return hyperparameters.of(factory)["x"]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (float, {"kind": float}),
        ("float", {"kind": float}),
        (None, {"kind": int}),
        (int | None, {"kind": int, "optional": True}),
        (Annotated[float, Ge(0)], {"kind": float, "low": 0, "open_high": True}),
        (
            Annotated[float, Gt(0)],
            {"kind": float, "low": 0, "open_low": True, "open_high": True},
        ),
        (Annotated[int, Le(3)], {"kind": int, "high": 3, "open_low": True}),
        (
            Annotated[int, Ge(1), Lt(3)],
            {"kind": int, "low": 1, "high": 3, "open_high": True},
        ),
        (Annotated[float, Interval(ge=0, le=1)], {"kind": float, "low": 0, "high": 1}),
        (
            Annotated[float, Interval(gt=-INF, lt=INF)],
            {"kind": float, "open_low": True, "open_high": True},
        ),
        (
            Annotated[float, Ge(0)] | None,
            {"kind": float, "low": 0, "open_high": True, "optional": True},
        ),
        (
            Annotated[float | None, "a unit", Ge(0)],
            {"kind": float, "low": 0, "open_high": True, "optional": True},
        ),
        (Literal["a", "b"], {"kind": str, "choices": ("a", "b")}),
        (Literal[1, 2] | None, {"kind": int, "choices": (1, 2), "optional": True}),
        (int | str, {"kind": object}),
        (tuple[int, ...], {"kind": tuple}),
    ],
)
def test_an_annotation_is_read(annotation, expected):
    found = read(annotation)
    assert found == Hyperparameter("x", default=1, **expected)
    assert found.traced == (expected["kind"] is float)


def wrong_values(known: Hyperparameter) -> list[Any]:
    """A value beyond every bound, not among the choices, or of another kind."""
    if known.choices:
        return ["neither"]
    if known.kind not in (int, float):
        return [0.5]
    step = 1 if known.kind is int else 1e-6
    low = known.low if known.open_low else known.low - step
    high = known.high if known.open_high else known.high + step
    ends = [end for end in (low, high) if known.kind is float or math.isfinite(end)]
    return [*ends, "1", math.nan if known.kind is float else 0.5]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_hyperparameter_of_a_method_says_what_is_allowed(method):
    for name, known in hyperparameters.of(ALGORITHMS[method]).items():
        assert known.kind in hyperparameters.NOUNS and (
            known.kind not in (int, float) or known.ranged
        ), f"{name} has no range"
        assert known.kind is not str or known.choices or name in FREE_TEXT, (
            f"{name} has no choices"
        )
        hyperparameters.check(ALGORITHMS[method], {name: known.default})
        ends = [
            end
            for end, opened in (
                (known.low, known.open_low),
                (known.high, known.open_high),
            )
            if not opened
        ]
        for value in (*known.choices, *(ends if known.ranged else ())):
            hyperparameters.check(ALGORITHMS[method], {name: value})


@pytest.mark.parametrize(
    "method", [m for m in ALGORITHMS if hyperparameters.of(ALGORITHMS[m])]
)
def test_a_wrong_value_is_one_sentence_before_anything_is_compiled(method):
    task, events = toy.method_task(method), []
    listen = lambda name, *_, **__: events.append(name)
    jax.monitoring.register_event_time_span_listener(listen)
    try:
        for name, known in hyperparameters.of(ALGORITHMS[method]).items():
            for value in wrong_values(known):
                program = functools.partial(
                    simulate.program, ALGORITHMS[method], task, {name: value}
                )
                for call in (
                    program,
                    functools.partial(ALGORITHMS[method], task, **{name: value}),
                ):
                    with pytest.raises(InputError) as error:
                        call()
                    said = str(error.value)
                    assert said.startswith(
                        (
                            f"{method}: `{name}` must be ",
                            f"{method}: Unknown {name} {value!r}: ",
                        )
                    )
                    assert said.endswith(".") and "\n" not in said
    finally:
        jax.monitoring.unregister_event_time_span_listener(listen)
    assert not events


@pytest.mark.parametrize("method", ALGORITHMS)
def test_the_docstring_has_the_same_ranges_and_choices(method):
    for name, known in hyperparameters.of(ALGORITHMS[method]).items():
        documented(inspect.getdoc(ALGORITHMS[method]), name, known)


def documented(doc, name, known):
    """Asserts that a docstring has the range or the choices of a hyperparameter."""
    text = re.search(rf"^  {name}: (.*?)(?=^ {{0,2}}\w|\Z)", doc, re.M | re.S)[1]
    text = " ".join(text.split())
    if known.choices:
        assert all(
            re.search(rf"\b(?<!=){re.escape(choice)}(?![\w+])", text)
            for choice in known.choices
        )
    elif known.ranged:
        left, low, high, right = re.findall(
            r"([\[(])(-?[\d.]+|-inf), ([\d.]+|inf)([\])])", text
        )[0]
        assert (float(low), float(high)) == (known.low, known.high)
        assert (left == "(", right == ")") == (known.open_low, known.open_high)
    if known.kind is bool:
        assert "true or false" in text


def plain(
    task,
    *,
    lam: float = 1,
    rate: float | None = None,
    steps=2,
    gamma=0.5,
    clip: float = INF,
    kind: str = "a",
):
    """A stranger's factory: no range, and floats whose default is none."""
    return ALGORITHMS["fedavg"](task)


def test_what_is_traced_follows_the_annotation():
    task = toy.task()
    numbers = lambda **given: (
        simulate.program(plain, task, given, checked=False).traced.keys()
        - {"lr", "lr_decay"}
    )
    assert numbers() == {"lam", "gamma", "clip"}
    assert numbers(rate=1) == {"lam", "rate", "gamma", "clip"}
    assert numbers(steps=np.int32(3), kind="b") == {"lam", "gamma", "clip"}
    for wrong, said in (
        ({"steps": 0.5}, "plain: `steps` must be an integer, got 0.5."),
        ({"lam": "1"}, "plain: `lam` must be a number, got '1'."),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            simulate.program(plain, task, wrong)


def test_a_partial_factory_is_read_and_named_as_its_function():
    factory = functools.partial(ALGORITHMS["fedcp"], lam=2.0)
    assert hyperparameters.defaults(factory)["lam"] == 2.0
    with pytest.raises(
        InputError,
        match=r"^fedcp: Unknown hyperparameter 'lamda': did you mean 'lam'\? ",
    ):
        hyperparameters.check(factory, {"lamda": 1.0})
    assert typed(factory.func, {"norm": "none", "lam": "2"}) == {
        "norm": "none",
        "lam": 2.0,
    }


def positional(task, mu: float = 0.1):
    raise AssertionError("not to be called")


def required(task, *, mu: float):
    raise AssertionError("not to be called")


@pytest.mark.parametrize("factory", [positional, required])
@pytest.mark.parametrize("check", [hyperparameters.check, typed])
def test_a_hyperparameter_needs_a_keyword_and_a_default(factory, check):
    with pytest.raises(InputError, match="`mu` must be keyword-only"):
        check(factory, {"mu": "0.2"})
