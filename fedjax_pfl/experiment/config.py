"""Settings of an experiment.

The fields of the groups are the only source of the flags, the checks, config.json and
the presets, which all are flat.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_pfl import hyperparameters, user_code
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.algorithms.registry import unread
from fedjax_pfl.data.sources import chat
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.experiment import groups, text
from fedjax_pfl.experiment.groups import BY_FILE, setting
from fedjax_pfl.experiment.presets import DEFAULT_PRESETS, PRESETS, same, tuned
from fedjax_pfl.hyperparameters import from_text, typed
from fedjax_pfl.models import pretrained

COMMON = (  # flags that `--help` shows first
    *("algo", "preset", "dataset", "partition", "alpha"),
    *("clients", "model", "rounds", "lr", "seed"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(groups.Group):
    """Method."""

    algo: str = setting("", "method of --list, or FILE.py:FUNCTION")
    preset: str | None = setting(
        None,
        "setting of a paper, of --list, which other flags override; "
        "with --dataset=digits the preset digits replaces the defaults below",
    )
    tuned: bool = setting(
        False,
        "learning rate and hyperparameters that validation chose in the preset, which "
        "other flags override",
    )


GROUPS: dict[str, type[Any]] = {
    "method": Method,
    "data": groups.Data,
    "partition": groups.Partition,
    "model": groups.Model,
    "local": groups.Local,
    "server": groups.Server,
    "uploads": groups.Uploads,
    "evaluation": groups.Evaluation,
    "run": groups.Run,
}
# {flag: (group, field)}
_FIELDS = {
    field.metadata["flag"] or field.name: (group, field)
    for group, kind in GROUPS.items()
    for field in dataclasses.fields(kind)
}
# Kind, default, range and choices by name
SETTINGS = {
    flag: hyperparameters.of(GROUPS[group])[field.name]._replace(name=flag)
    for flag, (group, field) in _FIELDS.items()
}
HELP = {
    flag: ": ".join(
        [field.metadata["help"], *filter(None, [", ".join(SETTINGS[flag].choices)])]
    )
    for flag, (_, field) in _FIELDS.items()
}
# {heading: flags}
SECTIONS = {"Most used": list(COMMON)} | {
    str(kind.__doc__).rstrip("."): [
        flag for flag, (x, _) in _FIELDS.items() if x == group and flag not in COMMON
    ]
    for group, kind in GROUPS.items()
}
# Factories of the settings NAME:VALUE:VALUE...
OPTIONS = {
    flag: field.metadata["options"]
    for flag, (_, field) in _FIELDS.items()
    if field.metadata["options"] is not None
}
FREE = {flag for flag, (_, field) in _FIELDS.items() if field.metadata["free"]}
# {flag: what it needs to act}, {flag: those that must have their defaults}
NEEDS: dict[str, tuple[groups.Need, ...]] = {
    flag: field.metadata["needs"] for flag, (_, field) in _FIELDS.items()
}
EXCLUDES: dict[str, tuple[str, ...]] = {
    flag: field.metadata["excludes"] for flag, (_, field) in _FIELDS.items()
}


@dataclasses.dataclass(frozen=True, init=False)
class Config:
    """Settings of one run in groups.

    `Config(lr=0.1, model="cnn")` takes settings by the names of their flags, and
    `config.lr` is `config.local.lr`. `partition` and `model` are groups. `resolve` adds
    a preset; `build` completes `hparams`.
    """

    method: Method
    data: groups.Data
    partition: groups.Partition
    model: groups.Model
    local: groups.Local
    server: groups.Server
    uploads: groups.Uploads
    evaluation: groups.Evaluation
    run: groups.Run
    hparams: dict[str, Any]

    def __init__(self, *, hparams: Mapping[str, Any] | None = None, **settings: Any):
        given: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
        for flag, value in settings.items():
            if flag not in _FIELDS:
                raise TypeError(f"There is no setting {flag!r}.")
            group, field = _FIELDS[flag]
            given[group][field.name] = value
        for group, kind in GROUPS.items():
            object.__setattr__(self, group, kind(**given[group]))
        object.__setattr__(self, "hparams", dict(hparams or {}))

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(f"There is no setting {name!r}.")
        return self[name]

    def flat(self) -> dict[str, Any]:
        """Returns all settings by the names of their flags, and `hparams`."""
        return {flag: self[flag] for flag in _FIELDS} | {"hparams": self.hparams}

    def __getitem__(self, flag: str) -> Any:
        group, field = _FIELDS[flag]
        return getattr(getattr(self, group), field.name)

    def replace(self, **values: Any) -> "Config":
        """Returns the settings with some of them changed."""
        return Config(**self.flat() | values)


def resolve(given: Mapping[str, Any]) -> Config:
    """Returns the given settings over those of a preset and the defaults.

    Args:
      given: settings by name, as values or as text. `hparams` is {name: value or text};
        `config` is the path of a config.json that takes the place of the preset.

    Raises:
      InputError: an unknown name, or a value out of range.
    """
    base = read(Path(given["config"]).expanduser()) if given.get("config") else None
    usual = base.preset if base else DEFAULT_PRESETS.get(given.get("dataset", "digits"))
    name = usual if given.get("preset") is None else given["preset"]
    preset = PRESETS[choose("preset", name, PRESETS)] if name else None
    start = preset.settings_of(given.get("algo")) if preset else {}
    values = base.flat() if base else dict(start)
    for flag, x in given.items():
        if flag not in ("config", "hparams"):
            values[flag] = from_text(SETTINGS[flag], x)
    values["preset"] = name
    if not values.get("algo"):
        raise InputError(f"Choose a method with --algo: {', '.join(ALGORITHMS)}.")
    if given.get("steps") is not None and given.get("epochs") is not None:
        raise InputError("Specify exactly one of --epochs and --steps.")
    by_steps = values.get("steps") is not None and given.get("epochs") is None
    values["epochs" if by_steps else "steps"] = None
    rule = values.get("partition", SETTINGS["partition"].default)
    values |= _by_partition(groups.Partition(rule=rule), values, given)
    if given.get("dp_epsilon") is not None:
        values["dp_noise"] = given.get("dp_noise")  # not that of another epsilon
    algo = text.choose("algo", values["algo"], ALGORITHMS)
    known = {base.algo: base.hparams} if base else preset.hparams if preset else {}
    own = typed(find(algo), given.get("hparams", {}))
    chosen = dict(tuned(name, algo) or {}) if values.get("tuned") else {}
    if values.get("tuned") and not chosen:
        raise InputError(f"--tuned: {algo} has no tuned values in preset {name}.")
    lr = chosen.pop("lr", None)
    values |= {} if lr is None or given.get("lr") is not None else {"lr": lr}
    values["hparams"] = known.get(algo, {}) | chosen | own
    if values.get("base") and pretrained.is_folder(values["base"]):
        values |= {"model": pretrained.PREFIX + values["base"], "base": None}
    config = Config(**values)
    check(config)
    check_given(config, given)
    return config


def _by_partition(
    partition: groups.Partition, values: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings that the partition decides."""
    if not partition.given:
        natural = partition.rule.startswith("natural:")
        missing = [name for name in BY_FILE if values.get(name, 0) is None]
        own = {"clients": values.get("clients")} if natural else {}
        return {name: SETTINGS[name].default for name in missing} | own
    if unused := [name for name in BY_FILE if given.get(name) is not None]:
        rule = partition.rule
        raise InputError(f"--{unused[0]} has no effect with --partition={rule}.")
    file = partition.rule.startswith("file:")
    return dict.fromkeys(BY_FILE) | ({"clients": given.get("clients")} if file else {})


