"""FedOpt: treats the averaged client update as a gradient for a server optimizer.

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
from fedjax_pfl.engine import validate
from fedjax_pfl.errors import InputError
from fedjax_pfl.hyperparameters import method_name
from fedjax_pfl.optimizers import in_param_types
from fedjax_pfl.types import Algorithm, Array, Cohort, Metrics, PyTree, State, Task

RATE = "server_optimizer_lr"  # the hyperparameter that `optimized` adds
# models of a mean whose rounding, at most 2e-5 of a weight, counts as no change
MANY = 256


class Optimized(NamedTuple):
    """State.server of a method with a server optimizer."""

    method: PyTree  # the method's own
    optimizer: PyTree  # the optimizer's state


def plain(server: PyTree) -> PyTree:
    """Returns the method's own State.server, without that of the method's wrappers."""
    while isinstance(server, tuple) and hasattr(server, "method"):
        server = server.method
    return server


def optimized(
    factory: Callable[..., Algorithm] | str,
    optimizer: Callable[[Numeric], optax.GradientTransformation] = optax.adam,
) -> Callable[..., Algorithm]:
    """Returns the method with a step of an optimizer in place of the server's mean.

    In each round the weights w of the server and their mean after it, w', make a
    gradient w - w', from which the optimizer moves w. It moves the weights named by
    `Algorithm.averages`; all else of the state, such as running statistics, is the
    method's. SGD with rate 1 gives w', up to rounding. An optimizer that selects by
    name sees the averaged parts, or the parts of the model if the only average is one
    (SCAFFOLD's w). Where w - w' may be the rounding of a mean of up to 256 models the
    gradient is 0: Adam would take steps of full length from it. A round in which nobody
    takes a step, or no weight of the mean moves, changes neither w nor the optimizer's
    state.

    Args:
      factory: a method, or its name, with at least one name in `averages`.
      optimizer: learning rate -> transformation; its state is kept in State.server
        (`Optimized`).

    Returns:
      a factory with the further hyperparameter server_optimizer_lr in (0, inf), which
      is traced.

    Raises:
      InputError: the method has no averages, or `optimizer` is no function of the
        learning rate.

    Note:
      optax's Adam corrects the bias of its averages and has eps 1e-8; the paper does
      not, and takes beta_2 = 0.99 and tau = 1e-3 (`lambda lr: optax.adam(lr, b2=0.99,
      eps=1e-3)`).
    """
    factory = validate.method(factory)
    validate.optimizer(optimizer, "server_optimizer")
    make_step = in_param_types(optimizer)

    @functools.wraps(factory)
    def make(
        task: Task, *, server_optimizer_lr: Numeric = 1.0, **hparams: Any
    ) -> Algorithm:
        method = factory(task, **hparams)
        if not method.averages:
            raise InputError(
                f"{method_name(factory)} cannot have a server optimizer: its Algorithm "
                "names no `averages`."
            )
        return _wrapped(task, method, make_step(server_optimizer_lr))

    known = inspect.signature(factory)
    rate = inspect.Parameter(
        RATE,
        inspect.Parameter.KEYWORD_ONLY,
        default=1.0,
        annotation=Annotated[float, Gt(0)],
    )
    make.__signature__ = known.replace(parameters=[*known.parameters.values(), rate])  # type: ignore[attr-defined]
    return make


def _wrapped(
    task: Task, method: Algorithm, step: optax.GradientTransformation
) -> Algorithm:
    whole = _whole(method)

    def weights(server: PyTree) -> tuple[PyTree, PyTree]:
        """Splits the server's state into what the optimizer moves and the rest, each
        with holes."""
        moves = functools.partial(_moves, method)
        return trees.partition(server, jax.tree_util.tree_map_with_path(moves, server))

    def shown(tree: PyTree) -> PyTree:
        return tree[whole] if whole else tree

    def inner(state: State) -> State:
        return State(state.server.method, state.clients)

    def init(key: Array) -> State:
        state = method.init(key)
        if missing := set(method.averages) - set(state.server):
            raise InputError(f"`averages` must be keys of State.server, got {missing}.")
        moved, _ = weights(state.server)
        return State(Optimized(state.server, step.init(shown(moved))), state.clients)

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        new, metrics = method.round(key, inner(state), cohort)
        (before, _), (mean, rest) = weights(state.server.method), weights(new.server)
        gradient = jax.tree.map(
            functools.partial(_difference, jnp.sum(cohort.active)), before, mean
        )
        updates, kept = step.update(
            shown(gradient), state.server.optimizer, shown(before)
        )
        after = optax.apply_updates(shown(before), updates)
        after = optax.tree.cast_like(after, shown(before))
        moved = ({**before, whole: after} if whole else after, kept)
        moves = functools.reduce(
            jnp.logical_or, map(jnp.any, jax.tree.leaves(gradient)), jnp.bool(False)
        )
        moves &= jnp.any(local_training.learns(cohort.sizes, task))
        moved, kept = trees.choose(moves, moved, (before, state.server.optimizer))
        return State(Optimized(trees.merge(moved, rest), kept), new.clients), metrics

    def traffic(state: State, cohort: Cohort, metrics: Metrics) -> Any:
        return method.traffic and method.traffic(inner(state), cohort, metrics)

    return method._replace(
        init=init,
        round=round,
        predict=lambda server, row, c: method.predict(server.method, row, c),
        traffic=method.traffic and traffic,
        averages=(),
    )


def _difference(count: Array, before: Array, mean: Array) -> Array:
    """Returns before - mean, and 0 where it is at most the rounding of a mean of
    `count` [] models that are all `before`."""
    difference = before - mean
    # shares, products and sum are each rounded in float32, by count + 1 half units in
    # the last digit, and methods mix the mean with what was before (`trees.lerp`); of
    # many models that would be as much as they move
    units = (jnp.minimum(count, MANY) + 8) * jnp.finfo(jnp.float32).epsneg
    bound = units * jnp.abs(before)
    return jnp.where(jnp.abs(difference) <= bound, 0, difference)


def _moves(method: Algorithm, path: tuple[Any, ...], leaf: Array) -> bool:
    """Returns True for a leaf of State.server that is an averaged weight."""
    first, *names = [getattr(key, "key", None) for key in path]
    # a module may be called "stats", too
    stats = names[:1] == ["stats"] and first == _whole(method)
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    return first in method.averages and not stats and floats


def _whole(method: Algorithm) -> str:
    """Returns the only averaged name if it holds the parts of a model (SCAFFOLD,
    pFedAFM); else nothing."""
    first, *others = method.averages
    return "" if others or first in BODY_AND_HEAD else first
