"""Clients of several architectures: trees stacked per architecture. With a single one
they are plain stacked trees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import trees
from fedjax_pfl.types import Grouped, Model, Own, PyTree, Task


def members(task: Task, group: int) -> np.ndarray:
    """Returns the ids of the clients of an architecture, ascending."""
    return np.flatnonzero(np.asarray(task.architecture) == group)


def slots(task: Task) -> np.ndarray:
    """Returns the rank [N] of each client among those of its architecture."""
    slot = np.zeros(task.num_clients, np.int32)
    for group in range(len(task.models)):
        ids = members(task, group)
        slot[ids] = np.arange(len(ids))
    return slot


def stack(task: Task, make: Callable[[Model], PyTree]) -> PyTree:
    """Computes `make(model)` for every client: trees [N_g, ...] per architecture,
    Grouped if there are several."""
    return grouped(
        [
            trees.replicate(make(model), len(members(task, group)))
            for group, model in enumerate(task.models)
        ]
    )


def grouped(parts: list[PyTree]) -> PyTree:
    """Computes Grouped(parts); with one architecture its only part."""
    return parts[0] if len(parts) == 1 else Grouped(tuple(parts))


def select(tree: PyTree, group: int) -> PyTree:
    """Returns the tree with each Grouped node replaced by the part of one
    architecture."""
    return jax.tree.map(
        lambda x: x.trees[group] if is_grouped(x) else x, tree, is_leaf=is_grouped
    )


def rows_of(tree: PyTree, group: int, here: slice) -> PyTree:
    """Returns the rows of one architecture's clients, which stand at `here` in plain
    leaves."""
    return jax.tree.map(
        lambda x: x.trees[group] if is_grouped(x) else x[here], tree, is_leaf=is_grouped
    )


def is_grouped(x: Any) -> bool:
    """Returns True for a Grouped node."""
    return isinstance(x, Grouped)


def per_group(
    plain: Callable[..., Any], own: Callable[..., Any], tree: PyTree, *others: PyTree
) -> PyTree:
    """Returns a tree mapped leaf by leaf: plain(*leaves), and own(group, *leaves)
    below Grouped nodes."""

    def one(first: Any, *rest: Any) -> Any:
        if not is_grouped(first):
            return plain(first, *rest)
        part = lambda g: jax.tree.map(
            lambda *x: own(g, *x), *(t.trees[g] for t in (first, *rest))
        )
        return Grouped(tuple(map(part, range(len(first.trees)))))

    return jax.tree.map(one, tree, *others, is_leaf=is_grouped)


def join(results: list[PyTree]) -> PyTree:
    """Returns the results of each architecture's clients as one tree: what is marked
    `Own` Grouped, the rest one after another."""
    own: Callable[[Any], bool] = lambda x: isinstance(x, Own)
    if len(results) == 1:
        return jax.tree.map(lambda x: x.tree if own(x) else x, results[0], is_leaf=own)

    def one(*parts: Any) -> Any:
        return (
            Grouped(tuple(x.tree for x in parts))
            if own(parts[0])
            else jnp.concatenate(parts)
        )

    return jax.tree.map(one, *results, is_leaf=own)
