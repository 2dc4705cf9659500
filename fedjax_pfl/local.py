"""One client's training: shuffling, batching, masks, steps. The only file that scans over batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import trees
from fedjax_pfl.types import Array, Batch, Data, PyTree, Task

SHUFFLE, STEP, AUGMENT, LOSS = 1, 2, 3, 4  # streams of a training key
Loss = Callable[[PyTree, Batch, Array], tuple]  # (variables, batch, key) -> loss [], new stats (, aux)


def shuffle(key: Array, length: int, size: Array) -> Array:
    """A permutation [length] whose first `size` entries are 0..size-1 in an order that ignores the padding `length`."""
    bits = jax.random.bits(key, (length,))  # one draw a row: a prefix does not depend on the length
    # the sort is stable and valid rows stand first, so ties with the padding's value are harmless
    return jnp.argsort(jnp.where(jnp.arange(length) < size, bits, ~jnp.zeros((), bits.dtype)))


def take(data: Data, row: Array, mask: Array) -> Batch:
    """The batch of a client's rows `row` [B]; where `mask` [B] is False inputs and labels are zeros."""
    index = data.index[jnp.where(mask, row, 0)]
    index = jnp.where(mask, index, 0)  # an empty client's list holds nothing meaningful
    x = data.prepare(data.examples.x[index])
    x = jnp.where(trees.expand(mask, x.ndim), x, 0)  # not a product: 0 * NaN is NaN
    return Batch(x, jnp.where(mask, data.examples.y[index], 0), mask, row)


def _batches(data: Data, order: Array, start: Array, batch_size: int, count: int) -> list[Batch]:
    row = jax.lax.dynamic_slice_in_dim(order, start, batch_size * count)
    mask = start + jnp.arange(batch_size * count) < data.size
    parts = [slice(i * batch_size, (i + 1) * batch_size) for i in range(count)]
    return [take(data, row[part], mask[part]) for part in parts]


def _zeros_like_result(function: Callable[[], PyTree]) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function))


def steps(
    key: Array,
    data: Data,
    step: Callable[..., tuple[PyTree, PyTree]],
    carry: PyTree,
    *,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    batches_per_step: int = 1,
    drop_last: bool = False,
) -> tuple[PyTree, PyTree, Array]:
    """Runs `carry, aux = step(key, carry, *batches)` over shuffled batches.

    An epoch takes ceil(n / (B * batches_per_step)) steps (floor with `drop_last`), in a new order each epoch; with
    `steps` the client takes that many in all, however few its examples. A client without examples takes none.
    The trip count is dynamic: a client takes exactly its own steps, and no step consists of padding only.

    Returns:
      (carry, the mean of aux over the steps, the number of steps [] int32).
    """
    width = batch_size * batches_per_step
    length = data.index.shape[0]
    per_epoch = data.size // width if drop_last else (data.size + width - 1) // width
    if steps is None:
        assert epochs is not None
        total: Any = per_epoch * epochs
        passes: Any = epochs
    else:
        total = jnp.where(per_epoch > 0, steps, 0)
        passes = (total + per_epoch - 1) // jnp.maximum(per_epoch, 1)

    def one(e: Array, order: Array, s: Array, loop: PyTree) -> PyTree:
        carry, sums = loop
        step_key = jax.random.fold_in(jax.random.fold_in(key, STEP), e * per_epoch + s)
        carry, aux = step(step_key, carry, *_batches(data, order, s * width, batch_size, batches_per_step))
        return carry, trees.add(sums, aux)

    def epoch(e: Array, loop: PyTree) -> PyTree:
        shuffle_key = jax.random.fold_in(jax.random.fold_in(key, SHUFFLE), e)
        order = jnp.pad(shuffle(shuffle_key, length, data.size), (0, -length % width))
        count = jnp.minimum(per_epoch, total - e * per_epoch)
        return jax.lax.fori_loop(0, count, lambda s, loop: one(e, order, s, loop), loop)

    order = jnp.zeros(length + -length % width, jnp.int32)
    sums = _zeros_like_result(
        lambda: step(key, carry, *_batches(data, order, jnp.int32(0), batch_size, batches_per_step))[1]
    )
    carry, sums = jax.lax.fori_loop(0, passes, epoch, (carry, sums))
    return carry, jax.tree.map(lambda x: x / jnp.maximum(total, 1), sums), total


def sgd(
    key: Array,
    data: Data,
    loss: Loss,
    variables: dict[str, PyTree],
    task: Task,
    *,
    train: tuple[str, ...] = ("body", "head"),
    extra: Callable[[PyTree], PyTree] | None = None,
    epochs: int | None = None,
    has_aux: bool = False,
) -> tuple[dict[str, PyTree], Any]:
    """Trains the parts `train` of the variables by minibatch SGD with a fresh optimizer; batch-norm moments follow.

    Args:
      loss: (variables, batch, key) -> (mean loss over the valid rows [], new stats).
      extra: a gradient added to the loss's, a function of the trained parts (a proximal term, say).
      epochs: in place of the task's epochs or steps.
      has_aux: the loss returns a third result, a tree of what is to be reported.

    Returns:
      (variables, the mean loss over the steps []); with `has_aux`, in place of the loss, (loss, aux), both means.
    """
    optimizer = task.optimizer(task.lr)
    fixed = {name: part for name, part in variables.items() if name not in train}
    length: dict[str, Any] = {"epochs": task.epochs, "steps": task.steps} if epochs is None else {"epochs": epochs}

    def step(key: Array, carry: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
        params, stats, opt = carry
        if task.augment is not None:
            batch = batch._replace(x=task.augment(jax.random.fold_in(key, AUGMENT), batch.x))

        def objective(params: PyTree) -> tuple[Array, PyTree]:
            value, *others = loss({**fixed, **params, "stats": stats}, batch, jax.random.fold_in(key, LOSS))
            return value, others

        (value, (stats, *aux)), grads = jax.value_and_grad(objective, has_aux=True)(params)
        if extra is not None:
            grads = trees.add(grads, extra(params))
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), stats, opt), (value, *aux)

    params = {name: variables[name] for name in train}
    carry = (params, variables["stats"], optimizer.init(params))
    carry, means, _ = steps(key, data, step, carry, batch_size=task.batch_size, drop_last=task.drop_last, **length)
    return {**fixed, **carry[0], "stats": carry[1]}, means if has_aux else means[0]


def sweep(data: Data, function: Callable[[Batch], PyTree], batch_size: int) -> PyTree:
    """The sum of `function(batch)` over all rows in order; `function` masks its own sums by batch.mask."""
    length = data.index.shape[0]
    order = jnp.arange(length + -length % batch_size, dtype=jnp.int32)

    def one(s: Array, sums: PyTree) -> PyTree:
        (batch,) = _batches(data, order, s * batch_size, batch_size, 1)
        return trees.add(sums, function(batch))

    zeros = _zeros_like_result(lambda: function(_batches(data, order, jnp.int32(0), batch_size, 1)[0]))
    return jax.lax.fori_loop(0, (data.size + batch_size - 1) // batch_size, one, zeros)
