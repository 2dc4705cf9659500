"""MOON: FedAvg whose features are drawn to those of the global model and away from
those of the client's previous model.

Reference: Li et al., Model-contrastive federated learning (CVPR 2021), Algorithm 1;
authors' code: QinbinLi/MOON.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt

from fedjax_pfl import averaging, local_training, losses
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.types import Array, Method, Task, Update

TINY = 1e-8  # least norm of a feature vector, as in PyTorch's cosine similarity


def cosine(a: Array, b: Array) -> Array:
    """Returns the cosine similarity [B] of features a and b [B, K]."""
    norm = lambda h: jnp.sqrt(jnp.maximum(jnp.sum(h * h, axis=1), TINY**2))
    return jnp.sum(a * b, axis=1) / (norm(a) * norm(b))


@register("moon", targets=True, trainings=1)
def moon(
    task: Task,
    *,
    mu: Annotated[float, Ge(0)] = 1.0,
    tau: Annotated[float, Gt(0)] = 0.5,
) -> Method:
    """Adds mu times the contrastive loss -log(e^(s_glob / tau) / (e^(s_glob / tau) +
    e^(s_prev / tau))) to the cross entropy.

    s_glob and s_prev are the cosine similarities of the features with those of the
    received model and of the client's model after its last round.

    Args:
      mu: weight of the contrastive loss (μ) in [0, inf); 1 as the paper has it for
        CIFAR-100 and Tiny-ImageNet (5 for CIFAR-10, of the grid 0.1, 1, 5, 10).
      tau: temperature (τ) in (0, inf); 0.5 as in the paper.

    Note:
      The features are those before the last layer, as in PFLlib; the paper adds a
      projection head of two layers. Before its first round a client's previous model is
      the initial one. Both other models use their running statistics.
    """
    sgd, split = local_training.bind(task), averaging.split(task)

    def init(key):
        return split.init(key, lambda w: {"previous": w})

    def client(c, server, row):
        received = split.receive(server, row["own"])

        def features(w, batch):
            return c.model.features(w, batch.x, mask=batch.mask, train=False)[0]

        def loss(w, batch, key):
            h, stats = c.model.features(
                w, batch.x, mask=batch.mask, train=True, key=key
            )
            value = losses.of(task)(c.model.head(w["head"], h), batch.y, batch.mask)
            near = cosine(h, features(received, batch)) / tau
            away = cosine(h, features(row["previous"], batch)) / tau
            contrast = losses.masked_mean(jax.nn.softplus(away - near), batch.mask)
            return value + mu * contrast, stats

        w, value = sgd(c, received, loss=loss)
        upload, own = split.send(w)
        predict = averaging.predictor(c.model, w)
        return Update(upload, {"previous": w, "own": own}, predict, value)

    def predict(server, row, c):
        return averaging.predictor(c.model, split.receive(server, row["own"]))

    averages = averaging.BODY_AND_HEAD
    return averaging.from_client(init, client, predict, averages=averages)
