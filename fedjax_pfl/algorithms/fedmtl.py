"""FedMTL: each client trains its own model under a penalty on the sum of all models.

Reference: the penalty that TsingZ0/PFLlib writes under this name, after Smith et al.,
Federated multi-task learning (NeurIPS 2017). The authors' method is `mocha`.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_pfl import evaluation, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import Algorithm, Metrics, State, Task


@register("fedmtl", targets=True)
def fedmtl(
    task: Task, *, variant: Literal["gradient", "pfllib"] = "gradient"
) -> Algorithm:
    """Adds 10^-f (||w||^2 + omega^2 ||w + s_i||^2) to the loss of client i, s_i the sum
    of the other participants' models.

    Here omega = 1 - 1/S for S participants and f = floor(log10(Z) + 1) + 1 for Z
    parameters, so that the penalty is small.

    Args:
      variant: of the penalty, gradient or pfllib; pfllib's has no gradient, so that
        it is Local.

    Note:
      The participants' models are those before the round. The relations of the tasks
      are not learned: in PFLlib the matrix Omega is constant. Running statistics stay
      with the client. The reported loss is without the penalty.
    """
    sgd = local_training.bind(task)
    size = trees.size(params(jax.eval_shape(task.model.init, jax.random.key(0))))
    scale = 10.0 ** -(math.floor(math.log10(size) + 1) + 1)
    scale = scale if variant == "gradient" else 0.0

    def init(key):
        return State((), trees.replicate(task.model.init(key), task.num_clients))

    def round(key, state, cohort):
        count = jnp.sum(cohort.trained)
        omega = 1 - 1 / jnp.maximum(count, 1)
        zeros = jax.tree.map(jnp.zeros_like, trees.gather(state.clients, 0))
        mean, _ = cohort.mean(
            lambda c, w: (params(w),),
            state.clients,
            weight=cohort.trained,
            default=params(zeros),
            phase=None,
        )

        def client(c, w):
            others = jax.tree.map(lambda m, x: count * m - x, mean, params(w))

            # The gradient of the penalty.
            def extra(v):
                return jax.tree.map(
                    lambda x, s: 2 * scale * (x + omega**2 * (x + s)), v, others
                )

            w, value = sgd(c, w, extra=extra)
            post = evaluation.post(cohort, c, predictor(c.model, w))
            return w, value, post

        w, value, post = cohort.map(client, state.clients)
        return State((), w), Metrics(value, post)

    def predict(server, w, c):
        return predictor(c.model, w)

    def sent(state, cohort, metrics):
        return traffic.both_ways(cohort, size)

    return Algorithm(
        init,
        round,
        predict,
        evaluation.classification,
        sent,
        no_unseen="its penalty is on the sum of the models of a round",
    )
