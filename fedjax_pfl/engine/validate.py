"""What a program hands to the library, checked where it enters: its kinds, its ranges,
and that it belongs together."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms.find import find
from fedjax_pfl.engine import callables
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.models.nnx_model import BN_STATS
from fedjax_pfl.types import Algorithm, Array, Examples, Federation, Model, Subset, Task

LARGEST = 2**31 - 1  # steps and examples are counted in int32
_COUNTED = "it is counted in 32 bits"
_ONE_SOURCE = "make both of one data set and one partition"


def task(given: Task) -> Task:
    """Returns the task, a single participation as the range that it stands for.

    Raises:
      InputError: a field of a wrong kind or out of its range, or fields that do not fit
        each other.
    """
    given = given._replace(
        participation=_participation(given.participation),
        architecture=np.asarray(given.architecture),
    )
    for name, model in [("model", x) for x in given.models] + [
        ("shared", given.shared)
    ] * (given.shared is not None):
        if not isinstance(model, Model):
            raise InputError(
                f"{name}={model!r} must be a Model, as fedjax_pfl.models.model makes "
                "it."
            )
    _architectures(given)
    _variables(given)
    check("lr", given.lr, 0, math.inf, open_low=True)
    check("batch_size", given.batch_size, 1, LARGEST, whole=True, why=_COUNTED)
    if given.rounds is not None:
        check("rounds", given.rounds, 0, LARGEST, whole=True, why=_COUNTED)
    if (given.epochs is None) == (given.steps is None):
        raise InputError(
            "Local work is either epochs or steps: give exactly one of the two."
        )
    if given.drop_last not in (True, False):
        raise InputError(f"drop_last={given.drop_last!r} must be True or False.")
    if not np.array_equal(
        given.sizes, class_counts(given.class_counts, given.num_classes).sum(axis=1)
    ):
        raise InputError(
            "The task's sizes are not the sums of class_counts over the classes: "
            f"{_ONE_SOURCE}."
        )
    # steps of the largest client's epoch
    passes = -(-int(max(np.max(given.sizes), 1)) // given.batch_size)
    why = f"{_COUNTED}, and an epoch of the largest client has {passes:,} steps"
    epochs, steps = (0 if x is None else x for x in (given.epochs, given.steps))
    check("epochs", epochs, 0, LARGEST // passes, whole=True, why=why)
    check(
        "steps",
        steps,
        0,
        LARGEST // min(given.batch_size, 2**20),
        whole=True,
        why=_COUNTED,
    )
    callables.optimizer(given.optimizer)
    callables.augment(given)
    return given


def batches(given: Task) -> None:
    """Raises InputError where `drop_last` leaves no client a batch."""
    if given.drop_last and (largest := np.max(given.sizes)) < given.batch_size:
        raise InputError(
            f"drop_last with batches of {given.batch_size} leaves nothing to train on: "
            "the largest client has "
            f"{largest} examples. Take a smaller batch_size, or leave drop_last out."
        )


def _architectures(given: Task) -> None:
    """Raises InputError unless every client has one of the task's models, and every
    model a client."""
    of = given.architecture
    if of.dtype.kind not in "iu":
        raise InputError(
            f"architecture is of {of.dtype}: it must hold for each client the index of "
            "its model, [N]."
        )
    if of.shape != (given.num_clients,) or sorted(set(of.tolist())) != list(
        range(len(given.models))
    ):
        raise InputError(
            f"There are {len(given.models)} architectures and {given.num_clients} "
            "clients: each client needs one, and "
            "each architecture a client."
        )


def _variables(given: Task) -> None:
    """Raises InputError for variables of 64 bits or running statistics that the task
    has not."""
    choose("bn_stats", given.bn_stats, BN_STATS)
    networks = (*given.models, *filter(None, [given.shared]))
    variables = [jax.eval_shape(model.init, jax.random.key(0)) for model in networks]
    if any(x.dtype == jnp.float64 for x in jax.tree.leaves(variables)):
        raise InputError(
            "A model has variables of float64, and states are float32: build it with "
            "param_dtype=float32."
        )
    if given.bn_stats == "batch" and any(
        jax.tree.leaves(tree["stats"]) for tree in variables
    ):
        raise InputError(
            "bn_stats='batch' is of tasks whose models keep no running statistics: "
            "make them with it too."
        )


def class_counts(given: Any, num_classes: int) -> np.ndarray:
    """Returns training examples per client and class [N, C], on the host; else
    InputError."""
    if isinstance(given, tuple) and hasattr(given, "train"):
        raise InputError(
            f"class_counts is a {type(given).__name__}: give `class_counts` of the "
            "Federation."
        )
    counts = np.asarray(given)
    if counts.ndim != 2 or counts.dtype.kind not in "iu" or not counts.size:
        raise InputError(
            f"class_counts is {counts.dtype}{list(counts.shape)}: it must be [clients, "
            "classes], integers."
        )
    if counts.shape[1] != num_classes or counts.min() < 0:
        raise InputError(
            f"class_counts has {counts.shape[1]} classes, the least count "
            f"{counts.min()}: the data set has "
            f"{num_classes}, and no count is negative."
        )
    return counts


def method(factory: Callable[..., Algorithm] | str) -> Callable[..., Algorithm]:
    """Returns the factory of a method, which may be given by its name, see
    `algorithms.find`.

    Raises:
      InputError: there is no method of that name, or what is given is none.
    """
    if isinstance(factory, str):
        return find(factory)
    if not callable(factory):
        raise InputError(
            f"{factory!r} is no method: give a factory, (task, **hyperparameters) -> "
            "Algorithm, or a name."
        )
    return factory


def layout(lr_decay: Any, width: Any, devices: Any) -> None:
    """Raises InputError for a decay that is not positive, or a width or a number of
    devices that is none."""
    check("lr_decay", lr_decay, 0, math.inf, open_low=True)
    check("width", width, 1, LARGEST, whole=True)
    check("devices", devices, 1, LARGEST, whole=True)


def rounds(
    rounds: Any, eval_every: Any, start: Any, state: Any, state_every: Any
) -> None:
    """Raises InputError for numbers that no loop of rounds can have."""
    if jax.config.values["jax_debug_nans"] and eval_every != 1:
        raise InputError(
            f"jax_debug_nans needs eval_every=1, not {eval_every}: else missing "
            "scores, NaN, stop it."
        )
    check("rounds", rounds, 0, LARGEST, whole=True, why=_COUNTED)
    check("eval_every", eval_every, 0, math.inf, whole=True)
    check("state_every", state_every, 1, math.inf, whole=True)
    check("start", start, 0, rounds, whole=True, why="so many rounds are asked for")
    if start and state is None:
        raise InputError(
            f"start={start} needs the state after so many rounds: give `state`, or "
            "start at 0."
        )


def client(task: Task, id: Any) -> None:
    """Raises InputError unless a client has this id; one that is traced cannot choose
    an architecture."""
    if isinstance(id, jax.core.Tracer):
        if len(task.models) > 1:
            raise InputError(
                "With several architectures the client id must be a Python integer: it "
                "chooses the model."
            )
    elif (
        np.ndim(id)
        or np.asarray(id).dtype.kind not in "iu"
        or not 0 <= int(id) < task.num_clients
    ):
        raise InputError(
            f"There is no client {id}: ids are 0 to {task.num_clients - 1}."
        )


def inputs(task: Task, x: Any) -> Array:
    """Returns a batch of raw inputs; InputError unless it is [B, *input]."""
    if np.shape(x)[1:] != task.input.shape or not np.ndim(x):
        shape = ", ".join(map(str, ("B", *task.input.shape)))
        raise InputError(
            f"x is {list(np.shape(x))}: it must be a batch of raw inputs, [{shape}]; "
            "of one example take x[None]."
        )
    return jnp.asarray(x)


def key(given: Any) -> None:
    """Raises InputError unless it is one random key, of a kind that `kind_of_key`
    takes."""
    typed = jax.dtypes.issubdtype(getattr(given, "dtype", None), jax.dtypes.prng_key)
    if np.shape(given) != (
        ()
        if typed
        else jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    ):
        raise InputError("The key must be a single one, as jax.random.key(0) makes it.")
    kind_of_key(given)


def kind_of_key(given: Any) -> None:
    """Raises InputError for keys, one or several, whose draws depend on what else is
    vmapped."""
    typed = jax.dtypes.issubdtype(getattr(given, "dtype", None), jax.dtypes.prng_key)
    kind = str(
        jax.random.key_impl(given)
        if typed
        else jax.config.values["jax_default_prng_impl"]
    )
    # one draw of the first key serves all that are vmapped
    if kind in ("rbg", "unsafe_rbg"):
        raise InputError(
            f"The key is of the kind {kind}, whose draws under jax.vmap depend on the "
            "other keys, so that results "
            "would depend on the width: take jax.random.key(0, impl='threefry2x32'), "
            "or unset JAX_DEFAULT_PRNG_IMPL."
        )


def state(given: Any, wanted: Any) -> None:
    """Raises InputError unless a state has the structure, shapes and types of the
    wanted one."""
    leaves, structures = zip(*map(jax.tree.flatten, (given, wanted)), strict=True)
    kinds = [
        [(np.shape(x), getattr(x, "dtype", None)) for x in each] for each in leaves
    ]
    if len(set(structures)) > 1 or kinds[0] != kinds[1]:
        raise InputError(
            "The state is not one of this program: take a Result's of the same layout, "
            "or `place` what `unplace` gives."
        )


def federation(task: Task, given: Federation) -> None:
    """Raises InputError unless these are the clients that the task was made for, whose
    rows are examples.

    What is traced, or lies on other hosts, is not checked.
    """
    if not isinstance(given, Federation):
        raise InputError(
            f"federation={given!r} must be a Federation, as fedjax_pfl.data.federate "
            "makes it."
        )
    leaves = jax.tree.leaves(given)
    batches(task)
    if any(
        isinstance(x, jax.core.Tracer)
        or (isinstance(x, jax.Array) and not x.is_fully_addressable)
        for x in leaves
    ):
        return
    number_of_clients(task, given)
    if not np.array_equal(given.class_counts, task.class_counts) or not np.array_equal(
        given.train.size, task.sizes
    ):
        raise InputError(
            "The federation's clients hold other training examples than the task's: "
            f"{_ONE_SOURCE}."
        )
    _public(task, given.public)
    x, y = given.examples
    if (x.shape[1:], x.dtype) != (task.input.shape, task.input.dtype):
        raise InputError(
            f"The federation's examples are {x.dtype}{list(x.shape[1:])}, the task's "
            f"{task.input.dtype}"
            f"{list(task.input.shape)}: {_ONE_SOURCE}."
        )
    if len(x) != len(y):
        raise InputError(
            f"The federation's examples have {len(x)} inputs x but {len(y)} labels y: "
            f"{_ONE_SOURCE}."
        )
    for part in ("train", "val", "test"):
        if len(getattr(given, part).size) != task.num_clients:
            raise InputError(
                f"The federation has {task.num_clients} clients in train, and in "
                f"{part} another number: {_ONE_SOURCE}."
            )
        rows = _rows(part, getattr(given, part), len(y))
        labels = np.asarray(y)[rows]
        if len(labels) and not (labels.min() >= 0 and labels.max() < task.num_classes):
            raise InputError(
                f"The federation has labels {labels.min()}..{labels.max()} in {part}, "
                "but the task has "
                f"{task.num_classes} classes: {_ONE_SOURCE}."
            )


def number_of_clients(task: Task, given: Federation) -> None:
    """Raises InputError unless a federation, which may be traced, has as many clients
    as the task."""
    if (n := len(given.train.size)) != task.num_clients:
        raise InputError(
            f"The federation has {n} clients, but the task was made for "
            f"{task.num_clients}: {_ONE_SOURCE}."
        )


def _public(task: Task, given: Examples | None) -> None:
    """Raises InputError unless the public examples are the task's."""
    wanted = task.public
    if wanted is None:
        return
    if given is None or (given.x.shape, given.x.dtype) != (wanted.shape, wanted.dtype):
        raise InputError(
            "The federation's public examples are not the task's "
            f"{wanted.dtype}{list(wanted.shape)}: make both of one "
            "pool."
        )
    if task.public_classes and not (
        np.min(given.y) >= 0 and np.max(given.y) < task.public_classes
    ):
        raise InputError(
            "The federation's public examples have labels "
            f"{np.min(given.y)}..{np.max(given.y)}, but those of the task "
            f"{task.public_classes} classes: make both of one pool."
        )


