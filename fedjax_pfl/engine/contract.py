"""Checks of what a method returns, made while its functions are traced."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from fedjax_pfl.engine import frozen
from fedjax_pfl.errors import ContractError, InputError
from fedjax_pfl.hyperparameters import method_name
from fedjax_pfl.types import (
    Context,
    Examples,
    Federation,
    Grouped,
    Metrics,
    PyTree,
    RunState,
    Stage,
    State,
    Subset,
    Task,
)

# names of metrics that the tables of results use
RESERVED = (
    *("round", "participants", "loss", "traffic", "work", "clock", "staleness"),
    *("pre", "post", "post_latest", "val", "unseen", "unseen_post"),
)
# errors of JAX where Python needs the value of a traced array
TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def shapes(tree: PyTree) -> PyTree:
    """Returns the shapes and types of a tree's leaves; raises ContractError for a leaf
    that is no array."""

    def shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        try:
            return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
        except TypeError:
            name = jax.tree_util.keystr(path) or "the result"
            raise ContractError(
                f"{name} must be an array, got {type(x).__name__}."
            ) from None

    return jax.tree_util.tree_map_with_path(shape, tree)


@contextlib.contextmanager
def named(factory: Callable[..., Any], part: str = "") -> Iterator[None]:
    """Adds the method's name to ContractErrors, and explains errors of JAX where Python
    needs the value of a traced array."""
    name = method_name(factory)
    try:
        yield
    except ContractError as error:
        raise InputError(f"{name}: {error}") from error.__cause__
    except TRACED as error:
        raise InputError(
            f"{name} needs the value of a traced array in {part or 'its factory'} "
            f"({type(error).__name__}): float hyperparameters are traced; annotate "
            "this one int or Literal, or use jnp.where."
        ) from error


def check_stages(name: str, stages: Iterable[Stage], task: Task) -> None:
    """Warns of stages of a method that begin after the last round of the task.

    Raises:
      InputError: one of them is needed.
    """
    rounds = task.rounds or math.inf  # 0: the run has no round at all
    for stage in stages:
        if isinstance(stage.first, jax.core.Tracer) or stage.first < rounds:
            continue
        text = (
            f"{name}: {stage.missing} in the first {int(stage.first)} rounds, and the "
            f"run has {task.rounds}."
        )
        if stage.needed:
            raise InputError(text)
        _warn(text)


@functools.cache
def _warn(text: str) -> None:
    """Logs a warning once in a process."""
    logging.warning("%s", text)


def check_shapes(
    task: Task,
    traced: dict[str, float],
    init: Callable[..., RunState],
    round: Callable[..., PyTree],
    evaluate: Callable[..., PyTree],
) -> None:
    """Traces one round and one evaluation of a program on shapes alone."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    t = jax.ShapeDtypeStruct((), jnp.int32)
    flag = jax.ShapeDtypeStruct((), bool)
    values = dict.fromkeys(traced, jax.ShapeDtypeStruct((), jnp.result_type(float)))
    context = Context(key, values, abstract(task), t)
    state = jax.eval_shape(init, key, values)
    jax.eval_shape(evaluate, context, state)
    jax.eval_shape(round, context, state, flag)


def check_init(state: Any, clients: int) -> None:
    """Raises ContractError unless `init` returned a State with a row per client."""
    if not isinstance(state, State):
        raise ContractError(
            f"`init` must return State(server, clients), got {type(state).__name__}."
        )
    shapes(state)
    whole = jax.tree_util.tree_leaves_with_path(
        state.clients, is_leaf=lambda x: isinstance(x, Grouped)
    )
    for path, x in whole:
        if not isinstance(x, Grouped) and jnp.shape(x)[:1] != (clients,):
            raise ContractError(
                f"State.clients{jax.tree_util.keystr(path)} of `init` must have the "
                f"leading axis [{clients}], as trees.replicate makes it, got "
                f"{list(jnp.shape(x))}."
            )


