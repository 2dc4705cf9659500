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

from fedjax_pfl.algorithms.public_data import (
    EXACT,
    TINY,
    Predictions,
    divergence,
    mean,
    normalised,
)
from fedjax_pfl.types import Array


class Asked(NamedTuple):
    """Inputs of a rule: one student, and its teachers, the clients of the round."""

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


def distance(target: Array, z: Array, temperature: Numeric, reduction: str) -> Array:
    """Computes the loss of each row, [B]: KL(target || softmax(z / T)).

    Args:
      target: probabilities [B, C].
      z: logits [B, C].
      reduction: "mean" divides the divergence by the number of classes.
    """
    kl = divergence(target, z, temperature)
    return kl / z.shape[-1] if reduction == "mean" else kl


def uniform(asked: Asked) -> tuple[Array, Array]:
    """Returns FedMD's weights: the same for all."""
    weight = normalised(jnp.ones_like(asked.row), asked.given.here)
    return weight, weight


def cosines(asked: Asked) -> Array:
    """Returns the cosine [S] of the student's predictions with each teacher's,
    rounded so that ties do not depend on the layout."""
    flat = asked.given.outputs.reshape(len(asked.own), -1)
    mine = asked.outputs.reshape(-1)
    norm = jnp.sqrt(jnp.sum(flat * flat, axis=1) * jnp.sum(mine * mine))
    return jnp.round(
        jnp.dot(flat, mine, precision=EXACT) / jnp.where(norm > 0, norm, 1), 6
    )


def similar(asked: Asked) -> tuple[Array, Array]:
    """Returns Sim-pFD's weights, proportional to the cosine."""
    here = asked.given.here
    weight = normalised(jnp.where(here, cosines(asked), 0), here)
    return weight, weight


def nearest(asked: Asked, neighbours: int) -> tuple[Array, Array]:
    """Returns TopK-pFD's weights: the student itself and the most similar others, of
    equal ones the lower id, with the same weight."""
    here, cosine = asked.given.here, cosines(asked)
    order = jnp.where(here, cosine + asked.own, -jnp.inf)
    _, best = jax.lax.top_k(order, min(neighbours, len(here)))
    chosen = jnp.zeros_like(here).at[best].set(True) & here
    weight = normalised(jnp.ones_like(cosine), chosen)
    return weight, weight


def slope(row: Array, asked: Asked) -> Array:
    """Returns the gradient [S] of KL(t || s) with respect to the normalised row, t
    its mixture and s the student's own predictions, as a mean over the public
    examples."""
    t = mean(row, asked.given)
    ratio = jnp.log(jnp.maximum(t, TINY) / jnp.maximum(asked.outputs, TINY)) + 1
    return jnp.tensordot(asked.given.outputs, ratio, 2, precision=EXACT) / len(t)
