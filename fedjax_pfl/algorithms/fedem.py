"""FedEM: every client's data are a mixture of M distributions that all share; a client
learns its mixing weights.

Reference: Marfoq et al., Federated multi-task learning under a mixture of distributions
(NeurIPS 2021), Algorithm 1; authors' code: omarfoq/FedEM.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Interval

from fedjax_pfl import averaging, evaluation, local_training, losses, trees
from fedjax_pfl.algorithms.registry import OWN_LOSS, READS_LABELS, ROW_TARGETS, register
from fedjax_pfl.types import (
    Array,
    Batch,
    Data,
    Method,
    Predictor,
    PyTree,
    State,
    Task,
    Update,
)

TINY = 1e-30  # a weight that has underflowed to zero has a logarithm


def losses_of_rows(task: Task, components: PyTree, batch: Batch) -> Array:
    """Returns the cross entropy of every row under every component, in evaluation
    mode, [B, M]."""

    def one(theta):
        logits = averaging.predictor(task.model, theta)(batch.x, batch.mask)
        return losses.cross_entropy_of_rows(logits, batch.y)

    return jax.lax.map(one, components).T  # [M, B] -> [B, M]


def responsibilities(pi: Array, loss: Array) -> Array:
    """Computes the probability of each component for each row: q [B, M] proportional
    to pi exp(-loss), of pi [M] and loss [B, M]."""
    return jax.nn.softmax(jnp.log(jnp.maximum(pi, TINY))[None] - loss, axis=1)


def e_step(
    task: Task, components: PyTree, pi: Array, data: Data
) -> tuple[Array, Array]:
    """Returns the responsibilities of a client's rows [length, M], and its new
    mixing weights [M], their mean."""
    shape = (data.index.shape[0], len(pi))
    # small enough that a short client is not padded many times
    batch_size = evaluation.batch_size(task.sizes.max() / 4)

    def summed(batch):
        q = responsibilities(pi, losses_of_rows(task, components, batch))
        q = jnp.where(batch.mask[:, None], q, 0)
        return jnp.zeros(shape, q.dtype).at[batch.row].add(q), jnp.sum(q, axis=0)

    q, total = local_training.sweep(data, summed, batch_size)
    return q, jnp.where(data.size > 0, total / jnp.maximum(data.size, 1), pi)


def mixture(task: Task, components: PyTree, pi: Array) -> Predictor:
    """Returns the logarithm of sum_m pi(m) softmax(h_m(x)), which serves as logits."""

    def predict(x, mask):
        log_p = jax.lax.map(
            lambda theta: jax.nn.log_softmax(
                averaging.predictor(task.model, theta)(x, mask)
            ),
            components,
        )  # [M, B, C]
        return jax.nn.logsumexp(
            log_p + jnp.log(jnp.maximum(pi, TINY))[:, None, None], axis=0
        )

    return predict


@register(
    "fedem", excludes={"loss": OWN_LOSS, "mix": READS_LABELS, "positions": ROW_TARGETS}
)
def fedem(
    task: Task,
    *,
    components: Annotated[int, Interval(ge=1, le=100)] = 3,
) -> Method:
    """Trains M models on all examples, each weighted by how likely the model made it,
    and averages them as FedAvg does.

    Args:
      components: models that the clients share (M) in [1, 100]; 3 as in the paper.

    Note:
      The components begin differently, the first as FedAvg's model; all see the same
      batches. A step divides by the batch's size, not by the sum of responsibilities.
      The prediction mixes probabilities, with the weights of the client's last E-step,
      and the reported loss is the components' weighted sum. Components are trained one
      after another, clients in parallel.
    """
    model, split = task.model, averaging.split(task)
    sgd = local_training.bind(task)

    def init(key):
        keys = [key, *(jax.random.fold_in(key, m) for m in range(1, components))]
        theta = jax.tree.map(lambda *x: jnp.stack(x), *map(model.init, keys))
        shared, own = split.send(theta)
        row = {"pi": jnp.full(components, 1 / components, jnp.float32), "own": own}
        return State(shared, trees.replicate(row, task.num_clients))

    def m_step(c, theta, q):
        # Trains one component on its responsibilities q [length].
        def loss(w, batch, key):
            logits, stats = model.apply(
                w, batch.x, mask=batch.mask, train=True, key=key
            )
            each = losses.cross_entropy_of_rows(logits, batch.y)
            return losses.masked_mean(q[batch.row] * each, batch.mask), stats

        return sgd(c, theta, loss=loss)

    def client(c, server, row):
        theta = split.receive(server, row["own"])
        q, pi = e_step(task, theta, row["pi"], c.train)
        theta, value = jax.lax.map(lambda given: m_step(c, *given), (theta, q.T))
        upload, own = split.send(theta)
        predict = mixture(task, theta, pi)
        return Update(upload, {"pi": pi, "own": own}, predict, jnp.sum(value))

    def predict(server, row, c):
        theta = split.receive(server, row["own"])
        return mixture(task, theta, row["pi"])

    averages = averaging.BODY_AND_HEAD
    return averaging.from_client(init, client, predict, averages=averages)
