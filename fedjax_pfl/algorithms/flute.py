"""FLUTE: FedPer whose heads are drawn to a simplex of the client's classes, by the
client and once more by the server.

Reference: Liu, Shen & Yang, Federated representation learning in the
under-parameterized regime (ICML 2024), the algorithm for general networks; authors'
code: RenpuLiu/flute.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, keys, local_training, losses, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import Array, Method, State, Task, Update

TINY = 1e-12


def collapse(kernel: Array, has: Array) -> Array:
    """Returns ||W W^T / ||W W^T|| - (I - 1 1^T / C) u u^T / sqrt(C - 1)||, elementwise
    in u u^T, of a kernel W^T [K, C] and the classes u = `has` [C] of the client."""
    count = len(has)
    gram = jnp.dot(kernel.T, kernel, precision=jax.lax.Precision.HIGHEST)
    unit = gram / jnp.sqrt(jnp.maximum(jnp.sum(gram**2), TINY))
    target = (jnp.eye(count) - 1 / count) / jnp.sqrt(jnp.float32(max(count - 1, 1)))
    gap = unit - jnp.where(has[:, None] & has[None], target, 0)
    return jnp.sqrt(jnp.maximum(jnp.sum(gap**2), TINY))


@register("flute")
def flute(
    task: Task,
    *,
    lam1: Annotated[float, Ge(0)] = 0.25,
    lam2: Annotated[float, Ge(0)] = 0.0025,
    lam3: Annotated[float, Ge(0)] = 0.0005,
    server_lr: Annotated[float, Ge(0)] = 0.05,
    head_epochs: Annotated[int, Interval(ge=0, le=10_000)] = 4,
) -> Method:
    """Trains the head, then body and head, with the penalty lam1 `collapse` + lam2
    ||W||^2 + lam3 ||h||^2; the body is averaged, and the server takes a step of each
    head along the gradient of `collapse`.

    Args:
      lam1: weight of the distance to the simplex (λ1) in [0, inf); 0.25 as in FL-bench.
      lam2: weight of the head's size (λ2) in [0, inf); 0.0025 as in FL-bench.
      lam3: weight of the features' size (λ3) in [0, inf), their sum over the batch and
        not in the head's epochs; 0.0005 as in FL-bench.
      server_lr: step size of the server in [0, inf). FL-bench divides 0.5 by the
        clients of a round, 10 by default. With this, head_epochs and all weights at 0
        it is FedPer.
      head_epochs: local epochs of the head alone in [0, 10000]; 4 as in FL-bench, which
        counts them among the local epochs.

    Note:
      The paper's algorithm for linear models, in which the server also moves the
      representation, is not built. `post` scores the head after the server's step. The
      reported loss is that of the second phase, with the penalty.
    """
    model, sgd = task.model, local_training.bind(task)
    split = averaging.split(task, ("head",))

    def init(key):
        averaging.check_linear_head(model.init(key), "flute")
        return split.init(key)

    def objective(c, weight):
        def loss(w, batch, key):
            h, stats = model.features(w, batch.x, mask=batch.mask, train=True, key=key)
            kernel = w["head"]["kernel"]
            size = jnp.where(batch.mask, jnp.sum(h * h, axis=1), 0)
            value = losses.of(task)(model.head(w["head"], h), batch.y, batch.mask)
            value += lam1 * collapse(kernel, c.class_counts > 0)
            return value + lam2 * jnp.sum(kernel**2) + weight * jnp.sum(size), stats

        return loss

    def client(c, server, own):
        w = split.receive(server, own)
        w, _ = sgd(
            c,
            w,
            loss=objective(c, 0.0),
            train=("head",),
            epochs=head_epochs,
            stream=keys.Client.HEAD_PHASE,
        )
        w, value = sgd(c, w, loss=objective(c, lam3))
        # The server's step of the head.
        kernel = w["head"]["kernel"]
        moved = kernel - server_lr * jax.grad(collapse)(kernel, c.class_counts > 0)
        learns = local_training.learns(c.train.size, task)
        kernel = jnp.where(learns, moved, kernel).astype(kernel.dtype)
        w = w | {"head": w["head"] | {"kernel": kernel}}
        shared, own = split.send(w)
        return Update(shared, own, predictor(model, w), value)

    def predict(server, own, c):
        return predictor(model, split.receive(server, own))

    head = jax.eval_shape(model.init, jax.random.key(0))["head"]

    def sent(state: State, cohort, metrics):
        return traffic.both_ways(cohort, trees.size(state.server) + trees.size(head))

    return averaging.from_client(
        init, client, predict, traffic=sent, averages=("body",)
    )
