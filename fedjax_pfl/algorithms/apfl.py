"""APFL: FedAvg plus one personal model per client; a client predicts with a learned
mixture of the two.

Reference: Deng, Kamani & Mahdavi, Adaptive personalized federated learning (2020),
Algorithm 1."""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, local_training, losses, trees
from fedjax_pfl.algorithms.registry import ONE_RATE, register
from fedjax_pfl.types import Array, Method, PyTree, Task, Update


def mixture(v: PyTree, a: Array, w: PyTree) -> PyTree:
    """Returns a v + (1 - a) w, with the running statistics of v."""
    mixed = trees.lerp(a, averaging.params(v), averaging.params(w))
    return {**mixed, "stats": v["stats"]}


@register("apfl", targets=True, excludes={"lr": ONE_RATE})
def apfl(
    task: Task,
    *,
    alpha: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    adaptive: bool = True,
    lr_alpha: Annotated[float, Ge(0)] | None = None,
) -> Method:
    """Trains w as FedAvg does, and v such that the mixture a v + (1 - a) w fits the
    client; a is learned.

    Args:
      alpha: a client's first mixing weight (α) in [0, 1]; 0.5 as in the authors' code
        (paper also 0.25, 0.75).
      adaptive: true or false; a takes a gradient step at the first batch of each round,
        or is fixed.
      lr_alpha: the step size of a in [0, inf); default the learning rate.

    Note:
      Parameters are mixed, as in the paper; the authors' code mixes outputs,
      approximates the gradient of a and adds a decay of 0.02 to it. The mixture's
      running statistics belong to v. The reported loss is the global model's.
    """
    loss, split = losses.classification(task.model, task), averaging.split(task)
    rate = task.lr if lr_alpha is None else lr_alpha
    optimizer = task.optimizer(task.lr)

    def init(key):
        first = jnp.asarray(alpha, jnp.float32)
        return split.init(key, lambda w: {"v": w, "alpha": first})

    def mixed_loss(v, a, w, batch, key):
        return loss(mixture(v, a, w), batch, key)

    def descend(gradient, opt, variables, stats):
        params = averaging.params(variables)
        updates, opt = optimizer.update(averaging.params(gradient), opt, params)
        return {**optax.apply_updates(params, updates), "stats": stats}, opt

    def step(key, carry, batch):
        w, v, a, opts, first = carry
        (value, stats), by_w = jax.value_and_grad(loss, has_aux=True)(w, batch, key)
        gradient = jax.grad(mixed_loss, argnums=(0, 1), has_aux=True)
        (by_v, by_a), own_stats = gradient(v, a, w, batch, key)
        w, opt_w = descend(by_w, opts[0], w, stats)
        v, opt_v = descend(by_v, opts[1], v, own_stats)
        if adaptive:
            a = jnp.where(first, jnp.clip(a - rate * by_a, 0, 1), a)
        return (w, v, a, (opt_w, opt_v), jnp.zeros_like(first)), value

    def client(c, server, row):
        w = split.receive(server, row["own"])
        opts = tuple(optimizer.init(averaging.params(x)) for x in (w, row["v"]))
        start = (w, row["v"], row["alpha"], opts, jnp.bool(True))
        end, value, _ = local_training.work(c.key, c.train, step, start, task)
        w, v, a, _, _ = end
        upload, own = split.send(w)
        row = {"v": v, "alpha": a, "own": own}
        predict = averaging.predictor(c.model, mixture(v, a, w))
        return Update(upload, row, predict, value, {"alpha": a})

    def predict(server, row, c):
        w = split.receive(server, row["own"])
        return averaging.predictor(c.model, mixture(row["v"], row["alpha"], w))

    averages = averaging.BODY_AND_HEAD
    return averaging.from_client(init, client, predict, averages=averages)
