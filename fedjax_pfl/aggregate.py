"""Reductions over the clients of a round."""

import jax
import jax.numpy as jnp
from chex import Numeric

from fedjax_pfl import trees
from fedjax_pfl.types import Array, PyTree


def shares(weight: PyTree, active: Array) -> PyTree:
    """Normalises weights over the active clients.

    Args:
      weight: a pytree whose leaves are [S, ...] (or None: uniform); each trailing entry
        is normalised by itself, so [S, C] holds one set of weights a class branch.
      active: [S] bool.

    Returns:
      the same tree of shares that sum to 1 over the clients; all 0 where the weights of
      the active clients sum to 0; all NaN where their sum is not finite.
    """

    def share(w: Array | None) -> Array:
        w = jnp.ones(active.shape) if w is None else jnp.asarray(w, jnp.float32)
        w = jnp.where(trees.expand(active, w.ndim), w, 0)
        total = jnp.sum(w, axis=0, keepdims=True)
        return w / jnp.where(
            jnp.isfinite(total), jnp.where(total != 0, total, 1), jnp.nan
        )

    return jax.tree.map(share, weight, is_leaf=lambda w: w is None)


def weigh(share: PyTree, tree: PyTree) -> PyTree:
    """Multiplies one client's tree by its share.

    A share [] or [C] of a prefix multiplies the last axes of every leaf below it. A
    leaf with share 0 may be anything, NaN included, and its gradient is 0.
    """

    def times(p: Array, x: Array) -> Array:
        p = trees.align(p, x.ndim)
        # the inner one is for the gradient by p
        return jnp.where(p != 0, p * jnp.where(p != 0, x, 0), 0)

    return jax.tree.map(
        lambda p, part: jax.tree.map(lambda x: times(p, x), part), share, tree
    )


def filled(shares: PyTree, mean: PyTree, default: PyTree) -> PyTree:
    """Returns the mean where a client has a share (see `shares`), else `default`."""

    def fill(share: Array, mean: PyTree, default: PyTree) -> PyTree:
        return trees.choose(jnp.sum(share, axis=0) != 0, mean, default)

    return jax.tree.map(fill, shares, mean, default)


def project_simplex(v: Array, mask: Array, total: Numeric = 1.0) -> Array:
    """Projects v [T] onto {alpha >= 0, sum alpha = total, alpha = 0 off `mask`} in the
    Euclidean norm (Duchi et al., 2008)."""
    low = jnp.where(mask, v, -jnp.inf)
    # the projection is the same, and sums of large values would lose `total`
    low -= jnp.max(low, initial=jnp.finfo(low.dtype).min)
    u = jnp.sort(low)[::-1]
    finite = jnp.where(jnp.isfinite(u), u, 0)
    excess = (jnp.cumsum(finite) - total) / jnp.arange(1, v.shape[0] + 1)
    support = jnp.sum(jnp.isfinite(u) & (u > excess))
    tau = excess[jnp.maximum(support - 1, 0)]
    return jnp.where(mask, jnp.maximum(low - tau, 0), 0)


def descend(
    row: Array,
    slope: Array,
    here: Array,
    lr: Numeric,
    rho: Numeric,
    mean: float | None = None,
) -> Array:
    """Moves a row [N] of coefficients by one step along its gradient `slope` [N] and
    the penalty rho ||row - mean||^2.

    Only the entries `here` [N] bool move. They remain non-negative and keep their sum.

    Args:
      mean: where the penalty of an entry is 0; None: 1/N.
    """
    weight, mean = 2 * lr * rho, 1 / row.shape[0] if mean is None else mean
    # implicit: stable for every rho
    moved = (row - lr * slope + weight * mean) / (1 + weight)
    mass = jnp.sum(jnp.where(here, row, 0))
    return jnp.where(here, project_simplex(moved, here, mass), row)
