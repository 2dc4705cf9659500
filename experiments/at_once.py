"""Runs that differ in seed and numeric hyperparameters only may be trained as one
compiled program: which may, and what they share."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments import build, stopping
from experiments.config import Config
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.errors import InputError


class ApartError(Exception):
    """Runs cannot be one program; args: why, as the end of a sentence. No round was
    trained."""


class TooManyError(Exception):
    """Runs take more memory as one program than there is; args: how much, as a
    sentence."""


@contextlib.contextmanager
def each_alone(count: int) -> Iterator[None]:
    """What is wrong with one of several runs is said by itself alone, and stops no
    other."""
    try:
        yield
    except InputError as error:
        if count == 1:
            raise
        raise ApartError(
            f"one cannot run as it is ({' '.join(str(error).splitlines()).rstrip('.')})"
        ) from None


def check_settings(configs: Sequence[Config]) -> None:
    """Raises ApartError for settings of several runs that are not those of one program,
    before anything is loaded."""
    first = configs[0]
    if stopping.given(first) != stopping.given(first.replace(stop_at=None, patience=0)):
        raise ApartError("each ends by itself with --stop_at or --patience")
    if first.client_memory == "host":
        raise ApartError("that needs the clients' rows in the devices' memory")
    # those that go on have their own where the command says none
    if (
        len(
            {
                (c.rounds, c.checkpoint_every, c.client_memory, c.devices)
                for c in configs
            }
        )
        > 1
    ):
        raise ApartError(
            "they were begun with other rounds, checkpoints, devices or memory"
        )


def check(experiments: Sequence[build.Experiment], devices: int) -> None:
    """Raises ApartError for several runs that cannot be one program."""
    if devices > 1 and experiments[0].config.devices != "auto":
        raise ApartError("that needs one device")
    if len({build.lowered(each) for each in experiments}) > 1:
        raise ApartError("their partitions make other programs of them")
    # as --unseen draws other clients
    if len({tuple(each.task.architecture) for each in experiments}) > 1:
        raise ApartError("their clients in training have other networks")


def sharing(experiment: build.Experiment, first: build.Experiment) -> build.Experiment:
    """The experiment with the first one's arrays of the examples where it has the
    same."""
    names = ("dataset", "unmarked", "public")
    same: dict[str, Any] = {
        n: getattr(first, n)
        for n in names
        if _same_examples(getattr(first, n), getattr(experiment, n))
    }
    # on the host and on the device
    fields = {"dataset": "examples", "public": "public"}
    arrays: dict[str, Any] = {
        x: getattr(first.federation, x) for name, x in fields.items() if name in same
    }
    share = lambda federation: federation._replace(**arrays)
    others = experiment.unseen and experiment.unseen._replace(
        federation=share(experiment.unseen.federation)
    )
    return experiment._replace(
        federation=share(experiment.federation), unseen=others, **same
    )


def _same_examples(a: Dataset | None, b: Dataset | None) -> bool:
    if a is None or b is None:
        return a is b
    return np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y)
