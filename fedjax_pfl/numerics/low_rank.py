"""Matrices of low rank in place of a model's change, and what sending them takes."""

import jax
import jax.numpy as jnp
from chex import Numeric

from fedjax_pfl.types import Array, PyTree


def low_rank(x: Array, energy: Numeric) -> tuple[Array, Array]:
    """A leaf's matrix [m, n], n its last axis, of the least rank r that keeps a share
    `energy` of the squared singular values, and how many scalars are sent: r (m + n +
    1), or whole and unchanged where that is no more."""
    matrix = x.reshape(-1, x.shape[-1])
    u, s, v = jnp.linalg.svd(matrix, full_matrices=False)
    # else it is rounding
    s = jnp.where(s > jnp.finfo(s.dtype).eps * max(matrix.shape) * s[0], s, 0)
    # from the smallest on, so that none is lost beside the sum
    rest = jnp.cumsum(s[::-1] ** 2)[::-1]
    # 1 - energy may round to 1
    kept = (rest > (1 - energy) * rest[0]).at[0].set(s[0] > 0)
    near = jnp.dot(
        u * jnp.where(kept, s, 0)[None], v, precision=jax.lax.Precision.HIGHEST
    )
    count = jnp.sum(kept, dtype=jnp.int32) * (sum(matrix.shape) + 1)
    return jnp.where(count < x.size, near.reshape(x.shape), x), jnp.minimum(
        count, x.size
    )


def compress(new: PyTree, old: PyTree, energy: Numeric) -> tuple[PyTree, Array]:
    """old + (new - old) with each matrix of the change of low rank, and the scalars
    that are sent []."""
    count = jnp.zeros((), jnp.int32)
    leaves, treedef = jax.tree.flatten(new)
    for i, (x, y) in enumerate(zip(leaves, jax.tree.leaves(old), strict=True)):
        change, sent = low_rank(x - y, energy) if x.ndim > 1 else (x - y, x.size)
        leaves[i], count = y + change, count + sent
    return jax.tree.unflatten(treedef, leaves), count
