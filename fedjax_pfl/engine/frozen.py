"""Frozen variables of a task's models, as arguments of a round.

They are neither constants of the program nor in a state: every device has one copy for
all clients, which methods reach through the models they are given.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from fedjax_pfl.engine import distributed
from fedjax_pfl.engine.placement import BASE
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Federation, Model, Stored, Task

# arrays that were read and are in use, by where they are: one copy for all runs
_read: WeakValueDictionary[tuple[Stored, NamedSharding | None], Array] = (
    WeakValueDictionary()
)


def values(task: Task) -> tuple[Array, ...]:
    """Returns the frozen arrays of the task's models; an array of several models
    occurs once."""
    found: dict[int, Array] = {}
    for frozen in filter(None, (model.frozen for model in _models(task))):
        found |= {id(x): x for x in jax.tree.leaves(frozen.values)}
    return tuple(found.values())


def places(task: Task, mesh: Mesh) -> tuple[NamedSharding, ...]:
    """Returns the place of each of `values`: divided over the devices that share a
    base, or whole on each, where they do not divide its axis."""
    return tuple(
        NamedSharding(mesh, P() if axis is None else P(*[None] * axis, BASE))
        for _, axis in _divided(task, mesh.shape.get(BASE, 1))
    )


def placed(task: Task, mesh: Mesh | None = None) -> Task:
    """Returns the task with its frozen variables on the devices.

    Each of the `Stored` is read and copied before the next: divided over the devices
    of a mesh that share a base, else whole to the default device.
    """
    held = values(task)
    if not any(isinstance(x, Stored) for x in held):
        return task
    where: Sequence[NamedSharding | None] = [None] * len(held)
    divided = mesh is not None and mesh.shape.get(BASE, 1) > 1
    # arrays of several processes serve no function of one
    if mesh is not None and divided and not distributed.several():
        where = places(task, mesh)
    pairs = sorted(zip(held, where, strict=True), key=lambda pair: -pair[0].size)
    # the largest first, while most memory is free
    arrays = {id(x): _placed(x, at) for x, at in pairs}
    return bind(task, tuple(arrays[id(x)] for x in held))


def _placed(x: Array | Stored, where: NamedSharding | None) -> Array:
    if not isinstance(x, Stored):
        return x
    found = _read.get((x, where))
    if found is None:
        with jax.ensure_compile_time_eval():
            found = jax.block_until_ready(jax.device_put(x.read(), where))
        _read[x, where] = found
    return found


def least_devices(task: Task, width: int, devices: int, room: int | None) -> int:
    """Returns the least number of devices, a divisor of `devices`, that hold the frozen
    variables together; all where even these do not.

    With four times the trained variables of `width` clients (themselves, gradients,
    optimizer and upload) each may fill half of its memory.

    Args:
      room: bytes of a device's memory; None: as many as are needed.
    """
    shapes = [jax.eval_shape(model.init, jax.random.key(0)) for model in task.models]
    trained = 4 * width * max(_bytes(jax.tree.leaves(tree)) for tree in shapes)
    counts = [n for n in range(1, devices + 1) if devices % n == 0]
    for base in counts:
        parts = _divided(task, base)
        share = sum(_bytes([x]) // (1 if at is None else base) for x, at in parts)
        if room is None or share + trained <= room // 2:
            return base
    return devices


def _bytes(arrays: Sequence[Array]) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


def _divided(task: Task, base: int) -> list[tuple[Array, int | None]]:
    """Returns each of `values` with the axis that `base` devices divide, None: it is
    whole on each."""
    found: dict[int, tuple[Array, int | None]] = {}
    for frozen in filter(None, (model.frozen for model in _models(task))):
        pairs = zip(*map(jax.tree.leaves, (frozen.values, frozen.axes)), strict=True)
        for x, axis in pairs:
            whole = base == 1 or axis < 0 or x.shape[axis] % base
            found[id(x)] = x, None if whole else axis
    return list(found.values())


def bind(task: Task, given: tuple[Array, ...] | None) -> Task:
    """Returns the task with models that compute with other arrays of the same shapes.

    Args:
      given: arrays in the order of `values`, such as `Federation.frozen`.

    Raises:
      InputError: `given` is None, and a model has frozen variables.
    """
    known = values(task)
    if not known:
        return task
    if given is None:
        raise InputError(
            "The federation must have the frozen variables of the task's models: use "
            "simulate.with_frozen(federation, task)."
        )
    arrays = {id(x): new for x, new in zip(known, given, strict=True)}

    def bound(model: Model) -> Model:
        if model.frozen is None:
            return model
        new = jax.tree.map(lambda x: arrays[id(x)], model.frozen.values)
        features, head, apply = model.frozen.functions(new)
        frozen = model.frozen._replace(values=new)
        return model._replace(features=features, head=head, apply=apply, frozen=frozen)

    made = {id(model): bound(model) for model in _models(task)}
    shared = None if task.shared is None else made[id(task.shared)]
    return task._replace(
        models=tuple(made[id(model)] for model in task.models), shared=shared
    )


def with_frozen(federation: Federation, task: Task | None) -> Federation:
    """Adds the frozen variables of the task's models to a federation; without a task
    nothing."""
    if task is None:
        return federation
    return federation._replace(frozen=values(placed(task)) or None)


def _models(task: Task) -> list[Model]:
    shared = () if task.shared is None else (task.shared,)
    return list({id(model): model for model in (*task.models, *shared)}.values())
