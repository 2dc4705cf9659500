"""What the JSON files of a run directory hold, said once: read back, they are compared
with this."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.config import SETTINGS
from experiments.values import NOUN
from fedjax_pfl.models.layers import CONVOLUTIONS


class Object(NamedTuple):
    """A JSON object: what it must hold, what it may hold, and of what kind everything
    else is (None: any)."""

    required: dict[str, Any]
    optional: Mapping[str, Any] = MappingProxyType({})
    others: Any = None


class List(NamedTuple):
    """A JSON array of elements of one kind."""

    element: Any


Number = (float, type(None))  # null for what is not finite
COUNT = range(0, 2**53)
_PLACES = range(1, 2**31)

CONFIG = Object(
    {"algo": str, "dataset": str, "hparams": Object({}), "rounds": COUNT, "seed": COUNT}
    | {"digests": Object({}, others=str)},
    {
        name: (s.kind, type(None)) if s.optional else s.kind
        for name, s in SETTINGS.items()
    },
)
LAYOUT = Object(
    {
        "width": _PLACES,
        "conv": set(CONVOLUTIONS),
        "devices": Object({"count": _PLACES, "kind": str, "platform": str}),
    },
    {"runs": _PLACES},
)
PARTITION = Object(
    {"partition": str, "data": str},
    dict.fromkeys(
        ("public", "algo", "model_file", "networks", "dataset_file", "partition_file"),
        str,
    )
    | {"unseen": List(COUNT)},
)
VERSIONS = Object({}, {"resumed": List(Object({"round": COUNT}))})
_STATISTICS = Object(
    {"macro": float, "std": float},
    {
        "clients": (COUNT, type(None)),
        "round": COUNT,
        "course": (Object({}), type(None)),
    },
    Number,
)
_POINTS = Object({}, others=Object({}, others=_STATISTICS))
SECONDS = Object(
    {"seconds": Object({"train": float}, {"compile": float})},
    {"rounds": COUNT, "timed": COUNT},
)
SUMMARY = Object(
    SECONDS.required
    | {
        "status": str,
        "rounds": COUNT,
        "headline": Object({"score": str, "better": {"max", "min"}}),
        "scores": _POINTS,
        "traffic": Object({"bytes": COUNT}),
    },
    {
        "timed": COUNT,
        "unseen_rounds": COUNT,
        "ended": Object({"why": str, "stop_at": str, "patience": COUNT}),
        "examples": (
            Object({"used": COUNT, "available": COUNT, "of": COUNT}),
            type(None),
        ),
    },
)
ROW = Object({"round": COUNT})
METRICS = Object({"round": COUNT}, others=Number)
SCORES = Object(
    {"round": COUNT},
    {"ids": List(COUNT), "loss": List(Number)}
    | dict.fromkeys(
        ("post", "pre", "val", "unseen", "unseen_post"), Object({}, others=List(Number))
    ),
)

_NOUNS = NOUN | {type(None): "null"}


def problem(value: Any, wanted: Any, name: str = "it") -> str | None:
    """What is wrong with a value that was read, as `devices.count is "two", not a whole
    number from 1`; or None."""
    if isinstance(wanted, Object):
        return _object(value, wanted, name)
    if isinstance(wanted, List):
        if not isinstance(value, list):
            return f"{name} is {_shown(value)}, not a list"
        return next(
            (
                x
                for i, item in enumerate(value)
                if (x := problem(item, wanted.element, f"{name}[{i}]"))
            ),
            None,
        )
    return (
        None
        if _is(value, wanted)
        else f"{name} is {_shown(value)}, not {_noun(wanted)}"
    )


def _object(value: Any, wanted: Object, name: str) -> str | None:
    if not isinstance(value, dict):
        return f"{name} is {_shown(value)}, not an object"
    if missing := [key for key in wanted.required if key not in value]:
        return f"{name} lacks {missing[0]!r}"
    kinds, prefix = (
        dict(wanted.optional) | wanted.required,
        "" if name == "it" else f"{name}.",
    )
    limited = [
        (key, kind)
        for key in value
        if (kind := kinds.get(key, wanted.others)) is not None
    ]
    found = (problem(value[key], kind, prefix + key) for key, kind in limited)
    return next((x for x in found if x), None)


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        return any(problem(value, kind) is None for kind in wanted)
    if isinstance(wanted, range):
        return type(value) is int and value in wanted
    if isinstance(wanted, set):
        return isinstance(value, str) and value in wanted
    return (
        type(value) in (int, float) and math.isfinite(value)
        if wanted is float
        else type(value) is wanted
    )


def _noun(wanted: Any) -> str:
    if isinstance(wanted, Object):  # which is a tuple, too
        return "an object"
    if isinstance(wanted, tuple):
        return " or ".join(map(_noun, wanted))
    if isinstance(wanted, range):
        return f"a whole number from {wanted.start}"
    if isinstance(wanted, set):
        return f"one of {', '.join(sorted(wanted))}"
    return _NOUNS[wanted]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