def _participation(given: Any) -> tuple[float, float]:
    """A fraction, or a range of them."""
    given = given.tolist() if isinstance(given, np.ndarray | jax.Array) else given
    if len(pair := given if isinstance(given, tuple | list) else (given, given)) != 2:
        raise InputError(
            f"participation={given!r} must be a number, or a range of two."
        )
    for value in pair:
        check("participation", value, 0, 1, open_low=True)
    low, high = map(float, pair)
    if low > high:
        raise InputError(
            f"participation={low}:{high} is a range from high to low: write it as "
            f"{high}:{low}."
        )
    return low, high


def _rows(part: str, rows: Subset, n: int) -> np.ndarray:
    """The rows of one part, client after client."""
    index, size = np.asarray(rows.index), np.asarray(rows.size)
    if (
        index.ndim != 2
        or len(index) != len(size)
        or (len(size) and size.max() > index.shape[1])
    ):
        raise InputError(
            f"{part} has {size.max()} examples of a client in an index "
            f"{list(index.shape)}: it has no room."
        )
    valid = index[np.arange(index.shape[1]) < size[:, None]]
    if len(valid) and not (valid.min() >= 0 and valid.max() < n):
        wrong = valid.min() if valid.min() < 0 else valid.max()
        raise InputError(
            f"{part} holds the row {wrong}, but the examples have rows 0..{n - 1}: is "
            "it another data set?"
        )
    return valid
