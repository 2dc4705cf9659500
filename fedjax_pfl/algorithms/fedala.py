"""FedALA: before training, a client learns for each scalar of its last layer how far to
move it to the global model's.

Reference: Zhang et al., FedALA: adaptive local aggregation for personalized federated
learning (AAAI 2023), Algorithm 1; authors' code: TsingZ0/FedALA.
"""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval
from chex import Numeric

from fedjax_pfl import averaging, keys, local_training, losses, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import BODY_AND_HEAD, predictor
from fedjax_pfl.types import (
    Array,
    Batch,
    Data,
    Method,
    PyTree,
    Task,
    Update,
)

BLENDED: dict[str, tuple[str, ...]] = {
    "none": (),
    "head": ("head",),
    "all": BODY_AND_HEAD,
}


class Patience(NamedTuple):
    """When a client's first learning of its weights ends: at a steady loss, or after
    `cap` epochs."""

    window: int  # epochs whose losses are compared
    threshold: Numeric  # of their standard deviation
    cap: int


# the weights, the last epochs' losses, epochs, batches
Loop = tuple[PyTree, Array, Array, Array]


def blend(own: PyTree, received: PyTree, weights: PyTree) -> PyTree:
    """Computes own + (received - own) * weights, scalar by scalar."""
    return jax.tree.map(lambda w, g, a: w + (g - w) * a, own, received, weights)


def mean_of(weights: PyTree) -> Array:
    """Returns the mean over all scalars, []."""
    total = sum(
        (jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(weights)),
        jnp.float32(0),
    )
    return total / max(trees.size(weights), 1)


def subset(key: Array, data: Data, percent: Numeric) -> Data:
    """Returns a stretch of `percent` % of a client's rows, at least one, from a
    random row in its list."""
    size = jnp.minimum(
        jnp.maximum(jnp.floor(percent * data.size / 100).astype(jnp.int32), 1),
        data.size,
    )
    first = jax.random.randint(key, (), 0, data.size - size + 1, jnp.int32)
    position = jnp.minimum(
        first + jnp.arange(data.index.shape[0]), data.index.shape[0] - 1
    )
    return data._replace(index=data.index[position], size=size)


def learn(
    key: Array,
    data: Data,
    loss: Callable[[PyTree, Batch, Array], Array],
    weights: PyTree,
    first: Array,
    task: Task,
    lr: Numeric,
    patience: Patience,
) -> tuple[PyTree, Array]:
    """Descends `loss(weights, batch, key)` within [0, 1]: one epoch, or if `first` []
    until the losses are steady.

    Returns:
      (weights, the number of epochs []); none without data.
    """

    def batch(carry, batch):
        weights, _, count = carry
        value, slope = jax.value_and_grad(loss)(
            weights, batch, jax.random.fold_in(key, count)
        )
        moved = jax.tree.map(lambda a, g: jnp.clip(a - lr * g, 0, 1), weights, slope)
        return optax.tree.cast_like(moved, weights), value, count + 1

    def epoch(loop):
        weights, recent, epochs, count = loop
        weights, last, count = local_training.fold(
            data, batch, (weights, jnp.float32(0), count), task.batch_size
        )
        return weights, jnp.roll(recent, -1).at[-1].set(last), epochs + 1, count

    def goes_on(loop):
        _, recent, epochs, _ = loop
        steady: Array = (epochs > patience.window) & (
            jnp.std(recent) < patience.threshold
        )
        return (data.size > 0) & (epochs < jnp.where(first, patience.cap, 1)) & ~steady

    start = (
        weights,
        jnp.zeros(patience.window, jnp.float32),
        jnp.int32(0),
        jnp.int32(0),
    )
    weights, _, epochs, _ = jax.lax.while_loop(goes_on, epoch, start)
    return weights, epochs


@register("fedala", targets=True)
def fedala(
    task: Task,
    *,
    percent: Annotated[float, Interval(ge=0, le=100)] = 80.0,
    lr_weights: Annotated[float, Ge(0)] = 1.0,
    blended: Literal["none", "head", "all"] = "head",
    window: Annotated[int, Interval(ge=1, le=1000)] = 10,
    threshold: Annotated[float, Ge(0)] = 0.1,
    cap: Annotated[int, Interval(ge=1, le=100_000)] = 100,
) -> Method:
    """Trains from w_i + (w^t - w_i) W_i, W_i learned on the client's examples, in the
    head; else from w^t.

    Args:
      percent: the share (s) in [0, 100] of the training examples that W_i is learned
        on, a new stretch each round, at least one example; 80 as in the paper.
      lr_weights: the step size (η) in [0, inf) of W_i; 1 as in the paper.
      blended: what is blended, one of none (FedAvg), head (the paper's p = 1 layer),
        all.
      window: in [1, 1000], the epochs whose losses must be steady before the first
        learning of W_i ends; 10 as in the authors' code.
      threshold: of the standard deviation in [0, inf) of these losses; 0.1 as there.
      cap: in [1, 100000], the most epochs of the first learning; 100, the authors have
        none.

    Note:
      The first learning runs until the loss of the last batch is steady over the
      epochs, later ones for one epoch; where w^t equals w_i (in round 0) nothing is
      learned. Only participants learn W_i (the authors' code blends on every client in
      every round); a prediction of the others' blends too, and forgets it. Of w_i a
      client keeps what is blended, as the rest is replaced. The paper's p may stop at
      any layer; here a model is head and body. Running statistics are the received
      ones, or the client's with bn_stats=local. `global_share` is the mean of W_i,
      `ala_epochs` how long it was learned.
    """
    loss, split = losses.classification(task.model, task), averaging.split(task)
    sgd, patience = local_training.bind(task), Patience(window, threshold, cap)
    mask = trees.parts(task.model.bn_mask, BLENDED[blended])

    def extra(w):
        mine, _ = trees.partition(w, mask)
        ones = jax.tree.map(jnp.ones_like, mine)
        return {"w": mine, "weights": ones, "first": jnp.bool(True)}

    def start(c, server, row):
        # The model before training, its weights, and the epochs of learning them.
        received, rest = trees.partition(split.receive(server, row["own"]), mask)

        def objective(weights, batch, key):
            blended = blend(row["w"], received, weights)
            return loss(trees.merge(blended, rest), batch, key)[0]

        same = jax.tree.map(lambda a, b: jnp.all(a == b), row["w"], received)
        same = jnp.all(jnp.array(jax.tree.leaves(same), bool))
        data = subset(keys.fold(c.key, keys.Client.SUBSET), c.train, percent)
        data = data._replace(size=jnp.where(same, 0, data.size))
        key = keys.fold(c.key, keys.Client.BLEND)
        state = row["weights"], row["first"]
        weights, epochs = learn(
            key, data, objective, *state, task, lr_weights, patience
        )
        return trees.merge(blend(row["w"], received, weights), rest), weights, epochs

    def init(key):
        return split.init(key, extra)

    def client(c, server, row):
        w, weights, epochs = start(c, server, row)
        w, value = sgd(c, w)
        upload, own = split.send(w)
        first, mine = row["first"] & (epochs == 0), trees.partition(w, mask)[0]
        row = {"w": mine, "weights": weights, "first": first, "own": own}
        seen = {"global_share": mean_of(weights), "ala_epochs": epochs}
        return Update(upload, row, predictor(c.model, w), value, seen)

    def predict(server, row, c):
        return predictor(c.model, start(c, server, row)[0])

    return averaging.from_client(init, client, predict, averages=BODY_AND_HEAD)
