"""FedTGP: FedProto whose global prototypes are trained at the server, with a margin
between the classes.

Reference: Zhang et al., FedTGP: trainable global prototypes with
adaptive-margin-enhanced contrastive learning (AAAI 2024), Algorithm 1; authors' code:
TsingZ0/FedTGP.
"""

import functools
from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval
from flax import nnx

from fedjax_pfl import (
    architectures,
    averaging,
    evaluation,
    keys,
    local_training,
    losses,
    models,
    traffic,
)
from fedjax_pfl.algorithms.prototypes import Draw, descend, predictor
from fedjax_pfl.algorithms.registry import READS_LABELS, register
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers
from fedjax_pfl.types import Algorithm, Array, Metrics, Own, PyTree, State, Task

TINY = 1e-12


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    PROTOTYPES = 50, "the network of the prototypes"


class Prototypes(nnx.Module):
    """An embedding per class, and two linear layers with a ReLU between them."""

    def __init__(self, classes: int, width: int, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(1.0)
        self.embedding = nnx.Embed(classes, width, embedding_init=normal, rngs=rngs)
        self.inner = layers.linear(width, width, rngs)
        self.outer = layers.linear(width, width, rngs)

    def __call__(self, y: Array) -> Array:
        return self.outer(jax.nn.relu(self.inner(self.embedding(y))))


def largest_gap(proto: Array, has: Array) -> Array:
    """Returns the largest distance [] of a class's mean prototype to its nearest other
    one; inf of a single class.

    Args:
      proto: [S, K, C], used where `has` [S, C].
    """
    count = jnp.sum(has, axis=0)
    mean = jnp.sum(jnp.where(has[:, None], proto, 0), axis=0)
    mean /= jnp.maximum(count, 1)[None]
    d2 = jnp.sum((mean[:, :, None] - mean[:, None]) ** 2, axis=0)
    known = count > 0
    other = known[:, None] & known[None] & ~jnp.eye(len(known), dtype=bool)
    nearest = jnp.min(jnp.where(other, d2, jnp.inf), axis=1)
    return jnp.sqrt(jnp.max(jnp.where(known, nearest, 0)))


def contrast(proto: Array, h: Array, y: Array, mask: Array, margin: Array) -> Array:
    """Returns the loss [] of prototypes [C, K]: the cross entropy of -d, d [B, C] the
    distances of client prototypes h [B, K] to them, larger by `margin` for y."""
    d2 = jnp.sum((h[:, None] - proto[None]) ** 2, axis=2)
    d = jnp.sqrt(jnp.maximum(d2, TINY))
    d += margin * jax.nn.one_hot(y, len(proto))
    return losses.cross_entropy(-d, y, mask)


@register("fedtgp", several_architectures=True, excludes={"mix": READS_LABELS})
def fedtgp(
    task: Task,
    *,
    lam: Annotated[float, Ge(0)] = 10.0,
    margin: Annotated[float, Ge(0)] = 100.0,
    server_epochs: Annotated[int, Interval(ge=1, le=10_000)] = 100,
) -> Algorithm:
    """Trains each client's own model with the penalty lam mean((h - P_y)^2); the server
    trains the prototypes P on the clients' mean features.

    Args:
      lam: weight of the distance to the prototypes (λ) in [0, inf); 10 as in the
        authors' script.
      margin: upper bound of the margin (τ) in [0, inf); 100 as there. The margin is the
        smaller one of this bound and `largest_gap`.
      server_epochs: passes over the clients' mean features in [1, 10000]; 100 as there.

    Note:
      The server's step size and batch size are the clients', as in the authors' code.
      It takes the mean features in one random order, the same in all its epochs. Before
      the first round there are no prototypes. `acc` scores the head, `proto_acc` the
      nearest prototype received. All architectures must have the same feature width.
    """
    widths, classes = sorted({m.num_features for m in task.models}), task.num_classes
    if len(widths) > 1:
        raise InputError(
            f"FedTGP needs one feature width K in all architectures, not {widths}: set "
            "it to one value (--features)."
        )
    batch_size, labels = evaluation.pass_size(task.sizes), jnp.arange(classes)
    sgd = local_training.bind(task)
    network = models.network(lambda rngs: Prototypes(classes, widths[0], rngs))
    score = functools.partial(averaging.score_paired, names=("proto",))

    def generate(params: PyTree) -> Array:
        return network.apply({"params": params, "stats": {}}, labels)[0]  # [C, K]

    def init(key):
        net = network.init(keys.fold(key, Start.PROTOTYPES))["params"]
        known = {"proto": generate(net).T, "known": jnp.zeros(classes, bool)}
        rows = architectures.stack(task, lambda model: model.init(key))
        return State({"net": net, **known}, rows)

    def round(key, state, cohort):
        server = state.server
        proto, known = server["proto"], server["known"]

        def client(c, w):
            def loss(w, batch, key):
                h, stats = c.model.features(
                    w, batch.x, mask=batch.mask, train=True, key=key
                )
                gap = jnp.mean((h - proto.T[batch.y]) ** 2, axis=1)
                gap = losses.masked_mean(jnp.where(known[batch.y], gap, 0), batch.mask)
                z = c.model.head(w["head"], h)
                return losses.of(task)(z, batch.y, batch.mask) + lam * gap, stats

            def features(batch):
                return c.model.features(w, batch.x, mask=batch.mask, train=False)[0]

            w, value = sgd(c, w, loss=loss)
            mean = local_training.class_means(c.train, features, classes, batch_size)
            order = keys.fold(c.key, Draw.ORDER)
            draw = jax.random.uniform(order, (classes,), jnp.float32)
            post = evaluation.post(cohort, c, predictor(c.model, w, server), score)
            return Own(w), mean, draw, value, post

        w, mean, draw, value, post = cohort.map(client, state.clients)
        # The prototypes are trained with the adaptive margin.
        has = cohort.class_counts > 0
        order = jnp.argsort(cohort.ids)
        sent = cohort.replicated(mean)[order], has[order]
        gap = jnp.minimum(largest_gap(*sent), margin)
        net = descend(
            lambda net, h, y, mask: contrast(generate(net), h, y, mask, gap),
            server["net"],
            *sent,
            cohort.replicated(draw)[order],
            epochs=server_epochs,
            batch_size=task.batch_size,
            lr=task.lr,
        )
        here = jnp.any(cohort.trained)
        made = jnp.where(here, generate(net).T, proto)
        server = {"net": net, "proto": made, "known": known | here}
        return State(server, w), Metrics(value, post, {}, {"margin": gap})

    def predict(server, w, c):
        return predictor(c.model, w, server)

    def sent(state, cohort, metrics):
        own = jnp.sum(cohort.class_counts > 0, axis=1)
        down = jnp.full_like(own, widths[0]) * jnp.sum(state.server["known"])
        return traffic.both_ways(cohort, down, widths[0] * own)._replace(ints=own)

    return Algorithm(init, round, predict, score, sent)
