"""The settings of an experiment: flags, what presets and defaults fill in, and which may change on a resume."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import optax
from absl import flags

from experiments import targets
from experiments.presets import DEFAULT_PRESETS, PRESETS
from experiments.values import NOUN, number, typed_all
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.errors import InputError, check, choose, nearest
from fedjax_pfl.models.layers import CONVOLUTIONS
from fedjax_pfl.simulate import hyperparameters

INF = float("inf")
BY_FILE = ("val_fraction", "test_split", "alpha", "classes_per_client")  # None where a partition file says everything


class Setting(NamedTuple):
    """One flag of an experiment."""

    kind: type  # str, int, float or bool
    default: Any
    help: str
    free: bool = False  # may differ between a run and its resume


SETTINGS = {
    "algo": Setting(str, None, "the method; --list shows them all; or your own, as FILE.py:FACTORY"),
    "preset": Setting(str, None, "a paper's setting, which the other flags override; digits has one by default"),
    "dataset": Setting(str, "digits", "the data set, or npz:PATH for your own"),
    "data_fraction": Setting(float, 1.0, "the part of the data set to use, stratified, in (0, 1]"),
    "marks": Setting(bool, False, "draw FedDVA's marks on square images: client k has type k mod 4"),
    "val_fraction": Setting(float, 0.0, "the part of every client's training examples held out, in [0, 1)"),
    "test_split": Setting(str, "pool", "pool: a quarter of each client's examples; official: the data set's own"),
    "partition": Setting(str, "pathological", "who gets which examples, or file:PATH for your own"),
    "alpha": Setting(float, 0.1, "the Dirichlet concentration"),
    "classes_per_client": Setting(int, 2, "of the pathological partitions (shards: shards a client)"),
    "clients": Setting(int, 20, "the number of clients; with file:PATH the file says it"),
    "participation": Setting(str, "1", "the part of the clients in a round, or a range as 0.1:1 drawn each round"),
    "rounds": Setting(int, 100, "communication rounds; may grow on a resume"),
    "epochs": Setting(int, 1, "local epochs a round"),
    "steps": Setting(int, None, "local steps a round, in place of epochs"),
    "batch_size": Setting(int, 10, "examples a step"),
    "lr": Setting(float, 0.005, "the clients' learning rate"),
    "lr_decay": Setting(float, 1.0, "the factor on lr from round to round"),
    "optimizer": Setting(str, "sgd", "of the clients: sgd, adam, or another of optax's by its name there"),
    "momentum": Setting(float, 0.0, "of the local SGD, in [0, 1)"),
    "weight_decay": Setting(float, 0.0, "added to the gradient after clipping, as in PyTorch"),
    "clip": Setting(float, None, "the largest norm of a step's gradient"),
    "drop_last": Setting(bool, False, "skip the short last batch of an epoch"),
    "model": Setting(
        str,
        "auto",
        "the network; several as cnn,lenet (client i has number i mod G), or file:PATH with a name per client; "
        "auto: cnn for images of 16x16 and more, else mlp",
    ),
    "features": Setting(int, None, "K, to which every network's features are brought by adaptive average pooling"),
    "shared_model": Setting(str, None, "the small network that all clients exchange; default: the smallest of --model"),
    "public": Setting(str, None, "public examples: a data set, or its first examples as cifar100:10000"),
    "bn_stats": Setting(str, "aggregate", "running statistics: aggregate, local, or batch (none kept)"),
    "compute_dtype": Setting(str, "float32", "in which the body computes: float32, or bfloat16 for accelerators"),
    "seed": Setting(int, 0, "of everything that is drawn"),
    "eval_every": Setting(int, 1, "rounds between evaluations; the last is always evaluated, 0: only at the end"),
    "targets": Setting(str, None, "scores in (0, 1] whose first round is reported: 0.8,0.9 or acc:0.8,0.9", free=True),
    "checkpoint_every": Setting(int, 10, "rounds between checkpoints", free=True),
    "conv": Setting(str, "auto", "form of the convolutions: winograd, fused, matmul, xla, or auto: timed", free=True),
    "width": Setting(str, "auto", "clients trained at once, or auto: timed", free=True),
    "devices": Setting(str, "auto", "devices to spread the clients over: a number, all, or auto", free=True),
    "client_memory": Setting(str, "device", "where clients outside a round have their state: device, host", free=True),
    "data_dir": Setting(str, None, "where TFDS data sets were prepared (default: TFDS_DATA_DIR)", free=True),
}

_COMMANDS = {
    "workdir": (str, None, "the run directory (default: runs/ALGO-DATASET-PARTITION-seedK and what you changed)"),
    "resume": (bool, False, "continue the run in the run directory; settings not given are the recorded ones"),
    "coordinator": (str, None, "of several processes: HOST:PORT where process 0 listens, or auto (SLURM, TPU, ...)"),
    "num_processes": (int, None, "the number of processes, each with the same command"),
    "process_id": (int, None, "which of them this is: 0 to N-1; 0 writes the run directory and talks"),
    "list": (bool, False, "list methods, data sets, partitions, models and presets"),
    "describe": (str, None, "describe a method or a preset"),
    "help": (bool, False, "show this help"),
}

_DEFINE: dict[type, Callable] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
}
_RANGES: dict[str, tuple[float, float]] = {
    "rounds": (0, INF),
    "eval_every": (0, INF),
    "checkpoint_every": (1, INF),
    "lr_decay": (0, INF),
    "momentum": (0, 1),
    "weight_decay": (0, INF),
    "seed": (0, 2**32 - 1),
}


def parse(argv: list[str]) -> flags.FlagValues:
    """Reads a command line (without the program's name) into flags of its own; a flag that is not given is None."""
    values = flags.FlagValues()
    rows = {name: (s.kind, s.default, s.help) for name, s in SETTINGS.items()} | _COMMANDS
    for name, (kind, default, text) in rows.items():
        shown = "" if default is None else f" (default: {default})"
        _DEFINE[kind](name, None, text + shown, flag_values=values)
    flags.DEFINE_multi_string("hparam", [], "a hyperparameter of the method: name=value", flag_values=values)
    try:
        extra = values(["experiments.main", *argv])[1:]
    except flags.IllegalFlagValueError as error:
        raise _illegal(str(error), rows) from None
    except flags.UnrecognizedFlagError as error:
        near = nearest(error.flagname, values)
        hint = f"did you mean --{near}? " if near else ""
        raise InputError(f"Unknown flag --{error.flagname}: {hint}--help shows them all.") from None
    except (flags.Error, ValueError) as error:  # the latter: a value where none may be
        raise InputError(f"{error}: --help shows all flags.") from None
    if extra:
        raise InputError(f"Unexpected argument {extra[0]!r}: write settings as --name=value.")
    return values


def _illegal(message: str, rows: dict[str, tuple]) -> InputError:
    found = re.match(r"flag --(\w+)=(.*?): ", message, re.DOTALL)
    if not found or found[1] not in rows:
        return InputError(message)
    return InputError(f"--{found[1]}={found[2]} must be {NOUN[rows[found[1]][0]]}.")


def given(values: flags.FlagValues) -> dict[str, Any]:
    """The settings that the user gave, hyperparameters as {"hparams": {name: text}}."""
    settings = {name: values[name].value for name in SETTINGS if values[name].value is not None}
    return settings | {"hparams": dict(map(_name_value, values.hparam))}


def _name_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--hparam={text}: write it as --hparam name=value.")
    return name, value


def resolve(user: dict[str, Any]) -> dict[str, Any]:
    """The effective settings: the user's over the preset's over the defaults.

    Raises:
      InputError: an unknown name, or a value out of range.
    """
    preset = user.get("preset") or DEFAULT_PRESETS.get(user.get("dataset", "digits"))
    chosen = PRESETS[choose("preset", preset, PRESETS)] if preset else None
    defaults = {name: setting.default for name, setting in SETTINGS.items()}
    config = defaults | dict(chosen.settings_of(user.get("algo")) if chosen else {}) | user | {"preset": preset}
    if not config["algo"]:
        raise InputError(f"Say which method to run with --algo=NAME: one of {', '.join(ALGORITHMS)}.")
    factory = find(config["algo"])
    if user.get("steps") is not None and user.get("epochs") is not None:
        raise InputError("Local work is either --epochs or --steps: give exactly one of the two.")
    if user.get("epochs") is not None:
        config["steps"] = None
    if config["steps"] is not None:
        config["epochs"] = None
    if config["partition"].startswith("file:"):
        config |= _by_file(config["partition"], user)
    by_preset = chosen.hparams.get(config["algo"], {}) if chosen else {}
    config["hparams"] = hyperparameters(factory) | by_preset | typed_all(factory, user.get("hparams", {}))
    check_ranges(config)
    return config


def _by_file(spec: str, user: dict[str, Any]) -> dict[str, Any]:
    """The settings that a partition file decides; the number of clients, if given, is compared with the file's."""
    for name in BY_FILE:
        if user.get(name) is not None:
            raise InputError(f"--{name} means nothing with --partition={spec}, which says everything: leave it out.")
    return dict.fromkeys(BY_FILE) | {"clients": user.get("clients")}


def check_ranges(config: dict[str, Any]) -> None:
    """Raises InputError for a value that no experiment can have; a library function checks its own."""
    for name, (low, high) in _RANGES.items():
        check(name, config[name], low, high, open_low=name == "lr_decay", open_high=name == "momentum")
    choose("optimizer", config["optimizer"], optimizers())
    if config["momentum"] and config["optimizer"] != "sgd":
        raise InputError(
            f"--momentum={config['momentum']} is of --optimizer=sgd; {config['optimizer']} has its own: leave it out."
        )
    if config["clip"] is not None:
        check("clip", config["clip"], 0, INF, open_low=True)
    targets.parse(config["targets"])
    if config["test_split"] is not None:
        choose("test_split", config["test_split"], ("pool", "official"))
    choose("conv", config["conv"], CONVOLUTIONS)
    choose("client_memory", config["client_memory"], ("device", "host"))
    participation(config["participation"])
    if config["width"] != "auto":
        check("width", number(int, "--width", config["width"]), 1, INF)
    if config["devices"] not in ("auto", "all"):
        check("devices", number(int, "--devices", config["devices"]), 1, INF)


@functools.cache
def optimizers() -> tuple[str, ...]:
    """The names of optax's optimizers that take a learning rate first, have defaults for the rest, and need no more
    than a gradient."""
    found = []
    for name, thing in vars(optax).items():
        arguments = list(inspect.signature(thing).parameters.values()) if inspect.isfunction(thing) else []
        first = [p.name for p in arguments[:1]] == ["learning_rate"] and not name.startswith("scale_by")
        if first and all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in arguments[1:]):
            found.append(name)
    return tuple(name for name in found if name != "lbfgs")  # which also asks for the loss, as a function


