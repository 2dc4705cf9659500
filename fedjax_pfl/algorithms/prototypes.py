"""Mean features of each class, called prototypes: SGD on them at the server, and the
nearest one as a classifier."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from chex import Numeric

from fedjax_pfl import keys, local_training, losses
from fedjax_pfl.types import Array, Model, Predictor, PyTree


class Draw(keys.Stream):
    """Streams below a client's key."""

    ORDER = 50, "the order of its mean features at the server"


def predictor(model: Model, w: PyTree, server: PyTree) -> Predictor:
    """Returns logits [B, C, 2]: the head's, and <h, P_l> - |P_l|^2 / 2, largest for the
    known prototype nearest to h."""

    def predict(x, mask):
        h, _ = model.features(w, x, mask=mask, train=False)
        near = jnp.dot(h, server["proto"], precision=jax.lax.Precision.HIGHEST)
        near = near - jnp.sum(server["proto"] ** 2, axis=0)[None] / 2
        near = jnp.where(server["known"][None], near, -jnp.inf)
        return jnp.stack([model.head(w["head"], h), near], axis=-1)

    return predict


def head_loss(model: Model, head: PyTree, h: Array, y: Array, mask: Array) -> Array:
    """Returns the cross entropy [] of a head on features h [B, K]."""
    return losses.cross_entropy(model.head(head, h), y, mask)


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
