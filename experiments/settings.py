"""The settings of a run: what presets and defaults fill in, and which may change on a
resume."""

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from experiments import events, schema, stopping, targets
from experiments.config import (
    BY_FILE,
    FREE,
    SETTINGS,
    Config,
    optimizers,
    participation,
    same,
    without_effect,
)
from experiments.presets import DEFAULT_PRESETS, PRESETS
from experiments.values import number, typed_all
from fedjax_pfl import user_code
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data.partitioners import PARTITIONS
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.hyperparameters import check_value
from fedjax_pfl.models.layers import CONVOLUTIONS
from fedjax_pfl.simulate import hyperparameters


def resolve(user: Mapping[str, Any]) -> Config:
    """The effective settings: the user's over those of a config.json, or over the
    preset's and the defaults.

    Raises:
      InputError: an unknown name, or a value out of range.
    """
    base = _of_file(user["config"]) if user.get("config") is not None else None
    if base and user.get("preset") is not None:
        raise InputError(
            f"--preset={user['preset']} means nothing with --config, which says "
            "everything: leave it out."
        )
    usual = base.preset if base else DEFAULT_PRESETS.get(user.get("dataset", "digits"))
    name = usual if user.get("preset") is None else user["preset"]
    preset = None if name is None else PRESETS[choose("preset", name, PRESETS)]
    start = (
        vars(base) if base else preset.settings_of(user.get("algo")) if preset else {}
    )
    values = (
        start
        | {setting: value for setting, value in user.items() if setting != "config"}
        | {"preset": name}
    )
    if not values.get("algo"):
        raise InputError(
            f"Say which method to run with --algo=NAME: one of {', '.join(ALGORITHMS)}."
        )
    values |= _local_work(user, values)
    # None of a file: its partition may have been one that says everything
    values = {
        setting: value
        for setting, value in values.items()
        if setting not in BY_FILE or value is not None
    }
    values |= _by_partition(values.get("partition", Config.partition), user)
    algo, factory = values["algo"], find(values["algo"])
    before = (
        base.hparams
        if base and base.algo == algo
        else preset.hparams.get(algo, {})
        if preset
        else {}
    )
    values["hparams"] = (
        hyperparameters(factory) | before | typed_all(factory, user.get("hparams", {}))
    )
    config = Config(**values)
    check_ranges(config)
    for setting, why in without_effect(config).items():
        if user.get(setting) is not None:
            _warn(f"--{setting}={user[setting]} has no effect with {why}.")
    return events.check(config)


@functools.cache
def _warn(text: str) -> None:  # once, of all runs of a sweep
    logging.warning("%s", text)


def _of_file(text: str) -> Config:
    """The settings that a run's config.json holds; they may have been edited."""
    path = Path(os.path.expanduser(text))
    start = f"--config={text}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"{start} cannot be read ({why}): give the config.json of a run."
        ) from None
    if problem := schema.problem(content, schema.CONFIG):
        raise InputError(f"{start} is not the config.json of a run ({problem}).")
    if unknown := [
        name for name in content if name not in (*SETTINGS, "hparams", "digests")
    ]:
        raise InputError(
            f"{start} has a setting {unknown[0]!r}, which this version does not know."
        )
    return completed(
        {name: value for name, value in content.items() if name != "digests"}
    )


def _local_work(user: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, None]:
    """Of epochs and steps the one that does not count."""
    if user.get("steps") is not None and user.get("epochs") is not None:
        raise InputError(
            "Local work is either --epochs or --steps: give exactly one of the two."
        )
    by_steps = values.get("steps") is not None and user.get("epochs") is None
    return {"epochs" if by_steps else "steps": None}