def participation(text: str) -> tuple[float, float]:
    """Reads `0.5`, or a range `0.1:1`."""
    low, colon, high = str(text).partition(":")
    parts = [number(float, "--participation", part, text) for part in ((low, high) if colon else (low, low))]
    return parts[0], parts[1]


def resumed(recorded: dict[str, Any], user: dict[str, Any]) -> dict[str, Any]:
    """The settings of a resume: the recorded ones (complete), with the user's where they may differ.

    Raises:
      InputError: a setting differs that must not; all of them are named with both values.
    """
    factory = find(recorded["algo"])
    algo = user.get("algo", recorded["algo"])
    hparams = typed_all(factory, user["hparams"]) if algo == recorded["algo"] else {}
    wanted = {name: value for name, value in user.items() if name != "hparams"}
    if differing := _differing(recorded, wanted, hparams):
        raise InputError(f"A resume continues the recorded run, but these settings differ: {', '.join(differing)}.")
    if wanted.get("rounds", recorded["rounds"]) < recorded["rounds"]:
        raise InputError(f"rounds={wanted['rounds']} is less than the recorded {recorded['rounds']}: it may only grow.")
    free = {name: value for name, value in wanted.items() if SETTINGS[name].free or name == "rounds"}
    config = recorded | free
    check_ranges(config)
    return config


