"""Floating-point operations of a network's training step, counted in its trace."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from fedjax_pfl.models.functional import model
from fedjax_pfl.models.registry import Factory
from fedjax_pfl.types import Array, Model, PyTree


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
