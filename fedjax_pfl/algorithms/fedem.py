"""FedEM: every client's data are a mixture of M distributions that all share; a client
learns its mixing weights.

Reference: Marfoq et al., Federated multi-task learning under a mixture of distributions
(NeurIPS 2021), Algorithm 1.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval

from fedjax_pfl import averaging, evaluation, local_training, losses, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Cohort,
    Data,
    Metrics,
    Predictor,
    PyTree,
    State,
    Task,
)

TINY = 1e-30  # a weight that has underflowed to zero has a logarithm


def losses_of_rows(task: Task, components: PyTree, batch: Batch) -> Array:
    """The cross entropy of every row under every component, in evaluation mode, [B,
    M]."""

    def one(theta: PyTree) -> Array:
        logits = averaging.predictor(task.model, theta)(batch.x, batch.mask)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch.y)

    return jax.lax.map(one, components).T  # [M, B] -> [B, M]


def responsibilities(pi: Array, loss: Array) -> Array:
    """How likely each component made each row: q [B, M] proportional to pi exp(-loss),
    of pi [M] and loss [B, M]."""
    return jax.nn.softmax(jnp.log(jnp.maximum(pi, TINY))[None] - loss, axis=1)


def e_step(
    task: Task, components: PyTree, pi: Array, data: Data
) -> tuple[Array, Array]:
    """The responsibilities of a client's rows [length, M], and its new mixing weights
    [M], their mean."""
    shape = (data.index.shape[0], len(pi))
    # small enough that a short client is not padded many times
    batch_size = evaluation.batch_size(task.sizes.max() / 4)

    def summed(batch: Batch) -> tuple[Array, Array]:
        q = responsibilities(pi, losses_of_rows(task, components, batch))
        q = jnp.where(batch.mask[:, None], q, 0)
        return jnp.zeros(shape, q.dtype).at[batch.row].add(q), jnp.sum(q, axis=0)

    q, total = local_training.sweep(data, summed, batch_size)
    return q, jnp.where(data.size > 0, total / jnp.maximum(data.size, 1), pi)


def mixture(task: Task, components: PyTree, pi: Array) -> Predictor:
    """The logarithm of sum_m pi(m) softmax(h_m(x)), which serves as logits."""

    def predict(x: Array, mask: Array) -> Array:
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


@register("fedem")
def fedem(
    task: Task,
    *,
    components: Annotated[int, Interval(ge=1, le=100)] = 3,
    average: Literal["round", "all"] = "round",
    refit: Annotated[int, Interval(ge=0, le=1000)] = 0,
) -> Algorithm:
    """Trains M models on all examples, each weighted by how likely the model made it,
    and averages them as FedAvg does.

    Args:
      components: models that the clients share (M) in [1, 100]; 3 as in the paper.
      average: over one of round (its clients), all (those that were absent count with
        the last model, as in the authors' code).
      refit: E-steps in [0, 1000] before a prediction, which find the weights of a
        client that has never trained.

    Note:
      The components begin differently, the first as FedAvg's model; all see the same
      batches. A step divides by the batch's size, not by the sum of responsibilities.
      The prediction mixes probabilities, with the weights of the client's last E-step,
      and the reported loss is the components' weighted sum. Components are trained one
      after another, clients in parallel.
    """
    model, split = task.model, averaging.split(task)

    def init(key: Array) -> State:
        keys = [key, *(jax.random.fold_in(key, m) for m in range(1, components))]
        theta = jax.tree.map(lambda *x: jnp.stack(x), *map(model.init, keys))
        shared, own = split.send(theta)
        mine = {"pi": jnp.full(components, 1 / components, jnp.float32), "own": own}
        return State(shared, trees.replicate(mine, task.num_clients))

    def m_step(c: Client, theta: PyTree, q: Array) -> tuple[PyTree, Array]:
        """Trains one component on its responsibilities q [length]."""

        def loss(variables: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
            logits, stats = model.apply(
                variables, batch.x, mask=batch.mask, train=True, key=key
            )
            each = optax.losses.softmax_cross_entropy_with_integer_labels(
                logits, batch.y
            )
            return losses.masked_mean(q[batch.row] * each, batch.mask), stats

        return local_training.sgd(c.key, c.train, loss, theta, task)

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            theta = split.receive(state.server, mine["own"])
            q, pi = e_step(task, theta, mine["pi"], c.train)
            theta, value = jax.lax.map(lambda given: m_step(c, *given), (theta, q.T))
            shared, own = split.send(theta)
            return (
                shared,
                {"pi": pi, "own": own},
                jnp.sum(value),
                evaluation.post(cohort, c, mixture(task, theta, pi)),
            )

        mean, (mine, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        if average == "all":
            present = jnp.sum(cohort.sizes) / jnp.maximum(1, cohort.total)
            mean = trees.lerp(present, mean, state.server)
        return State(mean, mine), Metrics(value, post)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        theta, pi = split.receive(server, mine["own"]), mine["pi"]
        pi = jax.lax.fori_loop(
            0, refit, lambda _, pi: e_step(task, theta, pi, c.train)[1], pi
        )
        return mixture(task, theta, pi)

    return Algorithm(
        init,
        round,
        predict,
        evaluation.classification,
        averages=averaging.BODY_AND_HEAD,
    )