def check_same(recorded: dict[str, Any], config: dict[str, Any], path: Any) -> None:
    """Raises InputError if the run recorded at `path` is not one of the effective settings `config`; it may have other
    rounds, and whatever a resume may change."""
    wanted = {name: value for name, value in config.items() if name in SETTINGS}
    if wanted["clients"] is None:  # a partition file says it
        del wanted["clients"]
    if differing := _differing(recorded, wanted, config["hparams"]):
        raise InputError(f"{path} holds a run of other settings: {', '.join(differing)}.")


def _differing(recorded: dict[str, Any], wanted: dict[str, Any], hparams: dict[str, Any]) -> list[str]:
    """The settings that are not the recorded ones and must be, each with both values."""
    found = [
        f"{name} (recorded {recorded.get(name)}, now {value})"
        for name, value in wanted.items()
        if not SETTINGS[name].free and name != "rounds" and not same(name, recorded.get(name), value)
    ]
    return found + [
        f"hparam {name} (recorded {recorded['hparams'].get(name)}, now {value})"
        for name, value in hparams.items()
        if recorded["hparams"].get(name) != value
    ]


def same(name: str, a: Any, b: Any) -> bool:
    """Are a recorded and a given value the same setting?"""
    if name == "model" and b == "auto":
        return a in ("cnn", "mlp")  # what it may stand for
    return participation(a) == participation(b) if name == "participation" else a == b


def completed(recorded: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings, with the defaults of those that came into being since."""
    factory = find(recorded["algo"])
    config = {name: setting.default for name, setting in SETTINGS.items()} | recorded
    return config | {"hparams": hyperparameters(factory) | recorded["hparams"]}


def default_workdir(user: dict[str, Any], config: dict[str, Any]) -> str:
    """runs/ALGO-DATASET-PARTITION-seedK, then what the user set beside these, so that a sweep needs no names."""
    parts = [config["algo"].rpartition(":")[2], config["dataset"], config["partition"], f"seed{config['seed']}"]
    parts += [change for change in changes(user) if not change.startswith(("dataset=", "partition="))]
    if user.get("preset"):
        parts.insert(0, user["preset"])
    return "runs/" + file_name(parts)


def changes(user: dict[str, Any]) -> list[str]:
    """What the user set, as name=value, but for the method, the seed, and what a resume may change."""
    named = ("algo", "seed", "rounds", "preset")
    parts = [f"{n}={v}" for n, v in user.items() if n in SETTINGS and n not in named and not SETTINGS[n].free]
    return parts + [f"{name}={value}" for name, value in user["hparams"].items()]


def file_name(parts: list[str]) -> str:
    """A file's name of some words."""
    return "-".join(re.sub(r"[^\w.=+-]+", "_", str(part)) for part in parts)
