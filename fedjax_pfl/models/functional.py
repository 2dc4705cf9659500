"""Turns a module with a body and a head into pure functions over plain nested dicts."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from fedjax_pfl import trees, user_code
from fedjax_pfl.errors import InputError, check, check_shape, choose
from fedjax_pfl.models import checks, layers
from fedjax_pfl.models.features import WIDTH_BY, widened
from fedjax_pfl.models.registry import Factory, find
from fedjax_pfl.types import Array, Model, Network, PyTree

BN_STATS = ("aggregate", "local", "batch")
DTYPES = ("float32", "bfloat16")
Path = tuple[Any, ...]  # of a variable in a module: names, and numbers in lists


def network(
    build: Callable[[nnx.Rngs], nnx.Module],
    bn_stats: str = "aggregate",
    conv: str = "auto",
    compute_dtype: str = "float32",
) -> Network:
    """Makes pure functions of any Flax NNX module, such as an encoder, a policy network
    or a hypernetwork.

    Args:
      build: rngs -> a module. It gets those of the keyword arguments `mask` [B] bool,
        `train` bool and `rngs` (nnx.Rngs of the key, or None) that its `__call__`
        names; its outputs may be any tree.
      bn_stats: one of aggregate, local, batch; "batch" keeps no running statistics.
      conv: the form of the convolutions, see `layers.convolution`.
      compute_dtype: one of float32, bfloat16; variables, gradients, running statistics
        and outputs stay float32.

    Returns:
      A Network; its variables are nested dicts with string keys.

    Raises:
      InputError: the module keeps state other than parameters and running statistics,
        or has a batch norm that is not `layers.BatchNorm` or does not get `mask`.
    """
    choose("bn_stats", bn_stats, BN_STATS)
    choose("conv", conv, layers.CONVOLUTIONS)
    choose("compute_dtype", compute_dtype, DTYPES)

    def made(rngs: nnx.Rngs) -> nnx.Module:
        module = build(rngs)
        checks.network(module)
        return _normalised(module, bn_stats)

    def init(key: Array) -> PyTree:
        module = made(nnx.Rngs(key))
        return {
            "params": _nest(module, nnx.Param),
            "stats": _nest(module, nnx.BatchStat),
        }

    template = nnx.eval_shape(lambda: made(nnx.Rngs(0)))
    run = _apply(template, conv, compute_dtype)

    def apply(
        variables: PyTree,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Any, PyTree]:
        return run(variables["params"], variables["stats"], x, mask, train, key)

    norms = {
        "params": _marked(template, nnx.Param),
        "stats": _marked(template, nnx.BatchStat),
    }
    return Network(_drawn_once(init), apply, norms)


def model(
    factory: Factory | str,
    input_shape: tuple[int, ...],
    num_classes: int,
    bn_stats: str = "aggregate",
    conv: str = "auto",
    compute_dtype: str = "float32",
    features: int | None = None,
    width_by: str = "pool",
    input_dtype: Any = jnp.float32,
) -> Model:
    """Makes pure functions of a Flax NNX module.

    Args:
      factory: (input_shape, num_classes, rngs) -> a module with `body`, [B, *input] ->
        [B, K], and `head`, [B, K] -> [B, C]; or a name in MODELS, or of your own,
        FILE.py:NAME. The body gets those of the keyword arguments `mask` [B] bool,
        `train` bool and `rngs` (nnx.Rngs of the key, or None) that its `__call__`
        names.
      input_shape: of one example, without the batch axis.
      num_classes: C.
      bn_stats: "batch" keeps no running statistics and normalises by the batch at test
        time, too; "aggregate" and "local" differ only in what the methods do with
        variables["stats"].
      conv: the form of the convolutions, see `layers.convolution`.
      compute_dtype: in which the body computes, "float32" (whatever the variables and x
        are) or "bfloat16". Variables, gradients, running statistics, features and the
        head are float32 in any case.
      features: K, where it is not the network's own: its features are mapped to as
        many, and the head is a new one.
      width_by: how, "pool" (adaptive average pooling) or "linear" (a trainable layer),
        see `features.widened`.
      input_dtype: of a prepared example, such as jnp.int32 for tokens (on the command
        line it is that of the data); networks of MODELS take integers as float32.

    Returns:
      A Model; its variables are {"body": parameters, "head": parameters, "stats": the
      body's running statistics}, nested dicts with string keys.

    Raises:
      InputError: for an unknown name, a module without body or head, one that keeps
        state in other places or takes inputs of another type, or a batch norm that is
        not `layers.BatchNorm` or does not get `mask`.
    """
    checks.no_module(factory)
    named = not callable(factory) and not user_code.named(factory)  # in MODELS
    if not callable(factory):
        factory = find(factory)
    make = checks.arguments(factory)
    input_shape = check_shape("input_shape", input_shape)
    check("num_classes", num_classes, 1, math.inf, whole=True)
    choose("bn_stats", bn_stats, BN_STATS)
    choose("conv", conv, layers.CONVOLUTIONS)
    choose("compute_dtype", compute_dtype, DTYPES)
    choose("width_by", width_by, WIDTH_BY)
    # the networks here take whole numbers as float32
    whole = named and jnp.issubdtype(input_dtype, jnp.integer)
    example = jax.ShapeDtypeStruct(
        (2, *input_shape), jnp.float32 if whole else input_dtype
    )

    def build(rngs: nnx.Rngs) -> Any:  # a module with body and head
        module = make(input_shape, num_classes, rngs)()
        checks.parts(module)
        if features is not None:
            module = widened(module, example, num_classes, features, width_by, rngs)
        return _normalised(module, bn_stats)

    def init(key: Array) -> PyTree:
        return _parts(build(nnx.Rngs(key)), _nest)

    def apply(
        variables: PyTree,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        h, stats = extract(variables, x, mask, train, key)
        return head(variables["head"], h), stats

    template = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    run, head = _apply(template.body, conv, compute_dtype), _head(template.head, conv)

    def extract(
        variables: PyTree,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        if named and jnp.issubdtype(x.dtype, jnp.integer):
            x = x.astype(jnp.float32)
        return run(variables["body"], variables["stats"], x, mask, train, key)

    variables = _parts(template, _nest)
    h = checks.output(
        template, lambda x: jax.eval_shape(extract, variables, x)[0], example
    )
    return Model(
        _drawn_once(init), extract, head, apply, _parts(template, _marked), h.shape[-1]
    )


def _drawn_once(init: Callable[[Array], PyTree]) -> Callable[[Array], PyTree]:
    """Traced once where it is traced at all: NNX takes milliseconds to draw each
    parameter, and every function of a program begins with a state."""
    traced = trees.traced_once(init)
    return lambda key: traced(key) if isinstance(key, jax.core.Tracer) else init(key)


def _apply(
    template: nnx.Module, conv: str, dtype: str
) -> Callable[..., tuple[Any, PyTree]]:
    """A module as a function of (parameters, running statistics, x, mask, train,
    key)."""
    graph, param_state, stat_state = nnx.split(template, nnx.Param, nnx.BatchStat)  # type: ignore[misc]  # its results are of unknown number
    accepted = set(inspect.signature(template.__call__).parameters) & {
        "mask",
        "train",
        "rngs",
    }
    checks.called(template)

    def run(
        params: PyTree,
        stats: PyTree,
        x: PyTree,
        mask: Array | None,
        train: bool,
        key: Array | None,
    ) -> tuple[Any, PyTree]:
        rngs = None if key is None or "rngs" not in accepted else nnx.Rngs(key)
        kwargs = {"mask": mask, "train": train, "rngs": rngs}
        if dtype != "float32":  # else a float64 model stays one
            lower = lambda a: (
                a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
            )
            params, x = jax.tree.map(lower, (params, x))
        module = nnx.merge(graph, _fill(param_state, params), _fill(stat_state, stats))
        with layers.convolution(conv), layers.padded(mask):
            out = module(x, **{name: kwargs[name] for name in accepted})
        if dtype != "float32":
            out = jax.tree.map(lambda a: a.astype(jnp.float32), out)
        return out, _nest(module, nnx.BatchStat)

    return run


def _head(template: nnx.Module, conv: str) -> Callable[[PyTree, Array], Array]:
    graph, state = nnx.split(template, nnx.Param)

    def head(variables: PyTree, h: Array) -> Array:
        with layers.convolution(conv):
            return nnx.merge(graph, _fill(state, variables))(h)

    return head


def num_parameters(variables: PyTree) -> int:
    """Number of scalars in the parameters; running statistics do not count."""
    return trees.size(
        {part: tree for part, tree in variables.items() if part != "stats"}
    )


def _parts(
    module: Any, of: Callable[[nnx.Module, type[nnx.Variable[Any]]], PyTree]
) -> PyTree:
    """What `of`, `_nest` or `_marked`, says of a model's variables."""
    return {
        "body": of(module.body, nnx.Param),
        "head": of(module.head, nnx.Param),
        "stats": of(module.body, nnx.BatchStat),
    }


def _marked(module: nnx.Module, kind: type[nnx.Variable[Any]]) -> PyTree:
    """As `_nest`, True in place of the values whose own module is a batch norm, else
    False."""
    inside = tuple(
        path
        for path, part in nnx.iter_modules(module)
        if isinstance(part, nnx.BatchNorm)
    )
    return _nest(module, kind, lambda path, _: path[:-1] in inside)


def _nest(
    module: nnx.Module,
    kind: type[nnx.Variable[Any]],
    value: Callable[[Path, nnx.Variable[Any]], Any] = lambda _, variable: (
        variable.get_value()
    ),
) -> PyTree:
    """The values of the variables of one kind, as a nested dict with string keys."""
    flat = nnx.to_flat_state(nnx.state(module, kind))
    return traverse_util.unflatten_dict(
        {_named(path): value(path, variable) for path, variable in flat}
    )


def _fill(template: nnx.State[Any, Any], tree: PyTree) -> nnx.State[Any, Any]:
    """The state with the values of a nested dict with string keys: the inverse of
    `_nest`."""
    values = traverse_util.flatten_dict(tree)
    flat = nnx.to_flat_state(template)
    return nnx.from_flat_state(
        [(path, variable.replace(values[_named(path)])) for path, variable in flat]
    )


def _named(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _normalised(module: nnx.Module, bn_stats: str) -> nnx.Module:
    """The module, its batch norms without running statistics for "batch"; Flax's own
    would count padding."""
    for path, part in nnx.iter_modules(module):
        if not isinstance(part, nnx.BatchNorm):
            continue
        if not isinstance(part, layers.BatchNorm):
            raise InputError(
                f"{type(module).__name__}.{'.'.join(map(str, path))} is Flax's own "
                "batch norm, whose statistics count "
                "the padding of a batch: use fedjax_pfl.models.layers.BatchNorm, and "
                "hand it `mask` and `train`."
            )
        if bn_stats == "batch":
            part.mean = part.var = None  # type: ignore[assignment]  # layers.BatchNorm takes None
    return module
