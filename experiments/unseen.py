"""The clients that --unseen keeps out of training: who they are, and what they score
under the trained method."""

from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.config import Config
from experiments.files import Row
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.engine import unseen
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Federation, PyTree, Task


class Unseen(NamedTuple):
    """The clients that do not train."""

    ids: np.ndarray  # [U] in the partition of everybody
    everybody: Partition
    partition: Partition
    federation: Federation
    task: Task


def draw(config: Config, architecture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids of the clients that train, and of those that do not, ascending: of each
    architecture, at least one.

    Args:
      architecture: [n] of everybody.
    """
    # a stream of its own: a partition by the seed's may draw the same permutation
    rng, apart = (
        np.random.default_rng([config.seed, 1]),
        np.zeros(len(architecture), bool),
    )
    for group in np.unique(architecture) if config.unseen else ():
        ids = np.flatnonzero(architecture == group)
        chosen = rng.permutation(ids)[: max(1, round(config.unseen * len(ids)))]
        if len(chosen) == len(ids):
            raise InputError(
                f"--unseen={config.unseen} of {len(ids)} clients (of one network) "
                "leaves none to train: take less, or "
                "more --clients."
            )
        apart[chosen] = True
    return np.flatnonzero(~apart), np.flatnonzero(apart)


def as_asked(config: Config, summary: Row) -> bool:
    """Are the scores in a summary, if there are such clients, after just these
    --unseen_rounds?"""
    return (
        not config.unseen
        or summary.get("unseen_rounds", config.unseen_rounds) == config.unseen_rounds
    )


def scorer(config: Config, trained: Task, others: Task, width: int = 1) -> Any:
    """`engine.unseen.scorer` for these settings; InputError if the method has no way
    for unseen clients."""
    options: dict[str, Any] = {
        "lr_decay": config.lr_decay,
        "width": width,
        "rounds": config.unseen_rounds,
    }
    return unseen.scorer(find(config.algo), trained, others, config.hparams, **options)


def scores(
    config: Config, trained: Task, others: Unseen, server: PyTree, width: int
) -> dict[str, dict[str, Any]]:
    """The scores after the last round, {point: {score: [U]}} on the host.

    Args:
      server: of the state after the last round, on the host.
      width: clients at once; on one device, as they are few and it is once.
    """
    run = jax.jit(scorer(config, trained, others.task, min(width, len(others.ids))))
    return jax.device_get(
        run(
            jax.random.key(config.seed),
            others.federation,
            server,
            np.int32(config.rounds),
        )
    )
