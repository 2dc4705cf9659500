"""Per-FedAvg: learns a model from which one gradient step on a client's own data leads
to a good model (MAML).

Reference: Fallah, Mokhtari & Ozdaglar, Personalized federated learning with theoretical
guarantees: a model-agnostic meta-learning approach (NeurIPS 2020), Algorithm 1 and its
two approximations."""

import functools
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import optax
from absl import logging
from annotated_types import Ge, Gt
from chex import Numeric

from fedjax_pfl import averaging, evaluation, keys, local_training, losses
from fedjax_pfl.algorithms.registry import register
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

Variant = Literal["fo", "hf", "exact"]


def curvature(
    gradient: Callable[[PyTree], PyTree],
    w: PyTree,
    v: PyTree,
    variant: str,
    delta: Numeric,
) -> PyTree:
    """The Hessian at w times v, h: by a central difference of gradients (hf), or
    exactly."""
    if variant == "exact":
        return jax.jvp(gradient, (w,), (v,))[1]
    ahead, behind = (
        gradient(jax.tree.map(lambda x, d, s=sign: x + s * delta * d, w, v))
        for sign in (1, -1)
    )
    return jax.tree.map(lambda a, b: (a - b) / (2 * delta), ahead, behind)


def meta_gradient(
    loss: Callable[[PyTree, Batch, Array], tuple[Array, PyTree]],
    variables: PyTree,
    batches: tuple[Batch, ...],
    key: Array,
    variant: str,
    alpha: Numeric,
    delta: Numeric,
) -> tuple[PyTree, Array, PyTree]:
    """The gradient of f(w - alpha grad f(w)) by w, an estimate from two batches (fo) or
    three.

    Args:
      loss: as `local_training.sgd` takes it.
      batches: of the inner gradient, of the outer one, and of the Hessian.

    Returns:
      (gradient over body and head, the loss after the inner step [], its running
      statistics).
    """
    w, stats = averaging.params(variables), variables["stats"]

    def value(w: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        return loss({**w, "stats": stats}, batch, key)

    def gradient(w: PyTree, batch: Batch, number: int) -> PyTree:
        return jax.grad(value, has_aux=True)(
            w, batch, keys.fold(key, keys.Loss.INNER, number)
        )[0]

    inner, outer, *more = batches
    adapted = jax.tree.map(lambda x, g: x - alpha * g, w, gradient(w, inner, 0))
    (after, new), v = jax.value_and_grad(value, has_aux=True)(adapted, outer, key)
    if variant != "fo":
        h = curvature(lambda w: gradient(w, more[0], 1), w, v, variant, delta)
        v = jax.tree.map(lambda v, h: v - alpha * h, v, h)
    return v, after, new


@functools.cache  # a method is made several times in a run
def _warn(short: int, batches: int) -> None:
    text = (
        "per_fedavg: the batches of a meta-step must share examples at %d clients, "
        "which hold fewer than %d batches."
    )
    logging.warning(text, short, batches)


@register("per_fedavg")
def per_fedavg(
    task: Task,
    *,
    variant: Variant = "fo",
    alpha: Annotated[float, Ge(0)] | None = None,
    beta: Annotated[float, Ge(0)] | None = None,
    delta: Annotated[float, Gt(0)] = 0.001,
) -> Algorithm:
    """Averages models trained on f(w - alpha grad f(w)); a client predicts after one
    step on one batch of its own.

    Args:
      variant: of the meta-gradient, one of fo (no Hessian), hf (Hessian by a difference
        of gradients), exact.
      alpha: the inner step size (α) in [0, inf); default the learning rate.
      beta: the outer step size (β) in [0, inf); default the learning rate.
      delta: the difference of gradients (δ) in (0, inf) is taken at w ± δv, for hf.

    Note:
      A round has as many meta-steps as FedAvg has steps, the outer batches are
      FedAvg's, and the inner one (and the Hessian's) come from orders of their own:
      independent draws, that may share examples where PFLlib's halves of a batch of 2B
      do not, and that reuse all of them on a client with at most B. The inner step is
      plain SGD. In bfloat16 hf's difference is below rounding: take exact. `pre` scores
      the step from the global model, `post` from the client's. The loss is that after
      the inner step.
    """
    batches = 2 if variant == "fo" else 3
    if (short := int((task.sizes < batches * task.batch_size).sum())) > 0:
        _warn(short, batches)
    loss, split = losses.classification(task.model), averaging.split(task)
    inner_lr = task.lr if alpha is None else alpha
    optimizer = task.optimizer(task.lr if beta is None else beta)
    once = task._replace(
        lr=inner_lr, optimizer=optax.sgd, epochs=None, steps=1, drop_last=False
    )

    def adapt(c: Client, w: PyTree) -> PyTree:
        """One step, which is discarded after the prediction."""
        return local_training.sgd(
            keys.fold(c.key, keys.Client.FINE_TUNE), c.train, loss, w, once
        )[0]

    def step(
        key: Array, carry: PyTree, outer: Batch, inner: Batch, *more: Batch
    ) -> tuple[PyTree, Array]:
        w, opt = carry
        v, value, stats = meta_gradient(
            loss, w, (inner, outer, *more), key, variant, inner_lr, delta
        )
        params = averaging.params(w)
        updates, opt = optimizer.update(v, opt, params)
        return ({**optax.apply_updates(params, updates), "stats": stats}, opt), value

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, own: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            w = split.receive(state.server, own)
            start = (w, optimizer.init(averaging.params(w)))
            (w, _), value, _ = local_training.work(
                c.key, c.train, step, start, task, batches_per_step=batches
            )
            shared, own = split.send(w)
            tuned = jax.lax.cond(cohort.evaluated, lambda: adapt(c, w), lambda: w)
            return (
                shared,
                own,
                value,
                evaluation.post(cohort, c, averaging.predictor(task.model, tuned)),
            )

        w, (own, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        return State(w, own), Metrics(value, post)

    def predict(server: PyTree, own: PyTree, c: Client) -> Predictor:
        return averaging.predictor(task.model, adapt(c, split.receive(server, own)))

    return Algorithm(
        split.init,
        round,
        predict,
        evaluation.classification,
        averages=averaging.BODY_AND_HEAD,
    )
