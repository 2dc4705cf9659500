"""Grad-CAM: the parts of an image that raise a logit, for any function with a
convolution.

Reference: Selvaraju et al., Grad-CAM: visual explanations from deep networks via
gradient-based localization (ICCV 2017, arXiv 1610.02391), Equations 1 and 2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import partial_eval

from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array


def grad_cam(logits: Callable[[Array], Array], x: Array, classes: Array) -> Array:
    """Computes relu(sum_k alpha_k A_k) of each example [B, H', W'].

    A [B, H', W', O] are the feature maps of the last convolution: the last array of
    the shape of its output, so with bias, norm, sum and ReLU up to the next pooling.
    alpha_k is the mean over pixels of the logit's derivative by A_k.

    Args:
      logits: x -> [B, C], each example by itself. Any JAX function, such as
        `lambda x: model.apply(variables, x)[0]` or a method's predictor. A network of
        `models.model` needs conv="xla".
      x: images [B, H, W, D], prepared.
      classes: the class of each example that is explained, [B].

    Raises:
      InputError: the logits depend on no convolution.
    """

    def explained(x: Array) -> Array:
        each = jnp.take_along_axis(logits(x), classes[:, None], axis=1)
        return jnp.sum(each)

    with jax.disable_jit():  # else a jitted network is one equation
        traced = jax.make_jaxpr(explained)(x)
    features, rest = _divided(traced)
    maps = features(x)
    slopes = jax.grad(rest, argnums=1)(x, maps)
    pixels = tuple(range(1, maps.ndim - 1))
    alpha = jnp.mean(slopes, axis=pixels, keepdims=True)
    return jax.nn.relu(jnp.sum(alpha * maps, axis=-1))


def _divided(
    closed: ClosedJaxpr,
) -> tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]:
    """Returns x -> feature maps, and (x, feature maps) -> the function's result."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True], instantiate=True)
    at = _last_maps(jaxpr.eqns)
    maps = jaxpr.eqns[at].outvars
    others = [*jaxpr.eqns[:at], *jaxpr.eqns[at + 1 :]]
    before = jaxpr.replace(outvars=maps, eqns=jaxpr.eqns[: at + 1])
    after = jaxpr.replace(invars=[*jaxpr.invars, *maps], eqns=others)
    parts = [jaxpr_as_fun(ClosedJaxpr(x, closed.consts)) for x in (before, after)]
    return lambda x: parts[0](x)[0], lambda x, maps: parts[1](x, maps)[0]


def _last_maps(eqns: Sequence[JaxprEqn]) -> int:
    """Returns the index of the equation whose result are the feature maps."""
    convolutions = [eqn for eqn in eqns if _convolves(eqn)]
    if not convolutions or len(_kinds(convolutions[-1])[0][0]) < 3:
        raise InputError("Grad-CAM needs a model with a convolution.")
    kinds = _kinds(convolutions[-1])
    return max(i for i, eqn in enumerate(eqns) if _kinds(eqn) == kinds)


def _kinds(eqn: JaxprEqn) -> list[tuple[Any, ...]]:
    """Returns shape and type of each result."""
    avals: list[Any] = [x.aval for x in eqn.outvars]
    return [(x.shape, x.dtype) for x in avals]


def _convolves(eqn: JaxprEqn) -> bool:
    """Returns whether the equation has a convolution in it."""
    inner = [e for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns]
    return eqn.primitive.name == "conv_general_dilated" or any(map(_convolves, inner))
