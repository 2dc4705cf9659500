"""FedRoD: a generic head trained with the balanced softmax is averaged, a personal head
beside it corrects its logits.

Reference: Chen & Chao, On bridging generic and personalized federated learning for
image classification (ICLR 2022).
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge
from chex import Numeric

from fedjax_pfl import averaging, evaluation, local_training, losses, optimizers
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


def personal_loss(task: Task, own: PyTree, h: Array, z: Array, batch: Batch) -> Array:
    """Cross entropy of the two heads' sum, with features h [B, K] and generic logits z
    [B, C] held fixed, []."""
    h, z = jax.lax.stop_gradient((h, z))
    return losses.cross_entropy(z + task.model.head(own, h), batch.y, batch.mask)


@register("fedrod")
def fedrod(task: Task, *, gamma: Annotated[float, Ge(0)] = 1.0) -> Algorithm:
    """Trains body and generic head on the balanced loss, and the personal head on the
    sum of both heads' logits.

    Args:
      gamma: exponent of the class counts in the balanced softmax (γ) in [0, inf); 1 as
        in the paper; with 0 body and generic head are FedAvg's.

    Note:
      Both losses of a batch see the same features, those before its step. The personal
      head starts as a copy of the generic one; the paper's variant that generates it by
      a hypernetwork is not built. `global_acc` scores the generic head alone. The
      reported loss is the sum of the two.
    """
    model, split = task.model, averaging.split(task)

    # two optimizers, so that nothing of one head's gradient reaches the other
    def separate(lr: Numeric) -> optax.GradientTransformation:
        return optimizers.per_part(
            {"generic": task.optimizer(lr), "own": task.optimizer(lr)}
        )

    def predictor(variables: PyTree, own: PyTree) -> Predictor:
        def predict(x: Array, mask: Array) -> Array:
            h, _ = model.features(variables, x, mask=mask, train=False)
            z = model.head(variables["head"], h)
            return jnp.stack([z + model.head(own, h), z], axis=-1)

        return predict

    def init(key: Array) -> State:
        return split.init(key, lambda w: {"head": w["head"]})

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            def loss(v: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
                w = {**v["generic"], "stats": v["stats"]}
                h, stats = model.features(
                    w, batch.x, mask=batch.mask, train=True, key=key
                )
                z = model.head(w["head"], h)
                generic = losses.balanced_softmax(
                    z, batch.y, batch.mask, c.class_counts, gamma
                )
                return generic + personal_loss(
                    task, v["own"]["head"], h, z, batch
                ), stats

            w = split.receive(state.server, mine["own"])
            v = {
                "generic": averaging.params(w),
                "own": {"head": mine["head"]},
                "stats": w["stats"],
            }
            apart = task._replace(optimizer=separate)
            v, value = local_training.sgd(
                c.key, c.train, loss, v, apart, train=("generic", "own")
            )
            w, head = {**v["generic"], "stats": v["stats"]}, v["own"]["head"]
            shared, own = split.send(w)
            post = evaluation.post(
                cohort, c, predictor(w, head), averaging.score_beside
            )
            return shared, {"head": head, "own": own}, value, post

        w, (mine, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        return State(w, mine), Metrics(value, post)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return predictor(split.receive(server, mine["own"]), mine["head"])

    return Algorithm(
        init, round, predict, averaging.score_beside, averages=averaging.BODY_AND_HEAD
    )
