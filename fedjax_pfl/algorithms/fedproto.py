"""FedProto: clients of different architectures exchange the mean features of each
class, called prototypes.

Reference: Tan et al., FedProto: federated prototype learning across heterogeneous
clients (AAAI 2022), Algorithm 1; authors' code: yuetan031/FedProto.
"""

import functools
from typing import Annotated

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
from fedjax_pfl.algorithms.prototypes import predictor
from fedjax_pfl.algorithms.registry import READS_LABELS, register
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import (
    Method,
    Own,
    State,
    Task,
    Update,
)


@register("fedproto", several_architectures=True, excludes={"mix": READS_LABELS})
def fedproto(task: Task, *, lam: Annotated[float, Ge(0)] = 1.0) -> Method:
    """Trains each client's own model; the features of an example are drawn to the
    global prototype of its class.

    Args:
      lam: weight of the distance to the prototypes (λ) in [0, inf); 1 as in the
        authors' code.

    Note:
      The distance is the authors' code's: squared, per example, a mean over batch and
      features. A client's prototypes are mean features of its trained model, from one
      more pass over its examples; HtFLlib takes the features seen during training. A
      prototype is the plain mean over the clients that have the class, as in the
      authors' code. A class that no client has keeps its prototype. `acc` scores the
      head, and `proto_acc` the nearest prototype received, class 0 before the first.
      All architectures must have the same feature width. The loss includes the
      distance's term.
    """
    widths, classes = sorted({m.num_features for m in task.models}), task.num_classes
    if len(widths) > 1:
        raise InputError(
            f"FedProto needs one feature width K in all architectures, not {widths}: "
            "set it to one value (--features)."
        )
    sgd, batch_size = local_training.bind(task), evaluation.pass_size(task.sizes)

    def init(key):
        proto, known = jnp.zeros((widths[0], classes)), jnp.zeros(classes, bool)
        rows = architectures.stack(task, lambda model: model.init(key))
        return State({"proto": proto, "known": known}, rows)

    def client(c, server, w):
        # Labels, and the distance to the prototypes [K, C] of known classes [C].
        def loss(w, batch, key):
            x, proto = batch.x, server["proto"].T[batch.y]
            h, stats = c.model.features(w, x, mask=batch.mask, train=True, key=key)
            value = losses.of(task)(c.model.head(w["head"], h), batch.y, batch.mask)
            gap = jnp.mean((h - proto) ** 2, axis=1)
            gap = jnp.where(server["known"][batch.y], gap, 0)
            return value + lam * losses.masked_mean(gap, batch.mask), stats

        w, value = sgd(c, w, loss=loss)

        # The mean features of each class, by the trained model.
        def features(batch):
            return c.model.features(w, batch.x, mask=batch.mask, train=False)[0]

        upload = local_training.class_means(c.train, features, classes, batch_size)
        return Update(upload, Own(w), predictor(c.model, w, server), value)

    def update(key, server, mean, mass):
        return {"proto": mean, "known": server["known"] | (mass > 0)}

    def predict(server, w, c):
        return predictor(c.model, w, server)

    def sent(state, cohort, metrics):
        own = jnp.sum(cohort.class_counts > 0, axis=1)
        down = jnp.full_like(own, widths[0]) * jnp.sum(state.server["known"])
        # The integers name the classes.
        return traffic.both_ways(cohort, down, widths[0] * own)._replace(ints=own)

    return averaging.from_client(
        init,
        client,
        predict,
        score=functools.partial(averaging.score_paired, names=("proto",)),
        weight=lambda cohort: cohort.class_counts > 0,
        default=lambda server: server["proto"],
        update=update,
        traffic=sent,
    )
