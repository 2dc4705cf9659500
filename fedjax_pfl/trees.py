"""Arithmetic on pytrees of arrays: a model's variables, one client's or with a leading
client axis.

A tree with holes has None where a leaf was left out; None is an empty pytree, so such
trees pass through jax.tree.map.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import Numeric

from fedjax_pfl.types import Array, PyTree, Stored

F = TypeVar("F", bound=Callable[..., Any])


def traced_once(function: F) -> F:
    """Returns a function of arrays that is traced once for all calls with arguments of
    the same shapes, and inlined."""
    return jax.jit(function, inline=True)  # type: ignore[return-value]


def read(tree: PyTree) -> PyTree:
    """Returns a tree whose `Stored` leaves are arrays on the default device."""
    return jax.tree.map(
        lambda x: jnp.asarray(x.read()) if isinstance(x, Stored) else x, tree
    )


def replicate(tree: PyTree, count: int) -> PyTree:
    """Gives every leaf [...] a leading axis: [count, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)


def gather(tree: PyTree, ids: Array | np.ndarray | int) -> PyTree:
    """Takes rows `ids` [S] (or one row, ids [] or an int) of the leading axis of every
    leaf."""
    return jax.tree.map(lambda x: x[ids], tree)


def scatter(tree: PyTree, ids: Array, rows: PyTree, active: Array) -> PyTree:
    """Writes rows [S, ...] into a tree [N, ...] at the distinct `ids` [S]; rows not
    `active` are unchanged."""

    def put(old: Array, new: Array) -> Array:
        nowhere = old.shape[0] + jnp.arange(ids.shape[0])
        return old.at[jnp.where(active, ids, nowhere)].set(
            new, mode="drop", unique_indices=True
        )

    return jax.tree.map(put, tree, rows)


def where(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Takes the rows of `new` [S, ...] where condition [S] holds, else those of
    `old`."""
    return jax.tree.map(
        lambda a, b: jnp.where(expand(condition, a.ndim), a, b), new, old
    )


def expand(x: Array, ndim: int) -> Array:
    """Appends axes of length one until `x` has `ndim` axes."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def align(x: Array, ndim: int) -> Array:
    """Prepends axes of length one until `x` has `ndim` axes."""
    return jnp.reshape(x, (1,) * (ndim - jnp.ndim(x)) + jnp.shape(x))


def choose(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Takes `new` where the condition holds, else `old`; its axes ([] or [C], say) are
    the last ones of every leaf."""
    return jax.tree.map(
        lambda a, b: jnp.where(align(condition, a.ndim), a, b), new, old
    )


def add(a: PyTree, b: PyTree) -> PyTree:
    """Adds trees leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def lerp(weight: Numeric, a: PyTree, b: PyTree) -> PyTree:
    """Computes weight * a + (1 - weight) * b, leaf by leaf."""
    return optax.tree.cast_like(
        jax.tree.map(lambda x, y: weight * x + (1 - weight) * y, a, b), b
    )


def proximal(anchor: PyTree, weight: Numeric) -> Callable[[PyTree], PyTree]:
    """Returns the gradient of the proximal term weight/2 ||w - anchor||^2 as a function
    of w."""
    return lambda w: jax.tree.map(lambda a, b: weight * (a - b), w, anchor)


def sq_dist(a: PyTree, b: PyTree) -> Array:
    """Computes ||a - b||^2 over all leaves, []."""
    return sum(
        (
            jnp.sum((x - y) ** 2)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        ),
        jnp.float32(0),
    )


def gram(a: PyTree, b: PyTree) -> Array:
    """Computes inner products [S, N] of the models a [S, ...] and b [N, ...]."""

    def product(x: Array, y: Array) -> Array:
        x, y = (z.reshape(len(z), -1).astype(jnp.float32) for z in (x, y))
        return jnp.dot(x, y.T, precision=jax.lax.Precision.HIGHEST)

    products = map(product, jax.tree.leaves(a), jax.tree.leaves(b))
    return sum(products, jnp.float32(0))


def mixtures(xi: Array, w: PyTree, ids: Array) -> PyTree:
    """Computes u_i = w_i + sum_j xi_ij (w_j - w_i): [S, ...] from the others' weights
    [S, N], all models w [N, ...], ids [S]."""
    total = jnp.sum(xi, axis=1)

    def mix(x: Array) -> Array:
        own, rest = x[ids].astype(jnp.float32), x.astype(jnp.float32)
        # Relative to the first model: where all are equal, or no other weighs, u_i is
        # w_i to the last bit.
        change = jnp.tensordot(
            xi, rest - rest[:1], axes=1, precision=jax.lax.Precision.HIGHEST
        )
        moved = own + change - expand(total, x.ndim) * (own - rest[:1])
        return moved.astype(x.dtype)

    return jax.tree.map(mix, w)


def partition(tree: PyTree, mask: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a tree into (leaves where `mask`, the others), each with holes; `mask`
    holds Python booleans."""
    chosen = jax.tree.map(lambda m, x: x if m else None, mask, tree)
    rest = jax.tree.map(lambda m, x: None if m else x, mask, tree)
    return chosen, rest


def merge(a: PyTree, b: PyTree) -> PyTree:
    """Undoes `partition`."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, a, b, is_leaf=lambda x: x is None
    )


def overlay(own: PyTree, other: PyTree) -> PyTree:
    """Fills the holes of `own` with the leaves of `other`, both nested dicts; `other`
    may lack keys without holes."""
    if isinstance(own, dict):
        return {
            name: overlay(part, (other or {}).get(name)) for name, part in own.items()
        }
    return other if own is None else own


def pruned(tree: PyTree) -> PyTree:
    """Removes the holes of a nested dict, and dicts that are then empty."""
    if not isinstance(tree, dict):
        return tree
    found = {name: pruned(part) for name, part in tree.items()}
    return {
        name: part
        for name, part in found.items()
        if not (part is None or (isinstance(part, dict) and not part))
    }


def named_shapes(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the path and the shape of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), jnp.shape(leaf))
        for path, leaf in leaves
    ]


def parts(tree: dict[str, PyTree], chosen: tuple[str, ...]) -> PyTree:
    """Returns the mask of a dict of parts ("body", "head", "stats"), True at the leaves
    of the chosen ones."""
    return {
        name: jax.tree.map(lambda _, hit=name in chosen: hit, part)
        for name, part in tree.items()
    }


def size(tree: PyTree) -> int:
    """Returns the number of scalars."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def finite(tree: PyTree, count: int) -> Array:
    """Returns which of the `count` rows [count, ...] of the leaves are finite,
    [count]."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    rows = (jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in floats)
    return functools.reduce(jnp.logical_and, rows, jnp.ones(count, bool))


def single(tree: PyTree) -> PyTree:
    """Casts float64 to float32; with jax_enable_x64 it is the default type."""
    return jax.tree.map(
        lambda x: (
            x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.float64 else x
        ),
        tree,
    )
