"""FedPCL: clients share class prototypes only, and train by a contrastive loss towards
those of all clients.

Reference: Tan et al., Federated learning from pre-trained models: a contrastive
learning approach (NeurIPS 2022), Algorithm 1; authors' code: yuetan031/FedPCL.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Gt
from chex import Numeric

from fedjax_pfl import (
    architectures,
    evaluation,
    local_training,
    losses,
    optimizers,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.registry import OWN_LOSS, READS_LABELS, register
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Algorithm, Array, Metrics, Model, Own, PyTree, State, Task

TINY = 1e-12


def unit(h: Array) -> Array:
    """Returns the rows of h [B, K] at length 1."""
    return h / jnp.sqrt(jnp.maximum(jnp.sum(h * h, axis=1, keepdims=True), TINY))


def contrast(h: Array, proto: Array, known: Array, y: Array, tau: Numeric) -> Array:
    """Returns the cross entropy [B] of the similarities h P / tau over the known
    classes; h [B, K], P [K, C], known [C]."""
    z = jnp.dot(h, proto, precision=jax.lax.Precision.HIGHEST) / tau
    log_p = jax.nn.log_softmax(jnp.where(known[None], z, -1e9))
    return -jnp.take_along_axis(log_p, y[:, None], axis=1)[:, 0]


@register(
    "fedpcl",
    several_architectures=True,
    excludes={"loss": OWN_LOSS, "mix": READS_LABELS},
)
def fedpcl(
    task: Task,
    *,
    tau: Annotated[float, Gt(0)] = 0.07,
    clip: Annotated[float, Gt(0)] = 10.0,
) -> Algorithm:
    """Minimises the contrastive losses of the unit features towards the global
    prototypes and, in the mean over the clients, towards theirs.

    A prototype is the mean unit feature of a class. A client predicts by its nearest
    own prototype.

    Args:
      tau: temperature (τ) in (0, inf); 0.07 as in the authors' code.
      clip: largest norm of the gradient in (0, inf); 10 as in PFLlib.

    Note:
      The paper's frozen pretrained networks are left out, as in PFLlib: the client
      trains its own body, and the head is not used. The authors' code contrasts the
      prototype of an example's class with the features of the batch. A class that a
      client has not sent has the global prototype in that client's set. In the first
      round nothing is trained, and prototypes are sent. The global prototype is the
      uniform mean over the clients that have sent the class, of their last ones. All
      architectures must have the same feature width.
    """
    widths, classes = sorted({m.num_features for m in task.models}), task.num_classes
    if len(widths) > 1:
        raise InputError(
            f"FedPCL needs one feature width K in all architectures, not {widths}: set "
            "it to one value (--features)."
        )
    width, n = widths[0], task.num_clients
    batch_size = evaluation.pass_size(task.sizes)
    clipped = task._replace(
        optimizer=lambda lr: optax.chain(optimizers.clipped(clip), task.optimizer(lr))
    )
    sgd = local_training.bind(clipped)

    def features(model: Model, w: PyTree, x: Array, mask: Array) -> Array:
        return unit(model.features(w, x, mask=mask, train=False)[0])

    def init(key):
        zeros = jnp.zeros((n, width, classes))
        server = {"proto": zeros, "has": jnp.zeros((n, classes), bool)}

        def row(model):
            w = model.init(key)
            return {"body": w["body"], "stats": w["stats"]}

        rows = {"w": architectures.stack(task, row), "proto": zeros}
        return State(server, rows)

    def known(server):
        # The global prototypes, and each client's set, filled up with them.
        has = server["has"]
        count = jnp.sum(has, axis=0)
        mean = jnp.sum(jnp.where(has[:, None], server["proto"], 0), axis=0)
        mean = mean / jnp.maximum(count, 1)[None]
        return mean, jnp.where(has[:, None], server["proto"], mean[None]), count > 0

    def predictor(model, w, proto, held):
        def predict(x, mask):
            z = jnp.dot(
                features(model, w, x, mask), proto, precision=jax.lax.Precision.HIGHEST
            )
            return jnp.where(held[None], z, -2.0)  # below every cosine

        return predict

    def round(key, state, cohort):
        mean, sets, seen = known(state.server)

        def client(c, row):
            def loss(w, batch, key):
                h, stats = c.model.features(
                    w, batch.x, mask=batch.mask, train=True, key=key
                )
                h = unit(h)
                value = contrast(h, mean, seen, batch.y, tau)
                each = jax.vmap(lambda p: contrast(h, p, seen, batch.y, tau))(sets)
                value = value + jnp.mean(each, axis=0)
                # Nothing is learned before the first prototypes.
                return jnp.any(seen) * losses.masked_mean(value, batch.mask), stats

            w, value = sgd(c, row["w"], loss=loss, train=("body",))
            unit_features = lambda batch: features(c.model, w, batch.x, batch.mask)
            proto = local_training.class_means(
                c.train, unit_features, classes, batch_size
            )
            proto = proto.astype(jnp.float32)
            post = evaluation.post(
                cohort, c, predictor(c.model, w, proto, c.class_counts > 0)
            )
            return {"w": Own(w), "proto": proto}, proto, value, post

        rows, proto, value, post = cohort.map(client, state.clients)
        server = {
            "proto": trees.scatter(
                state.server["proto"], cohort.ids, proto, cohort.trained
            ),
            "has": trees.scatter(
                state.server["has"], cohort.ids, cohort.class_counts > 0, cohort.trained
            ),
        }
        return State(server, rows), Metrics(value, post)

    def predict(server, row, c):
        return predictor(c.model, row["w"], row["proto"], c.class_counts > 0)

    def sent(state, cohort, metrics):
        own = jnp.sum(cohort.class_counts > 0, axis=1)
        down = jnp.full_like(own, width) * jnp.sum(state.server["has"])
        return traffic.both_ways(cohort, down, width * own)._replace(ints=own)

    return Algorithm(init, round, predict, evaluation.classification, sent)
