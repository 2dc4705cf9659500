"""What there is to choose from, in words: `--list` and `--describe`."""

import contextlib
import functools
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from experiments import active
from experiments.presets import DEFAULT_PRESETS, PRESETS, Preset
from experiments.presets.preset import Cell
from fedjax_pfl import models, user_code
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data.datasets import DATASETS, load
from fedjax_pfl.data.partitioners import PARTITIONS
from fedjax_pfl.engine import unseen
from fedjax_pfl.errors import choose, interval
from fedjax_pfl.hyperparameters import Hyperparameter, of
from fedjax_pfl.models import MODELS
from fedjax_pfl.testing import synthetic
from fedjax_pfl.types import Task

_WIDTH, _INDENT = 110, 32
_MADE = {  # what a function of the user's own returns
    "algo": "Algorithm",
    "model": "a Flax NNX module with body and head",
    "dataset": "Dataset",
    "partition": "Partition",
}


def named(user: Mapping[str, Any] = MappingProxyType({})) -> dict[str, dict[str, str]]:
    """Everything that has a name, with one line each, by kind: {title: {name: line}}.

    Args:
      user: settings, whose parts of the user's own are named, too.
    """
    yours = {
        kind: f"your own function, {call} -> {_MADE[kind]}"
        for kind, call in user_code.CALLS.items()
    }
    mine = {
        kind: {"FILE.py:NAME": yours[kind]}
        | {
            name: first_sentence(user_code.load(kind, name))
            for name in str(user.get(kind, "")).split(",")
            if user_code.named(name)
        }
        for kind in yours
    }
    methods = {name: first_sentence(factory) for name, factory in ALGORITHMS.items()}
    models = {name: first_sentence(factory) for name, factory in MODELS.items()}
    return {
        "Methods (--algo; more with --describe=NAME)": methods | mine["algo"],
        "Data sets (--dataset)": DATASETS | mine["dataset"],
        "Partitions (--partition)": PARTITIONS | mine["partition"],
        "Models (--model)": models | mine["model"],
        "Presets (--preset)": {
            name: preset.description for name, preset in PRESETS.items()
        },
    }


