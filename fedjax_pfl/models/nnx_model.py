"""Turns a module with a body and a head into pure functions over plain nested dicts."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx, traverse_util
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from fedjax_pfl import trees, user_code
from fedjax_pfl.errors import InputError, check, check_shape, choose
from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Net
from fedjax_pfl.models.registry import MODELS, Factory
from fedjax_pfl.types import Array, Model, Network, PyTree

BN_STATS = ("aggregate", "local", "batch")
DTYPES = ("float32", "bfloat16")
WIDTH_BY = ("pool", "linear")
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
        _check_network(module)
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
    _no_module(factory)
    named = not callable(factory) and not user_code.named(factory)  # in MODELS
    if not callable(factory):
        factory = find(factory)
    make = _arguments(factory)
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
        _check_parts(module)
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
    h = _output(template, lambda x: jax.eval_shape(extract, variables, x)[0], example)
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
    _check_call(template)

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


def find(name: str) -> Factory:
    """The factory of a network.

    Args:
      name: in MODELS, or FILE.py:NAME, or package.module:NAME.

    Raises:
      InputError: there is none.
    """
    if not user_code.named(name):
        return MODELS[choose("model", name, MODELS)]
    _no_module(user_code.load("model", name))

    def build(input_shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs) -> Any:
        return user_code.call(
            "model", name, input_shape=input_shape, num_classes=num_classes, rngs=rngs
        )

    return build


def adaptive_average_pool(h: Array, features: int) -> Array:
    """Averages neighbouring features, as PyTorch's AdaptiveAvgPool1d does: [B, L] ->
    [B, K].

    Output i is the mean of the inputs floor(i L / K) to ceil((i + 1) L / K) - 1; K may
    be larger than L.
    """
    size = h.shape[-1]
    if size % features == 0:
        return h.reshape(len(h), features, -1).mean(-1)
    first = np.arange(features) * size // features
    last = -(-np.arange(1, features + 1) * size // features)  # exclusive
    # [L, K]
    inside = (first <= np.arange(size)[:, None]) & (np.arange(size)[:, None] < last)
    return jnp.dot(
        h,
        jnp.asarray(inside / (last - first), h.dtype),
        precision=lax.Precision.HIGHEST,
    )


class Widened(nnx.Module):
    """A body and a map of its features to K: a linear layer or, where it is None,
    pooling."""

    def __init__(self, body: Any, features: int, project: nnx.Linear | None):
        self.body, self.features, self.project = body, features, project

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        h = _call_body(self.body, x, mask=mask, train=train, rngs=rngs)
        return (
            adaptive_average_pool(h, self.features)
            if self.project is None
            else self.project(h)
        )


def _call_body(body: Any, x: Array, **given: Any) -> Array:
    """A body's features of x, with those of the keyword arguments that it names."""
    accepted = inspect.signature(body.__call__).parameters
    return body(x, **{name: value for name, value in given.items() if name in accepted})


def widened(
    module: Any,
    example: jax.ShapeDtypeStruct,
    num_classes: int,
    features: int,
    by: str,
    rngs: nnx.Rngs,
) -> Net:
    """Gives a network another number of features and a new linear head.

    Args:
      module: has a `body`, [B, *input] -> [B, L]; its head is dropped.
      example: shape and type of a prepared batch of two.
      num_classes: C.
      features: K.
      by: one of
        pool: adaptive average pooling, without parameters, as HtFLlib does;
        linear: a trainable linear layer L -> K without activation.
      rngs: for the initialisation of the new layers, PyTorch's default.

    Returns:
      A Net whose head is one linear layer, kernel [K, C] and bias [C].

    Raises:
      InputError: for less than one feature, or a body that does not return one array.
    """
    check(
        "features",
        features,
        1,
        10**6,
        whole=True,
        why="the head has a row of weights for each",
    )
    _check_call(module.body)
    body = functools.partial(_call_body, module.body, mask=None, train=False, rngs=None)
    h = _output(module, functools.partial(jax.eval_shape, body), example)
    project = layers.linear(h.shape[-1], features, rngs) if by == "linear" else None
    return Net(
        Widened(module.body, features, project),
        layers.linear(features, num_classes, rngs),
    )


def _no_module(factory: Any) -> None:
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


