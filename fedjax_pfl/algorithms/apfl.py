"""APFL: FedAvg, and beside it a personal model per client that is predicted with in a
mixture of the two.

Reference: Deng, Kamani & Mahdavi, Adaptive personalized federated learning (2020),
Algorithm 1."""

from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, keys, local_training, losses, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Cohort,
    Metrics,
    Predictor,
    PyTree,
    State,
    Task,
)


def mixture_loss(
    task: Task, mix: str
) -> Callable[[PyTree, Array, PyTree, Batch, Array], tuple[Array, PyTree]]:
    """The loss of the mixture a v + (1 - a) w: (v, a [], w, batch, key) -> (mean loss
    [], running statistics for v).

    Args:
      mix: of the parameters, or of the outputs.
    """
    model = task.model

    def loss(
        v: PyTree, a: Array, w: PyTree, batch: Batch, key: Array
    ) -> tuple[Array, PyTree]:
        if mix == "params":
            return losses.classification(model)(mixture(v, a, w), batch, key)
        z, stats = model.apply(v, batch.x, mask=batch.mask, train=True, key=key)
        apart = keys.fold(key, keys.Loss.SHARED)
        z_global, _ = model.apply(w, batch.x, mask=batch.mask, train=True, key=apart)
        return losses.cross_entropy(
            trees.lerp(a, z, z_global), batch.y, batch.mask
        ), stats

    return loss


def mixture(v: PyTree, a: Array, w: PyTree) -> PyTree:
    """a v + (1 - a) w, with the running statistics that v has seen."""
    return {
        **trees.lerp(a, averaging.params(v), averaging.params(w)),
        "stats": v["stats"],
    }


@register("apfl")
def apfl(
    task: Task,
    *,
    alpha: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    adaptive: bool = True,
    lr_alpha: Annotated[float, Ge(0)] | None = None,
    alpha_decay: Annotated[float, Ge(0)] = 0.0,
    mix: Literal["params", "outputs"] = "params",
) -> Algorithm:
    """Trains w as FedAvg does, and v so that the mixture a v + (1 - a) w fits the
    client, and a is learned.

    Args:
      alpha: a client's first mixing weight (α) in [0, 1]; 0.5 as in the authors' code
        (paper also 0.25, 0.75).
      adaptive: whether a takes a gradient step at the first batch of each round, true
        or false.
      lr_alpha: the step size of a in [0, inf); default the learning rate.
      alpha_decay: weight of a's decay in [0, inf); 0.02 in the authors' code, not in
        the paper.
      mix: what is mixed, one of params (the paper), outputs (the authors' code).

    Note:
      The gradients are those of the mixture's own loss; the authors' code approximates
      a's. The mixture's running statistics belong to v. The reported loss is the global
      model's.
    """
    loss, mixed_loss = losses.classification(task.model), mixture_loss(task, mix)
    split = averaging.split(task)
    rate = task.lr if lr_alpha is None else lr_alpha
    optimizer = task.optimizer(task.lr)

    def mixed(v: PyTree, a: Array, w: PyTree) -> Predictor:
        if mix == "params":
            return predictor(task.model, mixture(v, a, w))
        return lambda x, mask: trees.lerp(
            a, predictor(task.model, v)(x, mask), predictor(task.model, w)(x, mask)
        )

    def init(key: Array) -> State:
        return split.init(
            key, lambda w: {"v": w, "alpha": jnp.asarray(alpha, jnp.float32)}
        )

    def descend(
        gradient: PyTree, opt: PyTree, variables: PyTree, stats: PyTree
    ) -> tuple[PyTree, PyTree]:
        params = averaging.params(variables)
        updates, opt = optimizer.update(averaging.params(gradient), opt, params)
        return {**optax.apply_updates(params, updates), "stats": stats}, opt

    def step(key: Array, carry: PyTree, batch: Batch) -> tuple[PyTree, Array]:
        w, v, a, opts, first = carry
        (value, stats), by_w = jax.value_and_grad(loss, has_aux=True)(w, batch, key)
        (by_v, by_a), own_stats = jax.grad(mixed_loss, argnums=(0, 1), has_aux=True)(
            v, a, w, batch, key
        )
        w, opt_w = descend(by_w, opts[0], w, stats)
        v, opt_v = descend(by_v, opts[1], v, own_stats)
        if adaptive:
            a = jnp.where(first, jnp.clip(a - rate * (by_a + alpha_decay * a), 0, 1), a)
        return (w, v, a, (opt_w, opt_v), jnp.zeros_like(first)), value

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            w = split.receive(state.server, mine["own"])
            opts = tuple(optimizer.init(averaging.params(x)) for x in (w, mine["v"]))
            carry = (w, mine["v"], mine["alpha"], opts, jnp.bool(True))
            (w, v, a, _, _), value, _ = local_training.work(
                c.key, c.train, step, carry, task
            )
            shared, own = split.send(w)
            return (
                shared,
                {"v": v, "alpha": a, "own": own},
                value,
                evaluation.post(cohort, c, mixed(v, a, w)),
            )

        w, (mine, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        return State(w, mine), Metrics(value, post, {"alpha": mine["alpha"]})

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return mixed(mine["v"], mine["alpha"], split.receive(server, mine["own"]))

    return Algorithm(
        init,
        round,
        predict,
        evaluation.classification,
        averages=averaging.BODY_AND_HEAD,
    )
