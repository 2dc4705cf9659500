"""Functions whose form under `jax.vmap` is written by hand."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fedjax_pfl.types import Array

Function = Callable[..., tuple[Array, ...]]


class Pair(NamedTuple):
    """A function of arrays, and the same function of arrays with a leading axis."""

    one: Function
    many: Function


def vmapped(one: Function, many: Function) -> Function:
    """Returns `one`, which `jax.vmap` replaces by `many`.

    The result can be differentiated forwards and backwards any number of times; its
    derivatives are replaced by those of `many`. Where an argument is shared by all
    elements, `one` is vmapped as usual.

    Args:
      one: floating-point arrays -> a tuple of arrays, made once per configuration:
        traces are cached by its identity.
      many: arrays [S, ...] -> a tuple of arrays [S, ...].
    """
    return functools.partial(_call.bind, pair=Pair(one, many))


@functools.cache
def _jvp(pair: Pair, count: int) -> Pair:
    """Maps primals and tangents to tangents."""

    def of(function: Function) -> Function:
        return lambda *args: jax.jvp(function, args[:count], args[count:])[1]

    return Pair(*map(of, pair))


@functools.cache
def _vjp(pair: Pair, count: int) -> Pair:
    """Maps primals and cotangents of the results to cotangents of the arguments."""

    def of(function: Function) -> Function:
        return lambda *args: jax.vjp(function, *args[:count])[1](args[count:])

    return Pair(*map(of, pair))


_call, _linear = Primitive("vmapped"), Primitive("vmapped_jvp")


def _evaluated(*args: Array, pair: Pair) -> tuple[Array, ...]:
    return pair.one(*args)


def _tangents(*args: Array, pair: Pair) -> tuple[Array, ...]:
    return _evaluated(*args, pair=_jvp(pair, len(args) // 2))


def _shapes(function: Callable[..., Any], *args: Any, pair: Pair) -> list[Any]:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    found = jax.eval_shape(functools.partial(function, pair=pair), *shapes)
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in found]


def _batch_call(
    args: Sequence[Array], axes: Sequence[Any], *, pair: Pair
) -> tuple[Sequence[Array], Sequence[int]]:
    if None in axes:
        found = jax.vmap(pair.one, in_axes=tuple(axes))(*args)
    else:
        moved = (jax.numpy.moveaxis(x, i, 0) for x, i in zip(args, axes, strict=True))
        found = pair.many(*moved)
    return found, [0] * len(found)


def _batch_linear(
    args: Sequence[Array], axes: Sequence[Any], *, pair: Pair
) -> tuple[Sequence[Array], Sequence[int]]:
    return _batch_call(args, axes, pair=_jvp(pair, len(args) // 2))


def _jvp_call(primals: Any, tangents: Any, *, pair: Pair) -> tuple[Any, Any]:
    moved = map(ad.instantiate_zeros, tangents)
    return _call.bind(*primals, pair=pair), _linear.bind(*primals, *moved, pair=pair)


def _jvp_linear(primals: Any, tangents: Any, *, pair: Pair) -> tuple[Any, Any]:
    derivative = _jvp(pair, len(primals) // 2)
    moved = map(ad.instantiate_zeros, tangents)
    found = _linear.bind(*primals, pair=pair)
    return found, _linear.bind(*primals, *moved, pair=derivative)


def _transpose_linear(cotangents: Any, *args: Any, pair: Pair) -> list[Any]:
    count = len(args) // 2
    primals, tangents = args[:count], args[count:]
    given = map(ad.instantiate_zeros, cotangents)
    found = _call.bind(*primals, *given, pair=_vjp(pair, count))
    pairs = zip(found, map(ad.is_undefined_primal, tangents), strict=True)
    return [None] * count + [x if wanted else None for x, wanted in pairs]


for _primitive, _function, _batch, _derivative in (
    (_call, _evaluated, _batch_call, _jvp_call),
    (_linear, _tangents, _batch_linear, _jvp_linear),
):
    _primitive.multiple_results = True
    _primitive.def_impl(_function)
    _primitive.def_abstract_eval(functools.partial(_shapes, _function))
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=True))
    batching.primitive_batchers[_primitive] = _batch
    ad.primitive_jvps[_primitive] = _derivative
ad.primitive_transposes[_linear] = _transpose_linear
