"""FedProto: clients of different architectures exchange the mean features of each
class, called prototypes.

Reference: Tan et al., FedProto: federated prototype learning across heterogeneous
clients (AAAI 2022), Algorithm 1.
"""

import functools
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge

from fedjax_pfl import (
    architectures,
    averaging,
    evaluation,
    local_training,
    losses,
    traffic,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Model,
    Own,
    Predictor,
    PyTree,
    State,
    Task,
    Update,
)


def predictor(model: Model, w: PyTree, server: PyTree) -> Predictor:
    """Returns logits [B, C, 2]: the head's, and <h, P_l> - |P_l|^2 / 2, largest for the
    known prototype nearest to h."""

    def predict(x: Array, mask: Array) -> Array:
        h, _ = model.features(w, x, mask=mask, train=False)
        near = jnp.dot(h, server["proto"], precision=jax.lax.Precision.HIGHEST)
        near = near - jnp.sum(server["proto"] ** 2, axis=0)[None] / 2
        near = jnp.where(server["known"][None], near, -jnp.inf)
        return jnp.stack([model.head(w["head"], h), near], axis=-1)

    return predict


@register("fedproto", several_architectures=True)
def fedproto(
    task: Task,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    collect: Literal["after", "during"] = "after",
) -> Algorithm:
    """Trains each client's own model; the features of an example are drawn to the
    global prototype of its class.

    Args:
      lam: weight of the distance to the prototypes (λ) in [0, inf); 1 as in the
        authors' code.
      collect: when a client takes the mean features of its classes, one of after (by
        one more pass, of the trained model), during (over the batches of local
        training: HtFLlib, and for one epoch the authors' code).

    Note:
      The distance is the authors' code's: squared, per example, a mean over batch and
      features. A prototype is the plain mean over the clients that have the class, as
      in the authors' code. A class that no client holds keeps its prototype; with
      collect=during also one that no batch had (`classes_sent` counts what a client had
      in its batches). `acc` scores the head, and `proto_acc` the nearest prototype
      received, class 0 before the first. All architectures must have the same feature
      width. The loss includes the distance's term.
    """
    widths, classes = sorted({m.num_features for m in task.models}), task.num_classes
    if len(widths) > 1:
        raise InputError(
            f"FedProto needs one feature width K in all architectures, not {widths}: "
            "set it to one value (--features)."
        )
    batch_size, during = evaluation.pass_size(task.sizes), collect == "during"
    sgd = local_training.bind(task)

    def init(key):
        proto, known = jnp.zeros((widths[0], classes)), jnp.zeros(classes, bool)
        rows = architectures.stack(task, lambda model: model.init(key))
        return State({"proto": proto, "known": known}, rows)

    def client(c, server, w):
        proto, known = server["proto"], server["known"]  # [K, C], [C]

        def loss(w, batch, key):
            h, stats = c.model.features(
                w, batch.x, mask=batch.mask, train=True, key=key
            )
            z = c.model.head(w["head"], h)
            gap = jnp.mean((h - proto.T[batch.y]) ** 2, axis=1)
            gap = losses.masked_mean(jnp.where(known[batch.y], gap, 0), batch.mask)
            value = losses.cross_entropy(z, batch.y, batch.mask)
            h = jax.lax.stop_gradient(h)
            seen = local_training.class_sums(h, batch, classes) if during else ()
            return value + lam * gap, stats, seen

        def features(batch):
            return c.model.features(w, batch.x, mask=batch.mask, train=False)[0]

        w, (value, seen) = sgd(c, w, loss=loss, has_aux=True)
        upload: PyTree
        more: dict[str, Array] = {}
        if during:  # `seen` are means over the steps
            total, count = (x * local_training.count(c.train, task) for x in seen)
            has = (count > 0).astype(jnp.float32)
            upload = {"proto": total / jnp.maximum(count, 1)[None], "has": has}
            more = {"classes_sent": jnp.sum(count > 0)}
        else:
            upload = local_training.class_means(c.train, features, classes, batch_size)
        return Update(upload, Own(w), predictor(c.model, w, server), value, more)

    def default(server):
        zeros = {"proto": jnp.zeros_like(server["proto"]), "has": jnp.zeros(classes)}
        return zeros if during else server["proto"]

    def server_update(server, mean, cohort):
        # The mean over the clients that have the class.
        has = jnp.any(cohort.class_counts > 0, axis=0)
        if during:
            has, share = mean["has"] > 0, jnp.where(mean["has"] > 0, mean["has"], 1)
            mean = jnp.where(has[None], mean["proto"] / share[None], server["proto"])
        return {"proto": mean, "known": server["known"] | has}

    def predict(server, w, c):
        return predictor(c.model, w, server)

    def sent(state, cohort, metrics):
        own = jnp.sum(cohort.class_counts > 0, axis=1)
        if during:
            own = metrics.clients["classes_sent"]
        down = jnp.full_like(own, widths[0]) * jnp.sum(state.server["known"])
        # which classes
        return traffic.both_ways(cohort, down, widths[0] * own)._replace(ints=own)

    return averaging.from_client(
        init,
        client,
        predict,
        score=functools.partial(averaging.score_paired, names=("proto",)),
        weight=lambda cohort: None if during else cohort.class_counts > 0,
        default=default,
        server_update=server_update,
        traffic=sent,
    )