def listing(user: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Everything that has a name, as text; `user` as of `named`."""
    return "\n\n".join(f"{title}\n{_rows(rows)}" for title, rows in named(user).items())


def _rows(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(
        _hanging(f"  {name:<{width}}  ", text) for name, text in rows.items()
    )


def _hanging(head: str, text: str) -> str:
    if not text:
        return head.rstrip()
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * min(len(head), _INDENT),
    )


def describe(name: str) -> str:
    """A method, a preset or a part of a user's own in full."""
    if name in PRESETS:
        return _preset(name)
    if ":" in name:
        kind = _kind(user_code.load("describe", name))
        return _method(find(name), name) if kind == "algo" else _part(kind, name)
    return _method(
        ALGORITHMS[choose("method or preset", name, [*ALGORITHMS, *PRESETS])], name
    )


def _kind(function: Callable) -> str:
    """What a part of a user's own is, by the arguments of its function."""
    known = user_code.parameters(function)
    places = [
        x
        for x in known.values()
        if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
    ]
    required = [x.name for x in places if x.default is x.empty]
    if not required or (required == ["seed"] and len(known) == 1):
        return "dataset"
    if "dataset" in required[:1]:
        return "partition"
    return "model" if len(required) > 1 else "algo"


def _part(kind: str, name: str) -> str:
    """A network, data set or partition of a user's own: its docstring, how it is
    called, and what a data set holds."""
    function = user_code.load(kind, name)
    parts = [f"{name}: {inspect.getdoc(function) or 'no docstring.'}"]
    parts += [
        f"Use: --{kind}={name}, called with {user_code.CALLS[kind]}, returns "
        f"{_MADE[kind]}."
    ]
    if kind == "dataset":
        d = load(name)
        tests = len(d.y) - d.num_train
        parts += [
            f"Holds: {len(d.y):,} examples of {d.x.dtype}{list(d.x.shape[1:])} in "
            f"{d.num_classes} classes, "
            f"{f'{tests:,} of them the official test set' if tests else 'no official test set'}."
        ]
    return "\n\n".join(parts)


def _method(factory: Callable, name: str) -> str:
    doc = inspect.getdoc(factory) or ""
    module = sys.modules[factory.__module__]
    about, place = (
        inspect.getdoc(module) or "",
        module.__file__ if ":" in name else module.__name__,
    )
    first = doc.split("\n\n")[0] or "no docstring."
    parts = [
        f"{name}: {first}",
        f"From {place}:\n{textwrap.indent(about, '  ')}" if about else f"From {place}.",
    ]
    rows = hyperparameters(factory)
    lines = [
        _hanging(f"  {n}={row['default']}{_beside(row)}  ", row["text"])
        for n, row in rows.items()
    ]
    parts.append(
        "\n".join(["Hyperparameters (--hparam name=value):", *lines])
        if lines
        else "No hyperparameters."
    )
    if note := sections(doc).get("Note"):
        first, *more = (" ".join(paragraph.split()) for paragraph in note.split("\n\n"))
        parts += [
            _hanging("Note: ", first),
            *(textwrap.indent(textwrap.fill(x, _WIDTH - 6), " " * 6) for x in more),
        ]
    if known := active.lines(name):
        title = _hanging(
            "",
            "Which of its parts have an effect at the defaults "
            f"({active.where(name)}):",
        )
        parts.append("\n".join([title, *(_hanging("  ", line) for line in known)]))
    return "\n\n".join(
        [*parts, _hanging("Unseen clients (--unseen): ", unseen_clients(factory))]
    )


def _beside(row: dict[str, Any]) -> str:
    """The type of a hyperparameter after its default, unless its text lists the
    choices."""
    listed = row["type"].startswith("one of") and "one of" in row["text"]
    return "" if listed else f" ({row['type']})"


def unseen_clients(factory: Callable) -> str:
    """Whether a method has a way for clients that do not train; of small tasks, one of
    which nearly all take."""
    for net in ("lenet_bn", "linear"):
        # a user's method for other inputs may raise anything
        with contextlib.suppress(Exception):
            why = unseen.obstacle(factory, _task(net))
            return (
                f"no way; {why}."
                if why
                else "a round of their own under the trained server."
            )
    return "it depends on the task."


@functools.cache
def _task(net: str) -> Task:
    """A task with all that a method may need: images, public examples, a model that all
    exchange."""
    counts, image = (
        np.full((4, synthetic.C), 50),
        jax.ShapeDtypeStruct((28, 28, 1), np.float32),
    )
    model = models.model(net, image.shape, synthetic.C)
    pool = jax.ShapeDtypeStruct((8, *image.shape), image.dtype)
    parts = {"models": (model,), "shared": model, "input": image, "public": pool}
    return synthetic.task(sizes=counts.sum(axis=1), class_counts=counts, **parts)


def _preset(name: str) -> str:
    preset = PRESETS[name]
    flags = " ".join(f"--{flag}={value}" for flag, value in preset.settings.items())
    default = [dataset for dataset, chosen in DEFAULT_PRESETS.items() if chosen == name]
    parts = [
        f"{name}: {preset.description}",
        f"Command: python -m experiments.main --preset={name} --algo=METHOD",
    ]
    parts += [_hanging("Same as: ", flags)]
    parts += (
        [f"Work: {preset.steps:,} client steps per round on all of the data."]
        if preset.steps
        else []
    )
    own = [
        _hanging(f"  {method:<14}", _own(preset, method))
        for method in sorted({*preset.methods, *preset.hparams})
    ]
    parts += ["\n".join(["Methods with settings of their own:", *own])] if own else []
    parts += [
        f"What --dataset={dataset} takes when no --preset is given."
        for dataset in default
    ]
    cells = [*([Cell({}, preset.published)] if preset.published else []), *preset.cells]
    if cells:
        rows = [_hanging("  ", row) for cell in cells for row in _cell(cell)]
        parts.append(
            "\n".join([f"Published, in %; compare {_compared(preset)}:", *rows])
        )
    if preset.measured:
        rows = [f"  {method:<14}{value}" for method, value in preset.measured.items()]
        parts.append(
            "\n".join(
                [
                    f"Measured here, {preset.headline} in %, mean of seeds 0, 1, 2:",
                    *rows,
                ]
            )
        )
    if preset.protocol:
        parts.append(_hanging("The paper's protocol: ", preset.protocol))
    return "\n\n".join(parts)


def _own(preset: Preset, method: str) -> str:
    flags = [
        f"--{name}={value}" for name, value in preset.methods.get(method, {}).items()
    ]
    return " ".join(
        flags
        + [
            f"--hparam={name}={value}"
            for name, value in preset.hparams.get(method, {}).items()
        ]
    )


def _compared(preset: Preset) -> str:
    scores = dict.fromkeys(preset.headlines.values())
    methods = {
        x: ", ".join(m for m, own in preset.headlines.items() if own == x)
        for x in scores
    }
    return "; ".join(
        f"{who} with {score}"
        for score, who in {
            **methods,
            preset.headline: "the others" if methods else "all",
        }.items()
    )


def _cell(cell: Cell) -> list[str]:
    """A cell of the paper's tables: where it is, then a line for each method."""
    where = ", ".join(f"{name}={value}" for name, value in cell.where.items())
    rows = [f"{method:<14}{value}" for method, value in cell.numbers.items()]
    rows += [
        f"{method:<14}converged in {value} rounds"
        for method, value in cell.rounds.items()
    ]
    return [*([f"at {where}:"] if where else []), *(rows or ["no number is known"])]


def hyperparameters(factory: Callable) -> dict[str, dict[str, Any]]:
    """For every hyperparameter its default, its type and range, and what the docstring
    says: meaning, source."""
    texts = arguments(inspect.getdoc(factory) or "")
    return {
        name: {
            "default": known.default,
            "type": _type(known),
            "text": texts.get(name, ""),
        }
        for name, known in of(factory).items()
    }


def _type(known: Hyperparameter) -> str:
    """Such as `float >= 0`, `int in [1, 4] or none`, `one of uniform, data`."""
    return _values(known) + (" or none" if known.optional else "")


def _values(known: Hyperparameter) -> str:
    if known.choices:
        return f"one of {', '.join(map(str, known.choices))}"
    low, high, open_low, open_high = (
        known.low,
        known.high,
        known.open_low,
        known.open_high,
    )
    if math.isfinite(low) and math.isinf(high):
        return f"{known.kind.__name__} {'>' if open_low else '>='} {low:g}"
    if known.ranged:
        return (
            f"{known.kind.__name__} in "
            f"{interval(low, high, open_low=open_low, open_high=open_high)}"
        )
    return known.kind.__name__


def arguments(doc: str) -> dict[str, str]:
    """The entries of a docstring's `Args:`."""
    entries = re.split(r"^(?=\w+: )", sections(doc).get("Args", ""), flags=re.MULTILINE)
    return dict(
        re.split(r":\s+", " ".join(e.split()), maxsplit=1) for e in entries if ": " in e
    )  # type: ignore[misc]


def sections(doc: str) -> dict[str, str]:
    """The indented sections of a docstring, {"Args": ..., "Note": ...}."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in doc.splitlines():
        if heading := re.fullmatch(r"(\w+):", line):
            lines = found.setdefault(heading[1], [])
        elif line and not line.startswith(" "):
            lines = []
        else:
            lines.append(line)
    return {
        name: textwrap.dedent("\n".join(body)).strip() for name, body in found.items()
    }


def first_sentence(thing: Callable) -> str:
    """The first paragraph of a docstring, which is one sentence, without its full
    stop."""
    return " ".join(
        (inspect.getdoc(thing) or "").split("\n\n")[0].split()
    ).removesuffix(".")
