"""What a method must return, checked while it is traced: each mistake is one sentence,
before anything compiles."""

import contextlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.errors import ContractError, InputError, in_one_line
from fedjax_pfl.hyperparameters import method_name
from fedjax_pfl.types import (
    Algorithm,
    Examples,
    Federation,
    Grouped,
    Metrics,
    PyTree,
    State,
    Subset,
    Task,
    Traffic,
)

RESERVED = (  # columns of the tables
    *("round", "participants", "loss", "traffic", "work"),
    *("pre", "post", "post_latest", "val", "unseen", "unseen_post"),
)
# of the columns of a score's statistics
ENDINGS = ("_micro", "_std", "_worst10", "_best10", "_clients")

TRACED = (  # what JAX says where Python looks at an array's value
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# this one first
INSTALLED = (
    Path(__file__).parents[1],
    Path(inspect.__file__).parent,
    Path(jax.__file__).parents[1],
)


def shapes(tree: PyTree) -> PyTree:
    """The tree with shapes and types in place of arrays; ContractError where something
    else stands."""

    def shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        try:
            return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
        except TypeError:
            at = jax.tree_util.keystr(path) or "it"
            raise ContractError(
                f"{at} is of type {type(x).__name__} and must be an array."
            ) from None

    return jax.tree_util.tree_map_with_path(shape, tree)


@contextlib.contextmanager
def named(factory: Callable[..., Any], part: str = "") -> Iterator[None]:
    """Puts the method's name before what it is said to do wrong; with the part of it
    that is traced here, whatever the user's own code raises is such a sentence as
    well."""
    name = method_name(factory)
    try:
        yield
    except ContractError as error:
        raise InputError(f"{name}: {error}") from error.__cause__
    except (InputError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        if not part or (line := own_line(factory, error)) is None:
            raise
        why = f"({in_one_line(error)}, at {line})"
        if isinstance(error, TRACED):  # whose own first line is of JAX's insides
            use = "annotate it int or Literal, or use jnp.where"
            why = (
                f"({type(error).__name__}, at {line}): a float hyperparameter is "
                f"traced, as arrays are; {use}"
            )
        raise InputError(f"{name} fails in {part} {why}.") from error


def own_line(factory: Callable[..., Any], error: Exception) -> str | None:
    """The last FILE:LINE of a traceback that is of neither this package, nor Python,
    nor what is installed beside JAX, unless the factory is; None if there is none."""
    code = getattr(inspect.unwrap(getattr(factory, "func", factory)), "__code__", None)
    own = getattr(code, "co_filename", None)
    here, *others = (f"{folder}{os.sep}" for folder in INSTALLED)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        if not file.startswith(here) and (
            file == own or not file.startswith(("<", *others))
        ):
            return f"{file}:{frame.lineno}"
    return None


def check_shapes(
    task: Task,
    traced: dict[str, float],
    init: Callable[..., State],
    round: Callable[..., PyTree],
    evaluate: Callable[..., PyTree],
) -> None:
    """Traces one round and one evaluation of a program's functions on shapes alone,
    which checks what they return."""
    key, t = (
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    number, flag = (
        jax.ShapeDtypeStruct((), jnp.result_type(float)),
        jax.ShapeDtypeStruct((), bool),
    )
    given = dict.fromkeys(traced, number)
    federation = _abstract(task)
    state = jax.eval_shape(init, key, given)
    jax.eval_shape(evaluate, key, given, federation, state, t)
    jax.eval_shape(round, key, given, federation, state, t, flag)


def check_algorithm(algorithm: Any) -> None:
    """Raises ContractError unless this is an Algorithm whose functions take the
    contract's arguments."""
    if not isinstance(algorithm, Algorithm):
        raise ContractError(
            f"the factory must return an Algorithm, not {type(algorithm).__name__}."
        )
    signatures = {
        "init": ("key",),
        "round": ("key", "state", "cohort"),
        "predict": ("server", "row", "client"),
    }
    signatures |= {
        "score": ("outputs", "y", "mask", "client"),
        "traffic": ("state", "cohort", "metrics"),
    }
    for name, kind in get_type_hints(Algorithm).items():
        if getattr(algorithm, name) is None and NoneType not in get_args(kind):
            raise ContractError(f"`{name}` is None, and must be given.")
    for name, arguments in signatures.items():
        function = getattr(algorithm, name)
        if function is None:
            continue
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError:
            raise ContractError(
                f"`{name}` must take the arguments ({', '.join(arguments)})."
            ) from None
    if not isinstance(algorithm.averages, tuple):
        raise ContractError(
            "`averages` must be a tuple of names, such as ('body',), not "
            f"{algorithm.averages!r}."
        )
    given = algorithm.headline
    if (
        not isinstance(given, tuple)
        or len(given) != 2
        or given[1] not in ("max", "min")
    ):
        raise ContractError(
            f"`headline` must be (score, 'max' or 'min'), not {given!r}."
        )


def check_init(state: Any, clients: int) -> None:
    """Raises ContractError unless `init` returned a State with a row for each of the
    clients."""
    if not isinstance(state, State):
        raise ContractError(
            f"`init` must return State(server, clients), not {type(state).__name__}."
        )
    shapes(state)
    whole = jax.tree_util.tree_leaves_with_path(
        state.clients, is_leaf=lambda x: isinstance(x, Grouped)
    )
    for path, x in whole:
        if not isinstance(x, Grouped) and jnp.shape(x)[:1] != (clients,):
            raise ContractError(
                f"State.clients{jax.tree_util.keystr(path)} of `init` has the shape "
                f"{list(jnp.shape(x))} and must have "
                f"a row for each of the {clients} clients, as trees.replicate makes "
                "them."
            )


def check_weight(weight: PyTree, places: int) -> None:
    """Raises ContractError unless the weight given to the mean has an entry per
    client."""
    for x in jax.tree.leaves(weight):
        if jnp.shape(x)[:1] != (places,):
            raise ContractError(
                f"the `weight` given to cohort.mean has the shape {list(jnp.shape(x))} "
                "and must have one entry per "
                f"client, here [{places}]."
            )


def check_sent(result: Any) -> None:
    """Raises ContractError unless the function given to the mean returned a tuple, the
    upload first."""
    if not isinstance(result, tuple) or not result:
        raise ContractError(
            "the function given to cohort.mean must return a tuple (upload, ...), not "
            f"{type(result).__name__}."
        )


def check_upload(upload: PyTree, default: PyTree) -> None:
    """Raises ContractError unless what a client sends is like the mean's default."""
    if apart := difference(shapes(default), shapes(upload)):
        raise ContractError(
            "the first result of the function given to cohort.mean, the upload, must "
            f"be like `default`: {apart}."
        )


def check_round(before: State, result: Any, places: int, method: Algorithm) -> None:
    """Raises ContractError unless a round returned a state like the one before and
    complete metrics of `places`, with the headline among the scores and what `idle`
    names among the server's."""
    if not (
        isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], State)
    ):
        raise ContractError("`round` must return (State, Metrics).")
    state, metrics = result
    if not isinstance(metrics, Metrics):
        raise ContractError(
            "`round` must return Metrics(loss=..., post=...) beside the state, not "
            f"{type(metrics).__name__}."
        )
    _check_metrics(metrics, places, method.headline[0])
    if missing := [
        part.metric for part in method.idle if part.metric not in metrics.server
    ]:
        raise ContractError(
            f"`idle` names the metric {missing[0]!r}, which is not in its "
            "Metrics.server."
        )
    if unknown := [name for name in method.averages if name not in state.server]:
        raise ContractError(
            f"`averages` names {unknown[0]!r}, which is no part of its State.server."
        )
    if apart := difference(shapes(before), shapes(state)):
        raise ContractError(
            "`round` must return a state of the same structure, shapes and types: "
            f"{apart}."
        )


def _check_metrics(metrics: Metrics, places: int, headline: str) -> None:
    if metrics.loss is None:
        raise ContractError(
            "its Metrics have no `loss`: give each client's mean training loss, [S]."
        )
    if metrics.post is None or (isinstance(metrics.post, dict) and not metrics.post):
        raise ContractError(
            "its Metrics have no `post`: give what evaluate.post returned for each "
            "client, {score: [S]}."
        )
    for field in ("post", "clients", "server"):
        given = getattr(metrics, field)
        if not isinstance(given, dict) or not all(
            isinstance(name, str) for name in given
        ):
            keys = (
                f"with the keys {list(given)}"
                if isinstance(given, dict)
                else type(given).__name__
            )
            raise ContractError(
                f"its Metrics.{field} must be a dictionary {{name: array}}, not {keys}."
            )
    _check_names(metrics.post)
    if headline not in metrics.post:
        raise ContractError(
            f"its Metrics.post lacks the headline {headline!r} and has only "
            f"{', '.join(metrics.post)}."
        )
    vectors = {
        f"{at}[{name!r}]": x
        for at in ("post", "clients")
        for name, x in getattr(metrics, at).items()
    }
    vectors = {"loss": metrics.loss} | vectors
    for name, x in (
        vectors | {f"server[{name!r}]": x for name, x in metrics.server.items()}
    ).items():
        kind: Any = getattr(x, "dtype", type(x))
        kinds: tuple[Any, ...] = (
            (jnp.floating,)
            if name == "loss"
            else (jnp.floating, jnp.integer, jnp.bool_)
        )
        if not hasattr(x, "dtype") or not any(
            jnp.issubdtype(kind, each) for each in kinds
        ):
            what, found = (
                "floats" if name == "loss" else "numbers",
                getattr(kind, "__name__", kind),
            )
            raise ContractError(
                f"its metric {name} must be an array of {what}, not {found}."
            )
        if name in vectors and jnp.shape(x) != (places,):
            raise ContractError(
                f"its metric {name} has the shape {list(jnp.shape(x))} and must be one "
                "number per client, [S]; "
                "what is not of single clients belongs to Metrics.server."
            )
        if np.size(x) == 0:
            raise ContractError(
                f"its metric {name} has the shape {list(jnp.shape(x))}, and so no "
                "number in it."
            )
    for name in (*metrics.clients, *metrics.server):
        if name.split("/")[0] in RESERVED or (
            name in metrics.clients and name in metrics.server
        ):
            raise ContractError(
                f"a metric cannot be named {name!r}: that name is taken."
            )


def check_traffic(sent: Any, places: int) -> None:
    """Raises ContractError unless `traffic` returned counts per client."""
    if not isinstance(sent, Traffic):
        raise ContractError(
            f"`traffic` must return a Traffic, not {type(sent).__name__}."
        )
    for name, x in sent._asdict().items():
        if x is not None and jnp.shape(x) != (places,):
            raise ContractError(
                f"its traffic `{name}` has the shape {list(jnp.shape(x))} and must be "
                "one count per client, [S]."
            )


def check_predictor(predictor: Any) -> None:
    """Raises ContractError unless `predict` returned a function of (x, mask)."""
    if not callable(predictor):
        raise ContractError("`predict` must return a function (x, mask) -> outputs.")
    try:
        inspect.signature(predictor).bind("x", "mask")
    except TypeError:
        raise ContractError(
            "`predict` must return a function of the arguments (x, mask)."
        ) from None


def check_scores(scores: Any, headline: str) -> None:
    """Raises ContractError unless `score` returned {name: (sum, count)} with the
    headline among them."""
    if not (
        isinstance(scores, dict)
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in scores.values())
    ):
        raise ContractError("`score` must return {name: (sum, count)}.")
    _check_names(scores)
    if headline not in scores:
        raise ContractError(
            f"`score` does not return the headline {headline!r}, only "
            f"{', '.join(scores)}."
        )
    for name, pair in shapes(scores).items():
        if pair[0].shape != pair[1].shape:
            raise ContractError(
                f"the sum and the count of the score {name!r} must have one shape, not "
                f"{list(pair[0].shape)} and "
                f"{list(pair[1].shape)}."
            )


