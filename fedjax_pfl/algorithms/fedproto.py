"""FedProto: clients of different architectures exchange the mean features of each
class, called prototypes.

Reference: Tan et al., FedProto: federated prototype learning across heterogeneous
clients (AAAI 2022), Algorithm 1.
"""

import functools
from collections.abc import Callable
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
    Batch,
    Client,
    Cohort,
    Metrics,
    Model,
    Own,
    Predictor,
    PyTree,
    State,
    Task,
    Traffic,
)


def predictor(model: Model, w: PyTree, server: PyTree) -> Predictor:
    """Logits [B, C, 2]: the head's, and <h, P_l> - |P_l|^2 / 2, largest for the known
    prototype nearest to h."""

    def predict(x: Array, mask: Array) -> Array:
        h, _ = model.features(w, x, mask=mask, train=False)
        near = jnp.dot(h, server["proto"], precision=jax.lax.Precision.HIGHEST)
        near = near - jnp.sum(server["proto"] ** 2, axis=0)[None] / 2
        return jnp.stack(
            [
                model.head(w["head"], h),
                jnp.where(server["known"][None], near, -jnp.inf),
            ],
            axis=-1,
        )

    return predict


@register("fedproto", several_architectures=True)
def fedproto(
    task: Task,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    proto_weight: Literal["uniform", "size"] = "uniform",
    collect: Literal["after", "during"] = "after",
) -> Algorithm:
    """Trains each client's own model, its features drawn to the global prototype of
    their class.

    Args:
      lam: weight of the distance to the prototypes (λ) in [0, inf); 1 as in the
        authors' code.
      proto_weight: of a client in the mean of a class, one of uniform (the authors'
        code), size (its examples of that class, as in the paper; with collect=during as
        often as they were in its batches).
      collect: when a client takes the mean features of its classes, one of after (by
        one more pass, of the trained model), during (over the batches of local
        training, of the model as it moves: HtFLlib, and for one epoch the authors'
        code).

    Note:
      The distance is the authors' code's: squared, per example, a mean over batch and
      features. A class that nobody holds in a round keeps its prototype; with
      collect=during also one that no batch had (`classes_sent` counts what a client had
      in its batches). `acc` is of the head, and `proto_acc` of the nearest prototype
      received, which names class 0 as long as there is none. All architectures must
      have the same feature width. The loss includes the distance's term.
    """
    widths, classes = (
        sorted({model.num_features for model in task.models}),
        task.num_classes,
    )
    if len(widths) > 1:
        raise InputError(
            f"FedProto needs one feature width K in all architectures, not {widths}: "
            "set it to one value (--features)."
        )
    batch_size, moving = evaluation.pass_size(task.sizes), collect == "during"
    score = functools.partial(averaging.score_beside, names=("proto",))

    def init(key: Array) -> State:
        server = {
            "proto": jnp.zeros((widths[0], classes)),
            "known": jnp.zeros(classes, bool),
        }
        return State(server, architectures.stack(task, lambda model: model.init(key)))

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        proto, known = state.server["proto"], state.server["known"]  # [K, C], [C]

        def client(
            c: Client, w: PyTree
        ) -> tuple[Array, Own, Array, Array, dict[str, Array]]:
            def loss(
                w: PyTree, batch: Batch, key: Array
            ) -> tuple[Array, PyTree, PyTree]:
                h, stats = c.model.features(
                    w, batch.x, mask=batch.mask, train=True, key=key
                )
                value = losses.cross_entropy(
                    c.model.head(w["head"], h), batch.y, batch.mask
                )
                gap = jnp.where(
                    known[batch.y], jnp.mean((h - proto.T[batch.y]) ** 2, axis=1), 0
                )
                seen = (
                    local_training.class_sums(jax.lax.stop_gradient(h), batch, classes)
                    if moving
                    else ()
                )
                return value + lam * losses.masked_mean(gap, batch.mask), stats, seen

            w, (value, seen) = local_training.sgd(
                c.key, c.train, loss, w, task, has_aux=True
            )
            if moving:  # `seen` are means over the steps
                total, count = (x * local_training.count(c.train, task) for x in seen)
                means = total / jnp.maximum(count, 1)[None]
            else:
                features = lambda batch: c.model.features(
                    w, batch.x, mask=batch.mask, train=False
                )[0]
                means, count = (
                    local_training.class_means(c.train, features, classes, batch_size),
                    c.class_counts,
                )
            post = evaluation.post(
                cohort, c, predictor(c.model, w, state.server), score
            )
            return means, Own(w), count, value, post

        weigh: Callable[[Array], Array] = lambda count: (
            count if proto_weight == "size" else count > 0
        )
        if moving:  # who has had a class in a batch is known after training only
            means, w, count, value, post = cohort.map(client, state.clients)
            one = lambda c, means: (means,)
            proto, _ = cohort.mean(
                one, means, weight=weigh(count), default=proto, phase=None
            )
        else:
            weight = weigh(cohort.class_counts)
            proto, (w, count, value, post) = cohort.mean(
                client, state.clients, weight=weight, default=proto
            )
        known = known | jnp.any((count > 0) & cohort.active[:, None], axis=0)
        more = {"classes_sent": jnp.sum(count > 0, axis=1)} if moving else {}
        return State({"proto": proto, "known": known}, w), Metrics(value, post, more)

    def predict(server: PyTree, w: PyTree, c: Client) -> Predictor:
        return predictor(c.model, w, server)

    def sent(state: State, cohort: Cohort, metrics: Metrics) -> Traffic:
        own = (
            metrics.clients["classes_sent"]
            if moving
            else jnp.sum(cohort.class_counts > 0, axis=1)
        )
        down = jnp.full_like(own, widths[0]) * jnp.sum(state.server["known"])
        # which classes
        return traffic.both_ways(cohort, down, widths[0] * own)._replace(ints=own)

    return Algorithm(init, round, predict, score, sent)
