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

from fedjax_pfl import (
    architectures,
    averaging,
    evaluation,
    local_training,
    losses,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.registry import READS_LABELS, register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import Array, Method, Metrics, Own, PyTree, State, Task, Update


def others(server: PyTree, id: Array, class_counts: Array) -> Array:
    """Counts the other clients that sent a prediction of each class in the last
    round, [C] int32."""
    return server["count"] - (server["took"][id] & (class_counts > 0))


def teacher(
    server: PyTree, mine: PyTree, id: Array, class_counts: Array
) -> tuple[Array, Array]:
    """Computes G [C, C], column l the mean prediction of the other clients for class l,
    and where there is one, [C] bool.

    Where nobody else sent one in the last round, it is what the client had received
    before.
    """
    count = others(server, id, class_counts)
    own = jnp.where((count < server["count"])[None], mine["own"], 0)
    mean = (server["mean"] * server["count"][None] - own) / jnp.maximum(count, 1)[None]
    # 0 may come out as -1e-8
    received = jnp.where((count > 0)[None], jnp.maximum(mean, 0), mine["table"])
    return received, mine["known"] | (count > 0)


@register("fd", several_architectures=True, excludes={"mix": READS_LABELS})
def fd(task: Task, *, gamma: Annotated[float, Ge(0)] = 1.0) -> Method:
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
    sgd, classes, batch_size = (
        local_training.bind(task),
        task.num_classes,
        evaluation.pass_size(task.sizes),
    )

    def init(key):
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

    def client(c, server, row):
        table, known = teacher(server, row, c.id, c.class_counts)

        def loss(w, batch, key):
            z, stats = c.model.apply(w, batch.x, mask=batch.mask, train=True, key=key)
            gap = optax.losses.softmax_cross_entropy(z, table.T[batch.y])
            gap = losses.masked_mean(jnp.where(known[batch.y], gap, 0), batch.mask)
            value = losses.of(task)(z, batch.y, batch.mask)
            return value + gamma * gap, stats

        w, value = sgd(c, row["w"], loss=loss)
        logits = predictor(c.model, w)
        soft = lambda batch: jax.nn.softmax(logits(batch.x, batch.mask))
        own = local_training.class_means(c.train, soft, classes, batch_size)
        row = {"w": Own(w), "own": own, "table": table, "known": known}
        return Update(own, row, logits, value)

    def finish(key, server, mean, sent, old, rows, cohort):
        took = jnp.zeros_like(server["took"]).at[cohort.ids].set(cohort.trained)
        count = jnp.sum(cohort.class_counts > 0, axis=0, dtype=jnp.int32)
        new = {"mean": mean, "count": count, "took": took}
        new = trees.choose(jnp.any(cohort.trained), new, server)
        return State(new, rows), Metrics()

    def predict(server, row, c):
        return predictor(c.model, row["w"])

    def sent(state, cohort, metrics):
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

    return averaging.from_client(
        init,
        client,
        predict,
        weight=lambda cohort: cohort.class_counts > 0,
        default=lambda server: jnp.zeros_like(server["mean"]),
        finish=finish,
        traffic=sent,
    )
