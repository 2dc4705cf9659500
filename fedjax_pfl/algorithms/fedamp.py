"""FedAMP: a proximal term holds every client near its own mixture of all models, in
which similar ones weigh more.

Reference: Huang et al., Personalized cross-silo federated learning on non-IID data
(AAAI 2021), Algorithm 1 and the heuristic of its section on deep networks (HeurFedAMP).
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Interval
from chex import Numeric

from fedjax_pfl import evaluation, local_training, losses, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Cohort,
    Metrics,
    Predictor,
    PyTree,
    State,
    Task,
    Traffic,
)

TINY = 1e-12


def gram(a: PyTree, b: PyTree) -> Array:
    """Inner products [S, N] of the models a [S, ...] and b [N, ...]."""

    def flat(x: Array) -> Array:
        return x.reshape(len(x), -1).astype(jnp.float32)

    products = (
        jnp.dot(flat(x), flat(y).T, precision=jax.lax.Precision.HIGHEST)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    return sum(products, jnp.zeros(()))


def square_norms(w: PyTree) -> Array:
    """||w_i||^2 [N] of models w [N, ...]."""
    squares = (
        jnp.sum(x.astype(jnp.float32) ** 2, axis=tuple(range(1, x.ndim)))
        for x in jax.tree.leaves(w)
    )
    return sum(squares, jnp.zeros(()))


def square_distances(w: PyTree, ids: Array) -> Array:
    """||w_i - w_j||^2 [S, N] of the models `ids` [S] to all models w [N, ...]."""
    # one matrix product instead of S passes over all models; centred, so that what they
    # have in common cannot cancel
    w = jax.tree.map(
        lambda x: (
            x.astype(jnp.float32)
            - jnp.mean(x.astype(jnp.float32), axis=0, keepdims=True)
        ),
        w,
    )
    norms = square_norms(w)
    return jnp.maximum(
        norms[ids][:, None] + norms[None] - 2 * gram(trees.gather(w, ids), w), 0
    )


def cosines(w: PyTree, ids: Array) -> Array:
    """cos(w_i, w_j) [S, N] of the models `ids` [S] with all models w [N, ...]."""
    norms = jnp.sqrt(square_norms(w))
    return gram(trees.gather(w, ids), w) / jnp.maximum(
        norms[ids][:, None] * norms[None], TINY
    )


def amp_weights(
    d2: Array, others: Array, alpha: Numeric, sigma: Numeric, xi_min: Numeric
) -> tuple[Array, Array]:
    """FedAMP's weights of the others' models: alpha A'(d2), A(x) = 1 - exp(-x / sigma);
    the own one has the rest.

    Args:
      d2: [S, N] squared distances.
      others: [S, N] whose models are mixed in, without the own.

    Returns:
      (weights [S, N], whether they were shrunk to a sum of 1 - xi_min [S]).
    """
    xi = jnp.where(others, alpha / sigma * jnp.exp(-d2 / sigma), 0)
    total = jnp.sum(xi, axis=1)
    excess = total > 1 - xi_min
    shrink = jnp.where(excess, (1 - xi_min) / jnp.where(excess, total, 1), 1)
    return xi * shrink[:, None], excess


def heur_weights(
    cosine: Array, others: Array, sigma: Numeric, xi_self: Numeric
) -> tuple[Array, Array]:
    """HeurFedAMP's: a softmax of sigma cos, cosine [S, N], that leaves xi_self to the
    own model; never shrunk."""
    largest = jnp.max(jnp.where(others, cosine, -1), axis=1, keepdims=True)
    xi = jnp.where(others, jnp.exp(sigma * (cosine - largest)), 0)
    total = jnp.sum(xi, axis=1, keepdims=True)
    return (1 - xi_self) * xi / jnp.where(total > 0, total, 1), jnp.zeros(
        len(others), bool
    )


def mixtures(xi: Array, w: PyTree, ids: Array) -> PyTree:
    """u_i = w_i + sum_j xi_ij (w_j - w_i): [S, ...] from the others' weights [S, N],
    all models w [N, ...], ids [S]."""
    total = jnp.sum(xi, axis=1)

    def mix(x: Array) -> Array:
        own, rest = x[ids].astype(jnp.float32), x.astype(jnp.float32)
        # seen from the first model: where all are equal, or nobody else weighs, u_i is
        # w_i to the last bit, and a norm's gradient at w_i - u_i is not that of
        # rounding errors
        change = jnp.tensordot(
            xi, rest - rest[:1], axes=1, precision=jax.lax.Precision.HIGHEST
        )
        return (own + change - trees.expand(total, x.ndim) * (own - rest[:1])).astype(
            x.dtype
        )

    return jax.tree.map(mix, w)


@register("fedamp")
def fedamp(
    task: Task,
    *,
    alpha: Annotated[float, Gt(0)] = 1000.0,
    lam: Annotated[float, Ge(0)] = 1.0,
    sigma: Annotated[float, Gt(0)] = 0.1,
    xi_min: Annotated[float, Interval(ge=0, le=1)] = 0.0,
    attention: Literal["amp", "heur"] = "amp",
    xi_self: Annotated[float, Interval(ge=0, le=1)] = 0.1,
) -> Algorithm:
    """Trains each model w_i from where it stood, with the extra gradient lam/alpha (w_i
    - u_i), u_i its mixture.

    Args:
      alpha: the server's step (α) in (0, inf), a factor of the others' weights; 1000 as
        in PFLlib's examples.
      lam: weight of the attention (λ) in [0, inf); 1 as there.
      sigma: σ in (0, inf): squared distances are divided by it (amp), or cosines
        multiplied (heur); 0.1 as there. The method is sensitive to it: at the defaults
        another model's weight
        α/σ exp(-d²/σ) falls from 1 to 0.01 between distances d of 0.96 and 1.18.
      xi_min: the least weight of the own model in [0, 1] (amp); the others' weights are
        shrunk where they exceed the rest, which nothing in the paper or PFLlib
        prevents.
      attention: one of amp (the paper's A), heur (HeurFedAMP: a softmax of cosines).
      xi_self: the weight of the own model in [0, 1] with heur; 0.1 as in PFLlib's
        script.

    Note:
      u_i mixes the models that were uploaded in the last round with examples to learn
      from, and the own one; before round 0 everybody's is the common start. A client's
      model is kept once, in the server's table of all. Running statistics stay with the
      client and do not travel, as u_i predicts nothing. `self_weight` is the weight of
      the own
      model: at 1 everybody learns alone, held by lam/alpha near where its round began.
      `rescaled` is whether the others' weights were shrunk: where they were, only their
      ratios are FedAMP's.

      At the defaults lam/alpha is 0.001, so weak that this is Local on the digits; the
      proximal term acts with a larger lam. PFLlib since March 2023 is Local whatever
      lam: its term, the norm of w_i - u_i, is taken of detached tensors and has no
      gradient.
    """
    loss = losses.classification(task.model)

    def init(key: Array) -> State:
        w = task.model.init(key)
        everybody = trees.replicate(w, task.num_clients)
        server = {"w": params(everybody), "uploaded": jnp.ones(task.num_clients, bool)}
        return State(server, everybody["stats"])

    def weights(server: PyTree, ids: Array) -> tuple[Array, Array]:
        others = server["uploaded"][None] & (
            ids[:, None] != jnp.arange(task.num_clients)[None]
        )
        if attention == "heur":
            return heur_weights(cosines(server["w"], ids), others, sigma, xi_self)
        return amp_weights(
            square_distances(server["w"], ids), others, alpha, sigma, xi_min
        )

    def mix(server: PyTree, ids: Array) -> tuple[PyTree, dict[str, Array]]:
        xi, rescaled = weights(server, ids)
        self_weight = jnp.maximum(1 - jnp.sum(xi, axis=1), 0)
        return mixtures(xi, server["w"], ids), {
            "self_weight": self_weight,
            "rescaled": rescaled,
        }

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        # a matrix product may round a row by its position: give each row its own
        order = jnp.argsort(cohort.ids)
        u, seen = trees.gather(mix(state.server, cohort.ids[order]), jnp.argsort(order))

        def client(
            c: Client, u: PyTree, w: PyTree, stats: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            variables, value = local_training.sgd(
                c.key,
                c.train,
                loss,
                {**w, "stats": stats},
                task,
                extra=trees.proximal(u, lam / alpha),
            )
            post = evaluation.post(cohort, c, predictor(task.model, variables))
            return params(variables), variables["stats"], value, post

        own = trees.gather(state.server["w"], cohort.ids)
        w, stats, value, post = cohort.map(client, u, own, state.clients)
        uploaded = jnp.zeros(task.num_clients, bool).at[cohort.ids].set(cohort.trained)
        server = {
            "w": trees.scatter(state.server["w"], cohort.ids, w, cohort.active),
            "uploaded": jnp.where(
                jnp.any(cohort.trained), uploaded, state.server["uploaded"]
            ),
        }
        return State(server, stats), Metrics(value, post, seen)

    def predict(server: PyTree, stats: PyTree, c: Client) -> Predictor:
        return predictor(
            task.model, {**trees.gather(server["w"], c.id), "stats": stats}
        )

    def sent(state: State, cohort: Cohort, metrics: Metrics) -> Traffic:
        return traffic.both_ways(
            cohort, trees.size(state.server["w"]) // task.num_clients
        )

    return Algorithm(init, round, predict, evaluation.classification, sent)
