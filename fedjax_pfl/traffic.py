"""Communication between server and clients, in scalars, integers and messages."""

import jax
import jax.numpy as jnp

from fedjax_pfl import trees
from fedjax_pfl.errors import ContractError
from fedjax_pfl.types import Array, Cohort, Metrics, PyTree, State, Traffic


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


def uploads(state: State, cohort: Cohort, metrics: Metrics) -> Traffic:
    """Counts the uploads of `Cohort.mean`, both ways; the default of
    `Algorithm.traffic`.

    Raises:
      ContractError: the server has a state, and the round does not call `mean`.
    """
    if not cohort.uploads and jax.tree.leaves(state.server):  # type: ignore[attr-defined]
        raise ContractError(
            "a round without cohort.mean must count its own `traffic` (see "
            "fedjax_pfl.traffic.both_ways)."
        )
    lengths = cohort.lengths  # type: ignore[attr-defined]  # the engine's
    sizes = [[trees.size(upload) for upload in call] for call in cohort.uploads]  # type: ignore[attr-defined]
    per_group = [sum(call[group] for call in sizes) for group in range(len(lengths))]
    each = jnp.concatenate(
        [
            jnp.full(n, size, jnp.int32)
            for n, size in zip(lengths, per_group, strict=True)
        ]
    )
    return both_ways(cohort, each)


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
