"""Per-FedAvg: learns a model from which one gradient step on a client's own data leads
to a good model (MAML).

Reference: Fallah, Mokhtari & Ozdaglar, Personalized federated learning with theoretical
guarantees: a model-agnostic meta-learning approach (NeurIPS 2020), Algorithm 1 and its
two approximations."""

from typing import Annotated

import jax
import optax
from absl import logging
from annotated_types import Ge
from chex import Numeric

from fedjax_pfl import averaging, keys, local_training, losses
from fedjax_pfl.algorithms.registry import ONE_RATE, register
from fedjax_pfl.types import Array, Batch, Method, PyTree, Task, Update


def meta_gradient(
    loss: local_training.Loss,
    variables: PyTree,
    inner: Batch,
    outer: Batch,
    key: Array,
    alpha: Numeric,
) -> tuple[PyTree, Array, PyTree]:
    """Computes the gradient of f at w - alpha grad f(w), the first-order estimate of
    the meta-gradient, from two batches.

    Args:
      loss: as `local_training.sgd` takes it.

    Returns:
      (gradient over body and head, the loss after the inner step [], its running
      statistics).
    """
    w, stats = averaging.params(variables), variables["stats"]

    def value(w, batch, key):
        return loss({**w, "stats": stats}, batch, key)

    draw = keys.fold(key, keys.Loss.INNER, 0)
    slope, _ = jax.grad(value, has_aux=True)(w, inner, draw)
    adapted = jax.tree.map(lambda x, g: x - alpha * g, w, slope)
    (after, new), v = jax.value_and_grad(value, has_aux=True)(adapted, outer, key)
    return v, after, new


@register("per_fedavg", targets=True, excludes={"lr": ONE_RATE})
def per_fedavg(
    task: Task,
    *,
    alpha: Annotated[float, Ge(0)] | None = None,
    beta: Annotated[float, Ge(0)] | None = None,
) -> Method:
    """Averages models trained on f(w - alpha grad f(w)), without the Hessian (FO); a
    client predicts after one step on one batch of its own.

    Args:
      alpha: the inner step size (α) in [0, inf); default the learning rate.
      beta: the outer step size (β) in [0, inf); default the learning rate.

    Note:
      A round has as many meta-steps as FedAvg has steps. The outer batches are
      FedAvg's, and the inner ones come from an order of their own: independent draws,
      that may share examples where PFLlib's halves of a batch of 2B do not, and that
      reuse all of them on a client with at most B. The inner step is plain SGD. The
      paper's variant with a difference of gradients (HF) is not built. `pre` scores the
      step from the global model, `post` from the client's. The loss is that after the
      inner step.
    """
    short = int((task.sizes < 2 * task.batch_size).sum())
    if short:
        text = "per_fedavg: the batches of a meta-step share examples at %d clients."
        logging.log_first_n(logging.WARNING, text, 1, short)
    loss, split = losses.classification(task.model, task), averaging.split(task)
    inner_lr = task.lr if alpha is None else alpha
    optimizer = task.optimizer(task.lr if beta is None else beta)
    once = task._replace(
        lr=inner_lr, optimizer=optax.sgd, epochs=None, steps=1, drop_last=False
    )
    inner_sgd = local_training.bind(once)

    def adapt(c, w):
        # One step, which is discarded after the prediction.
        return inner_sgd(c, w, stream=keys.Client.FINE_TUNE)[0]

    def step(key, carry, outer, inner):
        w, opt = carry
        v, value, stats = meta_gradient(loss, w, inner, outer, key, inner_lr)
        params = averaging.params(w)
        updates, opt = optimizer.update(v, opt, params)
        return ({**optax.apply_updates(params, updates), "stats": stats}, opt), value

    def client(c, server, own):
        w = split.receive(server, own)
        start = (w, optimizer.init(averaging.params(w)))
        (w, _), value, _ = local_training.work(
            c.key, c.train, step, start, task, batches_per_step=2
        )
        shared, own = split.send(w)
        tuned = jax.lax.cond(c.evaluated, lambda: adapt(c, w), lambda: w)
        return Update(shared, own, averaging.predictor(task.model, tuned), value)

    def predict(server, own, c):
        return averaging.predictor(task.model, adapt(c, split.receive(server, own)))

    averages = averaging.BODY_AND_HEAD
    return averaging.from_client(split.init, client, predict, averages=averages)
