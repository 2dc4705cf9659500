"""Public examples, which the server and all clients have: what models predict for them,
and training on predictions."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import Numeric

from fedjax_pfl import keys, local_training, losses, trees
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Batch, Cohort, Data, Model, PyTree, Task

TINY = 1e-8  # probabilities are at least this before a logarithm
EXACT = jax.lax.Precision.HIGHEST  # predictions are compared in float32 on every device


class Predictions(NamedTuple):
    """Predictions of a round's clients for its public examples, by ascending id, so
    that no sum depends on the order of the clients."""

    ids: Array  # [S] int32
    here: Array  # [S] bool: does it take part?
    outputs: Array  # [S, D, C], zeros where not


def count(task: Task, size: int) -> int:
    """Returns the number of public examples in a round, at most the pool: D.

    Raises:
      InputError: the task has no pool.
    """
    if task.public is None:
        raise InputError(
            "This method needs public examples: give --public, such as mnist:5000 (in "
            "Python `with_public` of a task, "
            "and `public` of `federate`)."
        )
    return min(size, task.public.shape[0])


def draw(key: Array, task: Task, size: int) -> Array:
    """Returns the public examples of a round, drawn without replacement: ascending
    indices [D] into the pool.

    Args:
      key: the server's, of the round.
    """
    drawn = count(task, size)
    pool = task.public.shape[0]  # type: ignore[union-attr]  # else `count` has raised
    if drawn == pool:
        return jnp.arange(pool, dtype=jnp.int32)
    index = jax.random.choice(
        keys.fold(key, keys.Server.PUBLIC), pool, (drawn,), replace=False
    )
    return jnp.sort(index).astype(jnp.int32)


def subset(pool: Data | None, index: Array, wanted: Array) -> Data:
    """Returns the examples `index` [D] of the pool; none where not wanted []."""
    assert pool is not None  # as the task has one
    return pool._replace(
        index=index, size=jnp.where(wanted, len(index), 0).astype(jnp.int32)
    )


def logits(
    model: Model, variables: PyTree, data: Data, num_classes: int, batch_size: int
) -> Array:
    """Returns a model's logits [M, C] for all rows of the data, without dropout and
    with running statistics."""

    def one(found, batch):
        z, _ = model.apply(variables, batch.x, mask=batch.mask, train=False)
        # Past the end there is only padding.
        return found.at[batch.row].set(z.astype(found.dtype), mode="drop")

    nothing = jnp.zeros((data.index.shape[0], num_classes), jnp.float32)
    return local_training.fold(data, one, nothing, batch_size)


def gathered(cohort: Cohort, outputs: Array) -> Predictions:
    """Returns the predictions [S, D, C] of those who have trained."""
    order = jnp.argsort(cohort.ids)
    here = cohort.trained[order]
    outputs = cohort.replicated(outputs)[order]
    return Predictions(
        cohort.ids[order], here, jnp.where(trees.expand(here, outputs.ndim), outputs, 0)
    )


def distillation(
    model: Model,
    target: Array,
    distance: Callable[[Array, Array], Array],
) -> Callable[[PyTree, Batch, Array], tuple[Array, PyTree]]:
    """Returns the loss of training on targets: the mean of `distance` over the valid
    rows, as `local_training.sgd` takes it.

    Args:
      target: [D, C], for the rows of the data.
      distance: (target [B, C], logits [B, C]) -> [B].
    """

    def loss(variables, batch, key):
        z, stats = model.apply(variables, batch.x, mask=batch.mask, train=True, key=key)
        return losses.masked_mean(distance(target[batch.row], z), batch.mask), stats

    return loss


def mean(weight: Array, given: Predictions) -> Array:
    """Returns the mean [D, C] of all predictions with normalised weights [S]."""
    return jnp.tensordot(weight, given.outputs, 1, precision=EXACT)


def normalised(weight: Array, here: Array) -> Array:
    """Weights [S] that sum to 1 over `here` [S]: uniform ones where they hardly weigh
    anything, 0 if nobody is here."""
    weight = jnp.where(here, weight, 0)
    total, alike = jnp.sum(weight), here.astype(weight.dtype)
    return jnp.where(
        total > TINY,
        weight / jnp.maximum(total, TINY),
        alike / jnp.maximum(jnp.sum(alike), 1),
    )


def divergence(target: Array, z: Array, temperature: Numeric = 1.0) -> Array:
    """Computes KL(target || softmax(z / T)) of probabilities and logits [B, C] for
    each row, [B]."""
    return jnp.sum(
        target
        * (jnp.log(jnp.maximum(target, TINY)) - jax.nn.log_softmax(z / temperature)),
        axis=-1,
    )
