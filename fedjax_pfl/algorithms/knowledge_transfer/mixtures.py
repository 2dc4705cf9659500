"""Mixtures of the clients' predictions for public examples: their means, and the
weights with which each enters.

References: FedMD, Li & Wang (2019): uniform weights; KT-pFL, Zhang et al. (NeurIPS
2021): those of its baselines Sim-pFD and TopK-pFD, and the gradient of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import Numeric

from fedjax_pfl.types import Array

TINY = 1e-8  # probabilities are at least this before a logarithm
EXACT = jax.lax.Precision.HIGHEST  # predictions are compared in float32 on every device


class Predictions(NamedTuple):
    """What the clients of a round predict for its public examples, by ascending id: no
    sum depends on their order."""

    ids: Array  # [S] int32
    here: Array  # [S] bool: does it take part?
    outputs: Array  # [S, D, C], zeros where not


class Asked(NamedTuple):
    """What a rule knows of the student and of its teachers, the clients of the
    round."""

    row: Array  # [S] the student's coefficients so far; 0 if none are kept
    own: Array  # [S] bool: which of the teachers it is itself
    outputs: Array  # [D, C] its own predictions
    given: Predictions
    share: Array  # [] of all training examples


class Rule(NamedTuple):
    """How the coefficients are found: the weights [S] of this round's mixture, and the
    row [S] to be kept."""

    coefficients: Callable[[Asked], tuple[Array, Array]]
    # every coefficient before round 0; None: found anew in each round
    start: float | None = None
    # follow the row to be kept what is predicted after the training on the mixture?
    after: bool = False


def mean(weight: Array, given: Predictions) -> Array:
    """The mean [D, C] of all predictions with normalised weights [S]."""
    return jnp.tensordot(weight, given.outputs, 1, precision=EXACT)


def normalised(weight: Array, here: Array) -> Array:
    """Weights [S] that sum to 1 over `here` [S]: uniform ones where they hardly weigh
    anything, 0 if nobody is here."""
    weight = jnp.where(here, weight, 0)
    total, alike = jnp.sum(weight), here.astype(weight.dtype)
    return jnp.where(
        total > TINY,
        weight / jnp.maximum(total, TINY),
        alike / jnp.maximum(jnp.sum(alike), 1),
    )


def divergence(target: Array, z: Array, temperature: Numeric = 1.0) -> Array:
    """KL(target || softmax(z / T)) of probabilities and logits [B, C] for each row,
    [B]."""
    return jnp.sum(
        target
        * (jnp.log(jnp.maximum(target, TINY)) - jax.nn.log_softmax(z / temperature)),
        axis=-1,
    )


def distance(
    target: Array, z: Array, temperature: Numeric, space: str, reduction: str
) -> Array:
    """What training on a target minimises for each row, [B]: KL(target || softmax(z /
    T)), or the absolute error.

    Args:
      target: [B, C], probabilities, or logits if the space is "logit".
      z: logits [B, C].
      reduction: of the divergence, "mean" divides it by the number of classes.
    """
    if space == "logit":
        return jnp.mean(jnp.abs(z - target), axis=-1)
    kl = divergence(target, z, temperature)
    return kl / z.shape[-1] if reduction == "mean" else kl


def uniform(asked: Asked) -> tuple[Array, Array]:
    """FedMD: the same weight for all."""
    weight = normalised(jnp.ones_like(asked.row), asked.given.here)
    return weight, weight


def cosines(asked: Asked) -> Array:
    """The cosine [S] of the student's predictions with each teacher's, rounded so that
    ties do not depend on the layout."""
    flat = asked.given.outputs.reshape(len(asked.own), -1)
    mine = asked.outputs.reshape(-1)
    norm = jnp.sqrt(jnp.sum(flat * flat, axis=1) * jnp.sum(mine * mine))
    return jnp.round(
        jnp.dot(flat, mine, precision=EXACT) / jnp.where(norm > 0, norm, 1), 6
    )


def similar(asked: Asked, norm: str) -> tuple[Array, Array]:
    """Sim-pFD: weights proportional to the cosine, or to what it exceeds the least one
    by."""
    here, cosine = asked.given.here, cosines(asked)
    least = jnp.min(jnp.where(here, cosine, jnp.inf)) if norm == "minmax" else 0
    weight = normalised(jnp.where(here, cosine - least, 0), here)
    return weight, weight


def nearest(asked: Asked, neighbours: int, weights: str) -> tuple[Array, Array]:
    """TopK-pFD: the student itself and the most similar others, of equal ones the lower
    id."""
    here, cosine = asked.given.here, cosines(asked)
    _, best = jax.lax.top_k(
        jnp.where(here, cosine + asked.own, -jnp.inf), min(neighbours, len(here))
    )
    chosen = jnp.zeros_like(here).at[best].set(True) & here
    weight = normalised(cosine if weights == "cos" else jnp.ones_like(cosine), chosen)
    return weight, weight


def slope(row: Array, asked: Asked) -> Array:
    """The gradient [S] of KL(t || s) with respect to the normalised row, t its mixture
    and s the student's own predictions, as a mean over the public examples."""
    t = mean(row, asked.given)
    ratio = jnp.log(jnp.maximum(t, TINY) / jnp.maximum(asked.outputs, TINY)) + 1
    return jnp.tensordot(asked.given.outputs, ratio, 2, precision=EXACT) / len(t)


def sharpened(row: Array, asked: Asked, rho: Numeric, centre: float) -> Array:
    """A row after one update of KT-pFL's code: a step along the gradient of the mean
    squared error between mixture and own predictions and of the penalty rho mean((row -
    centre)^2), then the softmax of 5 times the row.

    The step size is 1, divided or multiplied by 5 up to five times until the mean
    absolute gradient is about 0.01. The entries of absent clients stay, and the others
    keep their sum.
    """
    here, count = asked.given.here, jnp.maximum(jnp.sum(asked.given.here), 1)
    mass = jnp.sum(jnp.where(here, row, 0))
    share = normalised(row, here)
    error = mean(share, asked.given) - asked.outputs
    gradient = (
        2 / error.size * jnp.tensordot(asked.given.outputs, error, 2, precision=EXACT)
    )
    gradient = jnp.where(
        here, gradient + 2 * rho / count * (share - centre / jnp.maximum(mass, TINY)), 0
    )

    def rescale(_: Array, size: Array) -> Array:
        average = jnp.sum(jnp.abs(gradient)) / count
        size = jnp.where(size * average > 0.01, size / 5, size)
        return jnp.where(size * average < 0.01, size * 5, size)

    moved = share - jax.lax.fori_loop(0, 5, rescale, jnp.float32(1)) * gradient
    return jnp.where(
        here, mass * jax.nn.softmax(jnp.where(here, 5 * moved, -jnp.inf)), row
    )
