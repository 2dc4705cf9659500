"""Floating-point operations of a method's local work, counted in the trace of its
round.

A loop over batches has as many turns as the client's examples ask for, which a trace
alone does not tell. So all clients get the same number of examples, and whatever in the
trace is then one known number, over and over, is followed through it: sizes, counters,
the ends of loops. A loop whose end depends on the data counts as one turn.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from fedjax_pfl import architectures, local_training
from fedjax_pfl.engine.program import parts
from fedjax_pfl.models.nnx_model import product_flops
from fedjax_pfl.types import Algorithm, Federation, State, Task

Known = Any  # a NumPy scalar, the value of every element; None where it is not known
# operations that give elements of their first operand
_SAME = {
    "broadcast_in_dim",
    "copy",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "reshape",
    "rev",
    "slice",
    "sort",
}
_SAME |= {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "squeeze", "transpose"}
_NUMPY: dict[str, Any] = {
    "add": np.add,
    "and": np.logical_and,
    "ceil": np.ceil,
    "eq": np.equal,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "or": np.logical_or,
    "rem": np.fmod,
    "round": np.round,
    "sign": np.sign,
    "sub": np.subtract,
}


def flops_of_step(
    factory: Callable[..., Algorithm],
    task: Task,
    federation: Federation,
    hparams: dict[str, Any] | None = None,
    *,
    round: int = 1,
) -> float:
    """Floating-point operations of a client for each of the steps that its settings ask
    for (`local_training.planned`), of clients of several architectures in the mean over
    those steps' examples.

    Counts 2 for each multiply-add of a matrix product or convolution in the loops over
    batches of a round without evaluation, batches full: further models, inner steps,
    further gradients and what a method scores by itself are in it. The rest of the
    client's work and the server's (`local.ON_SERVER`) are not, nor is element-wise
    work.

    Args:
      task: with a model whose convolutions have the form "matmul": others save or hide
        products.
      federation: of which only the shapes matter, and the sizes of the validation
        splits.
      round: which, from 0: some methods do more in the first.
    """
    if (count := len(task.models)) > 1:
        each = [
            flops_of_step(
                factory, *alone(task, federation, group), hparams, round=round
            )
            for group in range(count)
        ]
        _, examples = local_training.planned(task, task.sizes)
        return float(np.average(np.asarray(each)[task.architecture], weights=examples))
    size = max(1, int(np.median(task.sizes)))
    size = max(size, task.batch_size) if task.drop_last else size  # fewer make no batch
    steps = int(local_training.planned(task, np.array([size]))[0][0])
    key = jax.eval_shape(lambda: jax.random.key(0))
    on = parts(factory, task, hparams)
    traced = {name: np.float32(value) for name, value in on.traced.items()}
    drawn, state = (
        jax.eval_shape(on.draw, None, key, 0),
        jax.eval_shape(on.init, key, traced),
    )
    clients = drawn[0].shape[0]
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((clients, *x.shape[1:]), x.dtype), state.clients
    )
    state = State(state.server, rows)
    shapes = key, traced, federation, state, *drawn, jnp.int32(0), jnp.bool(False)
    closed = jax.make_jaxpr(on.train)(*shapes)
    # a leaf, unlike None
    nothing: Any = lambda tree: jax.tree.map(lambda _: np.nan, tree)
    known, held_out = nothing(federation), np.int32(np.median(federation.val.size))
    known = known._replace(
        train=known.train._replace(size=np.int32(size)),
        val=known.val._replace(size=held_out),
    )
    given = (
        nothing(key),
        traced,
        known,
        nothing(state),
        np.nan,
        np.bool_(True),
        np.int32(round),
        np.bool_(False),
    )
    leaves = [None if x is np.nan else x for x in jax.tree.leaves(given)]
    with np.errstate(all="ignore"):  # a known number may be the seed of a hash
        _, total = _walk(closed.jaxpr, [None] * len(closed.consts), leaves, False)
    return float(total / clients / max(steps, 1))


def alone(task: Task, federation: Federation, group: int) -> tuple[Task, Federation]:
    """The clients of one architecture as a federation of their own."""
    ids = architectures.members(task, group)
    splits = ("train", "val", "test", "class_counts")
    rows = {
        name: jax.tree.map(lambda x: x[ids], getattr(federation, name))
        for name in splits
    }
    fields = {
        "sizes": task.sizes[ids],
        "class_counts": task.class_counts[ids],
        "models": (task.models[group],),
    }
    return task._replace(
        **fields, architecture=np.zeros(len(ids), int)
    ), federation._replace(**rows)


def parameters(eqn: Any) -> dict[str, Any]:
    """An equation's parameters; a scan's always say `num_consts` and `num_carry`, which
    JAX's own do up to 0.11."""
    p: dict[str, Any] = eqn.params
    if eqn.primitive.name != "scan" or "num_carry" in p:
        return p
    body = getattr(p["jaxpr"], "jaxpr", p["jaxpr"])

    def whole(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(
            a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True)
        )

    # what is stacked has an axis more, as have the rows that are read
    carry = whole(eqn.outvars, body.outvars)
    return p | {
        "num_carry": carry,
        "num_consts": whole(eqn.invars, body.invars) - carry,
    }


