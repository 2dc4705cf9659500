"""Several runs as one: seeds and numeric hyperparameters on a leading axis of every
array."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import trees
from fedjax_pfl.engine import validate
from fedjax_pfl.engine.method import Traced
from fedjax_pfl.engine.placement import Placement
from fedjax_pfl.engine.program import Program
from fedjax_pfl.engine.xla import computation
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Federation, Model, PyTree, State


def vectorized(
    programs: Sequence[Program],
    federations: Sequence[Federation],
    *,
    checked: bool = True,
) -> tuple[Program, Federation]:
    """The functions of R runs as one Program by `jax.vmap`, and their federations as
    one.

    Keys, traced hyperparameters, states, clients' rows and results have a leading axis
    [R]; the round, whether it is evaluated, and examples that all runs share have none.
    The runs may differ in the values of traced hyperparameters and in the clients'
    rows: what is traced is the first one's program.

    Args:
      programs: of one device, with the clients' rows in its memory.
      federations: of each run, with arrays of the same shapes (`federate(room=...)`);
        if all hold the same `examples` object, it is shared.
      checked: whether what the programs compute is compared as a whole, which traces
        each (some seconds); else the parts that a task names.

    Raises:
      InputError: several devices, rows on the host, other shapes of arrays or states,
        the clients of another task, or anything else in which a program differs from
        the first (Python callbacks are not compared).
    """
    if not programs or len(programs) != len(federations):
        raise InputError(
            f"There are {len(programs)} programs and {len(federations)} federations: "
            "give one to each run."
        )
    first = programs[0]
    if first.on_host or first.mesh is not None:
        raise InputError(
            "Several runs at once need one device that holds the clients' rows."
        )
    constants = _constants(first)
    for i, (p, f) in enumerate(zip(programs, federations, strict=True)):
        if p.task is not None:
            validate.federation(p.task, f)
        _alike(i, constants, _constants(p))
    federations = [
        f._replace(placement=p.placement)
        for p, f in zip(programs, federations, strict=True)
    ]
    if len(set(map(_shapes, federations))) > 1:
        raise InputError(
            "Several runs at once need arrays of the same shapes: federate(room=...) "
            "makes them so."
        )
    if (
        len(
            {
                _shapes(jax.eval_shape(p.init, jax.random.key(0), p.traced))
                for p in programs
            }
        )
        > 1
    ):
        raise InputError("Several runs at once need states of the same shapes.")
    if checked:
        _check_whole(programs, federations)
    whole, axes = _stacked(federations)
    traced = {
        name: jnp.stack([jnp.asarray(p.traced[name], float) for p in programs])
        for name in first.traced
    }

    def init(key: Array, traced: Traced, where: Placement | None = None) -> State:
        return jax.vmap(
            first.init, in_axes=(0, 0, None if where is None else axes.placement)
        )(key, traced, where)

    def each(functions: Sequence[Callable[[State], State]], state: State) -> State:
        return stack(
            [function(trees.gather(state, i)) for i, function in enumerate(functions)]
        )

    return Program(
        traced,  # type: ignore[arg-type]
        init,
        jax.vmap(first.round, in_axes=(0, 0, axes, 0, None, None)),
        jax.vmap(first.evaluate, in_axes=(0, 0, axes, 0, None)),
        jax.vmap(first.predict, in_axes=(0, 0, axes, 0, None, None, None)),
        lambda state: each([p.place for p in programs], state),
        lambda state: each([p.unplace for p in programs], state),
        whole.placement,
    ), whole


def stack(states: Sequence[PyTree]) -> PyTree:
    """Trees of the same structure as one with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def lowered(program: Program, federation: Federation) -> str:
    """A digest of all that a run compiles: programs that have the same differ in
    arguments only."""
    key, t = (
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    values = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in program.traced}
    state = jax.eval_shape(program.init, key, values, federation.placement)
    rest = (federation, state, t)
    arguments = {program.init: (federation.placement,), program.evaluate: rest}
    arguments |= {program.round: (*rest, jax.ShapeDtypeStruct((), jnp.bool))}
    texts = [
        jax.jit(function).lower(key, values, *more).as_text()
        for function, more in arguments.items()
    ]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _check_whole(
    programs: Sequence[Program], federations: Sequence[Federation]
) -> None:
    """InputError unless all programs compute what the first one does, which its parts
    do not tell: an initialisation, dropout, or sizes of the clients that a method uses
    as constants."""
    functions: Callable[[Program], Any] = lambda program: (
        program.init,
        program.round,
        program.evaluate,
    )
    others = [
        i
        for i, program in enumerate(programs)
        if functions(program) != functions(programs[0])
    ]
    wanted = lowered(programs[0], federations[0]) if others else ""
    for i in others:
        if lowered(programs[i], federations[i]) != wanted:
            raise InputError(
                f"Several runs at once may differ in arguments only, but what run {i} "
                "computes is not what the first "
                "does: other networks, other initialisations, or clients whose sizes "
                "the method has as constants."
            )


def _constants(program: Program) -> dict[str, Any]:
    """What a program is made of that is no argument of its functions, by name."""
    found = {**(program.static or {}), "traced hyperparameters": tuple(program.traced)}
    if (task := program.task) is None:
        return found
    found |= task._replace(sizes=None, class_counts=None, lr=0.0)._asdict()  # type: ignore[arg-type]
    raw, x = (
        jax.ShapeDtypeStruct((1, *task.input.shape), task.input.dtype),
        task.prepared,
    )
    model: Callable[[Model | None], Any] = lambda m: (
        m and _traced(m.apply, jax.eval_shape(m.init, key), x)
    )
    key = jax.random.key(0)
    shapes = jax.eval_shape(task.models[0].init, key)
    w = {part: shapes[part] for part in ("body", "head")}
    step = lambda lr, w: task.optimizer(lr).update(w, task.optimizer(lr).init(w), w)
    return found | {
        "models": [model(each) for each in task.models],
        "shared": model(task.shared),
        "optimizer": _traced(step, 0.1, w, otherwise=task.optimizer),
        "prepare": _traced(task.prepare, raw),
        "augment": task.augment and _traced(task.augment, key, x),
        "prepare_public": task.public
        and _traced(task.prepare_public or task.prepare, task.public),
    }


def _traced(function: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
    """What a function computes, so that two that were made apart can be the same; where
    that cannot be told, the function itself, or what is given."""
    try:
        return computation(function, *args)
    except Exception:  # an optimizer of other weights, or a network of other inputs
        return otherwise or function


def _alike(i: int, first: dict[str, Any], mine: dict[str, Any]) -> None:
    """InputError unless run i's constants are the first one's."""
    for name in first | mine:
        a, b = first.get(name), mine.get(name)
        if a is not b and not np.array_equal(a, b):  # type: ignore[arg-type]
            raise InputError(
                "Several runs at once may differ in traced hyperparameters and in the "
                "clients' rows only, but run "
                f"{i} has another {name} than the first."
            )


def _stacked(federations: Sequence[Federation]) -> tuple[Federation, Federation]:
    """The federations as one, and the axis of the runs in each of its fields; None: it
    is shared."""
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
