"""CFL: clusters of clients, each with a model, are split in two where the updates of
their clients disagree.

Reference: Sattler et al., Clustered federated learning: model-agnostic distributed
multitask optimization under privacy constraints (TNNLS 2021); authors' code:
felisat/clustered-federated-learning.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import Algorithm, Array, Metrics, Stage, State, Task

NEVER = -2.0  # below every cosine


def bipartition(cosine: Array, member: Array) -> Array:
    """Returns which clients [N] of a cluster go to its other half: the split whose
    largest similarity across the halves is least.

    Args:
      cosine: [N, N], symmetric.
      member: [N] bool; the half without the first member is returned.
    """
    pairs = member[:, None] & member[None]
    # The best path's weakest link: the cut of a maximum spanning tree.
    link = jnp.where(pairs, cosine, NEVER)
    link = jnp.where(jnp.eye(len(link), dtype=bool), jnp.inf, link)

    def through(k, link):
        return jnp.maximum(link, jnp.minimum(link[:, k][:, None], link[k][None]))

    link = jax.lax.fori_loop(0, len(link), through, link)
    weakest = jnp.min(jnp.where(pairs, link, jnp.inf))
    return member & (link[jnp.argmax(member)] <= weakest)


def split_clusters(cluster: Array, cosine: Array, divide: Array) -> Array:
    """Returns the clusters [N], named by their first client, after those of the clients
    `divide` [N] bool are split."""

    def one(name, found):
        member = cluster == name
        half = bipartition(cosine, member) & divide[name] & jnp.any(member)
        return jnp.where(half, jnp.argmax(half).astype(found.dtype), found)

    return jax.lax.fori_loop(0, len(cluster), one, cluster)


@register("cfl", targets=True)
def cfl(
    task: Task,
    *,
    eps1: Annotated[float, Ge(0)] = 0.4,
    eps2: Annotated[float, Ge(0)] = 1.6,
    first: Annotated[int, Interval(ge=0, le=100_000)] = 20,
    smallest: Annotated[int, Interval(ge=1, le=100_000)] = 2,
) -> Algorithm:
    """Adds the mean update of its cluster to the model of every client; splits a
    cluster where ||mean update|| < eps1 and max ||update|| > eps2.

    Args:
      eps1: bound of the norm of the mean update (ε1) in [0, inf); 0.4 as in the
        authors' code.
      eps2: bound of the largest norm (ε2) in [0, inf); 1.6 as there.
      first: rounds in [0, 100000] before the first split; 20 as there. A run of no more
        rounds has one cluster, and a warning.
      smallest: clusters of so many clients or fewer, in [1, 100000], are not split; 2
        as there.

    Note:
      The bipartition is the exact one of the paper; the authors' code has complete
      linkage. Only the clients that train in a round are compared, and a cluster is
      split only if all its clients do; those that are absent receive its update, too.
      Running statistics are averaged as the models are. The bounds are of absolute
      norms, so they depend on the network and the learning rate.
    """
    sgd, split, n = local_training.bind(task), averaging.split(task), task.num_clients

    def init(key):
        state = split.init(key)
        cluster = jnp.zeros(n, jnp.int32)
        server = {"w": trees.replicate(state.server, n), "cluster": cluster}
        return State(server, state.clients)

    def divided(update, here, cluster, t):
        # The clusters after this round's splits.
        product = trees.gram(params(update), params(update))
        norm = jnp.sqrt(jnp.maximum(jnp.diag(product), 0))
        cosine = product / jnp.maximum(norm[:, None] * norm[None], 1e-12)
        same = cluster[:, None] == cluster[None]
        weight = same / jnp.sum(same, axis=1, keepdims=True)
        mean = jnp.sqrt(jnp.maximum(jnp.sum((weight @ product) * weight, axis=1), 0))
        largest = jnp.max(jnp.where(same, norm[None], 0), axis=1)
        big = jnp.sum(same, axis=1) > smallest
        whole = jnp.all(~same | here[None], axis=1)
        divide = (mean < eps1) & (largest > eps2) & big & whole & (t >= first)
        return split_clusters(cluster, cosine, divide)

    def round(key, state, cohort):
        table, cluster = state.server["w"], state.server["cluster"]

        def client(c, shared, own):
            w, value = sgd(c, split.receive(shared, own))
            post = evaluation.post(cohort, c, predictor(c.model, w))
            sent, own = split.send(w)
            return jax.tree.map(jnp.subtract, sent, shared), own, value, post

        start = trees.gather(table, cohort.ids)
        update, own, value, post = cohort.map(client, start, state.clients)
        zeros = jax.tree.map(jnp.zeros_like, table)
        update = trees.scatter(zeros, cohort.ids, update, cohort.trained)
        here = jnp.zeros(n, bool).at[cohort.ids].set(cohort.trained)
        cluster = divided(update, here, cluster, cohort.round)
        # The mean update of each cluster, over its clients that train.
        a = (cluster[:, None] == cluster[None]) & here[None]
        a = a / jnp.maximum(jnp.sum(a, axis=1, keepdims=True), 1)

        def add(w, d):
            mean = jnp.tensordot(a, d, 1, precision=jax.lax.Precision.HIGHEST)
            return (w + mean).astype(w.dtype)

        table = jax.tree.map(add, table, update)
        count = jnp.sum(cluster == jnp.arange(n))
        server = {"w": table, "cluster": cluster}
        return State(server, own), Metrics(value, post, {}, {"clusters": count})

    def predict(server, own, c):
        return predictor(c.model, split.receive(trees.gather(server["w"], c.id), own))

    def sent(state, cohort, metrics):
        return traffic.both_ways(cohort, trees.size(state.server["w"]) // n)

    return Algorithm(
        init,
        round,
        predict,
        evaluation.classification,
        sent,
        stages=(Stage(first, "no cluster is split"),),
    )
