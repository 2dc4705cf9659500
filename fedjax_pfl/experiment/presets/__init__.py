"""Settings and published numbers of the papers' experiments: one TOML file per paper.

A file has the columns of the paper's tables (`methods`), `defaults` for all of its
presets, `templates` that presets name, and `presets`. Later ones of these override
earlier ones, tables entry by entry. Numbers are in %, one per method in the order of
`methods`; `-` marks a missing one, `a/b` two columns.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ORDER = ("builtin", "pfedc", "fedcp", "feddva", "mnfl", "pfedafm")
# data set -> preset that is used without --preset
DEFAULT_PRESETS = {"digits": "digits", "synthetic": "synthetic"}
# a smaller value reduces the experiment, any other difference changes it
SIZES = ("rounds", "clients", "data_fraction", "epochs", "steps")
# settings that are compared by other means, or change no score after the last round
# of `benchmarks.leaderboard`: {preset: {method: {lr or hyperparameter: value}}}
TUNED = Path(__file__).parent / "tuned.json"
_IGNORED = ("algo", "preset", "seed", "eval_every", "hparams")
_NONE: Mapping[str, Any] = MappingProxyType({})


class Cell(NamedTuple):
    """A paper's numbers for settings that differ from the preset's."""

    where: dict[str, Any]  # setting or hyperparameter -> value
    numbers: Mapping[str, str]  # method -> % as printed
    rounds: dict[str, int]  # method -> rounds until convergence


class Preset(NamedTuple):
    """Settings of an experiment and the numbers to expect."""

    paper: str
    description: str  # one line
    settings: dict[str, Any]
    headline: str  # score and point that the paper reports, as POINT/SCORE
    headlines: Mapping[str, str] = _NONE  # method -> its own headline
    published: Mapping[str, str] = _NONE  # method -> %, at these settings
    hparams: Mapping[str, dict[str, Any]] = (
        _NONE  # method -> values that are no defaults
    )
    methods: Mapping[str, dict[str, Any]] = _NONE  # method -> its own settings
    cells: tuple[Cell, ...] = ()
    own: Sequence[str] = ()  # the paper's own methods
    baselines: Mapping[str, Any] = _NONE  # settings of all other methods
    protocol: str = ""  # how the paper measured

    def headline_of(self, method: str) -> str:
        """Returns the headline to compare with the paper's number of a method."""
        return self.headlines.get(method, self.headline)

    def settings_of(self, method: str | None) -> dict[str, Any]:
        """Returns the settings for a method; None: for the preset's own."""
        own = self.methods.get(method or self.settings.get("algo", ""), {})
        return self.settings | own

    def cell(self, config: Mapping[str, Any]) -> Cell:
        """Returns the published numbers for a run's settings.

        Several cells may fit: those with a number for the method come first.
        """
        algo, known = config["algo"], {**config.get("hparams", {}), **config}
        fitting = [
            cell
            for cell in self.cells
            if all(same(name, known.get(name), x) for name, x in cell.where.items())
        ]
        first = [x for x in fitting if algo in x.numbers or algo in x.rounds]
        return next(iter(first + fitting), Cell({}, self.published, {}))


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
    templates = [content["templates"][one] for one in own.get("template", [])]
    fields = _merged(content.get("defaults", {}), *templates, own)
    fields.pop("template", None)
    base = fields.pop("base", {})
    cells = [
        Cell(
            base | cell["where"],
            _numbers(cell.get("numbers", {}), methods),
            cell.get("rounds", {}),
        )
        for cell in fields.get("cells", ())
    ]
    protocol = f"{fields.get('protocol', '')} {fields.pop('note', '')}"
    published = _numbers(fields.get("published", {}), methods)
    fields |= {"cells": tuple(cells), "published": published}
    return Preset(content["paper"], **fields | {"protocol": " ".join(protocol.split())})


PRESETS: dict[str, Preset] = {
    name: preset for stem in ORDER for name, preset in _read(stem).items()
}


def tuned(preset: str | None, algo: str) -> dict[str, Any] | None:
    """Returns a method's tuned values, `lr` and hyperparameters; None where there are
    none."""
    found: dict[str, Any] = json.loads(TUNED.read_text()).get(preset or "", {})
    return found.get(algo)


def same(name: str, a: Any, b: Any) -> bool:
    """Returns whether two values of a setting are equal."""
    if name in ("participation", "unseen"):
        return str(a or 0).removesuffix(".0") == str(b or 0).removesuffix(".0")
    return a == b or (name == "model" and b == "auto" and a in ("cnn", "mlp"))


def published(config: Mapping[str, Any]) -> str | None:
    """Returns the paper's number for a run in %, as printed."""
    preset = PRESETS.get(config.get("preset") or "")
    return preset.cell(config).numbers.get(config["algo"]) if preset else None


def deviations(
    config: dict[str, Any],
    defaults: Mapping[str, Any] | None = None,
    at: Mapping[str, Any] | None = None,
) -> str:
    """Describes in words how a run differs from its preset's setting.

    Args:
      config: settings, with the method's hyperparameters as `hparams`.
      defaults: of the settings that the preset leaves out, likewise; None: these are
        not compared.
      at: settings by which the paper's cell is chosen instead of the run's.

    Returns:
      e.g. `reduced: rounds 3 of 40; changed: lr 0.1, not 0.005`; empty without a preset
      or a difference.
    """
    preset, algo = PRESETS.get(config.get("preset") or ""), config["algo"]
    if preset is None:
        return ""
    wanted = dict(defaults or {}) | preset.settings
    wanted |= {} if algo in preset.own else preset.baselines
    wanted |= wanted.pop("hparams", {}) | preset.hparams.get(algo, {})
    wanted |= preset.cell(config | dict(at or {})).where
    actual = {**config.get("hparams", {}), **config}
    reduced, changed = [], []
    for name in (x for x in wanted if x in actual and x not in _IGNORED):
        value, other = actual[name], wanted[name]
        if None not in (value, other) and name in SIZES and value < other:
            reduced.append(f"{name} {value} of {other}")
        elif not same(name, value, other):
            changed.append(f"{name} {value}, not {other}")
    parts = {"reduced: ": ", ".join(reduced), "changed: ": "; ".join(changed)}
    return "; ".join(title + text for title, text in parts.items() if text)
