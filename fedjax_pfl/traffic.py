"""Communication between server and clients, in scalars, integers and messages."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from fedjax_pfl import trees
from fedjax_pfl.errors import moved
from fedjax_pfl.types import Array, Cohort, PyTree, Traffic


def both_ways(
    cohort: Cohort, down: PyTree | int | Array, up: PyTree | int | Array | None = None
) -> Traffic:
    """Counts one message each way per round.

    Args:
      down: received by a client: a whole tree, a number of scalars, or numbers per
        client [S].
      up: sent by a client, likewise; None: the same.
    """
    up = down if up is None else up
    active = cohort.active.astype(jnp.int32)
    counts = [_count(tree, len(active)) * active for tree in (down, up)]
    messages = (counts[0] > 0).astype(jnp.int32) + (counts[1] > 0)
    return Traffic(counts[0], counts[1], 0 * active, messages)


def _count(tree: PyTree | int | Array, clients: int) -> int | Array:
    if isinstance(tree, int):
        return tree
    if (
        isinstance(tree, jax.Array)
        and tree.shape == (clients,)
        and jnp.issubdtype(tree.dtype, jnp.integer)
    ):
        return tree
    return trees.size(tree)


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = moved(__name__, {"uploads": "both_ways, or averaging.from_client"})
