"""FedGH: the server trains a common head on the mean features of the clients' classes.

Reference: Yi et al., FedGH: heterogeneous federated learning with generalized global
header (ACM MM 2023), Algorithm 1.
"""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval
from chex import Numeric

from fedjax_pfl import averaging, evaluation, keys, local_training, losses, traffic
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import Algorithm, Array, Metrics, Model, Own, PyTree, State, Task


def head_loss(model: Model, head: PyTree, h: Array, y: Array, mask: Array) -> Array:
    """Returns the cross entropy [] of a head on features h [B, K]."""
    return losses.cross_entropy(model.head(head, h), y, mask)


class Draw(keys.Stream):
    """Streams below a client's key."""

    ORDER = 50, "the order of its mean features at the server"


def descend(
    loss: Callable[[PyTree, Array, Array, Array], Array],
    params: PyTree,
    proto: Array,
    has: Array,
    draw: Array,
    *,
    epochs: int,
    batch_size: int,
    lr: Numeric,
) -> PyTree:
    """Returns the parameters after SGD on mean features, at the server.

    Args:
      loss: (params, features [B, K], classes [B], mask [B]) -> loss [].
      proto: [S, K, C] mean features, used where `has` [S, C].
      draw: [S, C] random numbers, by which the mean features are ordered.
    """
    clients, width, classes = proto.shape
    order = jnp.argsort(jnp.where(has, draw, jnp.inf).reshape(-1))
    order = jnp.pad(order, (0, -len(order) % batch_size))
    h, y = proto.transpose(0, 2, 1).reshape(-1, width), jnp.arange(clients * classes)
    count = jnp.sum(has)
    steps = (count + batch_size - 1) // batch_size

    def step(i, params):
        first = i % jnp.maximum(steps, 1) * batch_size
        rows = jax.lax.dynamic_slice_in_dim(order, first, batch_size)
        mask = first + jnp.arange(batch_size) < count
        slope = jax.grad(loss)(params, h[rows], y[rows] % classes, mask)
        moved = jax.tree.map(lambda w, g: w - lr * g, params, slope)
        return optax.tree.cast_like(moved, params)

    with jax.named_scope(local_training.ON_SERVER):
        return jax.lax.fori_loop(0, epochs * steps, step, params)


@register("fedgh", several_architectures=True)
def fedgh(
    task: Task,
    *,
    server_lr: Annotated[float, Ge(0)] = 0.01,
    server_epochs: Annotated[int, Interval(ge=1, le=10_000)] = 100,
) -> Algorithm:
    """Trains each client's body under the common head, which the server then trains on
    the clients' mean features per class.

    Args:
      server_lr: step size of the head at the server in [0, inf); 0.01 as in HtFLlib.
      server_epochs: passes over the mean features in [1, 10000]; 100 as in HtFLlib, 1
        in PFLlib and the paper.

    Note:
      A client trains body and head, and its head is then replaced by the next common
      one. The server takes batches of the task's batch size in one random order, the
      same in all its epochs. The mean features are those of one more pass after
      training. `post` scores the client's own trained head. All architectures must have
      the same feature width.
    """
    sgd, split = local_training.bind(task), averaging.split(task, ("body",))
    classes, batch_size = task.num_classes, evaluation.pass_size(task.sizes)
    widths = task.models[0].num_features

    def round(key, state, cohort):
        def client(c, own):
            w, value = sgd(c, split.receive(state.server, own))

            def features(batch):
                return c.model.features(w, batch.x, mask=batch.mask, train=False)[0]

            proto = local_training.class_means(c.train, features, classes, batch_size)
            post = evaluation.post(cohort, c, predictor(c.model, w))
            order = keys.fold(c.key, Draw.ORDER)
            draw = jax.random.uniform(order, (classes,), jnp.float32)
            own = split.send(w, c.architecture)[1]
            return Own(own), proto, draw, value, post

        own, proto, draw, value, post = cohort.map(client, state.clients)
        head = descend(
            lambda head, *batch: head_loss(task.models[0], head, *batch),
            state.server["head"],
            proto,
            cohort.class_counts > 0,
            draw,
            epochs=server_epochs,
            batch_size=task.batch_size,
            lr=server_lr,
        )
        return State({**state.server, "head": head}, own), Metrics(value, post)

    def predict(server, own, c):
        return predictor(c.model, split.receive(server, own))

    def sent(state, cohort, metrics):
        own = jnp.sum(cohort.class_counts > 0, axis=1)
        down = state.server["head"]
        return traffic.both_ways(cohort, down, widths * own)._replace(ints=own)

    return Algorithm(
        split.init, round, predict, evaluation.classification, traffic=sent
    )
