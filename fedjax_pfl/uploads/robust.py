"""Aggregation of uploads that few malicious clients cannot move far, for every method.

References: Yin, Chen, Kannan & Bartlett, Byzantine-robust distributed learning (ICML
2018, arXiv 1803.01498); Blanchard, El Mhamdi, Guerraoui & Stainer, Machine learning
with adversaries (NeurIPS 2017, arXiv 1703.02757); Pillutla, Kakade & Harchaoui, Robust
aggregation for federated learning (IEEE TSP 2022, arXiv 1912.13445).
"""

import functools
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from chex import Numeric

from fedjax_pfl import aggregate, trees
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Client, PyTree, Task, Upload
from fedjax_pfl.uploads.chain import option

ASSUMED = 0.2  # fraction of malicious clients
ITERATIONS = 16  # of the geometric median
SMALLEST = 1e-6  # distance by which the geometric median divides


@option("aggregate")
def robust(
    rule: Literal[
        "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"
    ] = "median",
    malicious_share: Annotated[float, Interval(ge=0, lt=0.5)] = ASSUMED,
) -> Upload:
    """Takes another rule in place of the mean of the updates.

    All S updates of a round are held on every device: S times the memory of a model.

    Args:
      rule: median or trimmed_mean of each number, unweighted; krum, the update nearest
        to its neighbours; multi_krum, the mean of the updates that Krum keeps;
        geometric_median, weighted as the mean (RFA).
      malicious_share: the fraction of malicious clients that a rule assumes, in
        [0, 0.5), rounded up to whole clients: of `trimmed_mean` trimmed at each end, of
        Krum left out.
    """

    def client(
        c: Client, update: PyTree, _: PyTree, row: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        return update, row, ()

    def combine(updates: PyTree, shares: PyTree) -> PyTree:
        return RULES[rule](updates, shares, malicious_share)

    def check(task: Task) -> None:
        least = task.cohort_sizes[0]
        share = np.float32(malicious_share)
        if rule == "trimmed_mean" and not _trimmed(share, jnp.int32(least)):
            raise InputError(
                f"`trimmed_mean` trims no client of a round of {least} with "
                f"malicious_share={malicious_share}: it needs 3 or more, and a share "
                "above 0."
            )

    return Upload(lambda like: ((), ()), client, combine=combine, check=check)


def median(stack: PyTree, shares: PyTree, share: Numeric) -> PyTree:
    """Computes the median of each number over the clients with a share.

    Args:
      stack: updates [S, ...].
      shares: a tree like the updates, see `aggregate.shares`.
      share: not used; the signature is that of all rules.
    """

    def middle(x: Array, here: Array) -> Array:
        x, count = _sorted(x, here)
        low, high = jnp.maximum(count - 1, 0) // 2, count // 2
        ends = [jnp.take_along_axis(x, i[None], axis=0)[0] for i in (low, high)]
        return (ends[0] + ends[1]) / 2

    return _each_number(middle, stack, shares)


def trimmed_mean(stack: PyTree, shares: PyTree, share: Numeric) -> PyTree:
    """Computes the mean of each number without the largest and the smallest values, a
    fraction `share` of the clients, rounded up, at each end; the arguments are those of
    `median`."""

    def mean(x: Array, here: Array) -> Array:
        x, count = _sorted(x, here)
        cut = _trimmed(share, count)
        rank = trees.expand(jnp.arange(x.shape[0]), x.ndim)
        kept = (rank >= cut[None]) & (rank < (count - cut)[None])
        total = jnp.sum(jnp.where(kept, x, 0), axis=0)
        return total / jnp.maximum(count - 2 * cut, 1)

    return _each_number(mean, stack, shares)


def krum(stack: PyTree, shares: PyTree, share: Numeric) -> PyTree:
    """Takes the update with the least sum of squared distances to its n - f - 2
    nearest, of n updates and f = share n malicious ones; the arguments are those of
    `median`."""
    scores = _krum_scores(*_vectors(stack, shares), share)
    return trees.gather(_complete(stack, shares), jnp.argmin(scores))


def multi_krum(stack: PyTree, shares: PyTree, share: Numeric) -> PyTree:
    """Averages the n - f updates with the least scores of `krum`, equally weighted."""
    vectors, here = _vectors(stack, shares)
    scores, count = _krum_scores(vectors, here, share), jnp.sum(here)
    rank = jnp.argsort(jnp.argsort(scores))
    kept = here & (rank < count - _malicious(share, count))
    weights = kept / jnp.maximum(jnp.sum(kept), 1)
    return _weighted(weights, _complete(stack, shares))


def geometric_median(stack: PyTree, shares: PyTree, share: Numeric) -> PyTree:
    """Computes the point with the least weighted sum of distances to the updates, by
    the smoothed Weiszfeld algorithm; the arguments are those of `median`.

    The weights are the clients' shares, averaged over the leaves of `shares`.
    """
    vectors, here = _vectors(stack, shares)
    each = [
        jnp.mean(x.reshape(x.shape[0], -1), axis=1) for x in jax.tree.leaves(shares)
    ]
    weights = sum(each[1:], each[0]) / len(each)
    finite = jnp.all(jnp.isfinite(vectors), axis=1)
    weights = jnp.where(here & finite, weights, 0)
    vectors = jnp.where(finite[:, None], vectors, 0)

    def normalised(w: Array) -> Array:
        return w / jnp.maximum(jnp.sum(w), 1e-30)

    def step(_: int, current: Array) -> Array:
        middle = current @ vectors
        distance = jnp.sqrt(jnp.sum((vectors - middle[None]) ** 2, axis=1))
        return normalised(weights / jnp.maximum(distance, SMALLEST))

    final = jax.lax.fori_loop(0, ITERATIONS, step, normalised(weights))
    return _weighted(final, _complete(stack, shares))


RULES: dict[str, Callable[[PyTree, PyTree, Numeric], PyTree]] = {
    "median": median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
}


def _each_number(
    reduce: Callable[[Array, Array], Array], stack: PyTree, shares: PyTree
) -> PyTree:
    """Returns reduce(x [S, ...], who has a share [S, ...]) of each leaf."""
    return jax.tree.map(
        lambda x, share: reduce(x, _aligned(share > 0, x)), stack, shares
    )


def _aligned(here: Array, x: Array) -> Array:
    """Broadcasts [S] or [S, C] to x [S, ..., C]."""
    between = (1,) * (x.ndim - here.ndim)
    shape = (here.shape[0], *between, *here.shape[1:])
    return jnp.broadcast_to(here.reshape(shape), x.shape)


def _sorted(x: Array, here: Array) -> tuple[Array, Array]:
    """Sorts [S, ...] along the clients; those not `here`, and NaN, come last. Returns
    how many are here, too."""
    sorts = jnp.sort(jnp.where(here, x, jnp.nan), axis=0)
    return sorts, jnp.sum(here, axis=0).astype(jnp.int32)


def _complete(stack: PyTree, shares: PyTree) -> PyTree:
    """Puts the update 0 where a client has no share."""
    return jax.tree.map(
        lambda x, share: jnp.where(_aligned(share > 0, x), x, 0), stack, shares
    )


def _vectors(stack: PyTree, shares: PyTree) -> tuple[Array, Array]:
    """Returns the updates as vectors [S, Z], and which clients have a share [S]."""
    full = jax.tree.leaves(_complete(stack, shares))
    flat = [x.reshape(x.shape[0], -1).astype(jnp.float32) for x in full]
    present = [
        jnp.any(x.reshape(x.shape[0], -1) > 0, axis=1) for x in jax.tree.leaves(shares)
    ]
    return jnp.concatenate(flat, axis=1), functools.reduce(jnp.logical_or, present)


def _malicious(share: Numeric, count: Array) -> Array:
    """Returns the number of clients that may be malicious, rounded up."""
    return jnp.ceil(share * count - 1e-4).astype(jnp.int32)


def _trimmed(share: Numeric, count: Array) -> Array:
    """Returns how many values are trimmed at each end, of which one is left."""
    return jnp.minimum(_malicious(share, count), jnp.maximum(count - 1, 0) // 2)


def _krum_scores(vectors: Array, here: Array, share: Numeric) -> Array:
    """Returns the scores [S]; infinite for clients not `here`."""
    square = jnp.sum(vectors**2, axis=1)
    product = jnp.dot(vectors, vectors.T, precision=jax.lax.Precision.HIGHEST)
    distance = jnp.maximum(square[:, None] + square[None] - 2 * product, 0)
    distance = jnp.where(jnp.isfinite(distance), distance, jnp.inf)
    pairs = here[:, None] & here[None] & ~jnp.eye(len(here), dtype=bool)
    near = jnp.sort(jnp.where(pairs, distance, jnp.inf), axis=1)
    count = jnp.sum(here)
    neighbours = jnp.maximum(count - _malicious(share, count) - 2, 1)
    taken = jnp.arange(len(here))[None] < neighbours
    score = jnp.sum(jnp.where(taken, near, 0), axis=1)
    return jnp.where(here, score, jnp.inf)


def _weighted(weights: Array, stack: PyTree) -> PyTree:
    """Returns the weighted sum over the clients; a weight of 0 leaves out anything."""
    parts = jax.vmap(aggregate.weigh)(weights, stack)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), parts)
