"""What of the clients' data reaches the server, read off the jaxpr of a round."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from fedjax_pfl import trees
from fedjax_pfl.engine import contract, program
from fedjax_pfl.engine.cohort import Transform
from fedjax_pfl.types import Algorithm, Array, Cohort, PyTree, State, Task


class Exposed(NamedTuple):
    """What a round sends to the server; the clients' data are their examples and
    State.clients."""

    # for each call of `Cohort.mean` the upload's shapes per architecture
    uploads: list[list[PyTree]]
    # leaves of the server's next state that depend on the clients' data
    server: list[str]
    up: int  # largest number of scalars that a client is counted to send
    encrypted: bool  # the round counts ciphertexts, too


def held(key: Array, upload: PyTree, default: PyTree) -> PyTree:
    """Returns `default` in place of an upload."""
    return default


def exposed(
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
    """
    seen: list[list[PyTree]] = []
    on = program.parts(_spied(factory, seen), task, hparams, transform=transform)
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
    leaks = [n for i, n in enumerate(names) if any(_needed(closed, i)[1][:secret])]
    given = jax.tree.leaves(_filled(task, inputs))
    at = len(names) + 1  # Traffic.up follows Traffic.down
    up = _evaluated(closed, at, given, secret)
    return Exposed(seen, leaks, up, traffic.encrypted is not None)


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