def _check_names(scores: Iterable[str]) -> None:
    """Raises ContractError if a score has the name of a column of another one's
    statistics."""
    if taken := [name for name in scores if str(name).endswith(ENDINGS)]:
        raise ContractError(
            f"a score cannot be named {taken[0]!r}: names that end in "
            f"{', '.join(ENDINGS)} are those of its statistics."
        )


def _abstract(task: Task) -> Federation:
    """A federation like the task's own: shapes and types only."""
    array: Any = lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)
    n, most = task.num_clients, max(1, int(np.max(task.sizes)))
    split: Callable[[int], Subset] = lambda width: Subset(
        array((n, width)), array((n,))
    )
    examples = Examples(array((n, *task.input.shape), task.input.dtype), array((n,)))
    pool = (
        None
        if task.public is None
        else Examples(
            array(task.public.shape, task.public.dtype), array(task.public.shape[:1])
        )
    )
    # in no shape to be taken for 1 or for the classes
    tested = 3 if task.num_classes != 3 else 2
    return Federation(
        examples,
        split(most),
        split(0),
        split(tested),
        array((n, task.num_classes)),
        pool,
    )


def difference(wanted: PyTree, found: PyTree) -> str | None:
    """The first place where two trees of shapes differ, in words."""
    paths = (jax.tree_util.tree_leaves_with_path(tree) for tree in (wanted, found))
    a, b = (
        {jax.tree_util.keystr(path): (x.shape, x.dtype) for path, x in leaves}
        for leaves in paths
    )
    for path in (*a, *b):
        before, after = a.get(path), b.get(path)
        if before != after:
            return f"{path or 'it'} is {said(after)} and must be {said(before)}"
    same = jax.tree.structure(wanted) == jax.tree.structure(found)  # type: ignore[operator]  # PyTreeDef has no type
    return None if same else "the containers of its leaves differ"


def said(leaf: tuple[tuple[int, ...], Any] | None) -> str:
    """The shape and the type of a leaf, in words."""
    return "missing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"