def check(config: Config) -> None:
    """Raises InputError for a value out of range, or settings that contradict each
    other."""
    factory = find(text.choose("algo", config.algo, ALGORITHMS))
    hyperparameters.check(factory, hyperparameters.defaults(factory) | config.hparams)
    for flag, known in SETTINGS.items():
        value = config[flag]
        hyperparameters.check_value(known, value)
        if flag in OPTIONS and value is not None:
            OPTIONS[flag].read(value)
        if value != known.default and not known.default:
            check_partners(config, flag)
    for group in GROUPS:
        getattr(config, group).check()
    if generated := config.evaluation.generated:
        if not config.data.dataset.startswith(chat.PREFIX):
            raise InputError(f"--metrics={generated[0]} needs --dataset=chat:PATH.")
        if config.feature_cache is not None:
            raise InputError(f"--metrics={generated[0]} excludes --feature_cache.")


def check_given(config: Config, given: Mapping[str, Any]) -> None:
    """Raises InputError for a given setting that has no effect in a run."""
    for flag in (x for x in SETTINGS if given.get(x) is not None):
        check_partners(config, flag)
        removes = flag == "public" and groups.public(config.public)[0] == config.dataset
        if flag in unread(config.algo) and not removes:
            raise InputError(f"--{flag} has no effect with --algo={config.algo}.")


