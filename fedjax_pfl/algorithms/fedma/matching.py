"""Neurons of a network: which tensors share a permutation of them, and how those of
several clients are matched.

Reordering the neurons of a hidden layer, and the inputs of the layers that read it,
leaves a network's function as it is. A model is an ordered list of layers, and each has
a group of tensors for every permutation that is free.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_pfl import host_callback
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, PyTree

Path = tuple[str, ...]  # of a leaf of the variables, or of a layer's dict
HEAD, STEM, BLOCKS = ("head",), ("body", "stem"), ("body", "blocks")


class Group(NamedTuple):
    """Tensors that share one permutation of their output channels: those of one layer,
    or of a residual stream."""

    # kernels [..., width] and biases [width]: a neuron's row, by which it is matched
    rows: tuple[Path, ...]
    # [..., width], which only follow, as parameters and running statistics do
    followers: tuple[Path, ...]
    # kernels [..., pixels * width, out], whose input axis follows within each pixel
    readers: tuple[Path, ...]
    width: int

    @property
    def tensors(self) -> tuple[Path, ...]:
        """Returns the tensors of the layer itself."""
        return self.rows + self.followers


class Layer(NamedTuple):
    """One layer, or a residual stage, whose layers are matched together because each
    reads another."""

    groups: tuple[Group, ...]
    # one group after another is matched, at first by those rows whose inputs are in
    # order
    turns: tuple[Group, ...]

    @property
    def tensors(self) -> tuple[Path, ...]:
        """Returns the tensors of all groups."""
        return tuple(path for group in self.groups for path in group.tensors)


def layers(variables: PyTree) -> list[Layer]:
    """Returns the hidden layers of a model in order, known by the names that `nets` and
    `resnet` give to variables.

    Args:
      variables: of a model, arrays or their shapes.

    Raises:
      InputError: for any other model, as names do not tell which of its layers reads
        which.
    """
    made = _residual(variables) if _children(variables, BLOCKS) else _chain(variables)
    known = [path for layer in made if layer for path in layer.tensors] + _tensors(
        variables, HEAD
    )
    if not all(made) or set(known) != {
        _keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables)
    }:
        raise InputError(
            "Neurons can be matched in models made of nets.Dense, nets.Conv or, with "
            "batch norm, resnet.ResNet and a "
            "linear head (mlp, lenet, resnet18, ...), but the body of this one holds "
            f"{', '.join(variables['body'])}."
        )
    return [layer for layer in made if layer]


def _chain(variables: PyTree) -> list[Layer | None]:
    """Layers of which each reads only the one before."""
    convs, dense = ("body", "convs"), ("body", "dense", "layers")
    stacks = (convs, dense) if _children(variables, convs) else (("body", "layers"),)
    return _pairs(
        variables,
        [*(layer for stack in stacks for layer in _stack(variables, stack)), HEAD],
    )


def _pairs(variables: PyTree, chain: list[Path]) -> list[Layer | None]:
    """Returns the layers of a chain but the last, None where two do not fit."""

    def layer(path, reader):
        norms: list[Path] = [("norms", path[-1])] if path[1] == "convs" else []
        group = _group(variables, [path], norms, [reader])
        return Layer((group,), (group,)) if group else None

    return [layer(*pair) for pair in itertools.pairwise(chain)]


def _residual(variables: PyTree) -> list[Layer | None]:
    """Returns the stages of a residual network and its linear layers; a stage begins
    where a block projects its input."""
    after = [*_stack(variables, ("body", "dense", "layers")), HEAD]
    # what writes to the stream first, and the blocks
    stages: list[tuple[Path, list[Path]]] = [(STEM, [])]
    for block in _stack(variables, BLOCKS):
        if "shortcut" in _at(variables, block):
            stages.append(((*block, "shortcut"), []))
        stages[-1][1].append(block)
    nexts = [
        [(*blocks[0], name) for name in ("conv1", "shortcut")]
        for _, blocks in stages[1:]
    ] + [after[:1]]
    made = [
        _stage(variables, *stage, readers)
        for stage, readers in zip(stages, nexts, strict=True)
    ]
    return made + _pairs(variables, after)


def _stage(
    variables: PyTree, first: Path, blocks: list[Path], readers: list[Path]
) -> Layer | None:
    """Returns one permutation of the stream, to which `first` and the second
    convolution of each block add, and one a block.

    A block's own neurons can be compared once their inputs are in order, and its second
    convolution after these.
    """
    # the stream; a block that projects reads the last one
    reading = [block for block in blocks if first[:-1] != block]
    norm = (*first[1:-1], "shortcut_norm") if len(reading) < len(blocks) else ("norm",)
    inner = [
        _group(variables, [(*b, "conv1")], [(*b[1:], "norm1")], [(*b, "conv2")])
        for b in blocks
    ]
    writers, norms = (
        [(*b, "conv2") for b in blocks],
        [(*b[1:], "norm2") for b in blocks],
    )
    stream = _group(
        variables,
        [first, *writers],
        [norm, *norms],
        [*((*b, "conv1") for b in reading), *readers],
    )
    if stream is None or not all(inner):
        return None
    # blocks whose neurons are matched before the stream, 0 or 1
    before = len(blocks) - len(reading)
    late = tuple(row for row in stream.rows if row[:-1] in writers[before:])
    early = stream._replace(
        rows=tuple(row for row in stream.rows if row not in late),
        followers=stream.followers + late,
    )
    own = [group for group in inner if group]
    again = [*own[before:], stream, *own[before:]] if late else []
    return Layer((stream, *own), (*own[:before], early, *again))


def _stack(variables: PyTree, path: Path) -> list[Path]:
    """Returns the paths of the members of a list."""
    return [(*path, str(i)) for i in range(len(_children(variables, path)))]


def _group(
    variables: PyTree, written: list[Path], norms: list[Path], reading: list[Path]
) -> Group | None:
    """Returns the group of layers that only these read; None where they do not fit each
    other.

    Args:
      norms: the batch norms of what is written, paths inside of body and stats.
    """
    rows = [path for layer in written for path in _tensors(variables, layer)]
    readers = [path for layer in reading for path in _tensors(variables, layer)[:1]]
    if not all(_tensors(variables, layer) for layer in (*written, *reading)):
        return None
    width = _at(variables, rows[0]).shape[-1]
    paths = [(part, *norm) for part in ("body", "stats") for norm in norms]
    followers = [(*path, name) for path in paths for name in _children(variables, path)]
    alike = all(_at(variables, path).shape[-1] == width for path in rows)
    fits = alike and all(
        _at(variables, path).shape[-2] % width == 0 for path in readers
    )
    return Group(tuple(rows), tuple(followers), tuple(readers), width) if fits else None


def _tensors(variables: PyTree, layer: Path) -> list[Path]:
    """Returns the paths of a layer's kernel and, if it has one, bias; none where the
    layer is of another kind."""
    found = _children(variables, layer)
    names = ["kernel", "bias"][: len(found)]
    return [(*layer, name) for name in names] if set(names) == set(found) else []


def _at(tree: PyTree, path: Path) -> PyTree:
    for key in path:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree


def _children(tree: PyTree, path: Path) -> dict[str, PyTree]:
    """Returns the dict at a path of nested dicts; empty where there is none."""
    found = _at(tree, path)
    return found if isinstance(found, dict) else {}


def _keys(path: tuple[jax.tree_util.DictKey, ...]) -> Path:
    return tuple(key.key for key in path)


def mask(variables: PyTree, paths: tuple[Path, ...]) -> PyTree:
    """Returns the structure of the variables as Python booleans, True at these
    leaves."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _keys(path) in paths, variables
    )


