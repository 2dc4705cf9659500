"""FedSSA: the heads of clients of any architecture are averaged class by class, over
the clients that have the class.

Reference: Yi et al., FedSSA: semantic similarity-based aggregation for efficient
model-heterogeneous personalized federated learning (IJCAI 2024), Algorithm 1; authors'
code: LipingYi/FedSSA.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Interval
from chex import Numeric

from fedjax_pfl import (
    architectures,
    averaging,
    local_training,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Method, Own, State, Task, Update


def stabilisation(t: Array, mu: Numeric, rounds: int) -> Array:
    """Returns mu cos(pi t / (2 rounds)) in the rounds t up to `rounds`, then 0."""
    return jnp.where(t <= rounds, mu * jnp.cos(jnp.pi * t / (2 * rounds)), 0)


@register("fedssa", several_architectures=True)
def fedssa(
    task: Task,
    *,
    mu: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    stable: Annotated[int, Interval(ge=1, le=100_000)] = 2,
    variant: Literal["convex", "code"] = "convex",
) -> Method:
    """Trains each client's own model, after the head of its classes has become mu_t h_i
    + (1 - mu_t) h, h the mean head of the clients with the class.

    Args:
      mu: weight of the client's own head in the first round (μ) in [0, 1]; 0.5 as in
        the authors' code.
      stable: rounds in [1, 100000] in which the weight falls to 0, by a cosine; 2 as in
        the authors' code.
      variant: `code` fuses mu_t h_i + h as the authors' code does, whose weights do not
        sum to 1; one of convex, code.

    Note:
      The mean is over the clients of the round, all of the same weight; the authors'
      code takes all clients' last heads. A client predicts with its own last model. All
      architectures must have the same feature width and a linear head.
    """
    widths = sorted({m.num_features for m in task.models})
    if len(widths) > 1:
        raise InputError(
            f"FedSSA needs one feature width K in all architectures, not {widths}: set "
            "it to one value (--features)."
        )
    sgd = local_training.bind(task)

    def init(key):
        starts = [model.init(key) for model in task.models]
        for w in starts:
            averaging.check_linear_head(w, "fedssa")
        rows = architectures.stack(task, lambda model: model.init(key))
        return State({"head": starts[0]["head"]}, rows)

    def client(c, server, w):
        share = stabilisation(c.round, mu, stable)

        def fused(mine, other):
            rest = 1 - share if variant == "convex" else 1
            return (share * mine + rest * other).astype(mine.dtype)

        # The fused head of the client's classes, the last axis.
        head = jax.tree.map(fused, w["head"], server["head"])
        head = trees.choose(c.class_counts > 0, head, w["head"])
        w, value = sgd(c, {**w, "head": head})
        return Update({"head": w["head"]}, Own(w), predictor(c.model, w), value)

    def weight(cohort):
        return (cohort.class_counts > 0).astype(jnp.float32)

    def predict(server, w, c):
        return predictor(c.model, w)

    def sent(state, cohort, metrics):
        own = jnp.sum(cohort.class_counts > 0, axis=1)
        return traffic.both_ways(cohort, (widths[0] + 1) * own)._replace(ints=own)

    return averaging.from_client(init, client, predict, weight=weight, traffic=sent)