def _by_partition(spec: str, user: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a partition of the user's own decides; the number of clients,
    if given, is compared with a file's. A name that no partition has is found here,
    before data are loaded."""
    if not spec.startswith("file:") and not user_code.named(spec):
        choose("partition", spec, PARTITIONS)
        return {}
    for name in BY_FILE:
        if user.get(name) is not None:
            raise InputError(
                f"--{name} means nothing with --partition={spec}, which says "
                "everything: leave it out."
            )
    return dict.fromkeys(BY_FILE) | (
        {"clients": user.get("clients")} if spec.startswith("file:") else {}
    )


def check_ranges(config: Config) -> None:
    """Raises InputError for a value that no experiment can have; a library function
    checks its own."""
    for name, known in SETTINGS.items():
        check_value(known, getattr(config, name))
    for name, value in config.hparams.items():
        if not isinstance(value, bool | int | float | str | None):
            raise InputError(
                f"{config.algo}: the hyperparameter {name} is {type(value).__name__}, "
                "which a run cannot record: "
                "let it be a bool, int, float, str or None."
            )
    choose("optimizer", config.optimizer, optimizers())
    if config.momentum and config.optimizer != "sgd":
        raise InputError(
            f"--momentum={config.momentum} is of --optimizer=sgd; {config.optimizer} "
            "has its own: leave it out."
        )
    if config.server_optimizer is not None:
        choose("server_optimizer", config.server_optimizer, optimizers())
    if (config.server_optimizer is None) != (config.server_lr is None):
        raise InputError(
            "--server_optimizer and --server_lr belong together: give both, as "
            "--server_optimizer=adam "
            "--server_lr=0.01, or neither."
        )
    targets.parse(config.targets)
    stopping.parse(config.stop_at)
    choose("conv", config.conv, CONVOLUTIONS)
    participation(config.participation)
    if config.width != "auto":
        check("width", number(int, "--width", config.width), 1, math.inf)
    if config.devices not in ("auto", "all"):
        check("devices", number(int, "--devices", config.devices), 1, math.inf)


def resumed(recorded: Config, user: Mapping[str, Any]) -> Config:
    """The settings of a resume: the recorded ones, with the user's where they may
    differ.

    Raises:
      InputError: a setting differs that must not; all of them are named with both
        values.
    """
    if user.get("config") is not None:
        raise InputError(
            "--config means nothing with --resume, which continues the recorded "
            "settings: leave it out."
        )
    same_method = user.get("algo", recorded.algo) == recorded.algo
    hparams = typed_all(find(recorded.algo), user["hparams"]) if same_method else {}
    wanted = {name: value for name, value in user.items() if name != "hparams"}
    if differing := _differing(recorded, wanted, hparams):
        raise InputError(
            "A resume continues the recorded run, but these settings differ: "
            f"{', '.join(differing)}."
        )
    if wanted.get("rounds", recorded.rounds) < recorded.rounds:
        raise InputError(
            f"rounds={wanted['rounds']} is less than the recorded {recorded.rounds}: "
            "it may only grow."
        )
    config = recorded.replace(
        **{n: x for n, x in wanted.items() if n in FREE or n == "rounds"}
    )
    check_ranges(config)
    return events.check(config)


def check_same(recorded: Config, config: Config, path: Any) -> None:
    """Raises InputError if the run recorded at `path` is not one of the effective
    settings `config`; it may have fewer rounds, and whatever a resume may change."""
    wanted = {name: getattr(config, name) for name in SETTINGS}
    if wanted["clients"] is None:  # a partition file says it
        del wanted["clients"]
    if differing := _differing(recorded, wanted, config.hparams):
        raise InputError(
            f"{path} holds a run of other settings: {', '.join(differing)}."
        )
    if recorded.rounds > config.rounds:
        raise InputError(
            f"{path} holds a run of {recorded.rounds} rounds, which may only grow: "
            f"take --rounds={recorded.rounds} or "
            "more, or another directory."
        )


def _differing(
    recorded: Config, wanted: Mapping[str, Any], hparams: Mapping[str, Any]
) -> list[str]:
    """The settings that are not the recorded ones and must be, each with both
    values."""
    before = {name: getattr(recorded, name) for name in wanted}
    found = [
        f"{name} (recorded {before[name]}, now {value})"
        for name, value in wanted.items()
        if name not in FREE and name != "rounds" and not same(name, before[name], value)
    ]
    return found + [
        f"hparam {name} (recorded {recorded.hparams.get(name)}, now {value})"
        for name, value in hparams.items()
        if recorded.hparams.get(name) != value
    ]


def completed(recorded: Mapping[str, Any]) -> Config:
    """Recorded settings, with the defaults of those that came into being since."""
    return Config(
        **{
            **recorded,
            "hparams": hyperparameters(find(recorded["algo"])) | recorded["hparams"],
        }
    )


def default_workdir(
    user: Mapping[str, Any], config: Config, seeds: bool = False
) -> str:
    """runs/ALGO-DATASET-PARTITION-seedK, then what the user set beside these, so that a
    sweep needs no names; `seeds`: of the runs of several seeds."""
    seed = "seeds" if seeds else f"seed{config.seed}"
    parts = [
        *map(user_code.short, (config.algo, config.dataset, config.partition)),
        seed,
    ]
    parts += [
        change
        for change in changes(user)
        if not change.startswith(("dataset=", "partition="))
    ]
    if user.get("preset"):
        parts.insert(0, user["preset"])
    return "runs/" + file_name(parts)


def changes(user: Mapping[str, Any]) -> list[str]:
    """What the user set, as name=value, but for the method, the seed, and what a resume
    may change."""
    named = ("algo", "seed", "rounds", "preset")
    parts = [f"config={user['config']}"] if user.get("config") else []
    parts += [
        f"{n}={v}"
        for n, v in user.items()
        if n in SETTINGS and n not in named and n not in FREE
    ]
    return parts + [f"{name}={value}" for name, value in user["hparams"].items()]


def file_name(parts: list[str]) -> str:
    """A file's name of some words."""
    return "-".join(re.sub(r"[^\w.=+-]+", "_", str(part)) for part in parts)
