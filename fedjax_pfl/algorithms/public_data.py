"""Public examples, which the server and all clients have: what models predict for them,
and training on predictions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from chex import Numeric

from fedjax_pfl import evaluation, keys, local_training, losses, trees
from fedjax_pfl.algorithms.knowledge_transfer.mixtures import Predictions
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Batch, Client, Cohort, Data, Model, PyTree, Task


def count(task: Task, size: int) -> int:
    """How many public examples a round uses, at most the pool: D.

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
    """The public examples of a round, drawn without replacement: ascending indices [D]
    into the pool.

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
    """The examples `index` [D] of the pool; none where not wanted [].

    Raises:
      InputError: the federation has no pool.
    """
    if pool is None:
        raise InputError(
            "The task has public examples and the federation has none: give "
            "Federation.public."
        )
    return pool._replace(
        index=index, size=jnp.where(wanted, len(index), 0).astype(jnp.int32)
    )


def logits(
    model: Model, variables: PyTree, data: Data, num_classes: int, batch_size: int
) -> Array:
    """A model's logits [M, C] for all rows of the data, without dropout and with
    running statistics."""

    def one(found: Array, batch: Batch) -> Array:
        z, _ = model.apply(variables, batch.x, mask=batch.mask, train=False)
        # past the end there is only padding
        return found.at[batch.row].set(z.astype(found.dtype), mode="drop")

    return local_training.fold(
        data,
        one,
        jnp.zeros((data.index.shape[0], num_classes), jnp.float32),
        batch_size,
    )


def gathered(cohort: Cohort, outputs: Array) -> Predictions:
    """The predictions [S, D, C] of those who have trained."""
    order = jnp.argsort(cohort.ids)
    here = cohort.trained[order]
    outputs = cohort.replicated(outputs)[order]
    return Predictions(
        cohort.ids[order], here, jnp.where(trees.expand(here, outputs.ndim), outputs, 0)
    )


def pretrain(c: Client, variables: PyTree, task: Task, epochs: Any) -> PyTree:
    """The client's model after epochs over all public examples with their labels
    (FedMD).

    Meanwhile the public classes stand beside the private ones, as outputs of a linear
    layer that is dropped then.

    Raises:
      InputError: their labels are meaningless.
    """
    classes, width, own = task.public_classes, c.model.num_features, task.num_classes
    if not classes:
        raise InputError(
            "Training on public examples needs their labels, and the task's pool has "
            "none (Task.public_classes is 0): "
            "give a labelled one, or public_epochs=0."
        )

    def loss(v: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        h, stats = c.model.features(v, batch.x, mask=batch.mask, train=True, key=key)
        z = jnp.concatenate(
            [c.model.head(v["head"], h), jnp.dot(h, v["public"])], axis=1
        )
        return losses.cross_entropy(z, own + batch.y, batch.mask), stats

    key = keys.fold(c.key, keys.Client.PUBLIC_LABELS)
    outputs = jax.random.uniform(
        keys.fold(key, keys.Client.PUBLIC_LABELS), (width, classes), jnp.float32, -1, 1
    )
    data = subset(c.public, jnp.arange(task.public.shape[0]), c.train.size > 0)  # type: ignore[union-attr]
    v = {**variables, "public": outputs / width**0.5}
    v, _ = local_training.sgd(
        key, data, loss, v, task, train=("body", "head", "public"), epochs=epochs
    )
    return {part: v[part] for part in variables}


def distillation(
    model: Model,
    target: Array,
    distance: Callable[[Array, Array], Array],
    *,
    frozen: bool = False,
    by_batch: bool = False,
) -> Callable[[PyTree, Batch, Array], tuple[Array, PyTree]]:
    """The loss of training on targets: the mean of `distance` over the valid rows, as
    `local_training.sgd` takes it.

    Args:
      target: [D, C], for the rows of the data.
      distance: (target [B, C], logits [B, C]) -> [B].
      frozen: whether running statistics stay as they are, by which the model
        normalises, and there is no dropout.
      by_batch: whether a frozen model normalises by the batch nevertheless.
    """

    def loss(variables: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        train = not frozen or by_batch
        z, stats = model.apply(
            variables,
            batch.x,
            mask=batch.mask,
            train=train,
            key=None if frozen else key,
        )
        value = losses.masked_mean(distance(target[batch.row], z), batch.mask)
        return value, variables["stats"] if frozen else stats

    return loss


def validation(
    data: Data, target: Array, fraction: Numeric
) -> tuple[Data, Data, Array]:
    """Splits off the last of the examples as `local_training.holdout` does: (the
    others, those held out, and these' targets).

    Args:
      target: [D, C], for the rows of the data.
    """
    rest, held = local_training.holdout(data, fraction)
    return rest, held, jnp.roll(target, -rest.size, axis=0)


def early_stopped(
    key: Array,
    parts: tuple[Data, Data, Array],
    loss: Callable[..., local_training.Loss],
    target: Array,
    variables: PyTree,
    task: Task,
    passes: int,
    patience: int,
) -> tuple[PyTree, Array]:
    """Trains on targets until `patience` passes have brought nothing on the examples
    held out; the best pass is kept.

    Args:
      parts: what `validation` returned.
      loss: `distillation` but for its target [D, C].

    Returns:
      (variables, the loss of the best pass on the examples held out []: 0 without a
      pass, inf if none was finite).
    """
    data, held, held_target = parts
    optimizer, fit = task.optimizer(task.lr), loss(target=target)
    check = loss(target=held_target, frozen=True, by_batch=task.bn_stats == "local")
    per_pass = (data.size + task.batch_size - 1) // task.batch_size

    def validate(w: PyTree) -> Array:
        return evaluation.mean(
            held, lambda batch: check(w, batch, key)[0], task.batch_size
        )

    def step(key: Array, carry: PyTree, batch: Batch) -> tuple[PyTree, tuple[()]]:
        return jax.lax.cond(
            carry["idle"] < patience, lambda: trained(key, carry, batch), lambda: carry
        ), ()

    def trained(key: Array, carry: PyTree, batch: Batch) -> PyTree:
        w, count = carry["w"], carry["count"] + 1
        params = {name: part for name, part in w.items() if name != "stats"}
        objective = lambda params: fit({**params, "stats": w["stats"]}, batch, key)[:2]
        (_, stats), grads = jax.value_and_grad(objective, has_aux=True)(params)
        updates, opt = optimizer.update(grads, carry["opt"], params)
        w = {**optax.apply_updates(params, updates), "stats": stats}
        ended = count % per_pass == 0
        found = jax.lax.cond(ended, validate, lambda _: jnp.full((), jnp.inf), w)
        better = found < carry["least"]
        idle = jnp.where(better, 0, carry["idle"] + ended)
        best, least = (
            trees.choose(better, w, carry["best"]),
            jnp.where(better, found, carry["least"]),
        )
        return {
            "w": w,
            "opt": opt,
            "count": count,
            "best": best,
            "least": least,
            "idle": idle,
        }

    params = {name: part for name, part in variables.items() if name != "stats"}
    start = {
        "w": variables,
        "opt": optimizer.init(params),
        "best": variables,
        "least": jnp.full((), jnp.inf),
    }
    start |= {"count": jnp.int32(0), "idle": jnp.int32(0)}
    end, _, _ = local_training.work(key, data, step, start, task, epochs=passes)
    return end["best"], jnp.where(end["count"] > 0, end["least"], 0)
