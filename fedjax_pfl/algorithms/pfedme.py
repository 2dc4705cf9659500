"""pFedMe: a client's model is the minimiser theta of its loss plus lam/2 ||theta -
w||^2, and w descends that minimum.

Reference: Dinh, Tran & Nguyen, Personalized federated learning with Moreau envelopes
(NeurIPS 2020), Algorithm 1.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, keys, local_training, losses, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import beside, score_beside
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

# theta, its running statistics, the optimizer's state
Inner = tuple[PyTree, PyTree, PyTree]


@register("pfedme")
def pfedme(
    task: Task,
    *,
    inner_steps: Annotated[int, Interval(ge=0, le=10_000)] = 5,
    inner_lr: Annotated[float, Ge(0)] = 0.01,
    lam: Annotated[float, Ge(0)] = 15.0,
    beta: Annotated[float, Ge(0)] = 1.0,
    inner_decay: Annotated[float, Ge(0)] = 0.0,
) -> Algorithm:
    """Per batch approaches theta in K steps from the last theta, then moves w by lr lam
    (w - theta).

    Args:
      inner_steps: K in [0, 10000], steps of theta on each batch; 5 as in the authors'
        code.
      inner_lr: the step size (η_p) in [0, inf) of theta; 0.01 as in the authors'
        command for CIFAR-10 (their default is 0.09).
      lam: weight of the proximal term (λ) in [0, inf); 15 as in the authors' code.
      beta: the server's mixing weight (β) in [0, inf); 1 is the plain average.
      inner_decay: weight decay in [0, inf) of theta; the authors' code has 0.001, the
        paper none.

    Note:
      A round's local work is the task's batches, as in PFLlib (the authors take 20
      batches), of the participants only (the authors' code trains everybody). The
      personal model is theta, kept as it is; in both codes it is an alias of w. Running
      statistics are theta's, also in the global model. `global_acc` scores w. The loss
      is theta's before the last inner step, without the proximal term.
    """
    loss, optimizer = losses.classification(task.model), task.optimizer(inner_lr)
    split = averaging.split(task)

    def approach(
        key: Array, w: PyTree, start: Inner, batch: Batch
    ) -> tuple[Inner, Array]:
        """K steps from (theta, running statistics, optimizer state); also the loss
        before the last of them."""

        def step(i: Array, loop: tuple[Inner, Array]) -> tuple[Inner, Array]:
            (theta, stats, opt), _ = loop
            objective = lambda theta: loss(
                {**theta, "stats": stats}, batch, keys.fold(key, keys.Loss.INNER, i)
            )
            (value, stats), gradient = jax.value_and_grad(objective, has_aux=True)(
                theta
            )
            whole = jax.tree.map(
                lambda g, t, x: g + lam * (t - x) + inner_decay * t, gradient, theta, w
            )
            updates, opt = optimizer.update(whole, opt, theta)
            return (optax.apply_updates(theta, updates), stats, opt), value

        value, _ = loss({**start[0], "stats": start[1]}, batch, key)
        return jax.lax.fori_loop(0, inner_steps, step, (start, value))

    def init(key: Array) -> State:
        return split.init(key, lambda w: {"theta": w})

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def step(key: Array, carry: PyTree, batch: Batch) -> tuple[PyTree, Array]:
            w, inner = carry
            inner, value = approach(key, w, inner, batch)
            moved = jax.tree.map(lambda x, t: x - task.lr * lam * (x - t), w, inner[0])
            return (optax.tree.cast_like(moved, w), inner), value

        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            received = split.receive(state.server, mine["own"])
            w = averaging.params(received)
            start = (w, (w, received["stats"], optimizer.init(w)))
            (w, (theta, stats, _)), value, _ = local_training.work(
                c.key, c.train, step, start, task
            )
            w, theta = {**w, "stats": stats}, {**theta, "stats": stats}
            post = evaluation.post(
                cohort, c, beside(task.model, theta, w), score_beside
            )
            shared, own = split.send(w)
            return shared, {"theta": theta, "own": own}, value, post

        w, (mine, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        parts = [averaging.params(x) for x in (w, state.server)]
        mixed = trees.choose(
            jnp.any(cohort.trained), trees.lerp(beta, *parts), parts[1]
        )
        return State({**w, **mixed}, mine), Metrics(value, post)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return beside(task.model, mine["theta"], split.receive(server, mine["own"]))

    return Algorithm(
        init, round, predict, score_beside, averages=averaging.BODY_AND_HEAD
    )
