"""MOCHA: linear models whose relations are learned with them, by dual coordinate ascent
on the clients.

Reference: Smith, Chiang, Sanjabi & Talwalkar, Federated multi-task learning (NeurIPS
2017), Algorithm 1.

Axes: H columns of a client's model: 1 where every client has two classes, else C; d
features and a constant 1.
"""

import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Gt, Interval
from chex import Numeric

from fedjax_pfl import evaluation, local_training, losses, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.errors import InputError, needed
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Cohort,
    Metrics,
    Predictor,
    PyTree,
    State,
    Task,
    Traffic,
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
    """Sigma [N, N] of models w [N, d, H]: (W'W)^(1/2) over its trace."""
    flat = w.reshape(w.shape[0], -1)
    values, vectors = jnp.linalg.eigh(jnp.dot(flat, flat.T, precision=EXACT))
    root = jnp.sqrt(jnp.maximum(values, FLOOR))
    return jnp.dot(vectors * (root / jnp.sum(root))[None], vectors.T, precision=EXACT)


def aggregation(sigma: Array) -> Array:
    """rho = max_t sum_s |Sigma_ts| / Sigma_tt []: how much the clients' simultaneous
    steps may add up."""
    return jnp.max(jnp.sum(jnp.abs(sigma), axis=1) / jnp.diagonal(sigma))