def check_weight(weight: PyTree, count: int) -> None:
    """Raises ContractError unless each leaf of a mean's weights has one row per
    client."""
    if any(jnp.shape(x)[:1] != (count,) for x in jax.tree.leaves(weight)):
        raise ContractError(
            f"the `weight` of cohort.mean must have one entry per client, [{count}], "
            f"got {shapes(weight)}."
        )


def check_like(what: str, wanted: PyTree, found: PyTree) -> None:
    """Raises ContractError unless two trees have one structure, shapes and types."""
    wanted, found = shapes(wanted), shapes(found)
    if different := difference(wanted, found):
        raise ContractError(f"{what}: {different}.")


def check_kinds(result: Any) -> None:
    """Raises ContractError unless a round returned (State, Metrics)."""
    kinds = [type(x).__name__ for x in result] if isinstance(result, tuple) else ()
    if kinds != [State.__name__, Metrics.__name__]:
        raise ContractError(f"`round` must return (State, Metrics), got {kinds}.")


def check_round(
    before: RunState, state: RunState, metrics: Metrics, count: int, headline: str
) -> None:
    """Raises ContractError unless a round returned a state like the one before, and
    complete metrics of `count` clients with the headline among the scores."""
    if metrics.loss is None or not metrics.post:
        raise ContractError(
            "Metrics must have `loss`, the mean training loss per client [S], and "
            "`post`, the result of evaluation.post per client."
        )
    check_names(metrics.post, headline)
    vectors = {"loss": metrics.loss} | metrics.post | metrics.clients
    for name, x in vectors.items():
        if jnp.shape(x) != (count,):
            raise ContractError(
                f"the metric {name!r} must have one number per client, [{count}], got "
                f"{list(jnp.shape(x))}; other arrays belong in Metrics.server."
            )
    for name in (*metrics.clients, *metrics.server):
        if name.split("/")[0] in RESERVED:
            raise ContractError(f"a metric cannot be named {name!r}: it is reserved.")
    what = "`round` must keep the state's structure and types"
    check_like(what, before.method, state.method)
    check_like(what, before, state)


def check_scores(scores: Any, headline: str) -> None:
    """Raises ContractError unless `score` returned {name: (sum, count)} with the
    headline among the names."""
    if not isinstance(scores, dict) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in scores.values()
    ):
        raise ContractError("`score` must return {name: (sum, count)}.")
    check_names(scores, headline)


def check_names(scores: Iterable[str], headline: str) -> None:
    """Raises ContractError unless the headline is among the names of the scores, and
    none has a slash."""
    if headline not in scores or any("/" in name for name in scores):
        raise ContractError(
            f"the scores must have the headline {headline!r} and no name with a slash, "
            f"got {', '.join(scores)}."
        )


def abstract(task: Task) -> Federation:
    """Returns the shapes and types of a federation of the task."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    n, most = task.num_clients, max(1, int(np.max(task.sizes)))
    x = array(n, *task.input.shape, dtype=task.input.dtype)
    # a number of test examples that is neither 1 nor the number of classes
    tested = 3 if task.num_classes != 3 else 2
    splits = [Subset(array(n, width), array(n)) for width in (most, 0, tested)]
    public: Any = task.public
    if public is not None:
        public = Examples(public, array(public.shape[0]))
    train, val, test = splits
    counts = array(n, task.num_classes)
    y = array(n, *task.label.shape, dtype=task.label.dtype)
    held = tuple(array(*x.shape, dtype=x.dtype) for x in frozen.values(task)) or None
    examples = Examples(x, y)
    return Federation(examples, train, val, test, counts, public, frozen=held)


def difference(wanted: PyTree, found: PyTree) -> str | None:
    """Returns the first leaf in which two trees of shapes differ, or None."""
    paths = (jax.tree_util.tree_leaves_with_path(tree) for tree in (wanted, found))
    a, b = (
        {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}
        for leaves in paths
    )
    for path in (*a, *b):
        if a.get(path) != b.get(path):
            got = b.get(path, "missing")
            return f"{path or 'it'} must be {a.get(path, 'missing')}, got {got}"
    same = jax.tree.structure(wanted) == jax.tree.structure(found)  # type: ignore[operator]  # PyTreeDef has no type
    return None if same else "the containers of the leaves differ"
