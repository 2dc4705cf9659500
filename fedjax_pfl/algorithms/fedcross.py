"""FedCross: several models go round the clients, and the server mixes each with the one
that is least like it.

Reference: Hu et al., FedCross: towards accurate federated learning via multi-model
cross-aggregation (ICDE 2024), Algorithm 1.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Interval

from fedjax_pfl import averaging, evaluation, keys, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import Algorithm, Array, Metrics, PyTree, State, Task


class Draw(keys.Stream):
    """Streams below the server's key."""

    MODELS = 50, "which client trains which model"


def partner(w: PyTree, t: Array, select: str) -> Array:
    """Returns the model [M] that each of the models [M, ...] is mixed with in round t,
    not itself unless M = 1."""
    count = len(jax.tree.leaves(w)[0])
    own = jnp.eye(count, dtype=bool)
    if select == "order":
        return (jnp.arange(count) + t % max(count - 1, 1) + 1) % count
    product = trees.gram(w, w)
    norm = jnp.sqrt(jnp.diag(product))
    cosine = product / jnp.maximum(norm[:, None] * norm[None], 1e-12)
    sign = 1 if select == "lowest" else -1
    return jnp.argmin(jnp.where(own, jnp.inf, sign * cosine), axis=1)


@register("fedcross", targets=True)
def fedcross(
    task: Task,
    *,
    alpha: Annotated[float, Interval(ge=0, le=1)] = 0.99,
    select: Literal["lowest", "highest", "order"] = "lowest",
) -> Algorithm:
    """Mixes w_j = alpha v_j + (1 - alpha) v_k of the trained models v, k the partner of
    j; the global model is their uniform mean.

    There are as many models as the largest cohort has clients, and each client of a
    round trains one, at random.

    Args:
      alpha: weight of the own model (α) in [0, 1]; 0.99 as in the paper.
      select: the partner, one of lowest (the least cosine similarity, the paper's and
        PFLlib's choice), highest, order (another one in each round).

    Note:
      A model that no client trains in a round is mixed as it is. The similarity is that
      of all parameters; PFLlib adds those of pairs of layers. Running statistics are
      mixed as the models are. After training `acc` is that of the model that the client
      trained.
    """
    sgd, split = local_training.bind(task), averaging.split(task)
    count = task.cohort_sizes[1]

    def init(key):
        state = split.init(key)
        return State(trees.replicate(state.server, count), state.clients)

    def assign(key, cohort):
        # The clients in random order take the models in random order.
        draw = keys.fold(key, Draw.MODELS)

        def one(id):
            return jax.random.bits(jax.random.fold_in(draw, id), (), jnp.uint32)

        bits = jax.vmap(one)(cohort.ids)
        rank = jnp.argsort(jnp.lexsort((cohort.ids, bits, ~cohort.trained)))
        order = jax.random.permutation(jax.random.fold_in(draw, 1 << 30), count)
        return order[jnp.minimum(rank, count - 1)]

    def round(key, state, cohort):
        which = assign(key, cohort)

        def client(c, shared, own):
            w, value = sgd(c, split.receive(shared, own))
            post = evaluation.post(cohort, c, predictor(c.model, w))
            return *split.send(w), value, post

        start = trees.gather(state.server, which)
        v, own, value, post = cohort.map(client, start, state.clients)
        # Cross-aggregation.
        v = trees.scatter(state.server, which, v, cohort.trained)
        other = trees.gather(v, partner(params(v), cohort.round, select))
        mixed = trees.lerp(alpha, v, other)
        server = trees.choose(jnp.any(cohort.trained), mixed, state.server)
        return State(server, own), Metrics(value, post)

    def predict(server, own, c):
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0).astype(x.dtype), server)
        return predictor(c.model, split.receive(mean, own))

    def sent(state, cohort, metrics):
        return traffic.both_ways(cohort, trees.size(state.server) // count)

    return Algorithm(init, round, predict, evaluation.classification, sent)
