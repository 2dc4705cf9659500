"""FedAP: after rounds of FedBN, a client's model is a mixture of all models, weighted
by the similarity of the batch-norm statistics.

Reference: Lu et al., Personalized federated learning with adaptive batchnorm for
healthcare (IEEE Transactions on Big Data, 2022), the variant f-FedAP; authors' code:
microsoft/PersonalizedFL.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Interval
from chex import Numeric

from fedjax_pfl import averaging, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.errors import needed
from fedjax_pfl.types import Array, Method, Metrics, PyTree, Stage, State, Task, Update

NEAREST = 1e-14  # smaller distances count as this one


def layers(stats: PyTree) -> list[tuple[Array, Array]]:
    """Returns the running mean and variance [N, F] of each batch-norm layer."""
    if not isinstance(stats, dict):
        return []
    if stats.get("mean") is not None and stats.get("var") is not None:
        return [(stats["mean"], stats["var"])]
    return [pair for part in stats.values() for pair in layers(part)]


def distances(stats: PyTree, i: Array) -> Array:
    """Returns the distances [N] of all clients' statistics to client i's: the sum over
    the layers of the Wasserstein distance of diagonal Gaussians,

    (||mu_i - mu_j||^2 + ||sigma_i - sigma_j||^2)^(1/2).
    """
    total = jnp.zeros(())
    for mean, var in layers(stats):
        sigma = jnp.sqrt(var)
        both = (mean - mean[i][None]) ** 2 + (sigma - sigma[i][None]) ** 2
        total += jnp.sqrt(jnp.sum(both, axis=1))
    return total


def weights(stats: PyTree, seen: Array, ids: Array, lam: Numeric) -> Array:
    """Returns the weights [S, N] of the others' models for the clients `ids` [S]: in
    proportion to 1/d_ij, with the sum 1 - lam; 0 of those not `seen` [N]."""

    def one(i: Array) -> Array:
        near = 1 / jnp.maximum(distances(stats, i), NEAREST)
        near = jnp.where(seen & (jnp.arange(len(seen)) != i), near, 0)
        total = jnp.sum(near)
        return (1 - lam) * near / jnp.where(total > 0, total, 1)

    return jax.lax.map(one, ids)


@register("fedap", targets=True)
def fedap(
    task: Task,
    *,
    warmup: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    lam: Annotated[float, Interval(ge=0, le=1)] = 0.5,
) -> Method:
    """Trains from lam w_i + sum_j a_ij w_j and the client's own batch norm; a_ij is in
    proportion to 1/d_ij (`distances`).

    Args:
      warmup: share in [0, 1] of the rounds that are FedBN's; 0.5 as in FL-bench. With 1
        it is FedBN.
      lam: weight of the client's own model (λ) in [0, 1]; 0.5 as in the paper.

    Note:
      The paper's FedAP takes the statistics of a pretrained model's inputs to batch
      norm. Here they are the clients' running statistics after the warm-up, and no
      examples are held out for pretraining. The last uploads of all clients that have
      trained are mixed. A client predicts with the mixture. Without batch norm, or with
      bn_stats=batch, all others weigh the same.
    """
    sgd = local_training.bind(task)
    split = averaging.split(task, batch_norm=True)
    rounds = needed("rounds", task.rounds, "which its warm-up follows")
    n, first = task.num_clients, jnp.round(warmup * rounds)

    def init(key):
        shared, own = split.send(task.model.init(key))
        server = {
            "w": trees.replicate(shared, n),
            "stats": trees.replicate(own["stats"], n),
            "seen": jnp.zeros(n, bool),
        }
        return State(server, trees.replicate(own, n))

    def mixed(server, ids):
        a = weights(server["stats"], server["seen"], ids, lam)
        return trees.mixtures(a, server["w"], ids)

    def warm(cohort):
        return cohort.round < first

    def start(key, server, cohort):
        # Matrix products round a row by its position: rows are ordered by their ids.
        order = jnp.argsort(cohort.ids)
        return (), trees.gather(mixed(server, cohort.ids[order]), jnp.argsort(order))

    def client(c, server, own, _, start):
        w, value = sgd(c, split.receive(start, own))
        shared, own = split.send(w)
        return Update(shared, own, predictor(c.model, w), value, sent=shared)

    def finish(key, server, mean, w, old, rows, cohort):
        # In the warm-up everybody has the mean, of which a mixture is the mean.
        kept = trees.scatter(server["w"], cohort.ids, w, cohort.trained)
        same = warm(cohort) & jnp.any(cohort.trained)
        here = cohort.trained & warm(cohort)
        server = {
            "w": trees.choose(same, trees.replicate(mean, n), kept),
            "stats": trees.scatter(server["stats"], cohort.ids, rows["stats"], here),
            "seen": server["seen"].at[cohort.ids].max(cohort.trained),
        }
        return State(server, rows), Metrics()

    def predict(server, own, c):
        mine = trees.gather(mixed(server, c.id[None]), 0)
        return predictor(c.model, split.receive(mine, own))

    def sent(state, cohort, metrics):
        size, stats = (trees.size(state.server[part]) // n for part in ("w", "stats"))
        up = jnp.where(warm(cohort), size + stats, size)
        return traffic.both_ways(cohort, size, jnp.broadcast_to(up, cohort.ids.shape))

    return averaging.from_client(
        init,
        client,
        predict,
        default=lambda server: trees.gather(server["w"], 0),
        start=start,
        finish=finish,
        traffic=sent,
        stages=(Stage(first, "no models are mixed by their statistics"),),
    )
