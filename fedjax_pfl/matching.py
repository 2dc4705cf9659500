"""Neurons of a network: which tensors share a permutation of them, and how those of several clients are matched.

Reordering the neurons of a hidden layer, and the inputs of the layers that read it, leaves a network's function as it
is. A model is an ordered list of groups, one for each permutation that is free.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from fedjax_pfl import host
from fedjax_pfl.checks import BadInput
from fedjax_pfl.types import Array, PyTree

Path = tuple[str, ...]  # of a leaf of the variables, or of a layer's dict


class Group(NamedTuple):
    """Tensors that share one permutation of their output channels: those of one layer, or of a residual stream."""

    rows: tuple[Path, ...]  # kernels [..., width] and biases [width]: a neuron's row, by which it is matched
    vectors: tuple[Path, ...]  # [width], which only follow: parameters and moments of batch norms
    readers: tuple[Path, ...]  # kernels [..., pixels * width, out], whose input axis follows within each pixel
    width: int

    @property
    def tensors(self) -> tuple[Path, ...]:
        """What belongs to the layer itself."""
        return self.rows + self.vectors


def groups(variables: PyTree) -> list[Group]:
    """The hidden layers of a model in order, known by the names that `nets.Dense` and `nets.Conv` give to variables.

    Args:
      variables: of a model, arrays or their shapes.

    Raises:
      BadInput: for any other model, as names do not tell which of its layers reads which.
    """
    convs, dense = ("body", "convs"), ("body", "dense", "layers")
    stacks = (convs, dense) if _children(variables, convs) else (("body", "layers"),)
    chain = [(*stack, str(i)) for stack in stacks for i in range(len(_children(variables, stack)))]
    made = [_group(variables, *pair) for pair in itertools.pairwise([*chain, ("head",)])]
    known = [path for group in made if group for path in group.tensors] + _tensors(variables, ("head",))
    if not all(made) or set(known) != {_keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables)}:
        raise BadInput(
            "Neurons can be matched in models made of nets.Dense or nets.Conv with a linear head (mlp, lenet, cnn, "
            f"...), but the body of this one holds {', '.join(variables['body'])}."
        )
    return [group for group in made if group]


def _group(variables: PyTree, layer: Path, reader: Path) -> Group | None:
    """The group of a layer that only `reader` reads; None where they do not fit each other."""
    rows, readers = _tensors(variables, layer), _tensors(variables, reader)
    if not rows or not readers:
        return None
    width = _at(variables, rows[0]).shape[-1]
    norms = [(part, "norms", layer[-1]) for part in ("body", "stats") if layer[1] == "convs"]
    vectors = tuple((*norm, name) for norm in norms for name in _children(variables, norm))
    fits = _at(variables, readers[0]).shape[-2] % width == 0
    return Group(tuple(rows), vectors, tuple(readers[:1]), width) if fits else None


def _tensors(variables: PyTree, layer: Path) -> list[Path]:
    """The paths of a layer's kernel and, if it has one, bias; none where the layer is of another kind."""
    found = _children(variables, layer)
    names = ["kernel", "bias"][: len(found)]
    return [(*layer, name) for name in names] if set(names) == set(found) else []


def _at(tree: PyTree, path: Path) -> PyTree:
    for key in path:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree


def _children(tree: PyTree, path: Path) -> dict:
    """The dict at a path of nested dicts; empty where there is none."""
    found = _at(tree, path)
    return found if isinstance(found, dict) else {}


def _keys(path: tuple) -> Path:
    return tuple(key.key for key in path)


def mask(variables: PyTree, paths: tuple[Path, ...]) -> PyTree:
    """The structure of the variables as Python booleans, True at these leaves."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _keys(path) in paths, variables)


def permute(variables: PyTree, group: Group, order: Array) -> PyTree:
    """One client's variables with neuron order[g] of the group in place g; the function of the network stays.

    Args:
      order: [width] int32.
    """

    def moved(path: tuple, x: Array) -> Array:
        if _keys(path) in group.tensors:
            x = x[..., order]
        if _keys(path) in group.readers:
            pixels = x.reshape(*x.shape[:-2], -1, group.width, x.shape[-1])  # images are flattened as NHWC
            x = pixels[..., order, :].reshape(x.shape)
        return x

    return jax.tree_util.tree_map_with_path(moved, variables)


def neurons(variables: PyTree, group: Group) -> Array:
    """One client's rows [width, d] of a group: each neuron's incoming weights and bias."""
    parts = [_at(variables, path).astype(float) for path in group.rows]
    return jnp.concatenate([x.reshape(-1, group.width) for x in parts]).T


def match(rows: Array, ids: Array, sizes: Array, priority: Array) -> Array:
    """Orders the neurons of all clients alike, on the host in float64; every neuron has a partner at every client.

    The global neurons start as those of the client with most data. In each sweep the clients, one after another, leave
    the mean of the matched neurons and come back by the assignment with the least sum of squared distances to it.

    Args:
      rows: [S, width, d].
      ids: [S], distinct.
      sizes: [S] training examples; a client with 0 takes no part, and its rows are not looked at.
      priority: [S, sweeps], by which the clients take their turns in each sweep; ties go by id, as they do for sizes.

    Returns:
      [S, width] int32: neuron [s, g] of client s is the global neuron g; 0, 1, 2, ... where a client takes no part,
      and for everybody if a row is not finite.
    """
    shape = jax.ShapeDtypeStruct(rows.shape[:2], jnp.int32)
    return host.call(_match, shape, rows, ids, sizes, priority)


def _match(rows: np.ndarray, ids: np.ndarray, sizes: np.ndarray, priority: np.ndarray) -> np.ndarray:
    here = np.flatnonzero(sizes)
    orders = np.tile(np.arange(rows.shape[1], dtype=np.int32), (rows.shape[0], 1))
    if len(here) < 2 or not np.isfinite(rows[here]).all():
        return orders
    start = here[np.lexsort((ids[here], -sizes[here]))[0]]
    total = rows[start].astype(np.float64)  # [width, d], the sum of the matched neurons
    for sweep in range(priority.shape[1]):
        before = orders.copy()
        for s in here[np.lexsort((ids[here], priority[here, sweep]))]:
            if sweep == 0 and s == start:
                continue
            mine = rows[s].astype(np.float64)
            if sweep:
                total -= mine[orders[s]]
            # the squares in ||x - g||^2 add up to the same for every assignment, and a mean orders them as a sum does
            orders[s] = linear_sum_assignment(total @ mine.T, maximize=True)[1]
            total += mine[orders[s]]
        if sweep and np.array_equal(orders, before):
            break
    return orders
