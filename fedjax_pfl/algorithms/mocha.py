"""MOCHA: linear models whose relations are learned with them, by dual coordinate ascent
on the clients.

Reference: Smith, Chiang, Sanjabi & Talwalkar, Federated multi-task learning (NeurIPS
2017), Algorithm 1.

Axes: H columns of a client's model: 1 where every client has two classes, else C; d
features and a constant 1.
"""

import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Gt, Interval
from chex import Numeric

from fedjax_pfl import evaluation, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import OWN_LOSS, READS_LABELS, ROW_TARGETS, register
from fedjax_pfl.errors import InputError, needed
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Metrics,
    Predictor,
    PyTree,
    Stage,
    State,
    Task,
)

EXACT = jax.lax.Precision.HIGHEST
FLOOR = 1e-7  # of the eigenvalues of W'W, as in the authors' code


def check_linear(task: Task) -> None:
    """Raises InputError unless the model is one linear layer on its inputs."""
    variables = jax.eval_shape(task.model.init, jax.random.key(0))
    flat = task.model.num_features == math.prod(task.prepared.shape)
    one_layer = (
        trees.size(variables["head"])
        == (task.model.num_features + 1) * task.num_classes
    )
    if jax.tree.leaves((variables["body"], variables["stats"])) or not (
        flat and one_layer
    ):
        raise InputError("MOCHA learns linear models only: take --model=linear.")


def relations(w: Array) -> Array:
    """Computes Sigma [N, N] of models w [N, d, H]: (W'W)^(1/2) over its trace."""
    flat = w.reshape(w.shape[0], -1)
    values, vectors = jnp.linalg.eigh(jnp.dot(flat, flat.T, precision=EXACT))
    root = jnp.sqrt(jnp.maximum(values, FLOOR))
    return jnp.dot(vectors * (root / jnp.sum(root))[None], vectors.T, precision=EXACT)


def aggregation(sigma: Array) -> Array:
    """Computes rho = max_t sum_s |Sigma_ts| / Sigma_tt []: how much the clients'
    simultaneous steps may add up."""
    return jnp.max(jnp.sum(jnp.abs(sigma), axis=1) / jnp.diagonal(sigma))


def ascend(
    alpha: Array, y: Array, x: Array, w: Array, step: Array, rho: Array
) -> Array:
    """Returns the new dual variables [H] of one example: the exact maximum of its
    coordinate.

    Args:
      alpha: [H].
      y: labels [H], -1 or 1.
      x: [d].
      w: the client's model [d, H] with its steps so far, these times rho.
      step: Sigma_tt / (lambda n_t) [], what a unit of alpha x adds to the model.
      rho: see `aggregation`.
    """
    margin = y * jnp.dot(x, w, precision=EXACT)
    return y * jnp.clip((1 - margin) / (step * rho * jnp.sum(x * x)) + alpha * y, 0, 1)


def inputs(x: Array) -> Array:
    """Examples [B, ...] as rows [B, d]: flattened, and a constant 1."""
    flat = x.reshape(x.shape[0], -1)
    return jnp.concatenate([flat, jnp.ones((x.shape[0], 1), flat.dtype)], axis=1)


def signs(y: Array, c: Client, pairs: bool) -> Array:
    """Returns the label [] as -1 or 1 of every column, [H]; in `pairs` of classes
    the lower id is -1."""
    if pairs:
        return jnp.where(y == jnp.argmax(c.class_counts > 0), -1.0, 1.0)[None]
    return jnp.where(y == jnp.arange(len(c.class_counts)), 1.0, -1.0)


def predictor(w: Array, c: Client, pairs: bool) -> Predictor:
    """Returns the logits [B, C] of a client's model [d, H]; in `pairs` of classes -z
    and z at its two, -inf at the others."""

    def predict(x, mask):
        z = jnp.dot(inputs(x), w)
        if not pairs:
            return z
        here = c.class_counts > 0
        low = jnp.arange(len(here)) == jnp.argmax(here)
        return jnp.where(here[None], jnp.where(low[None], -z, z), -jnp.inf)

    return predict


def climb(
    server: PyTree, alpha: Array, c: Client, lam: Numeric, frac: Numeric, pairs: bool
) -> tuple[Array, Array, Array, Array]:
    """Runs SDCA on a client's subproblem (Eq. 4): its new alpha [M, H], the changes
    of its b and w [d, H], and the mean hinge loss [] before the steps."""
    w, size = server["w"][c.id], jnp.maximum(c.train.size, 1)
    sigma, rho = server["sigma"][c.id, c.id], server["rho"]

    def step(key, carry, batch):
        alpha, dw, db = carry
        x, y, row = inputs(batch.x)[0], signs(batch.y[0], c, pairs), batch.row[0]
        new = ascend(alpha[row], y, x, w + rho * dw, sigma / (lam * size), rho)
        change = x[:, None] * (new - alpha[row])[None]
        hinge = jnp.mean(jnp.maximum(1 - y * jnp.dot(x, w + dw, precision=EXACT), 0))
        carry = (
            alpha.at[row].set(new),
            dw + sigma / (lam * size) * change,
            db + change / size,
        )
        return carry, hinge

    carry = alpha, jnp.zeros_like(w), jnp.zeros_like(w)
    (alpha, dw, db), hinge, _ = local_training.steps(
        c.key, c.train, step, carry, batch_size=1, steps=visits(frac, c.train.size)
    )
    return alpha, db, dw, hinge


