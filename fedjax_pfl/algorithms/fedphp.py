"""FedPHP: a client keeps a moving average of its trained models, which teaches the
received model in the next round.

Reference: Li et al., FedPHP: federated personalization with inherited private models
(ECML PKDD 2021), Algorithm 1; authors' code: lxcnju/FedRepo.
"""

from typing import Annotated

import jax.numpy as jnp
from annotated_types import Interval
from chex import Numeric

from fedjax_pfl import averaging, local_training, losses, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.errors import needed
from fedjax_pfl.types import Array, Method, PyTree, Task, Update


def momentum(count: Array, mu0: Numeric, expected: float) -> Array:
    """Returns the weight mu [] of the old h_i after `count` [] participations, which
    grows to mu0 over the `expected` ones."""
    return mu0 * jnp.minimum(1, count / max(1.0, expected))


def transfer_loss(task: Task, teacher: PyTree, lam: Numeric) -> local_training.Loss:
    """Returns the loss (1 - lam) cross entropy + lam MMD between the features of w and
    of the teacher."""
    model = task.model

    def loss(w, batch, key):
        h, stats = model.features(w, batch.x, mask=batch.mask, train=True, key=key)
        taught, _ = model.features(teacher, batch.x, mask=batch.mask, train=False)
        z = model.head(w["head"], h)
        r = losses.mmd(h, taught, batch.mask)
        return (1 - lam) * losses.of(task)(z, batch.y, batch.mask) + lam * r, stats

    return loss


@register("fedphp", targets=True, trainings=1)
def fedphp(
    task: Task,
    *,
    lam: Annotated[float, Interval(ge=0, le=1)] = 0.01,
    mu0: Annotated[float, Interval(ge=0, le=1)] = 0.9,
) -> Method:
    """Trains the received model with h_i as its teacher, then moves h_i to mu h_i + (1
    - mu) w_i.

    Args:
      lam: weight of the teacher (λ) in [0, 1]; 0.01 as PFLlib's maintainer advises,
        0.05 to 0.1 in the authors' code.
      mu0: the largest weight (μ) of the old h_i in [0, 1]; 0.9 as in the paper.

    Note:
      mu = mu0 min(1, z_i / (expected participations in all rounds)), z_i the
      participations before this round, as in the authors' code (PFLlib: mu0 t / T). The
      first h_i is w_i. A client that takes no step (with `drop_last`, one without a
      whole batch) keeps its h_i and its count. The paper's variant that distils the
      predictions of h_i is not built. The MMD has PFLlib's fixed bandwidths
      (`losses.mmd`); the authors scale theirs by the batch's mean distance, and clip
      gradients (`--clip`).
      The teacher uses its running statistics, which are averaged as its parameters are.
      `acc` scores h_i, `global_acc` the received model before local training and the
      trained w_i after it. The reported loss is the weighted sum.
    """
    split, sgd = averaging.split(task), local_training.bind(task)
    rounds = needed("rounds", task.rounds, "which its mixing weight follows")
    expected = sum(task.participation) / 2 * rounds

    def init(key):
        return split.init(key, lambda w: {"h": w, "count": jnp.zeros((), jnp.int32)})

    def client(c, server, row):
        w = split.receive(server, row["own"])
        w, value = sgd(c, w, loss=transfer_loss(task, row["h"], lam))
        h = trees.lerp(momentum(row["count"], mu0, expected), row["h"], w)
        # Without a step w is the received model.
        learned = local_training.count(c.train, task) > 0
        h, count = trees.choose(learned, h, row["h"]), row["count"] + learned
        upload, own = split.send(w)
        predict = averaging.paired(c.model, h, w)
        return Update(upload, {"h": h, "count": count, "own": own}, predict, value)

    def predict(server, row, c):
        return averaging.paired(c.model, row["h"], split.receive(server, row["own"]))

    return averaging.from_client(
        init,
        client,
        predict,
        score=averaging.score_paired,
        averages=averaging.BODY_AND_HEAD,
    )
