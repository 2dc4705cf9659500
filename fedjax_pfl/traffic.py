"""What travels between the server and the clients, in scalars, integers and messages."""

import jax.numpy as jnp

from fedjax_pfl import trees
from fedjax_pfl.types import PyTree, Traffic


def both_ways(cohort, down: PyTree | int, up: PyTree | int | None = None) -> Traffic:
    """One message each way a round; `down` and `up` (None: the same) are trees that travel whole, or scalar counts."""
    up = down if up is None else up
    counts = [tree if isinstance(tree, int) else trees.size(tree) for tree in (down, up)]
    active = cohort.active.astype(jnp.int32)
    messages = sum(count > 0 for count in counts)
    return Traffic(counts[0] * active, counts[1] * active, 0 * active, messages * active)
