"""Compression of uploads, for every method whose clients send one mean.

References: Stich, Cordonnier & Jaggi, Sparsified SGD with memory (NeurIPS 2018, arXiv
1809.07599); Alistarh, Grubic, Li, Tomioka & Vojnovic, QSGD (NeurIPS 2017, arXiv
1610.02132); Vogels, Karimireddy & Jaggi, PowerSGD (NeurIPS 2019, arXiv 1905.13727).
"""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_pfl import architectures, keys, traffic, trees, uploads
from fedjax_pfl.engine import exposure, program, validate
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.hyperparameters import method_name
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Cohort,
    Metrics,
    PyTree,
    State,
    Task,
    Traffic,
)

POWERS = 2  # iterations of `low_rank`


class Rule(NamedTuple):
    """One way to compress an update."""

    # (key, update) -> what the server reads, a tree like the update
    apply: Callable[[Array, PyTree], PyTree]
    # update's shapes -> scalars and integers that travel
    size: Callable[[PyTree], tuple[int, int]]
    feedback: bool  # the client adds what was lost to its next update


class Fed(NamedTuple):
    """State.clients of a method with error feedback."""

    method: PyTree  # the method's own
    lost: PyTree  # [N, ...], what compression has left out so far


def top_k(fraction: float) -> Rule:
    """Sends the numbers of largest magnitude, a fraction in (0, 1] of all, and their
    positions; with error feedback."""
    check("fraction", fraction, 0, 1, open_low=True)

    def count(tree: PyTree) -> int:
        return max(1, math.ceil(fraction * trees.size(tree) - 1e-9))

    def apply(key: Array, update: PyTree) -> PyTree:
        vector, whole = ravel_pytree(update)
        _, at = jax.lax.top_k(jnp.abs(vector), count(update))
        return whole(jnp.zeros_like(vector).at[at].set(vector[at]))

    return Rule(apply, lambda tree: (count(tree), count(tree)), True)


