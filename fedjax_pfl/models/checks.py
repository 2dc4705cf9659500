"""What a network of a user's own may be: whatever a model cannot have is one
sentence."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError


def no_module(factory: Any) -> None:
    """InputError for a module in place of what makes one, and for any of Flax Linen."""
    old = isinstance(factory, linen.Module) or (
        inspect.isclass(factory) and issubclass(factory, linen.Module)
    )
    if old or isinstance(factory, nnx.Module):
        what = f"a module of Flax {'Linen' if old else 'NNX'}"
        raise InputError(
            f"{getattr(factory, '__name__', type(factory).__name__)} is {what}: give a "
            "function that makes one of NNX, "
            "(input_shape, num_classes, rngs) -> a module with body and head."
        )


def arguments(factory: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """The factory as (input_shape, num_classes, rngs) -> a function that makes the
    module, whether or not its signature has these after `*`; InputError for one that
    takes others."""
    name = getattr(factory, "__name__", type(factory).__name__)

    def make(
        input_shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs | None
    ) -> Callable[[], Any]:
        return user_code.bound(
            factory,
            "model",
            name,
            input_shape=input_shape,
            num_classes=num_classes,
            rngs=rngs,
        )

    make((), 0, None)
    return make


def _variables(
    module: Any, may: Callable[[str], tuple[type[nnx.Variable[Any]], ...]], rule: str
) -> None:
    """InputError unless each variable is of the kinds that `may` names for its part of
    the module, and each parameter is of floats."""
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        name = f"{type(module).__name__}.{'.'.join(map(str, path))}"
        for x in (
            jax.tree.leaves(variable.get_value())
            if isinstance(variable, nnx.Param)
            else ()
        ):
            if not jnp.issubdtype(kind := jnp.result_type(x), jnp.floating):
                raise InputError(
                    f"{name} is a parameter of {kind}: let it be of floats, which are "
                    "trained and averaged."
                )
        if not isinstance(variable, may(str(path[0]))):
            drawn = isinstance(variable, nnx.RngState)
            hint = "; dropout takes `rngs` when called, not when built" if drawn else ""
            raise InputError(f"{name} is a {type(variable).__name__}: {rule}{hint}.")


def _constants(module: nnx.Module) -> None:
    """InputError for an array that is no variable: one that is made while the module is
    traced cannot be used in another trace."""
    for path, part in nnx.iter_modules(module):
        for name, value in vars(part).items():
            leaves = jax.tree.leaves(
                value, is_leaf=lambda x: isinstance(x, nnx.Module | nnx.Variable)
            )
            if any(isinstance(x, jax.Array | np.ndarray) for x in leaves):
                full = ".".join(map(str, (type(module).__name__, *path, name)))
                raise InputError(
                    f"{full} is an array: make a constant in `__call__`, where it is "
                    "used."
                )


def output(
    module: Any,
    shape: Callable[[jax.ShapeDtypeStruct], Any],
    example: jax.ShapeDtypeStruct,
) -> Any:
    """The shape of the body's features of a batch of two.

    Raises:
      InputError: they are not one array, or the body takes integers where the example
        has none.
    """
    try:
        h = shape(example)
    except Exception as error:
        if jnp.issubdtype(example.dtype, jnp.floating) and _takes_integers(
            shape, example
        ):
            what = (
                f"takes integers, and examples are {example.dtype}: for tokens give "
                "input_dtype=jnp.int32"
            )
            raise InputError(f"{type(module).__name__}.body {what}.") from error
        raise
    if (
        not isinstance(h, jax.ShapeDtypeStruct)
        or h.shape[:1] != (2,)
        or len(h.shape) < 2
    ):
        raise InputError(
            f"{type(module).__name__}.body returns {h} of a batch of 2: it must be one "
            "array, [B, K]."
        )
    return h


def _takes_integers(
    shape: Callable[[jax.ShapeDtypeStruct], Any], example: jax.ShapeDtypeStruct
) -> bool:
    with contextlib.suppress(Exception):
        shape(jax.ShapeDtypeStruct(example.shape, jnp.int32))
        return True
    return False


def _has(module: nnx.Module, layer: type[nnx.Module]) -> bool:
    """Is there such a layer in a module, other than dropout with rate 0?"""
    return any(
        isinstance(part, layer) and getattr(part, "rate", 1)
        for _, part in nnx.iter_modules(module)
    )


_NEEDS: dict[str, tuple[type[nnx.Module], tuple[str, ...]]] = {
    "batch norm": (nnx.BatchNorm, ("mask", "train")),
    "dropout": (nnx.Dropout, ("rngs",)),
}


def called(module: nnx.Module) -> None:
    """InputError for a module with batch norm or dropout whose `__call__` does not take
    what these need."""
    taken = set(inspect.signature(module.__call__).parameters)
    for what, (layer, needed) in _NEEDS.items():
        if _has(module, layer) and not set(needed) <= taken:
            names = " and ".join(f"`{name}`" for name in needed)
            raise InputError(
                f"{type(module).__name__} has {what}: let its __call__ take {names}, "
                "for it."
            )


def network(module: nnx.Module) -> None:
    """InputError unless all variables are parameters or running statistics."""
    _constants(module)
    _variables(
        module,
        lambda _: (nnx.Param, nnx.BatchStat),
        "a network may hold parameters and running statistics",
    )


def parts(module: nnx.Module) -> None:
    """InputError unless all variables are parameters of body or head, or running
    statistics of the body."""
    kinds: dict[str, tuple[type[nnx.Variable[Any]], ...]] = {
        "body": (nnx.Param, nnx.BatchStat),
        "head": (nnx.Param,),
    }
    if isinstance(module, linen.Module):
        raise InputError(
            f"{type(module).__name__} is a module of Flax Linen: make one of NNX, with "
            "body and head."
        )
    for part in ("body", "head"):
        if not isinstance(getattr(module, part, None), nnx.Module):
            raise InputError(
                f"{type(module).__name__} has no `{part}`: a model needs a body, x -> "
                "h, and a head, h -> logits."
            )
    body, head = (getattr(module, part) for part in kinds)
    graphs = [nnx.iter_graph(part) for part in (body, head)]
    held = [
        {id(x) for _, x in graph if isinstance(x, nnx.Variable)} for graph in graphs
    ]
    if set.intersection(*held):
        raise InputError(
            f"{type(module).__name__} has a variable in both body and head: give each "
            "its own, as they are trained and "
            "sent apart."
        )
    if _has(head, nnx.Dropout):
        raise InputError(
            f"{type(module).__name__}.head has dropout, and a head gets h alone: move "
            "it into the body."
        )
    _constants(module)
    _variables(
        module,
        lambda part: kinds.get(part, ()),
        "a model may hold parameters in body and head and running statistics in body",
    )
