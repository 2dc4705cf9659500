"""SCAFFOLD: FedAvg whose local steps are corrected by control variates, estimates of
the clients' gradients.

Reference: Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated
learning (ICML 2020), Algorithm 1.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, keys, local_training, losses, trees
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


def full_gradient(task: Task, c: Client, variables: PyTree) -> PyTree:
    """The gradient of the mean loss over all training examples of a client."""
    loss = losses.classification(task.model)

    def summed(batch: Batch) -> PyTree:
        key = jax.random.fold_in(
            keys.fold(c.key, keys.Client.FULL_GRADIENT), batch.row[0]
        )
        by = jax.grad(lambda w: loss({**variables, **w}, batch, key)[0])(
            averaging.params(variables)
        )
        return optax.tree.scale(jnp.sum(batch.mask), by)

    return optax.tree.scale(
        1 / jnp.maximum(c.train.size, 1),
        local_training.sweep(c.train, summed, task.batch_size),
    )


@register("scaffold")
def scaffold(
    task: Task,
    *,
    server_lr: Annotated[float, Ge(0)] = 1.0,
    option: Annotated[int, Interval(ge=1, le=2)] = 2,
    weights: Literal["uniform", "data"] = "uniform",
) -> Algorithm:
    """Takes local steps along g(y) - c_i + c, and averages the clients' changes of y
    and of their control variates c_i.

    Args:
      server_lr: step of the server (η_g) in [0, inf); 1 as in the paper's experiments
        (FedRep's script uses 0.1).
      option: of the new c_i, in [1, 2], 1: the gradient at the received model; 2: from
        the steps taken.
      weights: of the models, and of the c_i in c, one of uniform (the paper), data
        (training examples).

    Note:
      Option 2 divides by the learning rate, so c_i estimates a gradient for plain SGD
      only; under momentum 0.9 it grows from round to round where a client takes four
      steps or more: take option 1. Were c the uniform mean under weights=data, it would
      undo the weights. Running statistics have no control variate and are averaged as
      the models are. A client without training examples is no part of S. A client keeps
      c_i as it was before any `transform` of uploads, so that with one c is not their
      mean.
    """
    loss, split = losses.classification(task.model), averaging.split(task)

    def init(key: Array) -> State:
        w = task.model.init(key)
        shared, own = split.send(w)
        zero = jax.tree.map(jnp.zeros_like, averaging.params(w))
        return State(
            {"w": shared, "c": zero},
            trees.replicate({"c": zero, "own": own}, task.num_clients),
        )

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        control = state.server["c"]

        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            received = split.receive(state.server["w"], mine["own"])
            correction = jax.tree.map(jnp.subtract, control, mine["c"])
            y, value = local_training.sgd(
                c.key, c.train, loss, received, task, extra=lambda _: correction
            )
            count = local_training.count(c.train, task)
            if option == 1:
                new = full_gradient(task, c, received)
            else:
                drift = jax.tree.map(
                    jnp.subtract, averaging.params(received), averaging.params(y)
                )
                new = jax.tree.map(
                    lambda d, x: d / (jnp.maximum(count, 1) * task.lr) - x,
                    drift,
                    correction,
                )
            new = trees.choose(
                count > 0, optax.tree.cast_like(new, mine["c"]), mine["c"]
            )
            change = jax.tree.map(jnp.subtract, new, mine["c"])
            shared, own = split.send(y)
            post = evaluation.post(cohort, c, averaging.predictor(task.model, y))
            return {"w": shared, "c": change}, {"c": new, "own": own}, value, post

        last = state.server["w"]
        here = cohort.trained
        weight = cohort.sizes if weights == "data" else here
        default = {"w": last, "c": jax.tree.map(jnp.zeros_like, control)}
        mean, (mine, value, post) = cohort.mean(
            client, state.clients, weight=weight, default=default
        )
        # |S| / N
        part = jnp.sum(weight) / (
            cohort.total if weights == "data" else task.num_clients
        )
        moved = trees.lerp(
            server_lr, averaging.params(mean["w"]), averaging.params(last)
        )
        w = {**mean["w"], **trees.choose(jnp.any(here), moved, averaging.params(last))}
        server = {
            "w": w,
            "c": optax.tree.cast_like(
                jax.tree.map(lambda c, d: c + part * d, control, mean["c"]), control
            ),
        }
        return State(server, mine), Metrics(value, post)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return averaging.predictor(task.model, split.receive(server["w"], mine["own"]))

    return Algorithm(init, round, predict, evaluation.classification, averages=("w",))
