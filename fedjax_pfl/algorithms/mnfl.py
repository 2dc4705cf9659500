"""MNFL with one architecture: every client receives a mixture of all clients' models,
whose coefficients are learned.

Reference: Zhang et al., Parameterized knowledge transfer for personalized federated
learning (KT-pFL, NeurIPS 2021), Eq. 7 with parameters in place of predictions; MNFL is
a variant. Authors' code: cugzj/KT-pFL.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, local_training, traffic, trees
from fedjax_pfl.aggregate import descend
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Metrics,
    PyTree,
    State,
    Task,
)

EXACT = jax.lax.Precision.HIGHEST  # models are mixed in float32 on every device


def mix(row: Array, models: PyTree) -> PyTree:
    """Computes sum_m row[m] models[m], of row [N] and leaves [N, ...], in the types
    of the models."""
    return optax.tree.cast_like(
        jax.tree.map(lambda w: jnp.tensordot(row, w, 1, precision=EXACT), models),
        models,
    )


def gradient(row: Array, w: PyTree, models: PyTree) -> Array:
    """Returns the gradient [N] of ||mix(row, models) - w||^2 / (2 ||w||^2) with
    respect to the row."""
    residual = jax.tree.map(jnp.subtract, mix(row, models), w)

    def products(m, r):
        return jnp.dot(
            m.reshape(m.shape[0], -1), r.reshape(-1), precision=EXACT
        ).astype(row.dtype)

    inner = sum(
        map(products, *map(jax.tree.leaves, (models, residual))), jnp.zeros_like(row)
    )
    norm = sum(
        (jnp.sum(jnp.square(x.astype(row.dtype))) for x in jax.tree.leaves(w)),
        jnp.zeros((), row.dtype),
    )
    return inner / jnp.where(norm > 0, norm, 1)


@register("mnfl")
def mnfl(
    task: Task,
    *,
    coef_lr: Annotated[float, Ge(0)] = 0.01,
    rho: Annotated[float, Ge(0)] = 0.7,
    lam: Annotated[float, Ge(0)] = 1.0,
    coef_steps: Annotated[int, Interval(ge=0, le=10_000)] = 1,
) -> Algorithm:
    """Sends v_n = sum_m A[n,m] w_m, trains it to w_n, and moves row n of A so that v_n
    comes nearer to w_n.

    Args:
      coef_lr: step size of the coefficients (η3) in [0, inf); 0.01 as in the paper's
        ablations, 0 freezes A at 1/N.
      rho: weight of the penalty ||A - 1/N||^2 (ρ) in [0, inf); 0.7, the value of most
        of the authors' settings.
      lam: weight of the coefficients' loss (λ) in [0, inf); the paper gives none, so 1.
      coef_steps: steps of the coefficients a round, in [0, 10000]; 1 as in the paper.

    Note:
      The paper describes this version by two lines and has no code: the coefficients'
      loss ||v_n - w_n||^2 / (2 ||w_n||^2), weighted by the client's share of all
      training examples, is ours, as is the projection of every row to the simplex,
      without which the rows' sums drift. The penalty is stepped implicitly, which
      equals Eq. 7 to first order. The server keeps all N models; where only some
      clients take part, only their rows and columns of A move. Running statistics are
      mixed as the models are, and do not count in the loss. With public examples and
      several architectures it is mnfl_het.

      At the defaults the coefficients stay near 1/N, as their gradient is weighted by a
      client's share of all examples: this is close to FedAvg of uniform weights.
      The model of a client that did not take part counts as it is, which before its
      first round is the start. With lam=N, rho=0 and a larger coef_lr the coefficients
      move. A client predicts with the model of its last local training: `pre` is to be
      compared with FedAvg's `post`.
    """
    n, split, sgd = task.num_clients, averaging.split(task), local_training.bind(task)

    def init(key):
        shared, own = split.send(task.model.init(key))
        start = jnp.full((n, n), 1 / n, jnp.float32)
        server = {"w": trees.replicate(shared, n), "coefficients": start}
        return State(server, trees.replicate(own, n))

    def round(key, state, cohort):
        server = state.server

        # Each client trains the mixture that it receives.
        def client(c, own):
            v = mix(server["coefficients"][c.id], server["w"])
            w, value = sgd(c, split.receive(v, own))
            shared, own = split.send(w)
            post = evaluation.post(cohort, c, averaging.predictor(c.model, w))
            return shared, own, value, post

        w, own, value, post = cohort.map(client, state.clients)
        # The server keeps the models, and moves the coefficients of those that trained
        # them (Eq. 7).
        models = trees.scatter(server["w"], cohort.ids, w, cohort.trained)
        here = jnp.zeros(n, bool).at[cohort.ids].set(cohort.trained)
        compared = averaging.params(server["w"])

        def coefficients(c, w):
            weight = lam * c.train.size / jnp.maximum(1, cohort.total)

            def step(_, row):
                slope = weight * gradient(row, w, compared)
                return descend(row, slope, here, coef_lr, rho)

            row = jax.lax.fori_loop(0, coef_steps, step, server["coefficients"][c.id])
            return row, row[c.id]

        rows, self_weight = cohort.map(coefficients, averaging.params(w), phase=1)
        rows = trees.scatter(server["coefficients"], cohort.ids, rows, cohort.trained)
        seen, table = {"self_weight": self_weight}, {"coefficients": rows}
        server = {"w": models, "coefficients": rows}
        return State(server, own), Metrics(value, post, seen, table)

    def predict(server, own, c):
        w = split.receive(trees.gather(server["w"], c.id), own)
        return averaging.predictor(c.model, w)

    def sent(state, cohort, metrics):
        return traffic.both_ways(cohort, trees.size(state.server["w"]) // n)

    return Algorithm(
        init,
        round,
        predict,
        evaluation.classification,
        sent,
    )
