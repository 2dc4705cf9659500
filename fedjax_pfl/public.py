"""Public examples, which the server and all clients have: what models predict for them, and training on predictions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_pfl import keys, local, losses, trees
from fedjax_pfl.errors import InputError
from fedjax_pfl.numerics.mixtures import Predictions
from fedjax_pfl.types import Array, Batch, Cohort, Data, Model, PyTree, Task


def count(task: Task, size: int) -> int:
    """How many public examples a round uses, at most the pool: D.

    Raises:
      InputError: the task has no pool.
    """
    if task.public is None:
        raise InputError("This method needs public examples: give Task.public, and Federation.public with the pool.")
    pool: int = task.public.shape[0]
    return min(size, pool)


def draw(key: Array, task: Task, size: int) -> Array:
    """The public examples of a round, drawn without replacement: ascending indices [D] into the pool.

    Args:
      key: the server's, of the round.
    """
    drawn = count(task, size)
    pool = task.public.shape[0]  # type: ignore[union-attr]  # else `count` has raised
    if drawn == pool:
        return jnp.arange(pool, dtype=jnp.int32)
    index = jax.random.choice(keys.fold(key, keys.Server.PUBLIC), pool, (drawn,), replace=False)
    return jnp.sort(index).astype(jnp.int32)


def subset(pool: Data | None, index: Array, wanted: Array) -> Data:
    """The examples `index` [D] of the pool; none where not wanted [].

    Raises:
      InputError: the federation has no pool.
    """
    if pool is None:
        raise InputError("The task has public examples and the federation has none: give Federation.public.")
    return pool._replace(index=index, size=jnp.where(wanted, len(index), 0).astype(jnp.int32))


def logits(model: Model, variables: PyTree, data: Data, num_classes: int, batch_size: int) -> Array:
    """A model's logits [M, C] for all rows of the data, without dropout and with running statistics."""

    def one(found: Array, batch: Batch) -> Array:
        z, _ = model.apply(variables, batch.x, mask=batch.mask, train=False)
        return found.at[batch.row].set(z.astype(found.dtype), mode="drop")  # past the end there is only padding

    return local.fold(data, one, jnp.zeros((data.index.shape[0], num_classes)), batch_size)


def gathered(cohort: Cohort, outputs: Array) -> Predictions:
    """The predictions [S, D, C] of those who have trained."""
    order = jnp.argsort(cohort.ids)
    here = cohort.trained[order]
    outputs = cohort.everywhere(outputs)[order]
    return Predictions(cohort.ids[order], here, jnp.where(trees.expand(here, outputs.ndim), outputs, 0))


def distillation(
    model: Model, target: Array, distance: Callable[[Array, Array], Array], *, frozen: bool = False
) -> Callable[[PyTree, Batch, Array], tuple[Array, PyTree]]:
    """The loss of training on targets: the mean of `distance` over the valid rows, as `local.sgd` takes it.

    Args:
      target: [D, C], for the rows of the data.
      distance: (target [B, C], logits [B, C]) -> [B].
      frozen: whether the model has its running statistics, which stay as they are, and no dropout.
    """

    def loss(variables: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        z, stats = model.apply(variables, batch.x, mask=batch.mask, train=not frozen, key=key)
        value = losses.masked_mean(distance(target[batch.row], z), batch.mask)
        return value, variables["stats"] if frozen else stats

    return loss
