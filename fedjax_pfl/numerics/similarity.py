"""Similarities of models that are stacked on a leading axis, all pairs at once."""

import jax
import jax.numpy as jnp

from fedjax_pfl import trees
from fedjax_pfl.types import Array, PyTree

TINY = 1e-12


def gram(a: PyTree, b: PyTree) -> Array:
    """Inner products [S, N] of the models a [S, ...] and b [N, ...]."""

    def flat(x: Array) -> Array:
        return x.reshape(len(x), -1).astype(jnp.float32)

    products = (
        jnp.dot(flat(x), flat(y).T, precision=jax.lax.Precision.HIGHEST)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    return sum(products, jnp.zeros(()))


def square_norms(w: PyTree) -> Array:
    """||w_i||^2 [N] of models w [N, ...]."""
    squares = (
        jnp.sum(x.astype(jnp.float32) ** 2, axis=tuple(range(1, x.ndim)))
        for x in jax.tree.leaves(w)
    )
    return sum(squares, jnp.zeros(()))


def square_distances(w: PyTree, ids: Array) -> Array:
    """||w_i - w_j||^2 [S, N] of the models `ids` [S] to all models w [N, ...]."""
    # one matrix product instead of S passes over all models; centred, so that what they
    # have in common cannot cancel
    w = jax.tree.map(
        lambda x: (
            x.astype(jnp.float32)
            - jnp.mean(x.astype(jnp.float32), axis=0, keepdims=True)
        ),
        w,
    )
    norms = square_norms(w)
    return jnp.maximum(
        norms[ids][:, None] + norms[None] - 2 * gram(trees.gather(w, ids), w), 0
    )


def cosines(w: PyTree, ids: Array) -> Array:
    """cos(w_i, w_j) [S, N] of the models `ids` [S] with all models w [N, ...]."""
    norms = jnp.sqrt(square_norms(w))
    return gram(trees.gather(w, ids), w) / jnp.maximum(
        norms[ids][:, None] * norms[None], TINY
    )
