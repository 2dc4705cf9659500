"""APPLE: a client's model is a learned combination of all clients' core models, of
which it trains its own.

Reference: Luo & Wu, Adapt to adaptation: learning personalization for cross-silo
federated learning (IJCAI 2022), Algorithm 1; authors' code: ljaiverson/pFL-APPLE.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval
from chex import Numeric

from fedjax_pfl import (
    evaluation,
    keys,
    local_training,
    losses,
    optimizers,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.errors import needed
from fedjax_pfl.types import Algorithm, Array, Metrics, PyTree, State, Task


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    CORES = 50, "the core models"


def combine(p: Array, table: PyTree) -> PyTree:
    """Returns sum_j p_j w_j of core models [N, ...] with p [N]."""

    def one(x: Array) -> Array:
        mixed = jnp.tensordot(p, x, 1, precision=jax.lax.Precision.HIGHEST)
        return mixed.astype(x.dtype)

    return jax.tree.map(one, table)


def schedule(t: Array, last: Numeric, shape: str) -> Array:
    """Returns lambda(t) [], from 1 at round 0 to about 0 at round `last` and 0 from
    there on."""
    part = t / jnp.maximum(last, 1e-9)
    value = (jnp.cos(jnp.pi * part) + 1) / 2 if shape == "cosine" else 1e-3**part
    return jnp.where(part < 1, value, 0)


@register("apple", targets=True)
def apple(
    task: Task,
    *,
    coef_lr: Annotated[float, Ge(0)] = 0.001,
    mu: Annotated[float, Ge(0)] = 0.1,
    last: Annotated[float, Interval(ge=0, le=1)] = 0.1,
    scheduler: Literal["cosine", "exponential"] = "exponential",
    coef_momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9,
    start: Literal["separate", "common"] = "separate",
) -> Algorithm:
    """Minimises F_i(sum_j p_ij w_j) + lambda(t) mu/2 ||p_i - p_0||^2 over the client's
    core model w_i and its coefficients p_i.

    The coefficients begin at p_0, the shares of the training examples.

    Args:
      coef_lr: step size of p_i in [0, inf); 0.001 as in the authors' code.
      mu: weight of the penalty (μ) in [0, inf); 0.1 as there.
      last: share of the rounds in [0, 1] after which the penalty is 0; 0.1 as there.
      scheduler: lambda(t), one of cosine, exponential (the authors' default).
      coef_momentum: momentum of p_i's steps in [0, 1); 0.9 as there.
      start: core models that begin at different random values (separate, as there) or
        at the same ones (common, as in PFLlib).

    Note:
      The authors' code has mu ||p_i - p_0||^2, which is this penalty, the paper's, at
      half their mu, and rounds `last` of the rounds down. Their core models have
      momentum 0.9, too, which is the task's optimizer here. The
      gradient by p_ij is <grad F_i, w_j>, as in the paper; PFLlib takes means over
      the parameters, and a step size of w_i that is larger by N. The core models are
      the last uploads of all clients, and each client receives all of them. Running
      statistics stay where they are, with the client.
    """
    n, rounds = task.num_clients, needed("rounds", task.rounds, "which mu follows")
    p0 = jnp.asarray(task.sizes / max(1, sum(task.sizes)), jnp.float32)

    # The coefficients have an optimizer of their own.
    def separate(lr):
        coefficients = optax.sgd(coef_lr, momentum=coef_momentum)
        parts = {"core": task.optimizer(lr), "p": coefficients}
        return optimizers.per_part(parts)

    sgd = local_training.bind(task._replace(optimizer=separate))

    def init(key):
        w = task.model.init(key)
        rows = trees.replicate({"p": p0, "stats": w["stats"]}, n)
        core = trees.replicate(params(w), n)
        if start == "separate":
            draws = jax.random.split(keys.fold(key, Start.CORES), n)
            core = jax.vmap(lambda draw: params(task.model.init(draw)))(draws)
        return State({"core": core}, rows)

    def personal(server, row):
        return combine(row["p"], server["core"]) | {"stats": row["stats"]}

    def round(key, state, cohort):
        table = state.server["core"]
        strength = mu * schedule(cohort.round, last * rounds, scheduler)

        def client(c, row):
            mine = trees.gather(table, c.id)
            plain = losses.classification(c.model, task)

            def loss(v, batch, key):
                # The own core model moves; in the table it is as received.
                change = jax.tree.map(jnp.subtract, v["core"], mine)
                fixed = combine(v["p"], table)
                own = v["p"][c.id]
                w = jax.tree.map(lambda x, d: x + own * d, fixed, change)
                return plain({**w, "stats": v["stats"]}, batch, key)

            # The gradient of the penalty.
            def extra(v):
                zero = jax.tree.map(jnp.zeros_like, v["core"])
                return {"core": zero, "p": strength * (v["p"] - p0)}

            v = {"core": mine, **row}
            v, value = sgd(c, v, loss=loss, train=("core", "p"), extra=extra)
            row = {"p": v["p"], "stats": v["stats"]}
            change = jax.tree.map(jnp.subtract, v["core"], mine)
            w = jax.tree.map(
                lambda x, d: x + v["p"][c.id] * d, combine(v["p"], table), change
            )
            w |= {"stats": v["stats"]}
            post = evaluation.post(cohort, c, predictor(c.model, w))
            return v["core"], row, value, post, {"own_weight": v["p"][c.id]}

        core, rows, value, post, seen = cohort.map(client, state.clients)
        table = trees.scatter(table, cohort.ids, core, cohort.trained)
        return State({"core": table}, rows), Metrics(value, post, seen)

    def predict(server, row, c):
        return predictor(c.model, personal(server, row))

    def sent(state, cohort, metrics):
        size = trees.size(state.server["core"])
        return traffic.both_ways(cohort, size, size // n)

    return Algorithm(init, round, predict, evaluation.classification, sent)
