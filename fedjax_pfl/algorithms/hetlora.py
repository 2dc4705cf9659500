"""HetLoRA: clients train LoRA's products with different ranks, and the server averages
them, padded with zeros, by their norms.

Reference: Cho et al., Heterogeneous LoRA for federated fine-tuning of on-device
foundation models (EMNLP 2024).
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, local_training, losses, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.evaluation import LORA_ERROR
from fedjax_pfl.models import low_rank
from fedjax_pfl.models.low_rank import masked
from fedjax_pfl.types import Array, Method, PyTree, State, Task, Update

LEAST = 1e-24  # square of a norm whose gradient is taken as 0


@register("hetlora")
def hetlora(
    task: Task,
    *,
    rank_min: Annotated[int, Ge(1)] = 1,
    gamma: Annotated[float, Interval(gt=0, le=1)] = 0.99,
    lam: Annotated[float, Ge(0)] = 0.005,
    by_norm: bool = True,
) -> Method:
    """Averages A and B, of which client k has the first r_k columns and rows.

    A client minimises CE + lam ||A[:, s:]|| ||B[s:]||, s = floor(gamma r_k), and r_k
    becomes s where training reduced that product of norms. The weight of its A and B is
    ||A_k B_k||_F over all layers, of the head the number of its examples.

    Args:
      rank_min: least rank, also of self-pruning, in [1, inf); r_k is drawn from
        rank_min to the rank r of the model, both included. Where r is smaller than
        rank_min, every r_k is r.
      gamma: share of the rank that self-pruning keeps, in (0, 1]; 1: ranks remain.
      lam: weight of the regulariser in [0, inf).
      by_norm: true or false; if false, A and B are weighted by examples, too.

    Note:
      The model must be adapted by `lora`. All clients hold r columns, those from r_k on
      zero, so that they are trained at once; `traffic` counts r_k. The defaults of
      gamma and lam were not compared with the paper's text. Where one rank is for all,
      gamma 1, lam 0 and by_norm False, the method is FedAvg.
    """
    rank = low_rank.rank(task.model, "hetlora")
    split, plain = averaging.split(task), losses.classification(task.model, task)
    at, watched = jnp.arange(rank), LORA_ERROR in task.metrics

    def init(key):
        state = split.init(key, lambda w: {})
        ranks = low_rank.ranks(key, rank_min, rank, task.num_clients)
        return State(state.server, state.clients | {"rank": ranks})

    def less(of):
        return jnp.floor(gamma * of).astype(jnp.int32)

    def tail(body, of):
        # The norms of the columns that pruning would remove.
        chosen = (at >= less(of)) & (at < of)
        pairs = _layers(masked(body, chosen))
        return sum((_norm(a) * _norm(b) for a, b in pairs), jnp.float32(0))

    def client(c, server, row):
        of = row["rank"]
        start = split.receive(server, row["own"])
        # Truncation to the client's rank.
        start = start | {"body": masked(start["body"], at < of)}

        def loss(w, batch, key):
            value, stats = plain(w, batch, key)
            return value + lam * tail(w["body"], of), stats

        w, value = local_training.bind(task, loss)(c, start)
        # Rank self-pruning.
        smaller = tail(w["body"], of) < tail(start["body"], of)
        new = jnp.where(smaller, jnp.clip(less(of), rank_min, of), of)
        w = w | {"body": masked(w["body"], at < new)}
        upload, own = split.send(w)
        norm = jnp.float32(1)
        if by_norm:
            squares = sum(_product(a, b) for a, b in _layers(w["body"]))
            norm = jnp.sqrt(jnp.asarray(squares, jnp.float32))
        scaled = jax.tree.map(lambda x: norm.astype(x.dtype) * x, upload["body"])
        upload = upload | {"body": scaled, "norm": norm}
        predict = averaging.predictor(c.model, w)
        row, seen = {"own": own, "rank": new}, {"rank": new.astype(jnp.float32)}
        sent = (w["body"], norm) if watched else ()
        return Update(upload, row, predict, value, seen, sent)

    def weight(cohort):
        trained = cohort.trained.astype(jnp.float32)
        ours = trained if by_norm else cohort.sizes
        weights = dict.fromkeys(split.personal[0], cohort.sizes)
        return weights | {"body": ours, "norm": ours}

    def observe(sent, cohort):
        body, norm = sent
        mass = weight(cohort)["body"] * norm
        return {LORA_ERROR: low_rank.averaging_error(body, mass, cohort)}

    def default(server):
        return server | {"norm": jnp.float32(1)}

    def update(key, server, mean, mass):
        # Sparsity-weighted aggregation: sum_k ||dW_k|| A_k / sum_k ||dW_k||.
        total = mean.pop("norm")
        share = lambda x, old: jnp.where(
            total > 0, x / jnp.where(total > 0, total, 1).astype(x.dtype), old
        )
        body = jax.tree.map(share, mean["body"], server["body"])
        return server | mean | {"body": body}

    def predict(server, row, c):
        w = split.receive(server, row["own"])
        body = masked(w["body"], at < row["rank"])
        return averaging.predictor(c.model, w | {"body": body})

    def count(state, cohort, metrics):
        one = trees.size(state.server["body"]) // rank  # scalars per column
        rest = trees.size(state.server) - one * rank
        down, up = (
            rest + one * r.astype(jnp.int32)
            for r in (state.clients["rank"], metrics.clients["rank"])
        )
        return traffic.both_ways(cohort, down, up + by_norm)

    return averaging.from_client(
        init,
        client,
        predict,
        weight=weight,
        default=default,
        update=update,
        traffic=count,
        observe=observe if watched else None,
        averages=averaging.BODY_AND_HEAD,
    )


def _layers(body: PyTree) -> list[tuple[Array, Array]]:
    """Returns A [I, r] and B [r, O] of every layer."""
    pairs = low_rank.factors(body).values()
    return [(a.reshape(-1, a.shape[-1]), b) for a, b in pairs]


def _norm(x: Array) -> Array:
    """Computes the norm, with the gradient 0 at 0."""
    return jnp.sqrt(jnp.maximum(jnp.sum(x**2), LEAST))


def _product(a: Array, b: Array) -> Array:
    """Computes ||A B||^2 without the product."""
    return jnp.sum((a.T @ a) * (b @ b.T))
