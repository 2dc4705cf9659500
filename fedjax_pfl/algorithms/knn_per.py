"""kNN-Per: FedAvg whose clients mix the global model's prediction with that of the
nearest of their own examples.

Reference: Marfoq et al., Personalized federated learning through local memorization
(ICML 2022), Algorithm 1; authors' code: omarfoq/knn-per.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Gt, Interval
from chex import Numeric

from fedjax_pfl import averaging, evaluation, local_training
from fedjax_pfl.algorithms.registry import ROW_TARGETS, register
from fedjax_pfl.types import (
    Array,
    Client,
    Method,
    Predictor,
    PyTree,
    Task,
    Update,
)


def neighbours(
    h: Array, store: tuple[Array, Array], k: int, scale: Numeric, classes: int
) -> Array:
    """Returns the nearest neighbours' share of each class [B, C] for features h [B, K].

    The k nearest of the datastore have the weights exp(-||h - h_j||^2 / (K scale)).
    """
    features, labels = store
    product = jnp.dot(h, features.T, precision=jax.lax.Precision.HIGHEST)
    square = lambda x: jnp.sum(x * x, axis=1)
    d2 = jnp.maximum(square(h)[:, None] + square(features)[None] - 2 * product, 0)
    d2 = jnp.where(labels[None] >= 0, d2, jnp.inf)
    near, index = jax.lax.top_k(-d2, min(k, len(labels)))
    # A softmax: far from all examples the weights would underflow together.
    near = near / (h.shape[1] * scale)
    weight = jnp.exp(near - jnp.where(near[:, :1] > -jnp.inf, near[:, :1], 0))
    votes = weight[:, :, None] * jax.nn.one_hot(labels[index], classes)
    total = jnp.sum(weight, axis=1, keepdims=True)
    return jnp.sum(votes, axis=1) / jnp.where(total > 0, total, 1)


@register("knn_per", excludes={"positions": ROW_TARGETS}, trainings=1)
def knn_per(
    task: Task,
    *,
    k: Annotated[int, Interval(ge=1, le=10_000)] = 10,
    lam: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    scale: Annotated[float, Gt(0)] = 1.0,
) -> Method:
    """Predicts by lam p_kNN + (1 - lam) p_global, p_kNN the weighted vote of the k
    nearest training examples in the space of features.

    Args:
      k: neighbours in [1, 10000], at most all of the client's examples; 10 as in the
        paper. The authors' scripts for CIFAR take 7.
      lam: weight of the neighbours (λ) in [0, 1]; 0.5. The paper tunes it per client on
        validation examples. With 0 it is FedAvg.
      scale: of the kernel (σ) in (0, inf); 1 as in the authors' code.

    Note:
      The kernel is that of the authors' code, exp(-d^2 / (K scale)) for K features. The
      datastore holds all training examples of the client, and is built anew for every
      prediction. A client without examples predicts by the global model. The outputs
      are probabilities. `global_acc` scores the global model.
    """
    sgd, split = local_training.bind(task), averaging.split(task)
    batch_size = evaluation.pass_size(task.sizes)

    def predictor(c: Client, w: PyTree) -> Predictor:
        # The datastore of the training examples.
        def features(batch):
            return c.model.features(w, batch.x, mask=batch.mask, train=False)[0]

        width = c.model.num_features
        store = local_training.collect(c.train, features, width, batch_size)
        share = jnp.where(c.train.size > 0, lam, 0)

        def predict(x, mask):
            h, _ = c.model.features(w, x, mask=mask, train=False)
            p = jax.nn.softmax(c.model.head(w["head"], h))
            near = neighbours(h, store, k, scale, task.num_classes)
            return jnp.stack([share * near + (1 - share) * p, p], axis=-1)

        return predict

    def client(c, server, own):
        w, value = sgd(c, split.receive(server, own))
        upload, own = split.send(w)
        return Update(upload, own, predictor(c, w), value)

    def predict(server, own, c):
        return predictor(c, split.receive(server, own))

    return averaging.from_client(
        split.init,
        client,
        predict,
        score=averaging.score_paired,
        averages=averaging.BODY_AND_HEAD,
    )