def visits(frac: Numeric, size: Array) -> Array:
    """Returns the number of examples that a client of `size` visits, the share
    `frac` rounded up, [] int32."""
    # in float32 0.6 * 25 is over 15
    return jnp.ceil(frac * size * (1 - 2e-7)).astype(jnp.int32)


@register(
    "mocha",
    excludes={
        "loss": OWN_LOSS,
        "mix": READS_LABELS,
        "positions": ROW_TARGETS,
        "work": "its local work is `frac` of the examples",
    },
)
def mocha(
    task: Task,
    *,
    lam: Annotated[float, Gt(0)] = 1.0,
    frac: Annotated[float, Interval(gt=0, le=1000)] = 0.5,
    relate_every: Annotated[int, Ge(1)] | None = None,
) -> Algorithm:
    """Each client improves its part of the dual of a multi-task SVM; the server adds
    up, and learns the relations.

    Args:
      lam: weight of the regulariser (λ) in (0, inf); 1 as chosen for the pFedC paper
        (grid 0.001 to 10 by tens).
      frac: examples a client visits a round, as a share of its own, in (0, 1000]; 0.5
        as in the authors' code.
      relate_every: rounds between updates of Sigma, in [1, inf); default a tenth of the
        run's (the authors: 100).

    Note:
      Where every client has exactly two classes its model is one SVM, the lower class
      id is -1; elsewhere every client has one SVM for each class against the rest, and
      all of them share Sigma. A round is one inner step. When Sigma changes, W is made
      anew from the duals: the authors' code keeps the old one, and then its dual
      objective may exceed its primal one. The task's lr, optimizer, batch size, epochs,
      steps, drop_last and augmentation are not used.
    """
    if relate_every is None:
        reason = "a tenth of which is between updates of Sigma"
        relate_every = max(1, needed("rounds", task.rounds, reason) // 10)
    check_linear(task)
    n, d = task.num_clients, math.prod(task.prepared.shape) + 1
    pairs = bool(np.all(np.count_nonzero(task.class_counts, axis=1) == 2))
    columns = 1 if pairs else task.num_classes

    def models(sigma, b):
        # W = B Sigma / lambda, whatever Sigma has been.
        return jnp.tensordot(sigma, b, 1, precision=EXACT) / lam

    def init(key):
        zero, sigma = jnp.zeros((n, d, columns)), jnp.eye(n) / n
        server = {"w": zero, "b": zero, "sigma": sigma, "rho": aggregation(sigma)}
        return State(server, {"alpha": jnp.zeros((n, int(task.sizes.max()), columns))})

    def round(key, state, cohort):
        server = state.server

        # Each client solves its subproblem approximately (Eq. 4).
        def client(c, row):
            alpha, db, dw, value = climb(server, row["alpha"], c, lam, frac, pairs)
            w = server["w"][c.id] + dw
            post = evaluation.post(cohort, c, predictor(w, c, pairs))
            return {"alpha": alpha}, server["b"][c.id] + db, value, post

        rows, b, value, post = cohort.map(client, state.clients)
        # The server adds up, and makes the models of the sums.
        b = trees.scatter(server["b"], cohort.ids, b, cohort.active)
        w = models(server["sigma"], b)
        # At the end of an outer iteration it learns Sigma of the models; rho and the
        # models follow.
        renew = (cohort.round + 1) % relate_every == 0
        sigma = jax.lax.cond(renew, lambda: relations(w), lambda: server["sigma"])
        new = {"w": models(sigma, b), "b": b, "sigma": sigma, "rho": aggregation(sigma)}
        # Where no client trained nothing was learned, of relations neither.
        new = trees.choose(jnp.any(cohort.trained), new, server)
        return State(new, rows), Metrics(value, post)

    def predict(server, row, c):
        return predictor(server["w"][c.id], c, pairs)

    def sent(state, cohort, metrics):
        # Down also Sigma_tt and rho.
        return traffic.both_ways(cohort, d * columns + 2, d * columns)

    return Algorithm(
        init,
        round,
        predict,
        evaluation.classification,
        sent,
        stages=(Stage(relate_every - 1, "no relations are learned"),),
    )
