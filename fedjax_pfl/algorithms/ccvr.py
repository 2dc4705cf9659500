"""CCVR: FedAvg whose head is retrained at the server on features drawn from Gaussians,
one per class.

Reference: Luo et al., No fear of heterogeneity: classifier calibration for federated
learning with non-IID data (NeurIPS 2021), Algorithm 1.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, keys, local_training, traffic, trees
from fedjax_pfl.algorithms.prototypes import descend, head_loss
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.types import Algorithm, Array, Metrics, State, Task


class Draw(keys.Stream):
    """Streams below the server's key."""

    FEATURES = 50, "features of the Gaussians"
    ORDER = 51, "the order of the features"


def covariance(first: Array, second: Array, count: Array) -> Array:
    """Returns the covariances [K, K, C] of the classes' features over all clients, of
    their means [K, C], E[h h^T] [K, K, C] and numbers [C]; 0 for a class with fewer
    than two."""
    spread = second - first[:, None] * first[None]
    factor = jnp.where(count > 1, count / jnp.maximum(count - 1, 1), 0)
    return spread * factor[None, None]


def gaussian(key: Array, mean: Array, cov: Array, samples: int) -> Array:
    """Returns features [samples, K, C] of the classes' Gaussians."""
    # one after another: a batch of LAPACK's decompositions hangs XLA's CPU client after
    # convolutions (JAX 0.10)
    values, vectors = jax.lax.map(jnp.linalg.eigh, cov.transpose(2, 0, 1))
    # Eigenvalues that are rounding have no direction, and equal ones many: the
    # symmetric root does not depend on the choice.
    values = jnp.where(values > 1e-5 * values[:, -1:], values, 0)
    root = jnp.einsum(
        "cik,ck,cjk->cij",
        vectors,
        jnp.sqrt(values),
        vectors,
        precision=jax.lax.Precision.HIGHEST,
    )
    noise = jax.random.normal(key, (samples, *mean.T.shape), jnp.float32)
    moved = jnp.einsum("mck,cjk->mjc", noise, root, precision=jax.lax.Precision.HIGHEST)
    return mean[None] + moved


@register("ccvr")
def ccvr(
    task: Task,
    *,
    samples: Annotated[int, Interval(ge=1, le=100_000)] = 200,
    server_epochs: Annotated[int, Interval(ge=1, le=10_000)] = 1,
    server_lr: Annotated[float, Ge(0)] = 0.1,
) -> Algorithm:
    """Averages the models, then the class means and covariances of the global model's
    features, and retrains the head on `samples` virtual features per class.

    Training goes on from the averaged head; the calibrated one predicts.

    Args:
      samples: virtual features per class (M_c) in [1, 100000]; 200 as in FL-bench.
      server_epochs: passes over the virtual features in [1, 10000]; 1 as in FL-bench.
      server_lr: step size of the head in [0, inf). With 0 it is FedAvg. FL-bench takes
        the clients', 0.01 by default.

    Note:
      The authors published no code. The paper calibrates once, after all rounds, with
      the features of all clients. Here it is after every round, so that each evaluation
      sees it, with the features of the round's clients: all clients under full
      participation. They receive the averaged model a second time, which `traffic`
      counts. The covariance over these clients is the unbiased one. A class with fewer
      than two examples has no virtual features. `global_acc` scores the averaged head.
      Running the eigendecomposition costs C K^3.
    """
    model, split = task.model, averaging.split(task)
    sgd, batch_size = local_training.bind(task), evaluation.pass_size(task.sizes)
    classes, width = task.num_classes, task.model.num_features

    def init(key):
        state = split.init(key)
        head = model.init(key)["head"]
        return State({"w": state.server, "head": head}, state.clients)

    def moments(c, w):
        # The class means [K, C] of h, and those of h h^T [K, K, C].
        def values(batch):
            h, _ = model.features(w, batch.x, mask=batch.mask, train=False)
            square = (h[:, :, None] * h[:, None]).reshape(len(h), -1)
            return jnp.concatenate([h, square], axis=1)

        both = local_training.class_means(c.train, values, classes, batch_size)
        return both[:width], both[width:].reshape(width, width, classes)

    def calibrate(key, head, first, second, count):
        cov = covariance(first, second, count)
        h = gaussian(keys.fold(key, Draw.FEATURES), first, cov, samples)
        shape = (samples, classes)
        draw = jax.random.uniform(keys.fold(key, Draw.ORDER), shape, jnp.float32)
        return descend(
            lambda head, h, y, mask: head_loss(model, head, h, y, mask),
            head,
            h,
            jnp.broadcast_to((count > 1)[None], shape),
            draw,
            epochs=server_epochs,
            batch_size=task.batch_size,
            lr=server_lr,
        )

    def round(key, state, cohort):
        server = state.server

        def client(c, own):
            w, value = sgd(c, split.receive(server["w"], own))
            predict = averaging.paired(c.model, w, w)
            post = evaluation.post(cohort, c, predict, averaging.score_paired)
            upload, own = split.send(w)
            return upload, own, value, post

        w, (own, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=server["w"]
        )
        # Means and second moments of the global model's features.
        zeros = (
            jnp.zeros((width, classes), jnp.float32),
            jnp.zeros((width, width, classes), jnp.float32),
        )
        (first, second), _ = cohort.mean(
            lambda c, own: (moments(c, split.receive(w, own)),),
            own,
            weight=cohort.class_counts,
            default=zeros,
            phase=None,
        )
        count = jnp.sum(cohort.class_counts, axis=0)
        head = calibrate(key, w["head"], first, second, count)
        head = trees.choose(jnp.any(cohort.trained), head, server["head"])
        return State({"w": w, "head": head}, own), Metrics(value, post)

    def predict(server, own, c):
        w = split.receive(server["w"], own)
        return averaging.paired(c.model, w | {"head": server["head"]}, w)

    def sent(state, cohort, metrics):
        # Down the model before and after it is averaged.
        size = trees.size(state.server["w"])
        up = size + classes * (width + width**2)
        return traffic.both_ways(cohort, 2 * size, up)

    return Algorithm(init, round, predict, averaging.score_paired, sent)
