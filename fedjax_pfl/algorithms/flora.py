"""FLoRA: the server stacks the clients' LoRA matrices, so that their product is the
exact mean of the clients' products, and clients add it to the frozen base.

Reference: Wang et al., FLoRA: federated fine-tuning large language models with
heterogeneous low-rank adaptations (NeurIPS 2024), Algorithm 1. Authors' code:
ATP-1010/FederatedLLM.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge

from fedjax_pfl import (
    aggregate,
    averaging,
    evaluation,
    keys,
    local_training,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.evaluation import LORA_ERROR
from fedjax_pfl.models import low_rank
from fedjax_pfl.models.adapted import shifted
from fedjax_pfl.types import Algorithm, Metrics, Model, Predictor, PyTree, State, Task


class Draw(keys.Stream):
    """Streams below a client's key."""

    ADAPTER = 50, "the new A of a round"


@register("flora")
def flora(task: Task, *, rank_min: Annotated[int, Ge(1)] | None = None) -> Algorithm:
    """Adds the mean of the clients' products to the base; every round trains new A, B.

    With A = [p_1 A_1, ..., p_K A_K] and B = [B_1; ...; B_K], A B = sum_k p_k A_k B_k,
    p_k client k's share of the examples. Averaging A and B by themselves gives another
    product. Client k has the first r_k columns of A and rows of B. The head is averaged
    by examples.

    Args:
      rank_min: least rank, [1, inf); r_k is drawn from rank_min to the rank r of the
        model, both included, as in `hetlora`. None: every r_k is r, the default of the
        authors' code.

    Note:
      The model must be adapted by `lora`. The server keeps the sum of all rounds'
      products, whose size is that of the adapted weights. A client draws its new A as
      `lora` does. The scale alpha/r is the same for all ranks, as in the authors' code.
      The paper adapts language models and has no head. `traffic` counts the stacked
      matrices of all rounds since the client's last, or that sum if it is smaller.
    """
    rank = low_rank.rank(task.model, "flora")
    least = rank if rank_min is None else rank_min
    sgd, at = local_training.bind(task), jnp.arange(rank)
    scale = 1.0 if task.model.frozen is None else task.model.frozen.scale

    def scaled(products):
        return jax.tree.map(lambda x: scale * x, products)

    def init(key):
        w = task.model.init(key)
        server = {
            "head": w["head"],
            # for predictions
            "adapter": low_rank.without_product(w["body"]),
            # sum of all products; of a warm start also the first
            "delta": scaled(low_rank.products(w["body"])),
            # of all matrices A that were stacked so far
            "columns": jnp.int32(0),
        }
        ranks = low_rank.ranks(key, least, rank, task.num_clients)
        return State(server, {"rank": ranks, "columns": jnp.zeros_like(ranks)})

    def round(key, state, cohort):
        server, ranks = state.server, state.clients["rank"]
        # The clients add the earlier rounds' products to the base.
        model = shifted(task.model, server["delta"])

        def client(c, of):
            # New matrices of the client's rank, B = 0, then local training.
            body = c.model.init(keys.fold(c.key, Draw.ADAPTER))["body"]
            body = low_rank.masked(low_rank.without_product(body), at < of)
            start = {"body": body, "head": server["head"], "stats": {}}
            w, value = sgd(c._replace(model=model), start)
            post = evaluation.post(cohort, c, _predictor(model, w))
            return w["head"], w["body"], value, post

        head, (bodies, value, post) = cohort.mean(
            client, ranks, weight=cohort.sizes, default=server["head"]
        )
        # The server stacks A, weighted by p_k, and B, in the order of the clients.
        shares = aggregate.shares(cohort.sizes, cohort.active)
        sent = cohort.replicated(bodies), shares
        stack = low_rank.stacked(*trees.gather(sent, jnp.argsort(cohort.ids)))
        delta = trees.add(server["delta"], scaled(low_rank.products(stack)))
        columns = jnp.sum(jnp.where(cohort.trained, ranks, 0), dtype=jnp.int32)
        columns = server["columns"] + columns
        rows = {"rank": ranks, "columns": jnp.full_like(ranks, server["columns"])}
        server = server | {"head": head, "delta": delta, "columns": columns}
        # The mean is exact.
        shown = dict.fromkeys({LORA_ERROR} & {*task.metrics}, jnp.float32(0))
        return State(server, rows), Metrics(value, post, server=shown)

    def predict(server, row, c):
        w = {"body": server["adapter"], "head": server["head"], "stats": {}}
        return _predictor(shifted(c.model, server["delta"]), w)

    def sent(state, cohort, metrics):
        server, row = state
        one = trees.size(server["adapter"]) // rank  # scalars per column
        whole = trees.size(server["delta"])
        missed = jnp.minimum(server["columns"] - row["columns"], whole // one + 1)
        head = trees.size(server["head"])
        down = head + jnp.minimum(one * missed, whole)
        return traffic.both_ways(cohort, down, head + one * row["rank"])

    return Algorithm(init, round, predict, evaluation.classification, traffic=sent)


def _predictor(model: Model, w: PyTree) -> Predictor:
    """Returns the logits of a model, which has more of its own than the variables w."""
    return lambda x, mask: averaging.logits(model, w, x, mask)
