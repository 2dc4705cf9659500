"""Functions that a program hands to the library, checked: networks, optimizers,
augmentations."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.data.datasets import Dataset, prepared
from fedjax_pfl.engine import contract
from fedjax_pfl.errors import ContractError, InputError, first_line, in_one_line
from fedjax_pfl.types import Array, Model, PyTree, Task


def model(given: Model, dataset: Dataset) -> None:
    """Raises InputError unless the model takes the data set's inputs and has an output
    for each class."""
    if not isinstance(given, Model):
        how = (
            ": model(name, dataset.x.shape[1:], dataset.num_classes)"
            if isinstance(given, str)
            else ""
        )
        raise InputError(
            f"model={given!r} must be a Model, as fedjax_pfl.models.model makes "
            f"it{how}."
        )
    x = prepared(dataset)
    variables = jax.eval_shape(given.init, jax.random.key(0))
    _parts(given, variables)
    logits, h = (
        _returned(given, name, variables, x, dataset) for name in ("apply", "features")
    )
    if getattr(h, "shape", ())[-1:] != (given.num_features,):
        raise InputError(
            f"The model's num_features is {given.num_features}, and its features are "
            f"{h} of a batch of 2."
        )
    shape, expected = getattr(logits, "shape", None), (2, dataset.num_classes)
    if shape is None or shape[:-1] != expected[:-1]:
        raise InputError(
            f"The model returns {logits} of a batch of 2: it must be logits [B, C], "
            f"{list(expected)}."
        )
    if shape != expected:
        raise InputError(
            f"The model has {shape[-1]} outputs, but {dataset.name} has "
            f"{dataset.num_classes} classes: make it with "
            "dataset.num_classes."
        )


def _parts(given: Model, variables: Any) -> None:
    """Raises InputError for variables that are not of a model's three parts, or a mask
    of others."""
    if not isinstance(variables, dict) or set(variables) != {"body", "head", "stats"}:
        found = (
            ", ".join(map(str, variables))
            if isinstance(variables, dict)
            else type(variables).__name__
        )
        raise InputError(
            f'The model\'s `init` must return {{"body", "head", "stats"}}, nested '
            f"dicts, not {found}."
        )
    if jax.tree.structure(given.bn_mask) != jax.tree.structure(variables):  # type: ignore[operator]  # PyTreeDef has no type
        raise InputError(
            "The model's bn_mask must be like its variables, with a bool in place of "
            "each array."
        )


def _returned(given: Model, name: str, variables: Any, x: Any, dataset: Dataset) -> Any:
    """The shape of what a model's `apply` or `features` returns beside its
    statistics."""
    function = getattr(given, name)
    try:
        signature = inspect.signature(function)
        signature.bind(variables, x)
        signature.bind(variables, x, mask=None, train=False, key=None)
    except TypeError as error:
        wanted = "(variables, x, mask=None, train=False, key=None)"
        raise InputError(
            f"The model's `{name}` does not take {wanted}: {error}."
        ) from error
    try:
        made = jax.eval_shape(function, variables, x)
    except InputError:
        raise
    except Exception as error:  # of a user's network
        raise InputError(_misfit(given, variables, x, dataset, error)) from error
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise InputError(
            f"The model's `{name}` must return two things, the outputs and the "
            f"statistics, not {made}."
        )
    return made[0]


def _misfit(
    given: Model, variables: Any, x: Any, dataset: Dataset, error: Exception
) -> str:
    """Which part of a model does not take what it is given."""
    try:
        shape = jax.eval_shape(given.features, variables, x)[0].shape[1:]
    except Exception:
        shape = ()
    # so wide are the features of inputs that fit
    if shape[-1:] == (given.num_features,):
        start, advice = (
            f"The model's head does not take its body's features, of shape {shape}",
            "make it for as many",
        )
    else:
        start = (
            f"The model does not take the inputs of {dataset.name}, of shape "
            f"{x.shape[1:]}"
        )
        raw = x.shape[1:] == dataset.x.shape[1:]
        advice = (
            "make it with "
            f"{'dataset.x.shape[1:]' if raw else 'that shape, which prepare makes'}"
        )
    return f"{start} ({first_line(error)}): {advice}."


def optimizer(
    given: Any, name: str = "optimizer", rate: str = "lr and its decay"
) -> None:
    """Raises InputError unless it makes a transformation of gradients of a learning
    rate, which may be traced; `name` and `rate` are what the two are called."""
    try:
        made, failed = given(0.1), ""
    except Exception as error:  # not callable, of other arguments, or of the user's own
        made, failed = None, f" fails ({in_one_line(error)})" if callable(given) else ""
    if not isinstance(made, optax.GradientTransformation):
        returned = (
            f" returns {type(made).__name__}"
            if callable(given)
            else f" is {type(given).__name__}"
        )
        if hasattr(made, "gradient_transformation"):
            returned += ", so add .gradient_transformation()"
        raise InputError(
            f"{name} must be a function of the learning rate that returns an "
            "optax.GradientTransformation, such as "
            f"optax.sgd or lambda lr: optax.sgd(lr, 0.9), for {rate} to reach it, but "
            f"this one{failed or returned}."
        )
    weights = {
        part: {"kernel": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
        for part in ("body", "head")
    }

    def step(lr: Any, w: Any) -> Any:
        made = given(lr)
        return made.update(w, made.init(w), w)

    try:
        jax.eval_shape(step, 0.1, weights)
    except contract.TRACED as error:
        raise InputError(_of_a_value(given, name, error)) from error
    except TypeError as error:
        # another argument of `update`; whatever else fails may be of these weights
        if ") missing " in str(error):
            raise InputError(
                f"{name} asks for more than a gradient ({first_line(error)}): take "
                "another."
            ) from error
    except Exception:
        return


def guarded(
    given: Callable[..., optax.GradientTransformation], name: str = "optimizer"
) -> Callable[..., Any]:
    """The optimizer, of gradients in the types of the parameters (a traced weight makes
    a sum float32, and an average that is kept would change its type); where it fails on
    what a method trains, InputError says so."""

    @contextlib.contextmanager
    def blamed(params: Any = None) -> Iterator[None]:
        try:
            yield
        except (InputError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except contract.TRACED as error:
            raise InputError(_of_a_value(given, name, error)) from error
        except Exception as error:
            if params is None:
                raise InputError(f"{name} fails ({in_one_line(error)}).") from error
            parts = (
                f" of the parts {', '.join(map(str, params))}"
                if isinstance(params, dict)
                else ""
            )
            raise InputError(
                f"{name} fails on parameters{parts} ({in_one_line(error)}): a method "
                "may train one part of a model, or "
                "several models; let masks and labels be functions of the parameters, "
                "and need only the gradient."
            ) from error

    def make(lr: Any) -> optax.GradientTransformation:
        with blamed():
            made = given(lr)

        def init(params: Any) -> Any:
            with blamed(params):
                return made.init(params)

        def update(gradient: Any, state: Any, params: Any = None) -> Any:
            with blamed(params):
                gradient = (
                    gradient
                    if params is None
                    else optax.tree.cast_like(gradient, params)
                )
                return made.update(gradient, state, params)

        return optax.GradientTransformation(init, update)

    return make


def transformed(
    given: Callable[..., PyTree], key: Array, upload: PyTree, default: PyTree
) -> PyTree:
    """What a transform (`program.program`) makes of an upload, in the upload's types;
    InputError unless structure and shapes are the upload's, in floats."""
    say = (
        "transform must be a function (key, upload, default) that returns an upload "
        "like the one it is given"
    )
    try:
        made = given(key, upload, default)
        found = contract.shapes(made)
    except ContractError as error:
        raise InputError(f"{say}, but {error}") from error
    except (InputError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # not callable, of other arguments, or of the user's own
        line = contract.own_line(given, error)
        raise InputError(
            f"{say}, but this one fails "
            f"({in_one_line(error)}{f', at {line}' * bool(line)})."
        ) from error
    floats = lambda x: jax.ShapeDtypeStruct(
        x.shape, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    )
    if difference := contract.difference(
        *(jax.tree.map(floats, x) for x in (contract.shapes(upload), found))
    ):
        raise InputError(f"{say}: {difference}.")
    return optax.tree.cast_like(made, upload)


def _of_a_value(given: Any, name: str, error: Exception) -> str:
    """What to say where Python asks for the value of something traced."""
    line = contract.own_line(given, error)
    where = type(error).__name__ + (f", at {line}" if line else "")
    return (
        f"{name} asks for the value of the learning rate or of a gradient ({where}), "
        "which a compiled round does not "
        "have: use jnp.where; for a schedule, let its peak be 1 and scale by it, "
        "optax.chain(optax.sgd(lr), "
        "optax.scale_by_schedule(schedule))."
    )


def augment(given: Task) -> None:
    """Raises InputError unless the task's augmentation is a function of JAX that keeps
    the shape of a batch."""
    if given.augment is None:
        return
    if not callable(given.augment):
        raise InputError(
            f"augment={given.augment!r} must be a function, (key, x) -> x, or None."
        )
    x = jax.ShapeDtypeStruct((given.batch_size, *given.input.shape), given.input.dtype)
    batch = jax.eval_shape(given.prepare, x)
    try:
        found = jax.eval_shape(given.augment, jax.random.key(0), batch)
    except Exception as error:  # of a user's function
        raise InputError(
            f"augment fails ({first_line(error)}): it must be of JAX, (key, x) -> x."
        ) from error
    if getattr(found, "shape", None) != batch.shape:
        raise InputError(
            f"augment makes {found} of a batch {list(batch.shape)}: it must keep the "
            "shape."
        )
