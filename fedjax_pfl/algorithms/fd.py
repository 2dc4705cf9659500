"""FD: clients of different architectures exchange the mean prediction of each class,
which the others learn from.

Reference: Jeong et al., Communication-efficient on-device machine learning: federated
distillation and augmentation under non-IID private data (2018).
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge

from fedjax_pfl import architectures, evaluation, local_training, losses, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Cohort,
    Metrics,
    Own,
    Predictor,
    PyTree,
    State,
    Task,
    Traffic,
)


def others(server: PyTree, id: Array, class_counts: Array) -> Array:
    """How many other clients sent a prediction of each class in the last round, [C]
    int32."""
    return server["count"] - (server["took"][id] & (class_counts > 0))


def teacher(
    server: PyTree, mine: PyTree, id: Array, class_counts: Array
) -> tuple[Array, Array]:
    """G [C, C], column l the mean prediction of the other clients for class l, and
    where there is one, [C] bool.

    Where nobody else sent one in the last round, it is what the client had received
    before.
    """
    count = others(server, id, class_counts)
    own = jnp.where((count < server["count"])[None], mine["own"], 0)
    mean = (server["mean"] * server["count"][None] - own) / jnp.maximum(count, 1)[None]
    # 0 may come out as -1e-8
    received = jnp.where((count > 0)[None], jnp.maximum(mean, 0), mine["table"])
    return received, mine["known"] | (count > 0)


@register("fd", several_architectures=True)
def fd(task: Task, *, gamma: Annotated[float, Ge(0)] = 1.0) -> Algorithm:
    """Trains each client's own model on labels, and on the others' mean prediction for
    the label.

    Args:
      gamma: weight of the others' predictions (γ) in [0, inf); 1 as in HtFLlib.

    Note:
      Predictions are averaged as probabilities, over one more pass after training; the
      paper's average runs along with training. Code libraries average logits, own ones
      included, and take them for probabilities: that loss has no lower bound, and is
      not built. The loss includes the second term. A client takes its own table off the
      sum as it was before any `transform` of uploads, so that with one the others' mean
      is off by the difference.
    """
    classes, batch_size = task.num_classes, evaluation.pass_size(task.sizes)

    def init(key: Array) -> State:
        nothing, none = jnp.zeros((classes, classes)), jnp.zeros(classes, bool)
        server = {
            "mean": nothing,
            "count": jnp.zeros(classes, jnp.int32),
            "took": jnp.zeros(task.num_clients, bool),
        }
        mine = trees.replicate(
            {"own": nothing, "table": nothing, "known": none}, task.num_clients
        )
        return State(
            server,
            {"w": architectures.stack(task, lambda model: model.init(key)), **mine},
        )

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, mine: PyTree
        ) -> tuple[Array, PyTree, Array, dict[str, Array]]:
            table, known = teacher(state.server, mine, c.id, c.class_counts)

            def loss(w: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
                z, stats = c.model.apply(
                    w, batch.x, mask=batch.mask, train=True, key=key
                )
                gap = jnp.where(
                    known[batch.y],
                    optax.losses.softmax_cross_entropy(z, table.T[batch.y]),
                    0,
                )
                value = losses.cross_entropy(z, batch.y, batch.mask)
                return value + gamma * losses.masked_mean(gap, batch.mask), stats

            w, value = local_training.sgd(c.key, c.train, loss, mine["w"], task)
            logits = predictor(c.model, w)
            soft = lambda batch: jax.nn.softmax(logits(batch.x, batch.mask))
            own = local_training.class_means(c.train, soft, classes, batch_size)
            new = {"w": Own(w), "own": own, "table": table, "known": known}
            return own, new, value, evaluation.post(cohort, c, logits)

        has = cohort.class_counts > 0
        nothing = jnp.zeros_like(state.server["mean"])
        mean, (mine, value, post) = cohort.mean(
            client, state.clients, weight=has, default=nothing
        )
        took = jnp.zeros_like(state.server["took"]).at[cohort.ids].set(cohort.trained)
        server = {
            "mean": mean,
            "count": jnp.sum(has, axis=0, dtype=jnp.int32),
            "took": took,
        }
        return State(
            trees.choose(jnp.any(cohort.trained), server, state.server), mine
        ), Metrics(value, post)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        return predictor(c.model, mine["w"])

    def sent(state: State, cohort: Cohort, metrics: Metrics) -> Traffic:
        fresh = (
            jax.vmap(others, (None, 0, 0))(
                state.server, cohort.ids, cohort.class_counts
            )
            > 0
        )
        own = jnp.sum(cohort.class_counts > 0, axis=1)
        count = traffic.both_ways(
            cohort, classes * jnp.sum(fresh, axis=1), classes * own
        )
        return count._replace(ints=own)  # which classes

    return Algorithm(init, round, predict, evaluation.classification, sent)
