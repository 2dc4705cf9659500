"""Models of Flax NNX modules: pure functions over nested dicts of variables."""

import contextlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from fedjax_pfl import trees, user_code
from fedjax_pfl.errors import InputError, check, check_shape, choose
from fedjax_pfl.models import layers
from fedjax_pfl.models.nets import Net
from fedjax_pfl.models.registry import MODELS, Factory
from fedjax_pfl.models.text import Tokens
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
    """Makes pure functions of any Flax NNX module, such as an encoder or a
    hypernetwork.

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
      InputError: the module keeps state other than parameters, running statistics,
        random streams and caches, which each call makes anew, or has a batch norm that
        is not `layers.BatchNorm` or does not get `mask`.
    """
    _check_options(bn_stats, conv, compute_dtype)

    def made(rngs: nnx.Rngs) -> nnx.Module:
        module = build(rngs)
        _check_variables(module)
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
    input_dtype: Any = jnp.float32,
    vocabulary: int | None = None,
    positions: int | None = None,
    packed: bool = False,
    change: Callable[[nnx.Module, nnx.Rngs], None] | None = None,
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
        time, too; "aggregate" and "local" differ only in how the methods treat
        variables["stats"].
      conv: the form of the convolutions, see `layers.convolution`.
      compute_dtype: in which the body computes, "float32" (whatever the variables and x
        are) or "bfloat16". Variables, gradients, running statistics, features and the
        head are float32 in any case.
      features: K, where it is not the network's own: its features are pooled to as
        many, and the head is a new one (`widened`).
      input_dtype: of a prepared example, such as jnp.int32 for tokens (on the command
        line it is that of the data); networks of MODELS without a vocabulary take
        integers as float32.
      vocabulary: number of tokens, for a factory with a keyword argument of this name
        (`Dataset.vocabulary`).
      positions: labels per example L, likewise (`Dataset.positions`). Features are then
        [B L, K], or [B, L, K] of the body, and outputs [B L, C].
      packed: rows have several texts (`models.text.unpacked`), for a factory with a
        keyword argument of this name (`Dataset.packed`).
      change: (body, rngs), changes the body in place after it is made, such as by
        adding adapters to its layers.

    Returns:
      A Model; its variables are {"body": parameters, "head": parameters, "stats": the
      body's running statistics}, nested dicts with string keys.

    Raises:
      InputError: for an unknown name, a module without body or head, one that keeps
        other state or takes inputs of another type, a batch norm that is
        not `layers.BatchNorm` or does not get `mask`, or a network without `packed`
        for packed texts.
    """
    input_shape = check_shape("input_shape", input_shape)
    check("num_classes", num_classes, 1, math.inf, whole=True)
    _check_options(bn_stats, conv, compute_dtype)
    built_in = isinstance(factory, str) and not user_code.named(factory)
    more = {"vocabulary": vocabulary, "positions": positions, "packed": packed}
    make = _maker(factory, input_shape, num_classes, more)
    built_in = built_in and "vocabulary" not in user_code.parameters(
        MODELS[str(factory)]
    )
    if built_in and jnp.issubdtype(input_dtype, jnp.integer):
        input_dtype = jnp.float32
    example = jax.ShapeDtypeStruct((2, *input_shape), input_dtype)

    def build(rngs: nnx.Rngs) -> Any:  # a module with body and head
        module = make(rngs)
        _check_parts(module)
        if features is not None:
            module = widened(module, num_classes, features, rngs)
        module = _normalised(module, bn_stats)
        if change is not None:
            change(module.body, rngs)  # type: ignore[attr-defined]
        return module

    def init(key: Array) -> PyTree:
        return _parts(build(nnx.Rngs(key)), _nest)

    template = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    run, head = _apply(template.body, conv, compute_dtype), _head(template.head, conv)

    def extract(
        variables: PyTree,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        if built_in and jnp.issubdtype(x.dtype, jnp.integer):
            x = x.astype(jnp.float32)
        h, stats = run(variables["body"], variables["stats"], x, mask, train, key)
        if positions is not None and getattr(h, "ndim", 0) == 3:
            h = h.reshape(-1, h.shape[-1])
        return h, stats

    h = jax.eval_shape(extract, _parts(template, _nest), example)[0]
    if getattr(h, "shape", ())[:1] != (2 * (positions or 1),) or len(h.shape) < 2:
        raise InputError(
            f"{type(template).__name__}.body must return one array [B, K], got {h} for "
            "a batch of 2."
        )
    body = template.body
    of_tokens = isinstance(body, Tokens)
    continues = of_tokens and body.cache(1, 1) is not None
    return Model(
        _drawn_once(init),
        extract,
        head,
        composed(extract, head),
        _parts(template, _marked),
        h.shape[-1],
        cache=body.cache if continues else None,
        unembeds=of_tokens and body.pool == "logits",
    )


def composed(
    features: Callable[..., Any], head: Callable[[PyTree, Array], Array]
) -> Callable[..., tuple[Array, PyTree]]:
    """Returns the function `apply` of a Model from its `features` and `head`."""

    def apply(
        variables: PyTree,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        h, stats = features(variables, x, mask, train, key)
        return head(variables["head"], h), stats

    return apply


def _check_options(bn_stats: str, conv: str, compute_dtype: str) -> None:
    choose("bn_stats", bn_stats, BN_STATS)
    choose("conv", conv, layers.CONVOLUTIONS)
    choose("compute_dtype", compute_dtype, DTYPES)


def _maker(
    factory: Factory | str,
    input_shape: tuple[int, ...],
    num_classes: int,
    more: dict[str, Any],
) -> Callable[[nnx.Rngs], Any]:
    """The factory, or the one of a name, as a function of `rngs`; it gets those of
    `more` that it names."""
    name: str = getattr(factory, "__name__", str(factory))
    own = isinstance(factory, str) and user_code.named(factory)
    if own:
        factory = user_code.load("model", name)
    elif not callable(factory):
        factory = MODELS[choose("model", factory, MODELS)]
    function: Callable[..., Any] = factory
    if more["packed"] and "packed" not in user_code.parameters(function):
        raise InputError(
            "Packed texts need a causal transformer, such as --model=transformer, "
            "GPT-2 or Llama."
        )

    def make(rngs: nnx.Rngs) -> Any:
        given = {"input_shape": input_shape, "num_classes": num_classes, "rngs": rngs}
        known = user_code.parameters(function)
        given |= {key: value for key, value in more.items() if key in known}
        build = user_code.bound(function, "model", name, **given)
        with user_code.blamed("model", name) if own else contextlib.nullcontext():
            return build()

    return make


def _drawn_once(init: Callable[[Array], PyTree]) -> Callable[[Array], PyTree]:
    """Traces `init` once, as NNX takes milliseconds to draw each parameter."""
    traced = trees.traced_once(init)
    return lambda key: traced(key) if isinstance(key, jax.core.Tracer) else init(key)


def _apply(
    template: nnx.Module, conv: str, dtype: str
) -> Callable[..., tuple[Any, PyTree]]:
    """A module as a function of (parameters, statistics, x, mask, train, key)."""
    graph, param_state, stat_state, other = nnx.split(  # type: ignore[misc]  # its results are of unknown number
        template, nnx.Param, nnx.BatchStat, ...
    )
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
        if dtype != "float32":  # a float64 model keeps its type
            lower = lambda a: (
                a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
            )
            params, x = jax.tree.map(lower, (params, x))
        filled = (_fill(param_state, params), _fill(stat_state, stats))
        module = nnx.merge(graph, *filled, _renewed(other, key))
        if train:
            module.train()
        else:
            module.eval()
        with layers.convolution(conv), layers.padded(mask):
            out = module(x, **{name: kwargs[name] for name in accepted})
        if dtype != "float32":
            out = jax.tree.map(lambda a: a.astype(jnp.float32), out)
        return out, _nest(module, nnx.BatchStat)

    return run


def _head(template: nnx.Module, conv: str) -> Callable[[PyTree, Array], Array]:
    graph, state, other = nnx.split(template, nnx.Param, ...)  # type: ignore[misc]

    def head(variables: PyTree, h: Array) -> Array:
        module = nnx.merge(graph, _fill(state, variables), _renewed(other, None))
        module.eval()
        with layers.convolution(conv):
            return module(h)

    return head


def num_parameters(variables: PyTree) -> int:
    """Returns the number of parameters, without running statistics."""
    return trees.size(
        {part: tree for part, tree in variables.items() if part != "stats"}
    )


def _parts(
    module: Any, of: Callable[[nnx.Module, type[nnx.Variable[Any]]], PyTree]
) -> PyTree:
    """The parts of a model's variables by `_nest` or `_marked`."""
    return {
        "body": of(module.body, nnx.Param),
        "head": of(module.head, nnx.Param),
        "stats": of(module.body, nnx.BatchStat),
    }


def _marked(module: nnx.Module, kind: type[nnx.Variable[Any]]) -> PyTree:
    """The structure of `_nest`, True for variables of batch norms, else False."""
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


def _renewed(template: nnx.State[Any, Any], key: Array | None) -> nnx.State[Any, Any]:
    """The state of a call that is not kept: random streams of `key`, empty caches."""

    def value(i: int, variable: nnx.Variable[Any]) -> Array:
        if isinstance(variable, nnx.RngKey):
            return jax.random.fold_in(jax.random.key(0) if key is None else key, i)
        like = variable.get_value()
        return jnp.zeros(like.shape, like.dtype)

    flat = list(nnx.to_flat_state(template))
    return nnx.from_flat_state(
        [(path, x.replace(value(i, x))) for i, (path, x) in enumerate(flat)]
    )


def _named(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _normalised(module: nnx.Module, bn_stats: str) -> nnx.Module:
    """The module, its batch norms without running statistics for "batch"."""
    for path, part in nnx.iter_modules(module):
        if not isinstance(part, nnx.BatchNorm):
            continue
        if not isinstance(part, layers.BatchNorm):
            raise InputError(
                f"{type(module).__name__}.{'.'.join(map(str, path))} must be a "
                "fedjax_pfl.models.layers.BatchNorm, called with `mask` and `train`: "
                "Flax's own counts padding."
            )
        if bn_stats == "batch":
            part.mean = part.var = None  # type: ignore[assignment]  # layers.BatchNorm takes None
    return module


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
    """A body whose features are pooled to K."""

    def __init__(self, body: Any, features: int):
        self.body, self.features = body, features

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        given = {"mask": mask, "train": train, "rngs": rngs}
        accepted = inspect.signature(self.body.__call__).parameters
        h = self.body(x, **{name: given[name] for name in given if name in accepted})
        return adaptive_average_pool(h, self.features)


def widened(module: Any, num_classes: int, features: int, rngs: nnx.Rngs) -> Net:
    """Gives a network another number of features by adaptive average pooling, as
    HtFLlib does, and a new linear head.

    Args:
      module: has a `body`, [B, *input] -> [B, L]; its head is dropped.
      num_classes: C.
      features: K.
      rngs: for the initialisation of the head, PyTorch's default.

    Returns:
      A Net whose head is one linear layer, kernel [K, C] and bias [C].

    Raises:
      InputError: for less than one feature.
    """
    check("features", features, 1, 10**6, whole=True)
    _check_call(module.body)
    body = Widened(module.body, features)
    return Net(body, layers.linear(features, num_classes, rngs))


def _check_variables(module: nnx.Module, *parts: str) -> None:
    """Raises InputError for state other than parameters and running statistics, or
    outside the `parts` of a module."""
    for path, part in nnx.iter_modules(module):
        for name, value in vars(part).items():
            if isinstance(value, jax.Array | np.ndarray):
                full = ".".join(map(str, (type(module).__name__, *path, name)))
                raise InputError(
                    f"{full} must not be an array. Make constants in `__call__`."
                )
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if isinstance(variable, nnx.RngState | nnx.Cache):  # renewed at each call
            continue
        known = isinstance(variable, nnx.Param | nnx.BatchStat)
        if not known or (parts and path[0] not in parts):
            where = f" of {' or '.join(parts)}" if parts else ""
            raise InputError(
                f"{type(module).__name__}.{'.'.join(map(str, path))} must be a "
                f"parameter or a running statistic{where}, got "
                f"{type(variable).__name__}. Make it an nnx.Param or nnx.BatchStat."
            )


def _check_parts(module: Any) -> None:
    """Raises InputError unless a module has a body and a head, and no other
    variables."""
    for part in ("body", "head"):
        if not isinstance(getattr(module, part, None), nnx.Module):
            raise InputError(
                f"{type(module).__name__} must be a Flax NNX module with a body, "
                f"x -> h, and a head, h -> logits: it has no `{part}`."
            )
    _check_variables(module, "body", "head")


_NEEDS: dict[str, tuple[type[nnx.Module], tuple[str, ...]]] = {
    "batch norm": (nnx.BatchNorm, ("mask", "train")),
    "dropout": (nnx.Dropout, ("rngs",)),
}


def _check_call(module: nnx.Module) -> None:
    """Raises InputError for batch norm or dropout in a module whose `__call__` does not
    take their arguments."""
    taken = set(inspect.signature(module.__call__).parameters)
    held = [
        part
        for _, part in nnx.iter_modules(module)
        if getattr(part, "rate", 1) and getattr(part, "rngs", None) is None
    ]
    for kind, (layer, needed) in _NEEDS.items():
        if any(isinstance(part, layer) for part in held) and not taken.issuperset(
            needed
        ):
            names = " and ".join(f"`{name}`" for name in needed)
            raise InputError(
                f"{type(module).__name__}.__call__ must take {names}: it has {kind}."
            )


def flops(
    factory: Factory | str,
    input_shape: tuple[int, ...],
    num_classes: int = 10,
    batch: int = 1,
) -> int:
    """Counts floating-point operations of one training step on `batch` examples.

    Counts 2 for each multiply-add of a matrix product or convolution, forward and both
    gradients, without the gradient for the input; element-wise work is left out.
    """
    net = model(factory, input_shape, num_classes, conv="matmul")
    return step_flops(net, jax.ShapeDtypeStruct((batch, *input_shape), jnp.float32))


def step_flops(net: Model, x: jax.ShapeDtypeStruct) -> int:
    """Counts floating-point operations of one training step on a batch x [B, ...] with
    the network's form of convolutions."""
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
    """Counts floating-point operations of a matrix product or convolution, 2 per
    multiply-add; 0 for other equations."""
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
