"""What there is to choose from, in words: `--list` and `--describe`."""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from experiments.presets import DEFAULT_PRESETS, PRESETS
from experiments.settings import parameters
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.checks import choose
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.data.sources import DATASETS
from fedjax_pfl.models import MODELS

_WIDTH = 110


def listing() -> str:
    """Everything that has a name, with one line each."""
    sections: dict[str, dict[str, str]] = {
        "Methods (--algo; more with --describe=NAME)": {n: first_sentence(f) for n, f in ALGORITHMS.items()},
        "Data sets (--dataset)": DATASETS,
        "Partitions (--partition)": PARTITIONS,
        "Models (--model)": {name: first_sentence(factory) for name, factory in MODELS.items()},
        "Presets (--preset)": {name: preset.description for name, preset in PRESETS.items()},
    }
    return "\n\n".join(f"{title}\n{_rows(rows)}" for title, rows in sections.items())


def _rows(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(_hanging(f"  {name:<{width}}  ", text) for name, text in rows.items())


def _hanging(head: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def describe(name: str) -> str:
    """A method or a preset in full."""
    if name in PRESETS:
        return _preset(name)
    return _method(ALGORITHMS[choose("method or preset", name, [*ALGORITHMS, *PRESETS])], name)


def _method(factory: Callable, name: str) -> str:
    doc = inspect.getdoc(factory) or ""
    about = inspect.getdoc(sys.modules[factory.__module__]) or ""
    parts = [f"{name}: {doc.split(chr(10) * 2)[0]}", f"From {factory.__module__}:\n{textwrap.indent(about, '  ')}"]
    rows = hyperparameters(factory)
    lines = [_hanging(f"  {n}={row['default']} ({row['type']})  ", row["text"]) for n, row in rows.items()]
    parts.append("\n".join(["Hyperparameters (--hparam name=value):", *lines]) if lines else "No hyperparameters.")
    if note := sections(doc).get("Note"):
        parts.append(_hanging("Note: ", note))
    return "\n\n".join(parts)


def _preset(name: str) -> str:
    preset = PRESETS[name]
    flags = " ".join(f"--{flag}={value}" for flag, value in preset.settings.items())
    default = [dataset for dataset, chosen in DEFAULT_PRESETS.items() if chosen == name]
    parts = [f"{name}: {preset.description}", _hanging("Same as: ", flags), f"Time: {preset.time}"]
    parts += [f"What --dataset={dataset} takes when no --preset is given." for dataset in default]
    if preset.published:
        rows = [f"  {name:<12}{value:<16}{preset.headline_of(name)}" for name, value in preset.published.items()]
        parts.append("\n".join(["Published, in %, and what of a run to compare:", *rows]))
    return "\n\n".join(parts)


def hyperparameters(factory: Callable) -> dict[str, dict[str, Any]]:
    """For every hyperparameter its default, its type and what the docstring says: meaning, range, source."""
    texts = arguments(inspect.getdoc(factory) or "")
    return {
        name: {"default": p.default, "type": _type(p.annotation), "text": texts.get(name, "")}
        for name, p in parameters(factory).items()
    }


def _type(annotation: Any) -> str:
    return inspect.formatannotation(annotation).replace(" | None", " or none")


def arguments(doc: str) -> dict[str, str]:
    """The entries of a docstring's `Args:`."""
    entries = re.split(r"^(?=\w+: )", sections(doc, join="\n").get("Args", ""), flags=re.MULTILINE)
    return dict(re.split(r":\s+", " ".join(e.split()), maxsplit=1) for e in entries if ": " in e)  # type: ignore[misc]


def sections(doc: str, join: str = " ") -> dict[str, str]:
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
    return {name: textwrap.dedent("\n".join(body)).strip().replace("\n", join) for name, body in found.items()}


def first_sentence(thing: Callable) -> str:
    """The first paragraph of a docstring, which is one sentence, without its full stop."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).removesuffix(".")
