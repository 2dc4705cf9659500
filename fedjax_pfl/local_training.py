"""One client's training: shuffling, batching, masks, steps. The only file that scans
over batches."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import Numeric

from fedjax_pfl import keys, losses, trees
from fedjax_pfl.errors import InputError, moved
from fedjax_pfl.kernels.platform import platform
from fedjax_pfl.types import Array, Batch, Client, Data, PyTree, Task, Work

T = TypeVar("T")
# Trip counts. With dynamic a client passes over its own batches. With static it passes
# over as many as the largest client and masks those after its own, so that the trip
# count of an epoch is a constant of the program; work in steps, or in epochs of a
# client's own choice, remains dynamic. With bounded every loop has the static length of
# the largest client and superfluous steps are discarded: it has a reverse mode. The
# results are the same.
LOOPS = ("dynamic", "static", "bounded")
SCOPE = "loop_over_batches"  # in the names of a trace, see `engine.flops`
# likewise: what the server computes, though a client's function may have it
ON_SERVER = "on_server"
# (variables, batch, key) -> loss [], new stats (, aux)
Loss = Callable[
    [PyTree, Batch, Array], tuple[Array, PyTree] | tuple[Array, PyTree, PyTree]
]


def shuffle(key: Array, length: int, size: Array) -> Array:
    """A permutation [length] whose first `size` entries are 0..size-1 in an order that
    ignores the padding `length`."""
    # one draw a row: a prefix does not depend on the length
    bits = jax.random.bits(key, (length,), jnp.uint32)
    # the sort is stable and valid rows stand first, so ties with the padding's value
    # are harmless
    return jnp.argsort(
        jnp.where(jnp.arange(length) < size, bits, ~jnp.zeros((), bits.dtype))
    )


def take(data: Data, row: Array, mask: Array) -> Batch:
    """Returns the batch of a client's rows `row` [B].

    Where `mask` [B] is False it holds the client's first example, which a network can
    process as any other, or `data.mask_fill`. Labels of positions [B, L] become rows,
    those below 0 are masked.
    """
    # the list of a client without examples holds nothing meaningful
    index = jnp.where(data.size > 0, data.index[jnp.where(mask, row, 0)], 0)
    x, y = data.prepare(_rows(data.examples.x, index)), _rows(data.examples.y, index)
    if data.mask_fill is not None:
        # not a product: 0 * NaN is NaN
        x = jnp.where(trees.expand(mask, x.ndim), x, data.mask_fill.x[None])
    if y.ndim == 2 and jnp.issubdtype(y.dtype, jnp.integer):
        mask = (mask[:, None] & (y >= 0)).reshape(-1)
        y = jnp.maximum(y, 0).reshape(-1)
    if data.mask_fill is not None:
        fill = data.mask_fill.y.astype(y.dtype)
        y = jnp.where(trees.expand(mask, y.ndim), y, fill)
    return Batch(x, y, mask, row)


def _rows(x: Array, index: Array) -> Array:
    """x [n, ...] and index [B] -> x[index], on a CPU one row after another: a gather
    from a large array XLA splits over its threads, however few the rows, and a small
    step then waits longer for them than it computes."""
    return _copied_rows(x, index) if platform() == "cpu" else x[index]


@jax.custom_batching.custom_vmap
def _copied_rows(x: Array, index: Array) -> Array:
    return jax.lax.map(
        lambda i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), index
    )


@_copied_rows.def_vmap
def _copied_rows_of_clients(
    count: int, batched: list[bool], x: Array, index: Array
) -> tuple[Array, bool]:
    if batched[0]:  # every client has a data set of its own
        return jax.vmap(
            lambda x, i: x[i], in_axes=(0, 0 if batched[1] else None), axis_size=count
        )(x, index), True
    # else several rows at once would be a gather again
    rows = _copied_rows(x, index.reshape(-1))
    return rows.reshape(*index.shape, *x.shape[1:]), True


def shares_loop(kind: str) -> bool:
    """Returns True if the clients of a batch share one trip count, their largest.

    A loop whose condition differs between clients copies its carry in every turn, on an
    accelerator all weights. On a CPU small networks only are batched.
    """
    return platform() != "cpu" or kind == "static"


def trips(count: Any, kind: str = "dynamic") -> Any:
    """Returns the trip count of a loop: the client's, or the largest of its batch."""
    return _largest(jnp.asarray(count)) if shares_loop(kind) else count


