"""FedAS: a client aligns the received body to its previous features before training,
and bodies are weighted by their Fisher information.

Reference: Yang et al., FedAS: bridging inconsistency in personalized federated learning
(CVPR 2024); authors' code: xiyuanyang45/FedAS.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import (
    averaging,
    evaluation,
    keys,
    local_training,
    losses,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.registry import READS_LABELS, register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import Array, Client, Method, PyTree, Task, Update


class Draw(keys.Stream):
    """Streams below a client's key."""

    ALIGN = 50, "alignment of the received body"


def fisher(c: Client, w: PyTree, batch_size: int) -> Array:
    """Returns the sum [] over a client's batches of the squared norm of the gradient of
    their mean loss, an estimate of the Fisher information's trace."""

    def value(params, batch):
        z = predictor(c.model, {**w, **params})(batch.x, batch.mask)
        return losses.cross_entropy(z, batch.y, batch.mask)

    def add(total, batch):
        slope = jax.grad(value)(averaging.params(w), batch)
        return total + optax.tree.norm(slope, squared=True)

    return local_training.fold(c.train, add, jnp.zeros(()), batch_size)


@register("fedas", excludes={"mix": READS_LABELS})
def fedas(
    task: Task,
    *,
    align_lr: Annotated[float, Ge(0)] = 0.01,
    align_epochs: Annotated[int, Interval(ge=0, le=10_000)] = 1,
) -> Method:
    """Averages the bodies with weights in proportion to the trace of the clients'
    Fisher information; each client keeps its head.

    Before training, the received body takes SGD steps on the sum over the classes of
    the batch of mean((h - p_c)^2), p_c the mean feature of class c under the client's
    previous body. A client predicts with its own trained model.

    Args:
      align_lr: step size of the alignment in [0, inf); 0.01 as in PFLlib, whose FedAS
        is the authors'.
      align_epochs: epochs of the alignment in [0, 10000]; 1 as there. With 0 only the
        weights differ from FedPer's.

    Note:
      The Fisher information is taken over batches in the order of the examples, of the
      task's batch size; the estimate depends on it. Before a client's first round its
      previous body is the initial one. Each client aligns a copy of the received body.
      The authors' code aligns the server's own model, one client after another.
    """
    sgd, split = local_training.bind(task), averaging.split(task, ("head",))
    plain = task._replace(optimizer=optax.sgd, lr=align_lr, augment=None, mix=None)
    classes, batch_size = task.num_classes, evaluation.pass_size(task.sizes)
    align = local_training.bind(plain)

    def init(key):
        return split.init(key, lambda w: {"w": w})

    def aligned(c, received, previous):
        def features(batch):
            w = previous
            return c.model.features(w, batch.x, mask=batch.mask, train=False)[0]

        proto = local_training.class_means(c.train, features, classes, batch_size)

        def loss(w, batch, key):
            h, stats = c.model.features(
                w, batch.x, mask=batch.mask, train=True, key=key
            )
            gap = jnp.mean((h - proto.T[batch.y]) ** 2, axis=1)[None]
            total, count = local_training.class_sums(gap.T, batch, classes)
            return jnp.sum(total[0] / jnp.maximum(count, 1)), stats

        w, _ = align(
            c,
            received,
            loss=loss,
            train=("body",),
            stream=Draw.ALIGN,
            epochs=align_epochs,
        )
        return w

    def client(c, server, row):
        # Parameter alignment, then local training.
        received = split.receive(server, split.send(row["w"])[1])
        w = aligned(c, received, row["w"])
        w, value = sgd(c, w)
        shared, own = split.send(w)
        # The server divides the mean of F_i w_i by that of F_i.
        trace = fisher(c, w, task.batch_size)
        scaled = jax.tree.map(lambda x: (trace * x).astype(x.dtype), shared)
        upload = {"w": scaled, "fisher": trace}
        predict, seen = predictor(c.model, w), {"fisher": trace}
        return Update(upload, {"w": w, "own": own}, predict, value, seen)

    def update(key, server, mean, mass):
        total = mean["fisher"]
        new = jax.tree.map(lambda x: x / jnp.where(total > 0, total, 1), mean["w"])
        return trees.choose(total > 0, optax.tree.cast_like(new, server), server)

    def predict(server, row, c):
        return predictor(c.model, row["w"])

    def sent(state, cohort, metrics):
        size = trees.size(state.server)
        return traffic.both_ways(cohort, size, size + 1)  # up the Fisher information

    return averaging.from_client(
        init,
        client,
        predict,
        weight=lambda cohort: cohort.trained,
        default=lambda server: {"w": server, "fisher": jnp.ones((), jnp.float32)},
        update=update,
        traffic=sent,
    )
