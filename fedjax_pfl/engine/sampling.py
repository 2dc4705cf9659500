"""Sampling of the clients of a round."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import trees
from fedjax_pfl.errors import InputError, in_one_line
from fedjax_pfl.types import Array, History, Task

FEW = 4  # a cohort of at most one in so many clients is drawn without sorting them all


def shares(task: Task) -> tuple[float, float]:
    """Returns the smallest and the largest fraction of the clients in a round, after
    rounding to whole clients."""
    low, high = (size / task.num_clients for size in task.cohort_sizes)
    return low, high


class Record(NamedTuple):
    """The clients' rounds so far, as of `types.History`."""

    participations: Array  # [N] int32
    last_round: Array  # [N] int32
    last_loss: Array  # [N] float32


def first(n: int) -> Record:
    """Returns the record before the first round."""
    never = jnp.full(n, -1, jnp.int32)
    return Record(jnp.zeros(n, jnp.int32), never, jnp.zeros(n, jnp.float32))


def reads_record(task: Task) -> bool:
    """Returns whether `Task.sampling` reads a record of earlier rounds."""
    n, own = task.num_clients, task.sampling
    if own is None:
        return False

    def weights(key: Array, t: Array, record: Record) -> Array:
        none = lambda ids: jnp.zeros(ids.shape)
        return _weights(own, key, t, History(jnp.int32(1), none, *record))

    given = jax.random.key(0), jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(weights)(*given, jax.eval_shape(lambda: first(n))).jaxpr
    record = {id(x) for x in jaxpr.invars[2:]}
    read = [x for e in jaxpr.eqns for x in e.invars] + list(jaxpr.outvars)
    return any(id(x) in record for x in read)


def recorded(
    record: Record, ids: Array, active: Array, round: Array, loss: Array
) -> Record:
    """Returns the record after a round of the clients `ids` [S] with mean training
    losses [S]."""
    n = len(record.participations)
    count = record.participations[jnp.minimum(ids, n - 1)] + 1
    rows = Record(count, jnp.full(len(ids), round, jnp.int32), loss)
    new: Record = trees.scatter(record, ids, rows, active)
    return new


def _no_loss(ids: Array) -> Array:
    raise InputError(
        "`history.loss` needs the state of the clients on the devices: use "
        "client_memory=device."
    )


def sample(
    key: Array,
    task: Task,
    round: Array | int = 0,
    loss: Callable[[Array], Array] = _no_loss,
    record: Record | None = None,
) -> tuple[Array, Array]:
    """Draws a round's clients: ids [S] distinct, active [S].

    With participation (low, high) their number is uniform on {max(1, floor(low N)),
    ..., floor(high N)}. With `Task.sampling` they are drawn one after another by its
    weights, without replacement, and none of weight 0.

    Args:
      loss: as of `types.History`.
      record: of earlier rounds; None: there were none.
    """
    n, (least, most) = task.num_clients, task.cohort_sizes
    key_ids, key_number = jax.random.split(key)
    number = jax.random.randint(key_number, (), least, most + 1, jnp.int32)
    if task.sampling is not None:
        stream = jax.random.fold_in(key_ids, 1)
        history = History(number, loss, *(first(n) if record is None else record))
        weights = _weights(task.sampling, stream, jnp.asarray(round), history)
        if weights.shape != (n,):
            raise InputError(
                f"`sampling` must return weights [{n}], got {list(weights.shape)}."
            )
        score = jnp.log(weights) + jax.random.gumbel(key_ids, (n,), jnp.float32)
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


def _weights(
    sampling: Callable[..., Any], key: Array, round: Array, history: History
) -> Array:
    """Returns the weights of a user's draw; raises InputError if it fails."""
    try:
        return jnp.asarray(sampling(key, round, history))
    except InputError:
        raise
    except Exception as error:  # of a user's function
        raise InputError(
            "`sampling` must be a function (key, round, history) -> weights "
            f"({in_one_line(error)})."
        ) from error


def power_of_choice(
    sizes: np.ndarray, candidates: int
) -> Callable[[Array, Array, History], Array]:
    """Returns a `Task.sampling` that takes the clients of highest loss among candidates
    drawn by size (Cho et al., AISTATS 2022, power of choice).

    Args:
      sizes: [N] training examples.
      candidates: d, at least the clients of a round; with these the draw is by size.

    Raises:
      InputError: `candidates` is not in [1, N].
    """
    n = len(sizes)
    if not 1 <= candidates <= n:
        raise InputError(f"`candidates` must be in [1, {n}], got {candidates}.")

    def weights(key: Array, round: Array, history: History) -> Array:
        score = jnp.log(jnp.asarray(sizes)) + jax.random.gumbel(key, (n,), jnp.float32)
        ids = jnp.argsort(-score)[:candidates].astype(jnp.int32)
        first = ids[jnp.argsort(-history.loss(ids))]
        taken = jnp.arange(candidates) < history.number
        return jnp.zeros(n).at[first].set(taken)

    return weights


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