def check_partners(config: Config, flag: str) -> None:
    """Raises InputError for a setting without those that it needs, or with one that it
    excludes."""
    for need in NEEDS[flag]:
        by_file = need.flag in BY_FILE and config.partition.given
        if not by_file and not need.met(config[need.flag]):
            raise InputError(f"--{flag} needs {need}.")
    others = [x for x in EXCLUDES[flag] if config[x] != SETTINGS[x].default]
    if others:
        raise InputError(f"--{flag} excludes {', '.join(f'--{x}' for x in others)}.")


def read(path: Path) -> Config:
    """Returns the settings of a config.json; names that are no settings are ignored.

    Raises:
      InputError: the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {x: content[x] for x in (*SETTINGS, "hparams") if x in content}
        summary = path.with_name("summary.json")
        if known.get("metrics") == "acc" and summary.is_file():
            found = json.loads(summary.read_text(encoding="utf-8"))
            if found.get("headline", {}).get("score") != "acc":
                del known["metrics"]  # earlier versions recorded their default so
        return Config(**known)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def resumed(recorded: Config, given: Mapping[str, Any]) -> Config:
    """Returns recorded settings with the given ones, where a resume may change them.

    Raises:
      InputError: others differ; the message has both values of each.
    """
    wanted = {name: x for name, x in given.items() if name not in ("hparams", "config")}
    hparams = given.get("hparams", {})
    if wanted.get("algo", recorded.algo) == recorded.algo:
        hparams = typed(find(recorded.algo), hparams)
    pairs = [(name, recorded[name], x) for name, x in wanted.items()]
    pairs += [(f"hparam {n}", recorded.hparams.get(n), x) for n, x in hparams.items()]
    differing = [
        f"{name} (recorded {before}, now {now})"
        for name, before, now in pairs
        if name not in {*FREE, "rounds"} and not same(name, before, now)
    ]
    if wanted.get("rounds", recorded.rounds) < recorded.rounds:
        differing += [f"rounds (recorded {recorded.rounds}, may only grow)"]
    if differing:
        raise InputError(
            f"The recorded run has other settings: {', '.join(differing)}. "
            "Choose another directory by --workdir (run) or --root (sweep)."
        )
    changed = {n: x for n, x in wanted.items() if n in FREE or n == "rounds"}
    config = recorded.replace(**changed)
    check(config)
    return config


def changes(given: Mapping[str, Any]) -> list[str]:
    """Returns what the user set as name=value, but for what names a run otherwise."""
    skipped = {"algo", "seed", "rounds", "preset", *FREE}
    parts = [f"{n}={x}" for n, x in given.items() if n in SETTINGS and n not in skipped]
    return parts + [f"{name}={x}" for name, x in given.get("hparams", {}).items()]


def run_name(given: Mapping[str, Any], config: Config, seed: str = "") -> str:
    """Returns ALGO-DATASET-PARTITION-seedK and the user's changes as a file name."""
    preset = [given["preset"]] if given.get("preset") else []
    names = map(user_code.short, (config.algo, config.dataset, config.partition.rule))
    own = [x for x in changes(given) if not x.startswith(("dataset=", "partition="))]
    return file_name([*preset, *names, seed or f"seed{config.seed}", *own])


def file_name(parts: list[str]) -> str:
    """Returns words as the name of a file."""
    return "-".join(re.sub(r"[^\w.=+-]+", "_", str(part)) for part in parts)
