"""Malicious clients that send wrong updates; `data.shifts` has those with wrong
labels."""

import math
from typing import Annotated, Literal

import jax
import numpy as np
import optax
from annotated_types import Ge

from fedjax_pfl import keys, trees
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.types import Client, PyTree, Task, Upload
from fedjax_pfl.uploads.chain import option, random_like


def chosen(clients: int, fraction: float, seed: int = 0) -> np.ndarray:
    """Draws the malicious clients, the same in every round.

    Args:
      clients: N.
      fraction: of the clients in [0, 1), rounded to the nearest number.

    Returns:
      bool [N], as `Task.malicious`.
    """
    check("malicious", fraction, 0, 1, open_high=True)
    count = math.floor(fraction * clients + 0.5)
    drawn = np.random.default_rng(seed).permutation(clients)[:count]
    return np.isin(np.arange(clients), drawn)


@option("attack")
def attack(
    kind: Literal["sign_flip", "scale", "gaussian"] = "sign_flip",
    scale: Annotated[float, Ge(0)] = 1.0,
) -> Upload:
    """Replaces the updates of the clients in `Task.malicious`; their running statistics
    are honest.

    Args:
      kind: sign_flip sends -scale times the update, scale sends scale times it, and
        gaussian numbers of the standard deviation scale.
      scale: in [0, inf).
    """

    def client(
        c: Client, update: PyTree, _: PyTree, row: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        if kind == "gaussian":
            wrong = random_like(keys.fold(c.key, keys.Client.ATTACK), update)
        else:
            wrong = update
        factor = -scale if kind == "sign_flip" else scale
        wrong = optax.tree.cast_like(jax.tree.map(lambda x: factor * x, wrong), update)
        return trees.choose(c.malicious, wrong, update), row, ()

    def known(task: Task) -> None:
        if task.malicious is None:
            raise InputError("`attack` needs `malicious`, the clients that attack.")

    return Upload(lambda like: ((), ()), client, check=known)
