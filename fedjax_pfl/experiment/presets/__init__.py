"""Settings and published numbers of the papers' experiments: one TOML file per paper.

A file has the columns of the paper's tables (`methods`), `defaults` for all of its
presets, `templates` that presets name, and `presets`. Later ones of these override
earlier ones, tables entry by entry. Numbers are in %, one per method in the order of
`methods`; `-` marks a missing one, `a/b` two columns.
"""

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

ORDER = ("builtin", "pfedc", "fedcp", "feddva", "mnfl", "pfedafm")
# data set -> preset that is used without --preset
DEFAULT_PRESETS = {"digits": "digits", "synthetic": "synthetic"}
# a smaller value reduces the experiment, any other difference changes it
SIZES = ("rounds", "clients", "data_fraction", "epochs", "steps")


class Cell(NamedTuple):
    """A paper's numbers for settings that differ from the preset's."""

    where: dict[str, Any]  # setting or hyperparameter -> value
    numbers: dict[str, str]  # method -> % as printed
    rounds: dict[str, int]  # method -> rounds until convergence


class Preset(NamedTuple):
    """Settings of an experiment and the numbers to expect."""

    paper: str
    description: str  # one line
    settings: dict[str, Any]
    headline: str  # score and point that the paper reports, as POINT/SCORE
    steps: int | None = None  # client steps per round, on all of the data
    headlines: dict[str, str] = {}  # method -> its own headline
    published: dict[str, str] = {}  # method -> %, at these settings
    hparams: dict[str, dict[str, Any]] = {}  # method -> values that are no defaults
    methods: dict[str, dict[str, Any]] = {}  # method -> its own settings
    cells: tuple[Cell, ...] = ()
    own: tuple[str, ...] = ()  # the paper's own methods
    baselines: dict[str, Any] = {}  # settings of all other methods
    measured: dict[str, str] = {}  # method -> headline in %, measured here
    protocol: str = ""  # how the paper measured

    def headline_of(self, method: str) -> str:
        """Returns the headline to compare with the paper's number of a method."""
        return self.headlines.get(method, self.headline)

    def settings_of(self, method: str | None) -> dict[str, Any]:
        """Returns the settings for a method; None: for the preset's own."""
        own = self.methods.get(method or self.settings.get("algo", ""), {})
        return self.settings | own


def _merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            nested = isinstance(value, dict) and isinstance(result.get(name), dict)
            result[name] = _merged(result[name], value) if nested else value
    return result


def _numbers(value: Any, methods: list[str]) -> dict[str, str]:
    """Reads a row of a table, or a table method -> number."""
    pairs = value
    if isinstance(value, str):
        pairs = dict(zip(methods, value.split(), strict=True))
    known = {method: text for method, text in pairs.items() if text != "-"}
    return {m: x.replace("±", " ± ").replace("/", " and ") for m, x in known.items()}


def _read(stem: str) -> dict[str, Preset]:
    text = (resources.files(__name__) / f"{stem}.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    return {name: _preset(content, name) for name in content["presets"]}


def _preset(content: dict[str, Any], name: str) -> Preset:
    methods, own = content.get("methods", []), content["presets"][name]
    template = own.get("template", [])
    used = [template] if isinstance(template, str) else template
    templates = [content["templates"][one] for one in used]
    fields = _merged(content.get("defaults", {}), *templates, own)
    fields.pop("template", None)
    base = fields.pop("base", {})
    cells = [
        Cell(
            base | cell["where"],
            _numbers(cell.get("numbers", {}), methods)
            | _numbers(cell.get("more", {}), methods),
            cell.get("rounds", {}),
        )
        for cell in fields.get("cells", ())
    ]
    protocol = f"{fields.get('protocol', '')} {fields.pop('note', '')}"
    fields |= {"paper": content["paper"], "cells": tuple(cells)}
    fields |= {"own": tuple(fields.get("own", ())), "protocol": " ".join(protocol.split())}
    return Preset(**fields | {"published": _numbers(fields.get("published", {}), methods)})


PRESETS: dict[str, Preset] = {
    name: preset for stem in ORDER for name, preset in _read(stem).items()
}
