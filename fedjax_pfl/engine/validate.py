"""Checks of data, tasks and values where they enter the library."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import hyperparameters, local_training, user_code
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data.datasets import Dataset, prepared
from fedjax_pfl.engine import contract, frozen
from fedjax_pfl.errors import InputError, check, choose, first_line, in_one_line
from fedjax_pfl.evaluation import FURTHER, PERPLEXITY
from fedjax_pfl.models.nnx_model import BN_STATS
from fedjax_pfl.types import Algorithm, Federation, Method, Model, Task

LARGEST = 2**31 - 1  # steps and examples are counted in int32
_ONE_SOURCE = "make both from one data set and one partition"


def task(given: Task) -> Task:
    """Returns the task with a single participation as a range, and one name of
    `metrics` as a tuple without `acc`.

    Raises:
      InputError: a field has a wrong type, is out of range, or contradicts another.
    """
    metrics = [given.metrics] if isinstance(given.metrics, str) else given.metrics
    given = given._replace(
        metrics=tuple(name for name in metrics if name != "acc"),
        participation=_participation(given.participation),
        architecture=np.asarray(given.architecture),
    )
    shared = () if given.shared is None else (given.shared,)
    if not all(isinstance(x, Model) for x in (*given.models, *shared)):
        raise InputError("`models` and `shared` must be made by fedjax_pfl.model.")
    groups = given.architecture
    one_each = groups.shape == (given.num_clients,) and groups.dtype.kind in "iu"
    if not one_each or set(groups.tolist()) != set(range(len(given.models))):
        raise InputError(
            f"`architecture` must give each of the {given.num_clients} clients the "
            f"index of one of the {len(given.models)} models, and use all of them."
        )
    choose("bn_stats", given.bn_stats, BN_STATS)
    choose("loop", given.loop, local_training.LOOPS)
    check("lr", given.lr, 0, math.inf, open_low=True)
    check("batch_size", given.batch_size, 1, LARGEST, whole=True)
    if (given.epochs is None) == (given.steps is None):
        raise InputError("Specify exactly one of `epochs` and `steps`.")
    for name in ("epochs", "steps", "rounds"):
        if getattr(given, name) is not None:
            check(name, getattr(given, name), 0, LARGEST, whole=True)
    sizes = class_counts(given.class_counts, given.num_classes).sum(axis=1)
    one_label = given.label.shape == ()
    if np.shape(given.sizes) != sizes.shape or (
        one_label and not np.array_equal(given.sizes, sizes)
    ):
        raise InputError(
            f"`sizes` must equal `class_counts.sum(axis=1)`: {_ONE_SOURCE}."
        )
    optimizer(given.optimizer)
    _functions(given)
    for name in given.metrics:
        choose("metric", name, FURTHER)
    if PERPLEXITY in given.metrics and np.dtype(given.label.dtype).kind not in "iu":
        raise InputError("The metric perplexity needs labels that are classes.")
    return given


def _functions(given: Task) -> None:
    """Raises InputError unless loss, mix and schedule return what `Task` states."""
    whole = np.dtype(given.label.dtype).kind in "iu"
    count, shape = 2, given.label.shape
    if whole:  # each position is a row
        count, shape = 2 * math.prod(shape), ()
    logits = jax.ShapeDtypeStruct((count, given.num_classes), np.float32)
    y = jax.ShapeDtypeStruct((count, *shape), given.label.dtype)
    mask = jax.ShapeDtypeStruct((count,), bool)
    returns("loss", given.loss, (logits, y, mask), np.float32(0))
    returns("schedule", given.schedule, (jax.ShapeDtypeStruct((), np.int32),), 0.0)
    if given.mix is not None and given.label.shape == ():
        x = given.prepared
        pair = jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype), logits
        key = jax.eval_shape(lambda: jax.random.key(0))
        returns("mix", given.mix, (key, *pair, mask), pair)


def returns(
    name: str, function: Callable[..., Any] | None, given: tuple[Any, ...], wanted: Any
) -> None:
    """Raises InputError unless a user's function returns arrays of these shapes.

    Args:
      name: a key of `user_code.CALLS`.
      function: None is not checked.
      given: its arguments, or their shapes.
      wanted: a tree of real numbers like the result.
    """
    if function is None:
        return
    shape: Callable[[Any], Any] = lambda x: jax.ShapeDtypeStruct(np.shape(x), float)

    def call(*arguments: Any) -> Any:
        return jax.tree.map(jnp.asarray, function(*arguments))

    takes = f"`{name}` must be a function {user_code.CALLS[name]}"
    try:
        found = jax.eval_shape(call, *given)
    except InputError:
        raise
    except Exception as error:  # of a user's function
        raise InputError(f"{takes} ({in_one_line(error)}).") from error
    real = all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(found))
    same = jax.tree.map(shape, found) == jax.tree.map(shape, wanted)
    if not same or not (real or name == "schedule"):
        kinds = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(found)]
        shapes = [f"float32{list(np.shape(x))}" for x in jax.tree.leaves(wanted)]
        raise InputError(
            f"`{name}` must return {', '.join(shapes)}, got {', '.join(kinds) or None}."
        )


def _participation(given: Any) -> tuple[float, float]:
    """Returns a fraction of the clients as a range."""
    pair = given if isinstance(given, tuple | list) else (given, given)
    for value in pair:
        check("participation", value, 0, 1, open_low=True)
    if len(pair) != 2 or pair[0] > pair[1]:
        raise InputError(
            f"`participation` must be a number or (low, high), got {given!r}."
        )
    return float(pair[0]), float(pair[1])


def model(given: Model, dataset: Dataset) -> None:
    """Raises InputError unless the model takes the data set's inputs and has an output
    per class."""
    if not isinstance(given, Model):
        raise InputError(
            f"`model` must be a Model, got {given!r}: use fedjax_pfl.model(name, "
            "dataset.x.shape[1:], dataset.num_classes)."
        )
    x, wanted = prepared(dataset), (2 * (dataset.positions or 1), dataset.num_classes)
    variables = jax.eval_shape(given.init, jax.random.key(0))
    try:
        logits, _ = jax.eval_shape(given.apply, variables, x)
    except Exception as error:  # of a user's network
        raise InputError(
            f"The model fails on inputs of {dataset.name}, of shape {x.shape[1:]} "
            f"({first_line(error)})."
        ) from error
    if getattr(logits, "shape", None) != wanted:
        raise InputError(
            f"The model must return logits {list(wanted)} for a batch of 2 of "
            f"{dataset.name}, got {logits}: make it with dataset.num_classes."
        )


def optimizer(given: Any, name: str = "optimizer") -> None:
    """Raises InputError unless `given` makes a gradient transformation from a traced
    learning rate."""

    def make(lr: Any) -> None:
        if not isinstance(given(lr), optax.GradientTransformation):
            raise InputError("its result is none")

    try:
        jax.eval_shape(make, 0.1)
    except Exception as error:  # of a user's function
        raise InputError(
            f"`{name}` must be a function lr -> optax.GradientTransformation, such as "
            f"optax.sgd ({in_one_line(error)})."
        ) from error


def batches(given: Task) -> None:
    """Raises InputError if `drop_last` leaves no client a batch."""
    if given.drop_last and (largest := np.max(given.sizes)) < given.batch_size:
        raise InputError(
            f"`batch_size` must be at most {largest}, the size of the largest client, "
            f"with drop_last, got {given.batch_size}."
        )


def class_counts(given: Any, num_classes: int) -> np.ndarray:
    """Returns training examples per client and class [N, C] as a NumPy array; raises
    InputError if it has another shape or type."""
    given = getattr(given, "class_counts", given)
    counts = np.asarray(() if isinstance(given, tuple) else given)
    wrong = counts.ndim != 2 or counts.dtype.kind not in "iu" or not counts.size
    if wrong or counts.shape[1] != num_classes or counts.min() < 0:
        raise InputError(
            f"`class_counts` must be counts [clients, {num_classes}], got "
            f"{counts.dtype}{list(counts.shape)}: use Federation.class_counts."
        )
    return counts


def method(
    factory: Callable[..., Algorithm | Method] | str,
) -> Callable[..., Algorithm | Method]:
    """Returns the factory of a method given by itself or by its name (see
    `algorithms.find`)."""
    found = find(factory) if isinstance(factory, str) else factory
    try:
        inspect.signature(found).bind_partial(None)
    except TypeError as error:
        name = hyperparameters.method_name(found)
        raise InputError(
            f"{name} must take the arguments {user_code.CALLS['algo']} ({error})."
        ) from None
    return found


def layout(
    task: Task, lr_decay: Any, width: Any, devices: Any, base: Any, storage: Any
) -> None:
    """Raises InputError for a decay, a layout or a storage out of range."""
    check("lr_decay", lr_decay, 0, math.inf, open_low=True)
    check("width", width, 1, LARGEST, whole=True)
    check("devices", devices, 1, LARGEST, whole=True)
    check("base_devices", base, 1, LARGEST, whole=True)
    if devices % base:
        raise InputError(
            f"`devices` must be a multiple of base_devices={base}, got {devices}."
        )
    if base > 1 and not frozen.values(task):
        raise InputError("`base_devices` needs models with frozen variables.")
    choose("storage", storage, ("device", "host"))


def rounds(
    rounds: Any,
    eval_every: Any,
    start: Any,
    state: Any,
    state_every: Any,
    most: int | None = None,
) -> None:
    """Raises InputError for numbers of rounds out of range."""
    check("rounds", rounds, 0, LARGEST if most is None else most, whole=True)
    check("eval_every", eval_every, 0, math.inf, whole=True)
    check("state_every", state_every, 1, math.inf, whole=True)
    check("start", start, 0, rounds, whole=True)
    if start and state is None:
        raise InputError(f"start={start} needs the `state` after {start} rounds.")


def client(task: Task, id: Any, x: Any) -> None:
    """Raises InputError unless a client has this id, which may be traced, and x is a
    batch of raw inputs."""
    check("client", id, 0, task.num_clients - 1, whole=True)
    if np.shape(x)[1:] != task.input.shape or not np.ndim(x):
        raise InputError(
            f"`x` must be a batch of raw inputs, [B, *{task.input.shape}], got "
            f"{np.shape(x)}."
        )


def key(given: Any, shape: tuple[int, ...] = ()) -> None:
    """Raises InputError unless `given` is one key, or keys of this shape, whose draws
    do not depend on other keys under jax.vmap."""
    typed = jax.dtypes.issubdtype(getattr(given, "dtype", None), jax.dtypes.prng_key)
    wanted = shape if typed else (*shape, *np.shape(given)[-1:])
    if np.shape(given) != wanted or not (typed or np.ndim(given)):
        raise InputError(
            f"`key` must be made by jax.random.key and have the shape {list(shape)}."
        )
    default = jax.config.values["jax_default_prng_impl"]
    kind = str(jax.random.key_impl(given)) if typed else default
    if kind in ("rbg", "unsafe_rbg"):
        raise InputError(
            f"`key` must not be of the kind {kind}, whose draws depend on the width: "
            "use jax.random.key(0, impl='threefry2x32')."
        )


def state(given: Any, wanted: Any) -> None:
    """Raises InputError unless a state has the structure, shapes and types of another
    one."""
    different = contract.difference(wanted, contract.shapes(given))
    if different:
        raise InputError(
            f"`state` must be one of this program and layout ({different}): `place` "
            "what `unplace` returns."
        )


def federation(task: Task, given: Federation) -> None:
    """Raises InputError unless the federation has the clients of the task; arrays that
    are traced or on other hosts are not checked."""
    if not isinstance(given, Federation):
        raise InputError(f"`federation` must be made by federate, got {given!r}.")
    batches(task)
    number_of_clients(task, given)
    x, public = given.examples.x, task.public
    y = given.examples.y
    pairs = [
        ("examples", x.shape[1:], x.dtype, task.input),
        ("labels", y.shape[1:], y.dtype, task.label),
    ]
    if public is not None:
        pool = x[:0] if given.public is None else given.public.x
        pairs += [("public examples", pool.shape, pool.dtype, public)]
    for name, shape, dtype, wanted in pairs:
        if (shape, dtype) != (wanted.shape, wanted.dtype):
            raise InputError(
                f"The federation's {name} must be {wanted.dtype}{list(wanted.shape)} "
                f"as the task's, got {dtype}{list(shape)}: {_ONE_SOURCE}."
            )
    counts = given.class_counts
    if isinstance(counts, jax.core.Tracer) or not getattr(
        counts, "is_fully_addressable", True
    ):
        return
    if not np.array_equal(counts, task.class_counts) or not np.array_equal(
        given.train.size, task.sizes
    ):
        raise InputError(
            f"The federation's class counts must be those of the task: {_ONE_SOURCE}."
        )


def number_of_clients(task: Task, given: Federation) -> None:
    """Raises InputError unless a federation, which may be traced, has as many clients
    as the task in each split."""
    for split in (given.train, given.val, given.test):
        if len(split.size) != task.num_clients:
            raise InputError(
                f"The federation must have the task's {task.num_clients} clients, got "
                f"{len(split.size)}: {_ONE_SOURCE}."
            )
