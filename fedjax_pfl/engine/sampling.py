"""Sampling of the clients of a round."""

import jax
import jax.numpy as jnp

from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Task

FEW = 4  # a cohort of at most one in so many clients is drawn without sorting them all


def shares(task: Task) -> tuple[float, float]:
    """Returns the smallest and the largest fraction of the clients in a round, after
    rounding to whole clients."""
    low, high = (size / task.num_clients for size in task.cohort_sizes)
    return low, high


def sample(key: Array, task: Task, round: Array | int = 0) -> tuple[Array, Array]:
    """Draws a round's clients: ids [S] distinct, active [S].

    With participation (low, high) their number is uniform on {max(1, floor(low N)),
    ..., floor(high N)}. With `Task.sampling` they are drawn one after another by its
    weights, without replacement, and none of weight 0.
    """
    n, (least, most) = task.num_clients, task.cohort_sizes
    key_ids, key_number = jax.random.split(key)
    number = jax.random.randint(key_number, (), least, most + 1, jnp.int32)
    if task.sampling is not None:
        stream = jax.random.fold_in(key_ids, 1)
        weights = jnp.asarray(task.sampling(stream, jnp.asarray(round)))
        if weights.shape != (n,):
            raise InputError(
                f"`sampling` must return weights [{n}], got {list(weights.shape)}."
            )
        score = jnp.log(weights) + jax.random.gumbel(key_ids, (n,))
        order = jnp.argsort(-score).astype(jnp.int32)
        if most == n:
            taken = jnp.argsort(order) < number
            return jnp.arange(n, dtype=jnp.int32), taken & (weights > 0)
        ids = order[:most]
        return ids, (jnp.arange(most) < number) & (weights[ids] > 0)
    # sorting all of many clients would take longer than a small cohort's training
    if FEW * most <= n:
        return _distinct(key_ids, n, most), jnp.arange(most) < number
    order = jax.random.permutation(key_ids, n).astype(jnp.int32)
    if most == n:  # no rows need a gather
        return jnp.arange(n, dtype=jnp.int32), jnp.argsort(order) < number
    return order[:most], jnp.arange(most) < number


def _distinct(key: Array, n: int, count: int) -> Array:
    """Draws `count` distinct numbers below n in random order, [count] int32, in time
    that does not depend on n.

    Draws with replacement, and again where a number repeats an earlier one, until none
    does. All ordered draws are equally likely.
    """

    def repeats(ids: Array) -> Array:
        order = jnp.argsort(ids, stable=True)
        again = jnp.diff(ids[order], prepend=-1) == 0
        return jnp.zeros(count, bool).at[order].set(again, unique_indices=True)

    def redraw(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, ids, again = carry
        ids = jnp.where(
            again,
            jax.random.randint(jax.random.fold_in(key, i), (count,), 0, n, jnp.int32),
            ids,
        )
        return i + 1, ids, repeats(ids)

    start = jnp.int32(0), jnp.zeros(count, jnp.int32), jnp.ones(count, bool)
    return jax.lax.while_loop(lambda carry: carry[2].any(), redraw, start)[1]