def _arguments(factory: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
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


def _output(
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


def _check_call(module: nnx.Module) -> None:
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


def _check_network(module: nnx.Module) -> None:
    """InputError unless all variables are parameters or running statistics."""
    _constants(module)
    _variables(
        module,
        lambda _: (nnx.Param, nnx.BatchStat),
        "a network may hold parameters and running statistics",
    )


def _check_parts(module: nnx.Module) -> None:
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


def layer_order(
    model: Model, x: jax.ShapeDtypeStruct
) -> list[dict[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """Lists a model's layers from the input to the logits, without those that no
    prediction uses.

    Args:
      x: an input of the model, [B, ...].

    Returns:
      For each layer the shapes of its parameters by path: first the layer's own path,
      then those of the batch norms that follow it.
    """
    variables = jax.eval_shape(model.init, jax.random.key(0))
    traced = jax.make_jaxpr(lambda variables, x: model.apply(variables, x)[0])(
        variables, x
    ).jaxpr
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    order, _ = _uses(traced, range(len(traced.invars)))
    used = [
        leaves[i]
        for i in dict.fromkeys([*order, *range(len(leaves))])
        if i < len(leaves)
    ]
    needed = {leaves[i][0][:-1] for i in order if i < len(leaves)}
    bn_mask = dict(jax.tree_util.tree_leaves_with_path(model.bn_mask))
    found: list[dict[tuple[str, ...], tuple[tuple[int, ...], ...]]] = []
    for path, leaf in used:
        part, *inside, _name = (key.key for key in path)
        if part == "stats" or path[:-1] not in needed:
            continue
        layer = (part, *inside)
        if not any(layer in known for known in found):
            found += [] if bn_mask[path] and found else [{}]
            found[-1][layer] = ()
        here = next(known for known in found if layer in known)
        here[layer] += (leaf.shape,)
    return found


def _uses(
    jaxpr: Any, inputs: Sequence[int | None]
) -> tuple[list[int], list[int | None]]:
    """Which of a jaxpr's inputs, by number, its equations compute with, in their order,
    and which are its outputs: a change of type is no use, and what is within jit or
    remat is looked at by itself."""
    known, found = dict(zip(jaxpr.invars, inputs, strict=True)), list[int]()
    for e in jaxpr.eqns:
        given = [None if isinstance(v, Literal) else known.get(v) for v in e.invars]
        if e.primitive.name == "convert_element_type":
            known[e.outvars[0]] = given[0]
            continue
        inner = list(jaxprs_in_params(e.params))
        if len(inner) == 1 and len(inner[0].invars) == len(given):
            used, through = _uses(inner[0], given)
            found += used
            known |= dict(zip(e.outvars, through, strict=True))
        else:
            found += [i for i in given if i is not None]
    return found, [
        None if isinstance(v, Literal) else known.get(v) for v in jaxpr.outvars
    ]


def flops(
    factory: Factory | str,
    input_shape: tuple[int, ...],
    num_classes: int = 10,
    batch: int = 1,
) -> int:
    """Floating-point operations of one training step on `batch` examples.

    Counts 2 for each multiply-add of a matrix product or convolution, forward and both
    gradients, without the gradient for the input; element-wise work is left out.
    """
    net = model(factory, input_shape, num_classes, conv="matmul")
    return step_flops(net, jax.ShapeDtypeStruct((batch, *input_shape), jnp.float32))


def step_flops(net: Model, x: jax.ShapeDtypeStruct) -> int:
    """Floating-point operations of one training step on a batch x [B, ...], as the
    network's own form of convolutions has them."""
    variables = jax.eval_shape(net.init, jax.random.key(0))

    def loss(variables: PyTree, x: Array) -> Array:
        return net.apply(variables, x, train=True, key=jax.random.key(0))[0].sum()

    return _product_flops(
        jax.make_jaxpr(jax.grad(loss, allow_int=True))(variables, x).jaxpr
    )


def _product_flops(jaxpr: Jaxpr) -> int:
    def inner(eqn: JaxprEqn) -> int:
        return eqn.params.get("length", 1) * sum(
            map(_product_flops, jaxprs_in_params(eqn.params))
        )

    return sum(product_flops(eqn) + inner(eqn) for eqn in jaxpr.eqns)


def product_flops(eqn: Any) -> int:
    """Floating-point operations of one equation of a trace if it is a matrix product or
    a convolution, 2 a multiply-add; else 0."""
    each = 0  # multiply-adds of an element of the result
    if eqn.primitive.name == "dot_general":
        (axes, _), _ = eqn.params["dimension_numbers"]
        each = math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)
    elif eqn.primitive.name == "conv_general_dilated":
        kernel, out = (
            eqn.invars[1].aval.shape,
            eqn.params["dimension_numbers"].rhs_spec[0],
        )
        each = math.prod(kernel) // kernel[out]
    return 2 * each * math.prod(eqn.outvars[0].aval.shape) if each else 0
