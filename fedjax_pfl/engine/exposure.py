"""Data that a round sends from clients to the server, read from its jaxpr."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from fedjax_pfl import trees
from fedjax_pfl.engine import contract
from fedjax_pfl.engine.cohort import Transform
from fedjax_pfl.errors import InputError
from fedjax_pfl.hyperparameters import method_name
from fedjax_pfl.types import Algorithm, Array, Client, Cohort, PyTree, State, Task


class Exposed(NamedTuple):
    """Values that a round sends to the server; the clients' data are their examples and
    State.clients."""

    # for each call of `Cohort.mean` the upload's shapes per architecture
    uploads: list[list[PyTree]]
    # leaves of the server's next state that depend on the clients' data
    server: list[str]
    stateless: bool  # the server keeps nothing between rounds
    up: int  # largest number of scalars that a client is counted to send
    # largest sum of scalars and integers that it is counted to receive and send
    numbers: int
    encrypted: bool  # the round counts ciphertexts, too


def held(key: Array, upload: PyTree, default: PyTree, client: Client) -> PyTree:
    """Returns `default` in place of an upload."""
    return default


def exposed(
    parts: Callable[..., Any],
    factory: Callable[..., Algorithm],
    task: Task,
    hparams: dict[str, Any],
    *,
    transform: Transform | None = held,
) -> Exposed:
    """Returns what one round of a method sends; traced on shapes alone.

    With `transform=held` the leaves of `server` are those reached by a way other than
    the uploads of `Cohort.mean`. The numbers of examples and the class counts of the
    clients are not among the data.

    Args:
      parts: `program.parts`.
    """
    seen: list[list[PyTree]] = []
    on = parts(_spied(factory, seen), task, hparams, transform=transform)
    key = jax.eval_shape(lambda: jax.random.key(0))
    values = dict.fromkeys(on.traced, jax.ShapeDtypeStruct((), jnp.result_type(float)))
    state, f = jax.eval_shape(on.init, key, values), contract.abstract(task)
    shape: Callable[..., Any] = jax.ShapeDtypeStruct
    count = sum(on.lengths)
    rows = jax.tree.map(lambda x: shape((count, *x.shape[1:]), x.dtype), state.clients)
    ids, flags = shape((count,), jnp.int32), shape((count,), bool)

    def round(private: PyTree, server: PyTree, f: PyTree, *rest: Any) -> PyTree:
        examples, rows = private
        key, values, ids, active, t, evaluated = rest
        f, here = f._replace(examples=examples), State(server, rows)
        new, known = on.train(key, values, f, here, ids, active, t, evaluated)
        return new.server, known.traffic

    private = (f.examples, rows)
    last = (shape((), jnp.int32), shape((), bool))
    inputs = (private, state.server, f, key, values, ids, flags, *last)
    closed, (server, traffic) = jax.make_jaxpr(round, return_shape=True)(*inputs)
    names = [name for name, _ in trees.named_shapes(server)]
    secret = len(jax.tree.leaves(private))
    reads = (_read(closed.jaxpr, {i}) for i in range(len(names)))
    leaks = [
        n
        for n, read in zip(names, reads, strict=True)
        if min(read, default=secret) < secret
    ]
    given = jax.tree.leaves(_filled(task, inputs))
    at = len(names)  # of Traffic.down, up and ints
    down, up, ints = (_evaluated(closed, at + i, given, secret) for i in range(3))
    numbers, encrypted = down + up + ints, traffic.encrypted is not None
    return Exposed(seen, leaks, not names, up, numbers, encrypted)


def check_per_example(
    parts: Callable[..., Any],
    factory: Callable[..., Algorithm],
    task: Task,
    hparams: dict[str, Any],
) -> None:
    """Raises InputError unless the server sees examples only through gradients that
    `task.per_example` has replaced."""
    zeros = lambda key, gradients, mask: jax.tree.map(
        lambda x: jnp.zeros(x.shape[1:], x.dtype), gradients
    )
    blind = task._replace(per_example=zeros)
    found = exposed(parts, factory, blind, hparams, transform=None)
    if found.stateless and not found.uploads:
        raise InputError(
            f"{method_name(factory)} cannot have gradients per example: what clients "
            "send goes neither through cohort.mean nor into the server's state."
        )
    if found.server:
        raise InputError(
            f"{method_name(factory)} cannot have gradients per example: the server's "
            f"{found.server[0]!r} depends on examples by another way than the "
            "gradients of local_training.sgd."
        )


def _spied(
    factory: Callable[..., Algorithm], seen: list[list[PyTree]]
) -> Callable[..., Algorithm]:
    """Returns the method; its round writes the shapes of the uploads into `seen`."""

    @functools.wraps(factory)
    def make(task: Task, **hparams: Any) -> Algorithm:
        method = factory(task, **hparams)

        def round(key: Array, state: State, cohort: Cohort) -> Any:
            result = method.round(key, state, cohort)
            seen[:] = cohort.uploads  # type: ignore[attr-defined]  # the engine's
            return result

        return method._replace(round=round)

    return make


def _read(jaxpr: Any, outputs: set[int]) -> set[int]:
    """Returns the inputs of a jaxpr on which some of its outputs depend."""
    live = {id(jaxpr.outvars[i]) for i in outputs}
    for eqn in reversed(jaxpr.eqns):
        wanted = {i for i, x in enumerate(eqn.outvars) if id(x) in live}
        if wanted:
            live |= {id(eqn.invars[i]) for i in _read_by(eqn, wanted)}
    return {i for i, x in enumerate(jaxpr.invars) if id(x) in live}


def _read_by(eqn: Any, outputs: set[int]) -> set[int]:
    """Returns the inputs of an equation on which some of its outputs depend."""
    params, name, count = eqn.params, eqn.primitive.name, len(eqn.invars)
    if name == "scan":
        first, body = params["num_consts"], params["jaxpr"].jaxpr
        carried = params["num_carry"]
        return _looped(body, outputs, carried, lambda i: first + i)
    if name == "while":
        start, body = params["cond_nconsts"], params["body_jaxpr"].jaxpr
        first, cond = params["body_nconsts"], params["cond_jaxpr"].jaxpr
        tested = _read(cond, {0})
        carried = {i - start for i in tested if i >= start}
        read = _looped(body, outputs | carried, count, lambda i: first + i)
        return {start + i for i in read} | {i for i in tested if i < start}
    if name == "cond":
        each = [_read(branch.jaxpr, outputs) for branch in params["branches"]]
        return {0} | {1 + i for read in each for i in read}
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("call")))
    inner = getattr(inner, "jaxpr", inner)
    if inner is not None and len(inner.invars) == count:
        return _read(inner, outputs)
    return set(range(count))


def _looped(
    body: Any, outputs: set[int], carried: int, at: Callable[[int], int]
) -> set[int]:
    """Returns the inputs read in a loop whose first `carried` outputs are its inputs
    at(0), at(1), ... of the next turn; all that are wanted are outputs, too."""
    wanted = set(outputs)
    while True:
        read = _read(body, wanted)
        back = {i for i in range(min(carried, len(body.outvars))) if at(i) in read}
        if back <= wanted:
            # the first values of what is carried are read even if the body does not
            return read | {at(i) for i in wanted if i < carried}
        wanted |= back


def _needed(closed: ClosedJaxpr, output: int) -> tuple[Any, list[bool]]:
    """Returns the part of a jaxpr that computes one output, and which inputs it
    reads."""
    wanted = [i == output for i in range(len(closed.jaxpr.outvars))]
    return partial_eval.dce_jaxpr(closed.jaxpr, wanted)


def _evaluated(closed: ClosedJaxpr, output: int, given: list[Any], secret: int) -> int:
    """Returns the largest entry of an integer output; 0 if it depends on the first
    `secret` inputs."""
    jaxpr, used = _needed(closed, output)
    if any(used[:secret]):
        return 0
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
    (found,) = run(*(x for x, needed in zip(given, used, strict=True) if needed))
    return int(np.max(found, initial=0))


def _filled(task: Task, inputs: PyTree) -> PyTree:
    """Returns arrays of a round's shapes: everybody is active with the task's
    counts."""

    def zeros(x: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return np.zeros(x.shape, x.dtype)

    private, server, f, *rest = jax.tree.map(zeros, inputs)
    sizes = np.asarray(task.sizes, np.int32)
    counts = np.asarray(task.class_counts, np.int32)
    f = f._replace(train=f.train._replace(size=sizes), class_counts=counts)
    count = len(rest[2])
    rest[2], rest[3] = np.arange(count, dtype=np.int32), np.ones(count, bool)
    return (private, server, f, *rest)
