"""Bad commands and files, made systematically: each is one sentence and the documented exit code, and writes nothing.

Every setting and every hyperparameter has values of a wrong kind and out of its range; every file that a user may bring
is damaged in every way. A command that would begin to compile counts as accepted, which none of them may be.
"""

import math

import pytest

from experiments import main
from experiments.config import SETTINGS
from fedjax_pfl import hyperparameters
from fedjax_pfl.algorithms import ALGORITHMS

BASE = {"algo": "fedavg", "data_fraction": "0.2", "clients": "5", "model": "linear", "width": "1", "devices": "1"}
INTEGERS = ("x", "1.5", "", "nan", "-1", "1\n2", "9" * 30)
NUMBERS = ("x", "", "nan", "inf", "-1", "1,5", "1\n2")
WRONG = {int: INTEGERS, float: NUMBERS, bool: ("maybe", "", "1")}
TEXTS = {
    "algo": ("", "fedavgg", "FedAvg", "x:", ":x", "nowhere.py:f", "os:getcwd", "os.path:nothing", "1\n2"),
    "preset": ("", "pfedc", "DIGITS"),
    "dataset": ("", "digit", "npz:", "npz:/", "npz:nowhere.npz", "mnist"),
    "test_split": ("", "Pool", "official"),
    "partition": ("", "dirichlett", "file:", "file:/", "file:nowhere.npz"),
    "participation": ("", "0", "1.5", "-1", "nan", "1:0.5", "0.1:", ":", "0.1:0.5:1", "half"),
    "optimizer": ("", "sgdd", "lbfgs", "SGD"),
    "model": ("", "linearr", "linear,", "linear,linear,linear,linear,linear,linear", "file:", "file:/", "cnn"),
    "shared_model": ("", "linearr", "linear,linear"),
    "public": ("", "digit", "digits:0", "digits:99999999", "digits:-1", "npz:"),
    "bn_stats": ("", "Local", "global"),
    "compute_dtype": ("", "float", "int8"),
    "targets": ("", "80", "x", "0.5;0.6", "nan", ":", "nothing:0.5"),
    "conv": ("", "fft"),
    "width": ("", "0", "-1", "1.5", "wide", "9" * 30),
    "devices": ("", "0", "-1", "1.5", "many", "99", "9" * 30),
    "client_memory": ("", "disk", "host"),
    "data_dir": (),
}
WITH = {  # other settings, without which one means nothing
    "alpha": {"partition": "dirichlet"},
    "test_split": {},
    "momentum": {"optimizer": "sgd"},
    "data_dir": {"dataset": "mnist"},
}


def flags(**given):
    return [f"--{name}={value}" for name, value in (BASE | given).items()]


def of_settings():
    for name, known in SETTINGS.items():
        for value in TEXTS[name] if name in TEXTS else WRONG[known.kind]:
            if known.kind is bool:
                yield [*flags(), f"--{name}={value}"]
            else:
                yield flags(**WITH.get(name, {}), **{name: value})


def of_hyperparameters():
    for algo, factory in ALGORITHMS.items():
        for name, known in hyperparameters.of(factory).items():
            for value in WRONG.get(known.kind, ("no such choice",))[:1]:
                yield [*flags(algo=algo), f"--hparam={name}={value}"]
            if known.kind in (int, float) and math.isfinite(known.low):
                yield [*flags(algo=algo), f"--hparam={name}={math.floor(known.low) - 1}"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [*of_settings(), *of_hyperparameters()], ids=lambda c: " ".join(c[-2:]))
def test_a_bad_setting(command, tmp_path, monkeypatch, capsys):
    check(main.run, command, tmp_path, monkeypatch, capsys)