def ascend(
    alpha: Array, y: Array, x: Array, w: Array, step: Array, rho: Array
) -> Array:
    """The new dual variables [H] of one example: the exact maximum of its coordinate.

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
    """The label [] as -1 or 1 of every column, [H]; in `pairs` of classes the lower id
    is -1."""
    if pairs:
        return jnp.where(y == jnp.argmax(c.class_counts > 0), -1.0, 1.0)[None]
    return jnp.where(y == jnp.arange(len(c.class_counts)), 1.0, -1.0)


def predictor(w: Array, c: Client, pairs: bool) -> Predictor:
    """The logits [B, C] of a client's model [d, H]; in `pairs` of classes -z and z at
    its two, -inf at the others."""

    def predict(x: Array, mask: Array) -> Array:
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
    """SDCA on a client's subproblem (Eq. 4): its new alpha [M, H], the changes of its b
    and w [d, H], and the mean hinge loss [] before the steps."""
    w, size = server["w"][c.id], jnp.maximum(c.train.size, 1)
    sigma, rho = server["sigma"][c.id, c.id], server["rho"]

    def step(key: Array, carry: PyTree, batch: Batch) -> tuple[PyTree, Array]:
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
    """How many of its `size` examples a client visits, the share `frac` rounded up, []
    int32."""
    # in float32 0.6 * 25 is over 15
    return jnp.ceil(frac * size * (1 - 2e-7)).astype(jnp.int32)


def descend(
    server: PyTree, omega: Array, c: Client, lam: Numeric, task: Task
) -> tuple[Array, Array]:
    """SGD on the cross entropy + lam/2 tr(W Omega W') as a function of the client's own
    model [d, H]: it and the mean cross entropy []."""
    optimizer, w = task.optimizer(task.lr), server["w"][c.id]
    # not Omega_tt: all clients move at once, and by it their steps would add up
    own = jnp.sum(jnp.abs(omega[c.id]))
    others = jnp.tensordot(omega[c.id], server["w"], 1, precision=EXACT) - own * w

    def step(key: Array, carry: PyTree, batch: Batch) -> tuple[PyTree, Array]:
        w, opt = carry
        loss = lambda w: losses.cross_entropy(
            jnp.dot(inputs(batch.x), w), batch.y, batch.mask
        )
        value, gradient = jax.value_and_grad(loss)(w)
        updates, opt = optimizer.update(gradient, opt, w)
        return (
            (w + updates - task.lr * lam * others) / (1 + task.lr * lam * own),
            opt,
        ), value

    (w, _), value, _ = local_training.work(
        c.key, c.train, step, (w, optimizer.init(w)), task
    )
    return w, value


@register("mocha")
def mocha(
    task: Task,
    *,
    lam: Annotated[float, Gt(0)] = 1.0,
    frac: Annotated[float, Interval(gt=0, le=1000)] = 0.5,
    relate_every: Annotated[int, Ge(1)] | None = None,
    solver: Literal["sdca", "sgd"] = "sdca",
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
      solver: one of sdca (the paper: hinge loss), sgd (cross entropy, by the task's
        local work).

    Note:
      Where every client has exactly two classes its model is one SVM, the lower class
      id is -1; elsewhere every client has one SVM for each class against the rest, and
      all of them share Sigma. A round is one inner step. When Sigma changes, W is made
      anew from the duals: the authors' code keeps the old one, and then its dual
      objective may exceed its primal one. With sdca the task's lr, optimizer, batch
      size, epochs, steps, drop_last and augmentation are not used. With sgd there are
      no duals, and the penalty's step is implicit, by a curvature sum_s |Omega_ts| that
      bounds what the clients' simultaneous steps add up to. It is of length lr, as the
      loss's are under plain SGD; momentum or Adam weigh the loss differently.
    """
    sdca = solver == "sdca"
    if relate_every is None:
        relate_every = max(
            1,
            needed(
                "rounds", task.rounds, "a tenth of which lies between updates of Sigma"
            )
            // 10,
        )
    check_linear(task)
    n, d, classes = (
        task.num_clients,
        math.prod(task.prepared.shape) + 1,
        task.num_classes,
    )
    pairs = sdca and bool(np.all(np.count_nonzero(task.class_counts, axis=1) == 2))
    columns = 1 if pairs else classes

    def models(sigma: Array, b: Array) -> Array:
        # W = B Sigma / lambda, whatever Sigma has been
        return jnp.tensordot(sigma, b, 1, precision=EXACT) / lam

    def init(key: Array) -> State:
        zero, sigma = jnp.zeros((n, d, columns)), jnp.eye(n) / n
        if not sdca:
            return State({"w": zero, "sigma": sigma}, ())
        server = {"w": zero, "b": zero, "sigma": sigma, "rho": aggregation(sigma)}
        return State(server, {"alpha": jnp.zeros((n, int(task.sizes.max()), columns))})

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        server = state.server
        omega = None if sdca else jnp.linalg.inv(server["sigma"])

        # each client solves its subproblem approximately: its dual variables and what
        # they change, or its model
        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, Array, Array, dict[str, Array]]:
            if omega is None:
                alpha, db, dw, value = climb(server, mine["alpha"], c, lam, frac, pairs)
                mine, row, w = (
                    {"alpha": alpha},
                    server["b"][c.id] + db,
                    server["w"][c.id] + dw,
                )
            else:
                w, value = descend(server, omega, c, lam, task)
                row = w
            return mine, row, value, evaluation.post(cohort, c, predictor(w, c, pairs))

        mine, rows, value, post = cohort.map(client, state.clients)
        # the server adds up, and makes the models of the sums
        name = "b" if sdca else "w"
        server = {
            **server,
            name: trees.scatter(server[name], cohort.ids, rows, cohort.active),
        }
        if sdca:
            server["w"] = models(server["sigma"], server["b"])
        # where an outer iteration ends it learns Sigma of the models, and rho and the
        # models follow
        renew = (cohort.round + 1) % relate_every == 0
        sigma = jax.lax.cond(
            renew, lambda: relations(server["w"]), lambda: server["sigma"]
        )
        server = {**server, "sigma": sigma}
        if sdca:
            server |= {"w": models(sigma, server["b"]), "rho": aggregation(sigma)}
        # else nothing was learned, of relations neither
        someone = jnp.any(cohort.trained)
        return State(trees.choose(someone, server, state.server), mine), Metrics(
            value, post
        )

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return predictor(server["w"][c.id], c, pairs)

    def sent(state: State, cohort: Cohort, metrics: Metrics) -> Traffic:
        # down also Sigma_tt and rho; with sgd the others' part of the gradient and
        # sum_s |Omega_ts|
        return traffic.both_ways(
            cohort, d * columns + 2 if sdca else 2 * d * columns + 1, d * columns
        )

    return Algorithm(init, round, predict, evaluation.classification, sent)
