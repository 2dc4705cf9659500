"""FedRoD: a shared head trained with the balanced softmax plus a personal head that
adds a logit correction.

Reference: Chen & Chao, On bridging generic and personalized federated learning for
image classification (ICLR 2022).
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge

from fedjax_pfl import averaging, local_training, losses, optimizers
from fedjax_pfl.algorithms.registry import OWN_LOSS, READS_LABELS, register
from fedjax_pfl.types import Array, Batch, Method, PyTree, Task, Update


def personal_loss(task: Task, own: PyTree, h: Array, z: Array, batch: Batch) -> Array:
    """Computes the cross entropy [] of the two heads' sum; features h [B, K] and
    generic logits z [B, C] are constants."""
    h, z = jax.lax.stop_gradient((h, z))
    return losses.cross_entropy(z + task.model.head(own, h), batch.y, batch.mask)


@register("fedrod", excludes={"loss": OWN_LOSS, "mix": READS_LABELS})
def fedrod(task: Task, *, gamma: Annotated[float, Ge(0)] = 1.0) -> Method:
    """Trains body and generic head on the balanced loss, and the personal head on the
    sum of both heads' logits.

    Args:
      gamma: exponent of the class counts in the balanced softmax (γ) in [0, inf); 1 as
        in the paper; with 0 body and generic head are FedAvg's.

    Note:
      Both losses of a batch use the same features, those before its step. The personal
      head starts as a copy of the generic one; the paper's variant that generates it by
      a hypernetwork is not built. `global_acc` scores the generic head alone. The
      reported loss is the sum of the two.
    """
    model, split, parts = task.model, averaging.split(task), ("generic", "own")

    # Two optimizers keep the gradient of one head from the other.
    def separate(lr):
        return optimizers.per_part({part: task.optimizer(lr) for part in parts})

    sgd = local_training.bind(task._replace(optimizer=separate))

    def predictor(variables, own):
        def predict(x, mask):
            h, _ = model.features(variables, x, mask=mask, train=False)
            z = model.head(variables["head"], h)
            return jnp.stack([z + model.head(own, h), z], axis=-1)

        return predict

    def init(key):
        return split.init(key, lambda w: {"head": w["head"]})

    def client(c, server, row):
        def loss(v, batch, key):
            w = {**v["generic"], "stats": v["stats"]}
            h, stats = model.features(w, batch.x, mask=batch.mask, train=True, key=key)
            z = model.head(w["head"], h)
            generic = losses.balanced_softmax(
                z, batch.y, batch.mask, c.class_counts, gamma
            )
            return generic + personal_loss(task, v["own"]["head"], h, z, batch), stats

        w, own = split.receive(server, row["own"]), {"head": row["head"]}
        v = {"generic": averaging.params(w), "own": own, "stats": w["stats"]}
        v, value = sgd(c, v, loss=loss, train=parts)
        w, head = {**v["generic"], "stats": v["stats"]}, v["own"]["head"]
        upload, own = split.send(w)
        return Update(upload, {"head": head, "own": own}, predictor(w, head), value)

    def predict(server, row, c):
        return predictor(split.receive(server, row["own"]), row["head"])

    return averaging.from_client(
        init,
        client,
        predict,
        score=averaging.score_paired,
        averages=averaging.BODY_AND_HEAD,
    )
