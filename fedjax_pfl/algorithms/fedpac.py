"""FedPAC: features are drawn to global class means, and each client's head is the
combination of all heads that its feature statistics favour.

Reference: Xu et al., Personalized federated learning with feature alignment and
classifier collaboration (ICLR 2023), Algorithm 1; authors' code: JianXu95/FedPAC.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
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
from fedjax_pfl.algorithms.pfedc.min_norm import fista
from fedjax_pfl.algorithms.registry import READS_LABELS, register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import Array, Method, Metrics, PyTree, State, Task, Update

SMALLEST = 1e-3  # smaller weights of a head count as 0, as in the authors' code


def combination(v: Array, h: Array, here: Array) -> Array:
    """Returns the weights [S, S] of the heads; row i minimises the bound on client i's
    test loss.

    alpha^T (diag(v) + G_i) alpha over the simplex, G_i the inner products of h_i - h_j,
    where h_i [C K] are client i's class means times the class's share. Weights of at
    most 0.001 are set to 0 and the others scaled to the sum 1.

    Args:
      v: variances [S] of the estimates h [S, C K].
      here: [S] bool, the clients whose heads there are.
    """

    def one(mine: Array) -> Array:
        d = jnp.where(here[:, None], mine[None] - h, 0)
        gram = jnp.dot(d, d.T, precision=jax.lax.Precision.HIGHEST)
        alpha = fista(gram + jnp.diag(v), here)
        alpha = jnp.where(alpha > SMALLEST, alpha, 0)
        return alpha / jnp.maximum(jnp.sum(alpha), SMALLEST)

    return jax.lax.map(one, h)


def collaborate(
    heads: PyTree, v: Array, h: Array, ids: Array, here: Array
) -> tuple[PyTree, Array]:
    """Returns the combined heads [S, ...] of the clients `here` [S], and the weights
    [S] of their own ones; the other clients' heads are unchanged."""
    # Sums over the clients are in the order of their ids.
    order = jnp.argsort(ids)
    back = jnp.argsort(order)
    known = trees.gather((heads, v, h), order)
    zeros = jax.tree.map(jnp.zeros_like, known)
    trained, v, h = trees.where(here[order], known, zeros)
    alpha = combination(v, h, here[order])

    def mix(x: Array) -> Array:
        mixed = jnp.tensordot(alpha, x, 1, precision=jax.lax.Precision.HIGHEST)
        return mixed.astype(x.dtype)[back]

    mixed = trees.where(here, jax.tree.map(mix, trained), heads)
    return mixed, jnp.diag(alpha)[back]


@register("fedpac", excludes={"mix": READS_LABELS})
def fedpac(
    task: Task,
    *,
    lam: Annotated[float, Ge(0)] = 1.0,
    head_epochs: Annotated[int, Interval(ge=0, le=10_000)] = 1,
    head_lr: Annotated[float, Ge(0)] = 10.0,
) -> Method:
    """Trains the head on the received body, then the body with the penalty lam
    mean((h - c_y)^2), c_y the global mean feature of the class.

    The server averages bodies and class means, and gives client i the head sum_j
    alpha_ij phi_j of the trained heads phi_j (`combination`).

    Args:
      lam: weight of the distance to the class means (λ) in [0, inf); 1 as in the
        authors' code.
      head_epochs: local epochs of the head in [0, 10000]; 1 as there.
      head_lr: learning rate of the head in [0, inf), a multiple of the task's; 10 as
        there (0.1 and 0.01), 1 in PFLlib.

    Note:
      v_i = (mean ||h||^2 - sum_c p_c^2 ||mu_c||^2) / n_i and h_i = p_c mu_c are
      estimated on the received body before training, as in the authors' code. The
      quadratic program is solved by an accelerated projected gradient. Global class
      means are weighted by the examples of the class; PFLlib averages uniformly. The
      distance is a mean over the features, as in both. The optimizer is the task's; the
      authors' has momentum 0.5 and weight decay. Clients that are absent keep their
      heads. The reported loss is that of the body's phase.
    """
    sgd, split = local_training.bind(task), averaging.split(task, ("head",))
    sgd_head = local_training.bind(
        task._replace(optimizer=lambda lr: task.optimizer(head_lr * lr))
    )
    classes, width = task.num_classes, task.model.num_features
    batch_size = evaluation.pass_size(task.sizes)
    shapes = jax.eval_shape(task.model.init, jax.random.key(0))

    def init(key):
        state = split.init(key)
        server = {"w": state.server, "proto": jnp.zeros((width, classes))}
        return State(server | {"known": jnp.zeros(classes, bool)}, state.clients)

    def features(w, batch):
        return task.model.features(w, batch.x, mask=batch.mask, train=False)[0]

    def statistics(c, w):
        # v_i and h_i, of the received body.
        def sums(batch):
            h = features(w, batch)
            square = jnp.sum(jnp.where(batch.mask[:, None], h * h, 0))
            return local_training.class_sums(h, batch, classes)[0], square

        n = jnp.maximum(c.train.size, 1)
        total, square = local_training.sweep(c.train, sums, batch_size)
        h = total / n  # [K, C]
        return (square / n - jnp.sum(h * h)) / n, h.reshape(-1)

    def client(c, server, own):
        w = split.receive(server["w"], own)
        v, h = statistics(c, w)
        stream = keys.Client.HEAD_PHASE
        w, value = sgd_head(c, w, train=("head",), epochs=head_epochs, stream=stream)

        def loss(w, batch, key):
            h, stats = c.model.features(
                w, batch.x, mask=batch.mask, train=True, key=key
            )
            gap = jnp.mean((h - server["proto"].T[batch.y]) ** 2, axis=1)
            gap = jnp.where(server["known"][batch.y], gap, 0)
            z = c.model.head(w["head"], h)
            value = losses.of(task)(z, batch.y, batch.mask)
            return value + lam * losses.masked_mean(gap, batch.mask), stats

        w, value = sgd(c, w, loss=loss, train=("body",))
        proto = local_training.class_means(
            c.train, lambda batch: features(w, batch), classes, batch_size
        )
        shared, own = split.send(w)
        upload = {"w": shared, "proto": proto}
        return Update(upload, own, predictor(c.model, w), value, sent=(v, h))

    def weight(cohort):
        return {"w": cohort.sizes, "proto": cohort.class_counts}

    def finish(key, server, mean, sent, old, own, cohort):
        known = server["known"] | jnp.any(cohort.class_counts > 0, axis=0)
        heads, v, h = cohort.replicated((own["head"], *sent))
        head, seen = collaborate(heads, v, h, cohort.ids, cohort.trained)
        server = {"w": mean["w"], "proto": mean["proto"], "known": known}
        metrics = Metrics(clients={"self_weight": seen})
        return State(server, {**own, "head": head}), metrics

    def predict(server, own, c):
        return predictor(c.model, split.receive(server["w"], own))

    def travels(state, cohort, metrics):
        own = jnp.sum(cohort.class_counts > 0, axis=1)
        size = trees.size(state.server["w"]) + trees.size(shapes["head"])
        down = size + width * jnp.sum(state.server["known"]) + 0 * own
        up = size + 2 * width * own + 1
        return traffic.both_ways(cohort, down, up)._replace(ints=own)

    return averaging.from_client(
        init,
        client,
        predict,
        weight=weight,
        default=lambda server: {"w": server["w"], "proto": server["proto"]},
        finish=finish,
        traffic=travels,
        no_unseen="its heads are combined over the clients of a round",
    )
