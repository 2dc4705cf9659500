"""Floating-point operations of a method's local work, counted by the control flow of
its round.

The round is rewritten to return a sum: each matrix product and convolution adds its
operations, known from its shapes, as often as its loop turns. XLA removes all other
computation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_pfl import local_training
from fedjax_pfl.engine.parts import parts
from fedjax_pfl.engine.program import program, set_up
from fedjax_pfl.models.nnx_model import product_flops
from fedjax_pfl.types import Algorithm, Array, Context, Federation, Method, Task


def flops_of_step(
    factory: Callable[..., Algorithm | Method],
    task: Task,
    federation: Federation,
    hparams: dict[str, Any] | None = None,
    *,
    round: int = 1,
) -> float:
    """Returns the floating-point operations of a round's clients, divided by their
    local steps (`local_training.planned`).

    Counts 2 for each multiply-add of a matrix product or convolution in the loops over
    batches of a round without evaluation. A batch counts as full. Further models, inner
    steps and gradients count. Other work of the client, the server's work
    (`local_training.ON_SERVER`) and element-wise operations do not. All states are 0: a
    loop that ends by their values is not that of a run.

    Args:
      task: with a model whose convolutions have the form "matmul": others save or hide
        products.
      round: from 0; some methods do more in the first.
    """
    run = program(factory, task, hparams, checked=False)
    key, t = jax.random.key(0), np.int32(round)
    traced = {name: np.float32(value) for name, value in run.traced.items()}

    def total(federation: Federation) -> Array:
        shapes = jax.eval_shape(run.init, key, traced)
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        given = Context(key, traced, federation, t), state, np.bool_(False)
        closed = jax.make_jaxpr(run.round)(*given)
        return _walk(closed.jaxpr, closed.consts, jax.tree.leaves(given), False)[1]

    ids, active = parts(set_up(factory, task, hparams)).draw(None, key, t)
    drawn = np.asarray(ids)[np.asarray(active)]
    steps, _ = local_training.planned(task, np.asarray(federation.train.size)[drawn])
    return float(jax.jit(total)(federation)) / max(int(steps.sum()), 1)


def _walk(
    jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], counts: bool
) -> tuple[list[Any], Array]:
    """Returns the results and the operations; `counts` is True inside a loop over
    batches."""
    names = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(names, [*consts, *given], strict=True))
    total = jnp.float32(0)

    def read(v: Any) -> Any:
        return v.val if hasattr(v, "val") else values[v]

    for eqn in jaxpr.eqns:
        scopes = str(eqn.source_info.name_stack)
        inside = counts or local_training.SCOPE in scopes
        outs, flops = _equation(eqn, [read(v) for v in eqn.invars], inside)
        values.update(zip(eqn.outvars, outs, strict=True))
        total += 0 if local_training.ON_SERVER in scopes else flops
    return [read(v) for v in jaxpr.outvars], total


def _equation(eqn: Any, given: list[Any], counts: bool) -> tuple[list[Any], Any]:
    p, zero = parameters(eqn), jnp.float32(0)

    def run(closed: Any, *given: Any) -> tuple[list[Any], Array]:
        inner = getattr(closed, "jaxpr", closed)
        return _walk(inner, getattr(closed, "consts", ()), given, counts)

    match eqn.primitive.name:
        case "scan":
            first, count = p["num_consts"], p["num_carry"]
            consts, rest = given[:first], given[first:]

            def turn(loop: Any, rows: Any) -> Any:
                outs, flops = run(p["jaxpr"], *consts, *loop[0], *rows)
                return (outs[:count], loop[1] + flops), outs[count:]

            (carry, flops), rows = lax.scan(
                turn, (rest[:count], zero), rest[count:], p["length"], p["reverse"]
            )
            return [*carry, *rows], flops
        case "while":
            first = p["cond_nconsts"]
            last = first + p["body_nconsts"]

            def again(loop: Any) -> Any:
                return run(p["cond_jaxpr"], *given[:first], *loop[0])[0][0]

            def body(loop: Any) -> Any:
                outs, flops = run(p["body_jaxpr"], *given[first:last], *loop[0])
                return outs, loop[1] + flops

            return lax.while_loop(again, body, (given[last:], zero))
        case "cond":
            branches = [lambda *x, b=b: run(b, *x) for b in p["branches"]]
            return lax.switch(given[0], branches, *given[1:])
    called = next((p[key] for key in ("jaxpr", "call_jaxpr", "call") if key in p), None)
    if called is not None and not eqn.primitive.name.startswith("reduce"):
        return run(called, *given)
    outs = eqn.primitive.bind(*given, **eqn.params)
    outs = outs if eqn.primitive.multiple_results else [outs]
    return outs, float(product_flops(eqn)) if counts else 0.0


def parameters(eqn: Any) -> dict[str, Any]:
    """Returns an equation's parameters; those of a scan with `num_consts` and
    `num_carry`, which JAX has up to 0.11."""
    p: dict[str, Any] = eqn.params
    if eqn.primitive.name != "scan" or "num_carry" in p:
        return p
    body = getattr(p["jaxpr"], "jaxpr", p["jaxpr"])

    def whole(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)

    # stacked results and rows have one more axis than those of a turn
    carry = whole(eqn.outvars, body.outvars)
    consts = whole(eqn.invars, body.invars) - carry
    return p | {"num_carry": carry, "num_consts": consts}
