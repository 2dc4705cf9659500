"""FedOpt: an optimizer at the server in place of the mean of the clients' weights.

Reference: Reddi et al., Adaptive federated optimization (ICLR 2021, arXiv 2003.00295),
Algorithm 2."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Gt
from chex import Numeric

from fedjax_pfl import local_training, trees
from fedjax_pfl.averaging import BODY_AND_HEAD
from fedjax_pfl.engine import callables, validate
from fedjax_pfl.errors import InputError
from fedjax_pfl.hyperparameters import method_name
from fedjax_pfl.types import Algorithm, Array, Cohort, Metrics, PyTree, State, Task

NAME = "A server optimizer"
RATE = "server_optimizer_lr"  # of the hyperparameter that the factory gets
# models of a mean whose rounding, at most 2e-5 of a weight, counts as no change
MANY = 256


class Optimized(NamedTuple):
    """State.server of a method under a server optimizer."""

    method: PyTree  # the method's own
    optimizer: PyTree  # the optimizer's state


def plain(server: PyTree) -> PyTree:
    """The method's own State.server."""
    return server.method if isinstance(server, Optimized) else server


def optimized(
    factory: Callable[..., Algorithm] | str,
    optimizer: Callable[[Numeric], optax.GradientTransformation] = optax.adam,
) -> Callable[..., Algorithm]:
    """The method whose server takes a step of an optimizer where it would take the
    mean.

    In each round the weights w of the server and their mean after it, w', make a
    gradient w - w', from which the optimizer moves w (for the weights that
    `Algorithm.averages` names; all else of the state, running statistics among it,
    becomes what the method makes it). With plain SGD of rate 1 that is w', but for
    rounding. An optimizer that selects by name sees the averaged parts, of a single one
    that holds a model (SCAFFOLD's w) the model's. Where w - w' may be the rounding of a
    mean of so many models (up to 256) the gradient is 0, else Adam would make steps of
    full length of it. A round in which nobody takes a step, or no weight of the mean
    moves, changes neither w nor the optimizer's state.

    Args:
      factory: a method, or its name, of which `averages` names at least one part.
      optimizer: learning rate -> transformation; its state is kept in State.server
        (`Optimized`).

    Returns:
      a factory with one hyperparameter more, server_optimizer_lr in (0, inf), which is
      traced.

    Raises:
      InputError: `factory` is no method, or `optimizer` no function of the learning
        rate.

    Note:
      optax's Adam corrects the bias of its averages and has eps 1e-8; the paper does
      not, and takes beta_2 = 0.99 and tau = 1e-3 (`lambda lr: optax.adam(lr, b2=0.99,
      eps=1e-3)`).
    """
    factory = validate.method(factory)
    callables.optimizer(optimizer, NAME, RATE)

    @functools.wraps(factory)
    def make(
        task: Task, *, server_optimizer_lr: Numeric = 1.0, **hparams: Any
    ) -> Algorithm:
        method = factory(task, **hparams)
        if not method.averages:
            raise InputError(
                f"{method_name(factory)} cannot have a server optimizer: its Algorithm "
                "names no means of the clients' "
                "weights in State.server (`averages`), from which it would step."
            )
        return _wrapped(
            task, method, callables.guarded(optimizer, NAME)(server_optimizer_lr)
        )

    known, kind = inspect.signature(factory), inspect.Parameter.KEYWORD_ONLY
    rate = inspect.Parameter(
        RATE, kind, default=1.0, annotation=Annotated[float, Gt(0)]
    )
    make.__signature__ = known.replace(parameters=[*known.parameters.values(), rate])  # type: ignore[attr-defined]
    return make


def _wrapped(
    task: Task, method: Algorithm, step: optax.GradientTransformation
) -> Algorithm:
    def weights(server: PyTree) -> tuple[PyTree, PyTree]:
        """What the optimizer moves, and the rest, each with holes."""
        return trees.partition(
            server,
            jax.tree_util.tree_map_with_path(functools.partial(_moves, method), server),
        )

    whole = _whole(method)
    shown: Callable[[PyTree], PyTree] = lambda tree: tree[whole] if whole else tree

    def inner(state: State) -> State:
        return State(state.server.method, state.clients)

    def init(key: Array) -> State:
        state = method.init(key)
        if missing := [name for name in method.averages if name not in state.server]:
            raise InputError(
                f"`Algorithm.averages` names {missing[0]!r}, which is no part of "
                "State.server."
            )
        return State(
            Optimized(state.server, step.init(shown(weights(state.server)[0]))),
            state.clients,
        )

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        new, metrics = method.round(key, inner(state), cohort)
        (before, _), (mean, rest) = weights(state.server.method), weights(new.server)
        gradient = jax.tree.map(
            functools.partial(_difference, jnp.sum(cohort.active)), before, mean
        )
        updates, kept = step.update(
            shown(gradient), state.server.optimizer, shown(before)
        )
        new_weights = optax.tree.cast_like(
            optax.apply_updates(shown(before), updates), shown(before)
        )
        moved = ({**before, whole: new_weights} if whole else new_weights, kept)
        moves = functools.reduce(
            jnp.logical_or, map(jnp.any, jax.tree.leaves(gradient)), jnp.bool(False)
        )
        moves &= jnp.any(local_training.learns(cohort.sizes, task))
        moved, kept = trees.choose(moves, moved, (before, state.server.optimizer))
        return State(Optimized(trees.merge(moved, rest), kept), new.clients), metrics

    predict = lambda server, row, c: method.predict(server.method, row, c)
    sent = method.traffic
    traffic = sent and (
        lambda state, cohort, metrics: sent(inner(state), cohort, metrics)
    )
    return method._replace(
        init=init, round=round, predict=predict, traffic=traffic, averages=()
    )


def _difference(count: Array, before: Array, mean: Array) -> Array:
    """before - mean, and 0 where it is no more than the rounding of a mean of `count`
    [] models that are all as before."""
    difference = before - mean
    # their shares, products and sum are each rounded, in float32: by count + 1 half
    # units in the last place; and methods mix the mean with what was before
    # (`trees.lerp`). Of many models that would be as much as they move.
    bound = (
        (jnp.minimum(count, MANY) + 8) * jnp.finfo(jnp.float32).epsneg * jnp.abs(before)
    )
    return jnp.where(jnp.abs(difference) <= bound, 0, difference)


def _moves(method: Algorithm, path: tuple[Any, ...], leaf: Array) -> bool:
    """Is a leaf of State.server one of the weights that the server averages?"""
    names = [getattr(key, "key", None) for key in path]
    # a module may be called so, too
    stats = names[1:2] == ["stats"] and names[0] == _whole(method)
    return (
        names[0] in method.averages
        and not stats
        and jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _whole(method: Algorithm) -> str:
    """The only part that the server averages, if it holds the parts of a model
    (SCAFFOLD, pFedAFM); else nothing."""
    first, *others = method.averages
    return "" if others or first in BODY_AND_HEAD else first
