"""FedAMP: a proximal term holds every client near its own mixture of all models, in
which similar ones weigh more.

Reference: Huang et al., Personalized cross-silo federated learning on non-IID data
(AAAI 2021), Algorithm 1.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from chex import Numeric

from fedjax_pfl import evaluation, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Metrics,
    PyTree,
    State,
    Task,
)

TINY = 1e-12


def square_norms(w: PyTree) -> Array:
    """Computes ||w_i||^2 [N] of models w [N, ...]."""
    squares = (
        jnp.sum(x.astype(jnp.float32) ** 2, axis=tuple(range(1, x.ndim)))
        for x in jax.tree.leaves(w)
    )
    return sum(squares, jnp.float32(0))


def square_distances(w: PyTree, ids: Array) -> Array:
    """Computes ||w_i - w_j||^2 [S, N] of the models `ids` [S] to all models w [N,
    ...], as one matrix product instead of S passes over all models."""

    # Without the mean, which would cancel.
    def centred(x):
        x = x.astype(jnp.float32)
        return x - jnp.mean(x, axis=0, keepdims=True)

    w = jax.tree.map(centred, w)
    norms, products = square_norms(w), trees.gram(trees.gather(w, ids), w)
    return jnp.maximum(norms[ids][:, None] + norms[None] - 2 * products, 0)


def weights(
    d2: Array, others: Array, alpha: Numeric, sigma: Numeric
) -> tuple[Array, Array]:
    """Computes the weights of the others' models: alpha A'(d2), A(x) = 1 - exp(-x /
    sigma); the own one has the rest.

    Args:
      d2: [S, N] squared distances.
      others: [S, N] whose models are mixed in, without the own.

    Returns:
      (weights [S, N], whether they were shrunk to a sum of 1 [S]).
    """
    xi = jnp.where(others, alpha / sigma * jnp.exp(-d2 / sigma), 0)
    total = jnp.sum(xi, axis=1)
    excess = total > 1
    return xi * jnp.where(excess, 1 / jnp.where(excess, total, 1), 1)[:, None], excess


@register("fedamp", targets=True)
def fedamp(
    task: Task,
    *,
    alpha: Annotated[float, Gt(0)] = 1000.0,
    lam: Annotated[float, Ge(0)] = 1.0,
    sigma: Annotated[float, Gt(0)] = 0.1,
) -> Algorithm:
    """Trains each model w_i from where it stood, with the extra gradient lam/alpha (w_i
    - u_i), u_i its mixture.

    Args:
      alpha: the server's step (α) in (0, inf), a factor of the others' weights; 1000 as
        in PFLlib's examples.
      lam: weight of the attention (λ) in [0, inf); 1 as there.
      sigma: σ in (0, inf), which divides squared distances; 0.1 as there. The method is
        sensitive to it: another model's weight is α/σ exp(-d²/σ).

    Note:
      u_i mixes the models that were uploaded in the last round with examples to learn
      from, and the own one; before round 0 everybody's is the common start. A client's
      model is kept once, in the server's table of all. Running statistics stay with the
      client and do not travel, as u_i predicts nothing. `self_weight` is the weight of
      the own
      model: at 1 every client learns alone, regularised by lam/alpha towards its start.
      `rescaled` is 1 where the others' weights were shrunk to a sum of 1, which nothing
      in the paper or PFLlib prevents from being exceeded. The heuristic with cosines
      (HeurFedAMP) is not built.

      At the defaults lam/alpha is so weak that this is nearly Local; the proximal term
      acts with a larger lam. PFLlib since March 2023 is Local whatever lam: its term,
      the norm of w_i - u_i, is taken of detached tensors and has no gradient.
    """
    sgd, n = local_training.bind(task), task.num_clients

    def init(key):
        w = trees.replicate(task.model.init(key), n)
        server = {"w": params(w), "uploaded": jnp.ones(n, bool)}
        return State(server, w["stats"])

    def mix(server, ids):
        others = server["uploaded"][None] & (ids[:, None] != jnp.arange(n)[None])
        d2 = square_distances(server["w"], ids)
        xi, rescaled = weights(d2, others, alpha, sigma)
        self_weight = jnp.maximum(1 - jnp.sum(xi, axis=1), 0)
        seen = {"self_weight": self_weight, "rescaled": rescaled}
        return trees.mixtures(xi, server["w"], ids), seen

    def round(key, state, cohort):
        # A matrix product may round a row by its position, so rows are sorted by id.
        order = jnp.argsort(cohort.ids)
        u, seen = trees.gather(mix(state.server, cohort.ids[order]), jnp.argsort(order))

        # Each client trains its own model, regularised towards its mixture.
        def client(c, u, w, stats):
            anchor = trees.proximal(u, lam / alpha)
            w, value = sgd(c, {**w, "stats": stats}, extra=anchor)
            post = evaluation.post(cohort, c, predictor(task.model, w))
            return params(w), w["stats"], value, post

        own = trees.gather(state.server["w"], cohort.ids)
        w, stats, value, post = cohort.map(client, u, own, state.clients)
        new = jnp.zeros(n, bool).at[cohort.ids].set(cohort.trained)
        last = state.server["uploaded"]
        server = {
            "w": trees.scatter(state.server["w"], cohort.ids, w, cohort.active),
            "uploaded": jnp.where(jnp.any(cohort.trained), new, last),
        }
        return State(server, stats), Metrics(value, post, seen)

    def predict(server, stats, c):
        w = trees.gather(server["w"], c.id)
        return predictor(task.model, {**w, "stats": stats})

    def sent(state, cohort, metrics):
        return traffic.both_ways(cohort, trees.size(state.server["w"]) // n)

    return Algorithm(init, round, predict, evaluation.classification, sent)
