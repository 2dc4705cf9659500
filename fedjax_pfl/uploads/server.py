"""FedOpt: treats the averaged client update as a gradient for a server optimizer.

Reference: Reddi et al., Adaptive federated optimization (ICLR 2021, arXiv 2003.00295),
Algorithm 2."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from annotated_types import Gt, Interval

from fedjax_pfl.errors import InputError
from fedjax_pfl.optimizers import in_param_types
from fedjax_pfl.types import Array, PyTree
from fedjax_pfl.uploads.chain import Option, option

Rate = Annotated[float, Gt(0)]
Decay = Annotated[float, Interval(ge=0, lt=1)]


@option("server")
def fedavgm(lr: Rate = 1.0, momentum: Decay = 0.9) -> optax.GradientTransformation:
    """FedAvgM: momentum on the averaged update (Hsu, Qi & Brown, 2019, arXiv
    1909.06335).

    Args:
      lr: server's learning rate in (0, inf).
      momentum: in [0, 1).
    """
    return in_param_types(lambda lr: optax.sgd(lr, momentum))(lr)


@option("server")
def fedadagrad(lr: Rate = 0.1, tau: Rate = 1e-3) -> optax.GradientTransformation:
    """FedAdagrad: w += lr D / (sqrt(v) + tau), v the sum of D^2 from 0 on, D the
    averaged update.

    Args:
      lr: server's learning rate in (0, inf).
      tau: degree of adaptivity in (0, inf); 1e-3 as in the paper.
    """
    return _adaptive(lr, 0.0, tau, lambda v, square: v + square)


@option("server")
def fedadam(
    lr: Rate = 0.1, b1: Decay = 0.9, b2: Decay = 0.99, tau: Rate = 1e-3
) -> optax.GradientTransformation:
    """FedAdam: w += lr m / (sqrt(v) + tau), m and v means of D and D^2 with the decays
    b1 and b2 and without a correction of their bias, D the averaged update.

    Args:
      lr: server's learning rate in (0, inf).
      b1: in [0, 1).
      b2: in [0, 1); 0.99 as in the paper.
      tau: degree of adaptivity in (0, inf); 1e-3 as in the paper.
    """
    return _adaptive(lr, b1, tau, lambda v, square: b2 * v + (1 - b2) * square)


@option("server")
def fedyogi(
    lr: Rate = 0.1, b1: Decay = 0.9, b2: Decay = 0.99, tau: Rate = 1e-3
) -> optax.GradientTransformation:
    """FedYogi: FedAdam whose v moves by (1 - b2) D^2 towards D^2, by its sign alone.

    Args:
      lr: server's learning rate in (0, inf).
      b1: in [0, 1).
      b2: in [0, 1); 0.99 as in the paper.
      tau: degree of adaptivity in (0, inf); 1e-3 as in the paper.
    """

    def second(v: Array, square: Array) -> Array:
        return v - (1 - b2) * square * jnp.sign(v - square)

    return _adaptive(lr, b1, tau, second)


@option("server")
def of_optax(name: str, lr: Rate = 1.0) -> optax.GradientTransformation:
    """An optimizer of optax by its name.

    Args:
      name: such as adam or sgd.
      lr: server's learning rate in (0, inf).
    """
    make = getattr(optax, name, None)
    if make is None:
        raise InputError(f"`name` must be an optimizer of optax, got {name}.")
    made: optax.GradientTransformation = in_param_types(make)(lr)
    return made


SERVERS = {
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
}


def optimizer(name: str, lr: float = 1.0) -> Option:
    """Returns a server optimizer by its name: of `SERVERS`, or of optax."""
    return SERVERS[name](lr) if name in SERVERS else of_optax(name, lr)


def _adaptive(lr: Any, b1: Any, tau: Any, second: Any) -> optax.GradientTransformation:
    """Returns Algorithm 2 of Reddi et al.: the moments begin at 0 and are not
    corrected.

    Args:
      second: (v, D^2) -> v.
    """

    def init(params: PyTree) -> PyTree:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros

    def update(
        gradient: PyTree, state: PyTree, params: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        m, v = state
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, gradient)
        v = jax.tree.map(lambda v, g: second(v, g * g), v, gradient)
        steps = jax.tree.map(lambda m, v: -lr * m / (jnp.sqrt(v) + tau), m, v)
        return optax.tree.cast_like(steps, gradient), optax.tree.cast_like(
            (m, v), state
        )

    return optax.GradientTransformation(init, update)
