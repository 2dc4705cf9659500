"""Several runs in one program: seeds and numeric hyperparameters as a leading axis of
every array."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import trees
from fedjax_pfl.engine import frozen, validate
from fedjax_pfl.engine.method import Traced
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.program import Program
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Context, Federation, PyTree, RunState


def vectorized(
    programs: Sequence[Program],
    federations: Sequence[Federation],
    *,
    checked: bool = True,
) -> tuple[Program, Federation]:
    """Returns the functions of R runs as one Program by `jax.vmap`, and their
    federations as one.

    Keys, traced hyperparameters, states, clients' rows and results have a leading axis
    [R]; the round, whether it is evaluated, and examples that all runs share have none.
    The runs may differ in traced hyperparameters and in the clients' rows: the program
    that is traced is the first one.

    Args:
      programs: on one device, with the clients' rows in its memory.
      federations: one per run, with arrays of the same shapes (`federate(room=...)`);
        `examples` are shared if all are one object.
      checked: compares the traces of all programs, which takes seconds each.

    Raises:
      InputError: the runs differ in more than arguments (Python callbacks are not
        compared), or there are several devices.
    """
    first = programs[0]
    if first.on_host or first.mesh is not None:
        raise InputError("Several runs at once need one device with the clients' rows.")
    for p, f in zip(programs, federations, strict=True):
        if p.task is not None:
            validate.federation(p.task, f)
    federations = [
        frozen.with_frozen(f, p.task)._replace(placement=p.placement)
        for p, f in zip(programs, federations, strict=True)
    ]
    if len(set(map(_shapes, federations))) > 1:
        raise InputError(
            "Several runs at once need arrays of the same shapes: use "
            "federate(room=...)."
        )
    if checked:
        _check(programs, federations)
    whole, axes = _stacked(federations)
    traced = {
        name: jnp.stack([jnp.asarray(p.traced[name], float) for p in programs])
        for name in first.traced
    }

    def init(key: Array, traced: Traced, where: Placement | None = None) -> RunState:
        placed = None if where is None else axes.placement
        return jax.vmap(first.init, in_axes=(0, 0, placed))(key, traced, where)

    def each(
        functions: Sequence[Callable[[RunState], RunState]], state: RunState
    ) -> RunState:
        rows = [trees.gather(state, i) for i in range(len(functions))]
        return stack([f(row) for f, row in zip(functions, rows, strict=True)])

    each_run = Context(0, 0, axes, None)  # type: ignore[arg-type]  # axes
    return Program(
        traced,  # type: ignore[arg-type]
        init,
        jax.vmap(first.round, in_axes=(each_run, 0, None)),
        jax.vmap(first.evaluate, in_axes=(each_run, 0)),
        jax.vmap(first.predict, in_axes=(each_run, 0, None, None)),
        lambda state: each([p.place for p in programs], state),
        lambda state: each([p.unplace for p in programs], state),
        whole.placement,
    ), whole


def stack(states: Sequence[PyTree]) -> PyTree:
    """Stacks trees of the same structure on a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def lowered(program: Program, federation: Federation) -> str:
    """Returns a digest of all that a run compiles, equal for programs that differ in
    arguments only."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    t = jax.ShapeDtypeStruct((), jnp.int32)
    values = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in program.traced}
    state = jax.eval_shape(program.init, key, values, federation.placement)
    context = Context(key, values, federation, t)
    arguments: dict[Any, Any] = {
        program.init: (key, values, federation.placement),
        program.evaluate: (context, state),
        program.round: (context, state, jax.ShapeDtypeStruct((), jnp.bool)),
    }
    texts = [
        jax.jit(function).lower(*given).as_text()
        for function, given in arguments.items()
    ]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _check(programs: Sequence[Program], federations: Sequence[Federation]) -> None:
    """Raises InputError unless all programs compute the same as the first."""
    functions = [(p.init, p.round, p.evaluate) for p in programs]
    others = [i for i, found in enumerate(functions) if found != functions[0]]
    wanted = lowered(programs[0], federations[0]) if others else ""
    for i in others:
        if lowered(programs[i], federations[i]) != wanted:
            raise InputError(
                "Several runs at once must differ in traced hyperparameters and the "
                f"clients' rows only: the program of run {i} differs from the first."
            )


def _stacked(federations: Sequence[Federation]) -> tuple[Federation, Federation]:
    """Stacks the federations, but for fields that all share, and returns the axis of
    the runs in each field."""
    whole: dict[str, Any] = {}
    axes: dict[str, int | None] = {}
    for name in Federation._fields:
        values = [getattr(f, name) for f in federations]
        shared = all(_same(value, values[0]) for value in values)
        whole[name] = values[0] if shared else stack(values)
        axes[name] = None if shared else 0
    return Federation(**whole), Federation(**axes)  # type: ignore[arg-type]


def _same(a: PyTree, b: PyTree) -> bool:
    """Returns True for trees of the same arrays, by identity."""
    pairs = (jax.tree.leaves(tree) for tree in (a, b))
    return [id(x) for x in next(pairs)] == [id(x) for x in next(pairs)]


def _shapes(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, x.dtype) for x in leaves)
