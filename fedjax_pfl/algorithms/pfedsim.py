"""pFedSim: after rounds of FedAvg, a client's body is a mixture of all bodies, weighted
by the similarity of the heads.

Reference: Tan et al., pFedSim: similarity-aware model aggregation towards personalized
federated learning (2023); authors' code: KarhouTam/FL-bench.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Interval

from fedjax_pfl import averaging, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.errors import needed
from fedjax_pfl.types import Array, Method, Metrics, Stage, State, Task, Update

LARGEST = 0.9999  # similarity of a client with itself, as in the authors' code


def similarity(kernels: Array) -> Array:
    """Returns max(0, mean over the classes of cos(w_i^c, w_j^c)) [N, N] of heads'
    kernels [N, K, C]."""
    norm = jnp.linalg.norm(kernels, axis=1, keepdims=True)
    unit = kernels / jnp.maximum(norm, 1e-12)
    flat = unit.reshape(len(unit), -1)
    product = jnp.dot(flat, flat.T, precision=jax.lax.Precision.HIGHEST)
    return jnp.maximum(product / kernels.shape[2], 0)


def weights(phi: Array) -> Array:
    """Returns -log(1 - phi), normalised over the last axis; entries of 0.9999 or more
    count as 0.9999."""
    weight = -jnp.log1p(-jnp.minimum(phi, LARGEST))
    return weight / jnp.sum(weight, axis=-1, keepdims=True)


@register("pfedsim", targets=True)
def pfedsim(
    task: Task, *, warmup: Annotated[float, Interval(ge=0, le=1)] = 0.5
) -> Method:
    """Trains from the body sum_j a_ij w_j and the client's own head; a_ij is in
    proportion to -log(1 - phi_ij), phi_ij the similarity of the heads.

    Args:
      warmup: share (ρ) in [0, 1] of the rounds that are FedAvg's; 0.5 as in the
        authors' code. With 1 it is FedAvg.

    Note:
      phi_ij is renewed in the rounds that both clients take part in, and 0 before. A
      client predicts with its own last model, after the warm-up's rounds with the
      global one. The last uploads of all clients are mixed. Running statistics are
      averaged during the warm-up and mixed with the bodies afterwards. After the
      warm-up a client sends its model and receives a body, and once the global head.
    """
    sgd, split = local_training.bind(task), averaging.split(task)
    rounds = needed("rounds", task.rounds, "which its warm-up follows")
    n, first = task.num_clients, jnp.round(warmup * rounds)

    def init(key):
        w = task.model.init(key)
        averaging.check_linear_head(w, "pfedsim")
        shared, own = split.send(w)
        server = {"w": trees.replicate(shared, n), "phi": jnp.eye(n)}
        server["own_head"] = jnp.zeros(n, bool)
        return State(server, trees.replicate(own, n))

    def mixed(server, ids):
        phi = jnp.where(jnp.eye(n, dtype=bool), LARGEST, server["phi"])
        others = jnp.arange(n)[None] != ids[:, None]
        # trees.mixtures gives the client itself the rest.
        a = jnp.where(others, weights(phi)[ids], 0)
        w = server["w"]
        return trees.mixtures(a, {k: w[k] for k in w if k != "head"}, ids)

    def warms(cohort):
        return cohort.round < first

    def start(key, server, cohort):
        # Matrix products round a row by its position: rows are ordered by their ids.
        order = jnp.argsort(cohort.ids)
        body = trees.gather(mixed(server, cohort.ids[order]), jnp.argsort(order))
        mine = trees.gather(server["w"], cohort.ids)
        return (), trees.choose(warms(cohort), mine, mine | body)

    def client(c, server, own, _, start):
        w, value = sgd(c, split.receive(start, own))
        shared, own = split.send(w)
        return Update(shared, own, predictor(c.model, w), value, sent=shared)

    def finish(key, server, mean, w, old, rows, cohort):
        warm = warms(cohort)
        kept = trees.scatter(server["w"], cohort.ids, w, cohort.trained)
        same = trees.replicate(mean, n)
        here = jnp.zeros(n, bool).at[cohort.ids].set(cohort.trained)
        both = here[:, None] & here[None] & ~warm & ~jnp.eye(n, dtype=bool)
        phi = jnp.where(both, similarity(kept["head"]["kernel"]), server["phi"])
        everybody = trees.choose(warm & jnp.any(here), same, kept)
        own_head = server["own_head"] | (here & ~warm)
        server = {"w": everybody, "phi": phi, "own_head": own_head}
        return State(server, rows), Metrics()

    def predict(server, own, c):
        return predictor(c.model, split.receive(trees.gather(server["w"], c.id), own))

    def sent(state, cohort, metrics):
        w = state.server["w"]
        size, head = (trees.size(tree) // n for tree in (w, w["head"]))
        kept = state.server["own_head"][cohort.ids]
        return traffic.both_ways(cohort, size - head * kept, size)

    return averaging.from_client(
        init,
        client,
        predict,
        default=lambda server: trees.gather(server["w"], 0),
        start=start,
        finish=finish,
        traffic=sent,
        stages=(Stage(first, "no bodies are mixed"),),
    )
