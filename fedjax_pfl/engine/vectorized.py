"""Several runs as one: seeds and numeric hyperparameters on a leading axis of every array."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.engine import validate
from fedjax_pfl.engine.program import Program
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Federation, PyTree, State


def vectorized(programs: Sequence[Program], federations: Sequence[Federation]) -> tuple[Program, Federation]:
    """The functions of R runs as one Program by `jax.vmap`, and their federations as one.

    Keys, traced hyperparameters, states, clients' rows and results have a leading axis [R]; the
    round, whether it is evaluated, and examples that all runs share have none. The runs must be of
    the same method, task and options but for the values of traced hyperparameters: what is traced
    is the first one's program.

    Args:
      programs: of one device, with the clients' rows in its memory.
      federations: of each run, with arrays of the same shapes (`federate(room=...)`); if all hold
        the same `examples` object, it is shared.

    Raises:
      InputError: several devices, rows on the host, other shapes of arrays or states, or the
        clients of another task.
    """
    first = programs[0]
    if first.on_host or first.mesh is not None:
        raise InputError("Several runs at once need one device that holds the clients' rows.")
    for p, f in zip(programs, federations, strict=True):
        if p.task is not None:
            validate.federation(p.task, f)
    federations = [f._replace(placement=p.placement) for p, f in zip(programs, federations, strict=True)]
    if len(set(map(_shapes, federations))) > 1:
        raise InputError("Several runs at once need arrays of the same shapes: federate(room=...) makes them so.")
    states = {_shapes(jax.eval_shape(p.init, jax.random.key(0), p.traced)) for p in programs}
    tasks = [p.task for p in programs if p.task is not None]
    if len(states) > 1 or any(not np.array_equal(t.architecture, tasks[0].architecture) for t in tasks):
        raise InputError("Several runs at once need states of the same shapes and clients of the same architectures.")
    whole, axes = _stacked(federations)
    traced = {name: jnp.stack([jnp.asarray(p.traced[name], float) for p in programs]) for name in first.traced}

    def each(functions: Sequence[Callable[[State], State]], state: State) -> State:
        return stack([function(one(state, i)) for i, function in enumerate(functions)])

    return Program(
        traced,  # type: ignore[arg-type]
        jax.vmap(first.init),
        jax.vmap(first.round, in_axes=(0, 0, axes, 0, None, None)),
        jax.vmap(first.evaluate, in_axes=(0, 0, axes, 0, None)),
        jax.vmap(first.predict, in_axes=(0, 0, axes, 0, None, None, None)),
        lambda state: each([p.place for p in programs], state),
        lambda state: each([p.unplace for p in programs], state),
        whole.placement,
    ), whole


def stack(trees: Sequence[PyTree]) -> PyTree:
    """Trees of the same structure as one with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def one(tree: PyTree, i: int) -> PyTree:
    """What is run i's of a tree with a leading axis of runs."""
    return jax.tree.map(lambda x: x[i], tree)


def _stacked(federations: Sequence[Federation]) -> tuple[Federation, Federation]:
    """The federations as one, and the axis of the runs in each of its fields; None: it is
    shared."""
    whole: dict[str, Any] = {}
    axes: dict[str, int | None] = {}
    for name in Federation._fields:
        values = [getattr(f, name) for f in federations]
        shared = all(value is values[0] for value in values)
        whole[name] = values[0] if shared else stack(values)
        axes[name] = None if shared else 0
    return Federation(**whole), Federation(**axes)  # type: ignore[arg-type]


def _shapes(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, x.dtype) for x in leaves)