def permute(variables: PyTree, group: Group, order: Array) -> PyTree:
    """Returns one client's variables with neuron order[g] of the group in path g; the
    function of the network is unchanged.

    Args:
      order: [width] int32.
    """

    def moved(path, x):
        if _keys(path) in group.tensors:
            x = x[..., order]
        if _keys(path) in group.readers:
            # images are flattened as NHWC
            pixels = x.reshape(*x.shape[:-2], -1, group.width, x.shape[-1])
            x = pixels[..., order, :].reshape(x.shape)
        return x

    return jax.tree_util.tree_map_with_path(moved, variables)


def neurons(variables: PyTree, group: Group) -> Array:
    """Returns one client's rows [width, d] of a group: each neuron's incoming
    weights and bias."""
    parts = [_at(variables, path).astype(float) for path in group.rows]
    return jnp.concatenate([x.reshape(-1, group.width) for x in parts]).T


def match(rows: Array, ids: Array, sizes: Array, priority: Array) -> Array:
    """Orders the neurons of all clients alike; every neuron has a partner at every
    client.

    The global neurons start as those of the client with most data. In each sweep the
    clients, one after another, leave the mean of the matched neurons and come back by
    the assignment with the least sum of squared distances to it.

    Args:
      rows: [S, width, d].
      ids: [S], distinct.
      sizes: [S] training examples; a client with 0 takes no part, and its rows are not
        looked at.
      priority: [S, sweeps], by which the clients take their turns in each sweep; ties
        go by id, as they do for sizes.

    Returns:
      [S, width] int32: neuron [s, g] of client s is the global neuron g; 0, 1, 2, ...
      where a client takes no part, and for everybody if a row is not finite.
    """
    rows, ids, sizes, priority = map(jnp.asarray, (rows, ids, sizes, priority))
    here = sizes > 0
    here &= jnp.all(jnp.isfinite(rows) | ~here[:, None, None])
    rows = jnp.where(here[:, None, None], rows, 0)
    start = jnp.lexsort((ids, -sizes, ~here))[0]
    first = jnp.tile(jnp.arange(rows.shape[1], dtype=jnp.int32), (rows.shape[0], 1))

    def sweep(
        carry,
    ):
        n, _, total, before = carry
        queue = jnp.lexsort((ids, priority[:, n], ~here))

        def turn(i, so_far):
            s = queue[i]
            return lax.cond(
                here[s] & ((n > 0) | (s != start)),
                lambda: again(s, *so_far),
                lambda: so_far,
            )

        def again(s, total, orders):
            rest = jnp.where(n > 0, total - rows[s][orders[s]], total)
            # the squares in ||x - g||^2 add up to the same for every assignment, and a
            # mean orders them as a sum does
            order = _assignment(
                jnp.matmul(rest, rows[s].T, precision=lax.Precision.HIGHEST)
            )
            return rest + rows[s][order], orders.at[s].set(order)

        total, orders = lax.fori_loop(0, rows.shape[0], turn, (total, before))
        return n + 1, (n == 0) | jnp.any(orders != before), total, orders

    going = lambda carry: (carry[0] < priority.shape[1]) & carry[1]
    return lax.while_loop(
        going, sweep, (jnp.int32(0), jnp.bool(True), rows[start], first)
    )[-1]


def _assignment(gain: Array) -> Array:
    """Returns the columns [width] of a gain [width, width] whose sum over the rows
    is largest; on the host."""
    # imported here: it takes a sixth of a command's start
    from scipy.optimize import linear_sum_assignment

    def solve(gain):
        _, columns = linear_sum_assignment(np.nan_to_num(gain), maximize=True)
        return np.asarray(columns, np.int32)

    return host_callback.call(
        solve, jax.ShapeDtypeStruct(gain.shape[:1], jnp.int32), gain
    )
