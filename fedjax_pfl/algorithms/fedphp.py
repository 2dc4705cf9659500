"""FedPHP: a client inherits a moving average of its trained models, which teaches the
received one the next time.

Reference: Li et al., FedPHP: federated personalization with inherited private models
(ECML PKDD 2021), Algorithm 1.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Interval
from chex import Numeric

from fedjax_pfl import averaging, evaluation, local_training, losses, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import beside, score_beside
from fedjax_pfl.errors import needed
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

TEMPERATURE = 4.0  # of the teacher in distillation, as in the authors' code


def momentum(count: Array, mu0: Numeric, expected: float) -> Array:
    """The weight mu [] of the old h_i after `count` [] participations, growing to mu0
    over the `expected` ones."""
    return mu0 * jnp.minimum(1, count / max(1.0, expected))


def transfer_loss(
    task: Task, teacher: PyTree, lam: Numeric, regularizer: str
) -> local_training.Loss:
    """(1 - lam) cross entropy + lam R(w, teacher), as `local_training.sgd` takes it;
    the teacher does not move.

    Args:
      regularizer: mmd (of the features), kd (the teacher's softened predictions).
    """
    model = task.model

    def loss(w: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        h, stats = model.features(w, batch.x, mask=batch.mask, train=True, key=key)
        taught, _ = model.features(teacher, batch.x, mask=batch.mask, train=False)
        z = model.head(w["head"], h)
        if regularizer == "mmd":
            r = losses.mmd(h, taught, batch.mask)
        else:
            p = jax.nn.softmax(model.head(teacher["head"], taught) / TEMPERATURE)
            r = losses.masked_mean(
                -jnp.sum(p * jax.nn.log_softmax(z), axis=1), batch.mask
            )
        return (1 - lam) * losses.cross_entropy(z, batch.y, batch.mask) + lam * r, stats

    return loss


@register("fedphp")
def fedphp(
    task: Task,
    *,
    lam: Annotated[float, Interval(ge=0, le=1)] = 0.01,
    mu0: Annotated[float, Interval(ge=0, le=1)] = 0.9,
    regularizer: Literal["mmd", "kd"] = "mmd",
) -> Algorithm:
    """Trains the received model with h_i as its teacher, then moves h_i to mu h_i + (1
    - mu) w_i.

    Args:
      lam: weight of the teacher (λ) in [0, 1]; 0.01 as PFLlib's maintainer advises,
        0.05 to 0.1 in the authors' code.
      mu0: the largest weight (μ) of the old h_i in [0, 1]; 0.9 as in the paper.
      regularizer: what w is taught, one of mmd (features), kd (predictions).

    Note:
      mu = mu0 min(1, z_i / (expected participations in all rounds)), z_i the
      participations before this round, as in the authors' code: the first h_i is w_i,
      and a run's number of rounds is part of the method (PFLlib: mu0 t / T). A client
      that takes no step (with `drop_last`, one without a whole batch) inherits nothing,
      and its round is not counted. The MMD has PFLlib's fixed bandwidths
      (`losses.mmd`); the authors scale theirs by the batch's mean distance, and clip
      gradients, which `--clip` does here. The teacher predicts as in a test, by its
      running statistics, which are averaged as its parameters are. `acc` scores h_i,
      `global_acc` the received model before local training and the trained w_i after
      it, as PFLlib does now. PFLlib when FedCP's tables were made (its revisions of
      2022 and 2023) trained another method, which has no score here: a client began
      with (1 - mu) times the received model plus mu times its last one, of which
      accuracy was taken before training, and the received model was the teacher. The
      reported loss is the weighted sum.
    """
    split = averaging.split(task)
    rounds = needed("rounds", task.rounds, "which its mixing weight follows")
    expected = sum(task.participation) / 2 * rounds

    def init(key: Array) -> State:
        return split.init(key, lambda w: {"h": w, "count": jnp.zeros((), jnp.int32)})

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            w, loss = (
                split.receive(state.server, mine["own"]),
                transfer_loss(task, mine["h"], lam, regularizer),
            )
            w, value = local_training.sgd(c.key, c.train, loss, w, task)
            h = trees.lerp(momentum(mine["count"], mu0, expected), mine["h"], w)
            # else w is the received model, nothing of its own
            learned = local_training.count(c.train, task) > 0
            h, count = trees.choose(learned, h, mine["h"]), mine["count"] + learned
            post = evaluation.post(cohort, c, beside(task.model, h, w), score_beside)
            shared, own = split.send(w)
            return shared, {"h": h, "count": count, "own": own}, value, post

        w, (mine, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        return State(w, mine), Metrics(value, post)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return beside(task.model, mine["h"], split.receive(server, mine["own"]))

    return Algorithm(
        init, round, predict, score_beside, averages=averaging.BODY_AND_HEAD
    )