@jax.custom_batching.custom_vmap
def _largest(count: Array) -> Array:
    return count


@_largest.def_vmap
def _largest_of_clients(
    size: int, batched: list[bool], count: Array
) -> tuple[Array, bool]:
    return _largest(jnp.max(count) if batched[0] else count), False


def held_out(size: Numeric, fraction: Numeric) -> Array:
    """How many of a client's rows `holdout` holds out, [] int32."""
    held = jnp.clip(
        jnp.round(fraction * size).astype(jnp.int32), 1, jnp.maximum(size - 1, 1)
    )
    return jnp.where(size > 1, held, 0)


def holdout(data: Data, fraction: Numeric) -> tuple[Data, Data]:
    """Splits off the last of a client's rows: (the other rows, the held out ones), the
    same in every round.

    Where the partition shuffled the rows, as all here do, the tail is a random sample.
    The nearest number to fraction * n is held out, but at least one row and not all of
    them; a single row is not held out.
    """
    held = held_out(data.size, fraction)
    rest, length = data.size - held, data.index.shape[0]
    tail = data.index[jnp.minimum(rest + jnp.arange(length), length - 1)]
    return data._replace(size=rest), data._replace(index=tail, size=held)


def check_left(task: Task, fraction: Numeric) -> None:
    """Raises InputError where `drop_last` leaves no client a batch of what `holdout`
    leaves; a fraction that is traced passes."""
    if not task.drop_last or isinstance(fraction, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():
        left = int(np.max(task.sizes - np.asarray(held_out(task.sizes, fraction))))
    if left < task.batch_size:
        raise InputError(
            f"drop_last with batches of {task.batch_size} leaves nothing to train on: "
            "besides the examples held out the "
            f"largest client has {left}. Take a smaller batch_size, or leave drop_last "
            "out."
        )


def _batches(
    data: Data,
    orders: list[Array],
    start: Array,
    batch_size: int,
    rows: Array | None = None,
) -> list[Batch]:
    mask = start + jnp.arange(batch_size) < data.size
    if rows is not None:
        mask &= jnp.arange(batch_size) < rows
    return [
        take(data, jax.lax.dynamic_slice_in_dim(order, start, batch_size), mask)
        for order in orders
    ]


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
    steps: int | Array | None = None,
    batches_per_step: int = 1,
    drop_last: bool = False,
    rows: Array | None = None,
    limit: Array | None = None,
    keeps: bool = False,
) -> tuple[PyTree, PyTree, Array]:
    """Runs `carry, aux = step(key, carry, *batches)` over shuffled batches.

    An epoch takes ceil(n / B) steps (floor with `drop_last`), in a new order each
    epoch; with `steps` (which may be traced) the client takes that many in all, however
    few its examples. A client without examples takes none. Where a step wants several
    batches, each comes from an order of its own, the first from the same as if it were
    alone: they are drawn independently, have the same number of valid rows, and may
    share rows (all of them where n <= B). The trip count is dynamic by default (see
    `LOOPS`): a client takes exactly its own steps. Where clients share the loop
    (`shares_loop`) batches of padding only follow a client's own, with masks that are
    False.

    Args:
      rows: examples of a batch, at most `batch_size`, which they are by default.
      limit: the largest number of steps.
      keeps: the step takes `active` [] and returns its carry unchanged where that is
        False (None: the loop is not shared); else the carry is selected.

    Returns:
      (carry, the mean of aux over the steps, the number of steps [] int32).
    """
    shared, length = shares_loop(data.loop), data.index.shape[0]
    size = batch_size if rows is None else rows
    per_epoch, total = _counts(data, size, epochs, steps, drop_last, limit)
    padding = -length % batch_size if rows is None else batch_size
    planned = isinstance(epochs, int) and steps is None and limit is None
    static = data.loop == "static" and planned and rows is None
    most = -(-length // batch_size)  # of the largest client
    passes: Any = (
        epochs
        if steps is None and limit is None
        else (total + per_epoch - 1) // jnp.maximum(per_epoch, 1)
    )

    def one(
        e: Array, orders: list[Array], count: Array, s: Array, loop: PyTree
    ) -> PyTree:
        carry, sums, active = loop
        step_key = jax.random.fold_in(
            keys.fold(key, keys.Client.STEP), e * per_epoch + s
        )
        batches = _batches(data, orders, s * size, batch_size, rows)
        if not shared:
            carry, aux = step(step_key, carry, *batches)
            return carry, trees.add(sums, aux), active
        batches = [b._replace(mask=b.mask & active) for b in batches]
        mine = {"active": active} if keeps else {}
        new, aux = step(step_key, carry, *batches, **mine)
        aux = jax.tree.map(lambda x: jnp.where(active, x, 0), aux)
        new = new if keeps else trees.choose(active, new, carry)
        return new, trees.add(sums, aux), s + 1 < count

    def shuffled(e: Array) -> list[Array]:
        first = jax.random.fold_in(keys.fold(key, keys.Client.SHUFFLE), e)
        draws = [
            first,
            *(jax.random.fold_in(first, i) for i in range(1, batches_per_step)),
        ]
        return [jnp.pad(shuffle(key, length, data.size), (0, padding)) for key in draws]

    def epoch(e: Array, loop: PyTree) -> PyTree:
        orders = shuffled(e)
        count = jnp.minimum(per_epoch, total - e * per_epoch)
        first = (*loop, count > 0)
        turns = most if static else trips(count, data.loop)
        return jax.lax.fori_loop(
            0, turns, lambda s, loop: one(e, orders, count, s, loop), first
        )[:2]

    step = trees.traced_once(step)  # for the shapes of its sums, and in the loop
    orders = [jnp.zeros(length + padding, jnp.int32)] * batches_per_step
    sums = _zeros_like_result(
        lambda: step(key, carry, *_batches(data, orders, jnp.int32(0), batch_size))[1]
    )

    def turn(loop: PyTree, i: Array) -> tuple[PyTree, None]:
        e, s = jnp.divmod(i, jnp.maximum(per_epoch, 1))
        new = one(e, shuffled(e), per_epoch, s, (*loop, i < total))[:2]
        return trees.choose(i < total, new, loop), None

    with jax.named_scope(SCOPE):
        if data.loop == "bounded":
            most = _most(length, batch_size, epochs, steps, data)
            carry, sums = jax.lax.scan(turn, (carry, sums), jnp.arange(most))[0]
        else:
            carry, sums = jax.lax.fori_loop(
                0, passes if static else trips(passes, data.loop), epoch, (carry, sums)
            )
    return carry, jax.tree.map(lambda x: x / jnp.maximum(total, 1), sums), total


def _most(length: int, batch_size: int, epochs: Any, steps: Any, data: Data) -> int:
    """The largest number of steps, static."""
    most = steps if epochs is None else epochs * -(-length // batch_size)
    if data.work is not None or not isinstance(most, int):
        raise InputError("Reverse mode needs a static number of local steps.")
    return most


def _counts(
    data: Data,
    batch_size: int | Array,
    epochs: Any,
    steps: int | Array | None,
    drop_last: bool,
    limit: Array | None = None,
) -> tuple[Array, Array]:
    """The steps of an epoch, and all of them."""
    per_epoch = (
        data.size // batch_size
        if drop_last
        else (data.size + batch_size - 1) // batch_size
    )
    total = per_epoch * epochs if steps is None else jnp.where(per_epoch > 0, steps, 0)
    return per_epoch, total if limit is None else jnp.minimum(total, limit)


def learns(size: Array, task: Task) -> Array:
    """Which clients of `size` training examples, [] or [S], have a batch to train on:
    bool of that shape. With `drop_last` it must be a whole one."""
    return size >= (task.batch_size if task.drop_last else 1)


def count(data: Data, task: Task) -> Array:
    """The number of steps [] int32 that `work` takes."""
    plan = _plan(data.work, task)
    size = plan.pop("rows", task.batch_size)
    return _counts(data, size, drop_last=task.drop_last, **plan)[1]


def rate(data: Data, task: Task) -> Numeric:
    """The learning rate of a client, [] or a number."""
    given = data.work
    return task.lr if given is None or given.lr is None else task.lr * given.lr


def _plan(given: Work | None, task: Task, epochs: int | None = None) -> dict[str, Any]:
    """The options of `steps` for a client's local work, or for `epochs`."""
    plan: dict[str, Any] = {"epochs": task.epochs, "steps": task.steps}
    if given is not None:
        own = {"rows": given.batch_size, "limit": given.limit}
        plan |= {name: x for name, x in own.items() if x is not None}
        if given.epochs is not None or given.steps is not None:
            plan |= {"epochs": given.epochs, "steps": given.steps}
    return plan if epochs is None else plan | {"epochs": epochs, "steps": None}


def work(
    key: Array,
    data: Data,
    step: Callable[..., tuple[PyTree, PyTree]],
    carry: PyTree,
    task: Task,
    *,
    epochs: int | None = None,
    batches_per_step: int = 1,
    keeps: bool = False,
) -> tuple[PyTree, PyTree, Array]:
    """The task's local work: `steps` with its batch size, its epochs or steps (or
    `epochs`), and augmented batches."""

    def augmented(
        key: Array, carry: PyTree, *batches: Batch, **rest: Array
    ) -> tuple[PyTree, PyTree]:
        if task.augment is not None:
            draws = [
                keys.fold(key, keys.Step.AUGMENT, i) for i in range(batches_per_step)
            ]
            batches = tuple(
                b._replace(x=task.augment(k, b.x))
                for k, b in zip(draws, batches, strict=True)
            )
        if task.mix is not None:
            draws = [keys.fold(key, keys.Step.MIX, i) for i in range(batches_per_step)]
            batches = tuple(
                _mixed(k, b, task) for k, b in zip(draws, batches, strict=True)
            )
        return step(keys.fold(key, keys.Step.LOSS), carry, *batches, **rest)

    options: dict[str, Any] = {
        "batch_size": task.batch_size,
        "drop_last": task.drop_last,
        "keeps": keeps,
        **_plan(data.work, task, epochs),
    }
    return steps(
        key, data, augmented, carry, batches_per_step=batches_per_step, **options
    )


def _mixed(key: Array, batch: Batch, task: Task) -> Batch:
    labels = jax.nn.one_hot(batch.y, task.num_classes)
    assert task.mix is not None
    x, y = task.mix(key, batch.x, labels, batch.mask)
    return batch._replace(x=x, y=y)


def planned(task: Task, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts the work of one round on the host.

    Args:
      sizes: [N] training examples.

    Returns:
      steps [N] and examples seen [N], repetitions included, int64.
    """
    sizes = np.asarray(sizes, np.int64)
    given = None
    if task.work is not None:
        ids = jnp.arange(len(sizes), dtype=jnp.int32)
        given = jax.device_get(jax.vmap(task.work, (0, None))(ids, jnp.int32(0)))
    plan = _plan(given, task)
    size = plan.get("rows", task.batch_size)
    whole = sizes // size
    per_epoch = whole if task.drop_last else -(-sizes // size)
    seen = whole * size if task.drop_last else sizes  # in an epoch
    steps = (
        per_epoch * plan["epochs"]
        if plan["steps"] is None
        else np.where(per_epoch > 0, plan["steps"], 0)
    )
    steps = np.minimum(steps, plan.get("limit", steps))
    passes, rest = np.divmod(steps, np.maximum(per_epoch, 1))
    return steps, passes * seen + np.minimum(rest * size, seen)


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
    """Trains the parts `train` of the variables by minibatch SGD with a fresh
    optimizer; running statistics follow.

    Args:
      loss: (variables, batch, key) -> (mean loss over the valid rows [], new stats).
      extra: a gradient added to the loss's, a function of the trained parts (a proximal
        term, say).
      epochs: in place of the task's epochs or steps.
      has_aux: the loss returns a third result, a tree of what is to be reported.

    Returns:
      (variables, the mean loss over the steps []); with `has_aux`, in place of the
      loss, (loss, aux), both means.
    """
    optimizer = task.optimizer(rate(data, task))
    fixed = {name: part for name, part in variables.items() if name not in train}

    def step(
        key: Array, carry: PyTree, batch: Batch, active: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        params, old, opt = carry

        def objective(params: PyTree, batch: Batch) -> tuple[Array, PyTree]:
            value, *others = loss({**fixed, **params, "stats": old}, batch, key)
            return value, others

        compute = jax.value_and_grad(objective, has_aux=True)
        if task.per_example is not None:
            compute = functools.partial(_per_example, task.per_example, compute, key)
        (value, (stats, *aux)), grads = compute(params, batch)
        if extra is not None:
            grads = trees.add(grads, extra(params))
        updates, new = optimizer.update(grads, opt, params)
        if active is not None:
            updates = jax.tree.map(lambda x: jnp.where(active, x, 0), updates)
            stats, new = trees.choose(active, (stats, new), (old, opt))
        return (optax.apply_updates(params, updates), stats, new), (value, *aux)

    params = {name: variables[name] for name in train}
    carry = (params, variables["stats"], optimizer.init(params))
    carry, means, _ = work(key, data, step, carry, task, epochs=epochs, keeps=True)
    return {**fixed, **carry[0], "stats": carry[1]}, means if has_aux else means[0]


def _per_example(
    rule: Callable[[Array, PyTree, Array], PyTree],
    compute: Callable[[PyTree, Batch], tuple[tuple[Array, PyTree], PyTree]],
    key: Array,
    params: PyTree,
    batch: Batch,
) -> tuple[tuple[Array, PyTree], PyTree]:
    """Returns the results of `compute` with rule(key, gradients [B, ...], mask) in
    place of the gradient of a batch."""
    if batch.mask.shape != batch.row.shape:
        raise InputError("gradients per example need one label per example.")

    def one(x: Array, y: Array, row: Array) -> tuple[tuple[Array, PyTree], PyTree]:
        alone = Batch(x[None], y[None], jnp.ones(1, bool), row[None])
        return compute(params, alone)

    (values, others), grads = jax.vmap(one)(batch.x, batch.y, batch.row)
    if jax.tree.leaves(others[0]):
        raise InputError(
            "gradients per example need a model without running statistics."
        )
    mean = lambda x: jax.vmap(losses.masked_mean, (-1, None), -1)(
        x.reshape(len(batch.row), -1), batch.mask
    ).reshape(x.shape[1:])
    shown = jax.tree.map(mean, (values, others))
    return shown, rule(keys.fold(key, keys.Loss.NOISE), grads, batch.mask)


def bind(task: Task, loss: Loss | None = None) -> Callable[..., tuple[PyTree, Any]]:
    """Returns `sgd` for the clients of one task, as sgd(c, variables, **options).

    The options are those of `sgd`, and `loss`, `stream` (a `keys.Stream` in place of
    the client's main key) and `data` (in place of its training examples).

    Args:
      loss: as of `sgd`; None: the cross entropy of the client's own network.
    """

    def train(
        c: Client,
        variables: dict[str, PyTree],
        *,
        loss: Loss | None = loss,
        stream: keys.Stream | None = None,
        data: Data | None = None,
        **options: Any,
    ) -> tuple[dict[str, PyTree], Any]:
        key = c.key if stream is None else keys.fold(c.key, stream)
        data = c.train if data is None else data
        loss = losses.classification(c.model, task) if loss is None else loss
        return sgd(key, data, loss, variables, task, **options)

    return train


def fold(data: Data, function: Callable[[T, Batch], T], carry: T, batch_size: int) -> T:
    """Runs `carry = function(carry, batch)` over all rows in order."""
    length = data.index.shape[0]
    order = jnp.arange(length + -length % batch_size, dtype=jnp.int32)
    count = (data.size + batch_size - 1) // batch_size

    def one(s: Array, carry: T) -> T:
        (batch,) = _batches(data, [order], s * batch_size, batch_size)
        new = function(carry, batch)
        return trees.choose(s < count, new, carry) if shares_loop(data.loop) else new

    def turn(carry: T, s: Array) -> tuple[T, None]:
        return trees.choose(s < count, one(s, carry), carry), None

    with jax.named_scope(SCOPE):
        if data.loop == "bounded":
            every = jnp.arange(len(order) // batch_size)
            return jax.lax.scan(turn, carry, every)[0]
        static = len(order) // batch_size
        turns = static if data.loop == "static" else trips(count, data.loop)
        return jax.lax.fori_loop(0, turns, one, carry)


def sweep(data: Data, function: Callable[[Batch], T], batch_size: int) -> T:
    """The sum of `function(batch)` over all rows in order; `function` masks its own
    sums by batch.mask."""
    rows, function = (
        jnp.arange(batch_size, dtype=jnp.int32),
        trees.traced_once(function),
    )
    zeros: T = _zeros_like_result(lambda: function(take(data, rows, rows < data.size)))
    return fold(
        data, lambda sums, batch: trees.add(sums, function(batch)), zeros, batch_size
    )


def class_sums(values: Array, batch: Batch, num_classes: int) -> tuple[Array, Array]:
    """Sums [D, C] of a batch's values [B, D] over the rows of each class, and how many
    these are [C]."""
    member = jax.nn.one_hot(batch.y, num_classes) * batch.mask[:, None]
    return jnp.dot(values.T, member, precision=jax.lax.Precision.HIGHEST), jnp.sum(
        member, axis=0
    )


def class_means(
    data: Data, values: Callable[[Batch], Array], num_classes: int, batch_size: int
) -> Array:
    """Means [D, C] of values(batch) [B, D] over the rows of each class; 0 for a class
    without rows."""
    total, count = sweep(
        data, lambda batch: class_sums(values(batch), batch, num_classes), batch_size
    )
    return total / jnp.maximum(count, 1)[None]


def collect(
    data: Data, values: Callable[[Batch], Array], width: int, batch_size: int
) -> tuple[Array, Array]:
    """Returns values(batch) [B, width] of all rows, [M, width] float32, and their
    labels [M]; 0 and -1 in the padding."""
    length = data.index.shape[0]

    def write(found: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
        at = jnp.where(batch.mask, batch.row, length)
        kept, labels = found
        return (
            kept.at[at].set(values(batch).astype(kept.dtype), mode="drop"),
            labels.at[at].set(batch.y, mode="drop"),
        )

    kept = jnp.zeros((length, width), jnp.float32)
    return fold(data, write, (kept, jnp.full(length, -1, jnp.int32)), batch_size)


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = moved(
        __name__,
        {"bounded": 'task(..., loop="bounded")', "loop": 'task(..., loop="static")'},
    )