def _walk(
    jaxpr: Any, consts: Sequence[Known], given: Sequence[Known], counts: bool
) -> tuple[list[Known], int]:
    """The results, as far as they are known, and the operations; `counts`: is this
    inside a loop over batches?"""
    values = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True)
    )
    read: Callable[[Any], Known] = lambda v: (
        _literal(v.val) if hasattr(v, "val") else values[v]
    )
    total = 0
    for eqn in jaxpr.eqns:
        names = str(eqn.source_info.name_stack)
        outs, flops = _equation(
            eqn, [read(v) for v in eqn.invars], counts or local_training.SCOPE in names
        )
        values.update(zip(eqn.outvars, outs, strict=True))
        total += 0 if local_training.ON_SERVER in names else flops
    return [read(v) for v in jaxpr.outvars], total


def _literal(value: Any) -> Known:
    return (
        np.asarray(value)[()]
        if np.ndim(value) == 0 and not isinstance(value, jax.core.Tracer)
        else None
    )


def _equation(eqn: Any, given: list[Known], counts: bool) -> tuple[list[Known], int]:
    name, p = eqn.primitive.name, parameters(eqn)
    unknown = [None] * len(eqn.outvars)
    if name in ("dot_general", "conv_general_dilated"):
        return unknown, product_flops(eqn) if counts else 0
    if name == "scan":
        return _scan(p, given, counts)
    if name == "while":
        return _while(p, given, counts)
    if name == "cond":
        return _cond(p["branches"], given, counts)
    called = next((p[key] for key in ("jaxpr", "call_jaxpr", "call") if key in p), None)
    inner = getattr(called, "jaxpr", called)
    if (
        inner is not None
        and len(inner.invars) == len(given)
        and len(inner.outvars) == len(unknown)
    ):
        return _walk(inner, [None] * len(inner.constvars), given, counts)
    value = _value(eqn, given) if len(unknown) == 1 else None
    return unknown if value is None else [value], 0


def _value(eqn: Any, given: list[Known]) -> Known:
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "select_n" and given[0] is not None:
        return given[1 + int(given[0])]
    # whether a client is there, and alike: the larger number is meant
    if name == "select_n":
        return None if None in given[1:] else max(given[1:])
    if name in _SAME:
        return given[0]
    if None in given or not given or jnp.issubdtype(out.dtype, jax.dtypes.prng_key):
        return None
    cast = np.dtype(out.dtype).type
    if name == "convert_element_type":
        return cast(given[0])
    if name == "reduce_sum":
        return cast(
            given[0]
            * (math.prod(eqn.invars[0].aval.shape) // max(math.prod(out.shape), 1))
        )
    if name == "div":
        return cast(
            given[0] // given[1]
            if np.issubdtype(out.dtype, np.integer)
            else given[0] / given[1]
        )
    return cast(_NUMPY[name](*given)) if name in _NUMPY else None


def _scan(p: Any, given: list[Known], counts: bool) -> tuple[list[Known], int]:
    body, first = p["jaxpr"], p["num_consts"]
    consts, carry = given[:first], given[first : first + p["num_carry"]]
    rows = given[first + len(carry) :]
    total = 0
    for turn in range(p["length"]):
        outs, flops = _walk(
            body.jaxpr, [None] * len(body.consts), [*consts, *carry, *rows], counts
        )
        before, carry = carry, outs[: len(carry)]
        if carry == before:  # as all that follow
            total += flops * (p["length"] - turn)
            break
        total += flops
    return [*carry, *[None] * (len(body.jaxpr.outvars) - len(carry))], total


def _while(p: Any, given: list[Known], counts: bool) -> tuple[list[Known], int]:
    condition, body = p["cond_jaxpr"], p["body_jaxpr"]
    first, second = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry, total, last = given[second:], 0, -1
    # then a turn costs what the one before did, once it did so
    steady = not _has_loops(body.jaxpr)
    steps: list[Known] | None = None  # of the counters, while they alone are followed
    while True:
        (again,), _ = _walk(
            condition.jaxpr,
            [None] * len(condition.consts),
            [*given[:first], *carry],
            False,
        )
        if again is not None and not again:
            return carry, total
        if steps is not None and again is not None:
            carry = [
                None if d is None else c + d if d else c
                for c, d in zip(carry, steps, strict=True)
            ]
            total += last
            continue
        outs, flops = _walk(
            body.jaxpr,
            [None] * len(body.consts),
            [*given[first:second], *carry],
            counts,
        )
        total += flops
        if again is None or outs == carry:  # its end depends on the data
            return [None] * len(outs), total
        if steady and flops == last:
            steps = _steps(carry, outs)
        carry, last = outs, flops


def _steps(before: list[Known], after: list[Known]) -> list[Known] | None:
    """By how much each counter moves in a turn; None where none does, or something that
    is known moves otherwise."""
    found: list[Known] = []
    for a, b in zip(before, after, strict=True):
        if a is not None and b is not None and a != b and not isinstance(b, np.integer):
            return None
        found.append(None if a is None or b is None else 0 if a == b else b - a)
    return found if any(found) else None


def _has_loops(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "while"
        or any(map(_has_loops, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _cond(branches: Any, given: list[Known], counts: bool) -> tuple[list[Known], int]:
    """The branch that is taken, or of those that may be the one with the most
    operations."""
    chosen = branches if given[0] is None else [branches[int(given[0])]]
    found = [_walk(b.jaxpr, [None] * len(b.consts), given[1:], counts) for b in chosen]
    outs = found[0][0] if len(found) == 1 else [None] * len(found[0][0])
    return outs, max(flops for _, flops in found)