def qsgd(levels: int) -> Rule:
    """Rounds each number at random to a multiple of 1/levels of its array's norm,
    without bias.

    A number takes log2(2 levels + 1) bits, rounded up to whole bits; 32 bits count as
    one scalar. Each array sends its norm, too.
    """
    check("levels", levels, 1, math.inf, whole=True)
    bits = math.ceil(math.log2(2 * levels + 1))

    def one(key: Array, x: Array) -> Array:
        norm = jnp.linalg.norm(x.reshape(-1))
        level = levels * jnp.abs(x) / jnp.where(norm > 0, norm, 1)
        low = jnp.floor(level)
        up = jax.random.uniform(key, x.shape) < level - low
        return (norm * jnp.sign(x) * (low + up) / levels).astype(x.dtype)

    def apply(key: Array, update: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(update)
        drawn = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(structure, list(map(one, drawn, leaves)))

    def size(tree: PyTree) -> tuple[int, int]:
        numbers = math.ceil(trees.size(tree) * bits / 32)
        return numbers + len(jax.tree.leaves(tree)), 0

    return Rule(apply, size, False)


def low_rank(rank: int) -> Rule:
    """Sends two factors of each array as a matrix [m, n] of its last axis, by power
    iteration; with error feedback.

    An array of which the factors would be larger is sent whole.
    """
    check("rank", rank, 1, math.inf, whole=True)

    def sides(shape: tuple[int, ...]) -> tuple[int, int]:
        return math.prod(shape[:-1]), math.prod(shape[-1:])

    def smaller(shape: tuple[int, ...]) -> bool:
        m, n = sides(shape)
        return rank * (m + n) < m * n

    def one(key: Array, x: Array) -> Array:
        if not smaller(x.shape):
            return x
        matrix = x.reshape(sides(x.shape))
        q = jax.random.normal(key, (matrix.shape[1], rank), x.dtype)
        for _ in range(POWERS):
            p, _ = jnp.linalg.qr(matrix @ q)
            q = matrix.T @ p
        return (p @ q.T).reshape(x.shape)

    def apply(key: Array, update: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(update)
        drawn = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(structure, list(map(one, drawn, leaves)))

    def size(tree: PyTree) -> tuple[int, int]:
        shapes = [x.shape for x in jax.tree.leaves(tree)]
        each = [
            rank * sum(sides(shape)) if smaller(shape) else math.prod(shape)
            for shape in shapes
        ]
        return sum(each), 0

    return Rule(apply, size, True)


RULES: dict[str, Callable[..., Rule]] = {
    "top_k": top_k,
    "qsgd": qsgd,
    "low_rank": low_rank,
}


def compressed(
    factory: Callable[..., Algorithm] | str, rule: str, amount: float
) -> Callable[..., Algorithm]:
    """Returns the method with compressed uploads.

    The client compresses its update, upload - default. `Traffic` counts what travels
    up; what the server sends is not compressed.

    Args:
      factory: a method or its name.
      rule: top_k, qsgd or low_rank.
      amount: the argument of the rule of that name.

    Raises:
      InputError: a value is invalid, or a client sends anything but one upload of
        cohort.mean.
    """
    factory = validate.method(factory)
    made = RULES[choose("compression", rule, RULES)]
    how = made(amount if rule == "top_k" else int(amount))
    known: dict[int, Any] = {}

    @functools.wraps(factory)
    def make(task: Task, **hparams: Any) -> Algorithm:
        if isinstance(task.lr, numbers.Real):  # else in a trace
            # the models are kept, so that no other tuple has their id
            shape = _uploaded(factory, task, hparams)
            known[id(task.models)] = task.models, shape
        _, shape = known[id(task.models)]
        return _compressed(factory(task, **hparams), task, how, shape)

    return make


def _uploaded(
    factory: Callable[..., Algorithm], task: Task, hparams: dict[str, Any]
) -> PyTree:
    """Returns the shapes of the only upload."""
    name = method_name(factory)
    if len(task.models) > 1:
        raise InputError(f"{name}: compression needs clients of one architecture.")
    found = exposure.exposed(program.parts, factory, task, hparams)
    if len(found.uploads) != 1 or not jax.tree.leaves(found.uploads):
        raise InputError(
            f"{name} cannot have compression: a client must send one upload of "
            f"cohort.mean, got {len(found.uploads)}."
        )
    return found.uploads[0][0]


def _compressed(method: Algorithm, task: Task, rule: Rule, shape: PyTree) -> Algorithm:
    def init(key: Array) -> State:
        state = method.init(key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
        lost = trees.replicate(zeros, task.num_clients)
        return State(state.server, Fed(state.clients, lost))

    def inner(state: State) -> State:
        rows = state.clients.method if rule.feedback else state.clients
        return State(state.server, rows)

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        lost = state.clients.lost if rule.feedback else ()
        kept = []

        def mean(client: Any, *rows: PyTree, **options: Any) -> Any:
            sends = _sender(client, rule, options["default"])
            total, (rest, now) = cohort.mean(sends, lost, *rows, **options)
            kept.append(now)
            return total, rest

        through = uploads.Through(cohort, mean)
        new, metrics = method.round(key, inner(state), through)
        if rule.feedback:
            new = State(new.server, Fed(new.clients, kept[0]))
        return new, metrics

    def count(state: State, cohort: Cohort, metrics: Metrics) -> Traffic:
        plain = (method.traffic or traffic.uploads)(inner(state), cohort, metrics)
        scalars, integers = rule.size(shape)
        active = cohort.active.astype(jnp.int32)
        up = plain.up - active * (trees.size(shape) - scalars)
        return plain._replace(up=up, ints=plain.ints + active * integers)

    def predict(server: PyTree, row: PyTree, c: Client) -> Any:
        return method.predict(server, row.method, c)

    fields: dict[str, Any] = {"round": round, "traffic": count}
    if rule.feedback:
        fields |= {"init": init, "predict": predict}
    return method._replace(**fields)


def _sender(client: uploads.Sends, rule: Rule, default: PyTree) -> uploads.Sends:
    """Returns the client's function with a compressed upload; its other results are
    (the client's, what was lost)."""

    def sends(c: Client, lost: PyTree, *rows: PyTree) -> tuple[PyTree, ...]:
        now: PyTree = ()

        def change(c: Client, lost: PyTree, upload: PyTree, like: PyTree) -> PyTree:
            nonlocal now
            update = jax.tree.map(jnp.subtract, upload, like)
            if rule.feedback:
                update = optax.tree.cast_like(trees.add(update, lost), upload)
            key = keys.fold(uploads.key_of(c), keys.Client.COMPRESS)
            sent = rule.apply(key, update)
            now = jax.tree.map(jnp.subtract, update, sent) if rule.feedback else ()
            return trees.add(like, sent)

        plain = architectures.select(default, c.architecture)
        upload, *rest = uploads.sending(client, change, plain)(c, lost, *rows)
        return upload, tuple(rest), now

    return sends
