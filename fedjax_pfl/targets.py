"""Losses and scores of tasks without one class per example: regression and several
labels.

Axes: B batch, D targets or labels of an example. The type of the labels says which task
it is: float32 is regression, bool several labels."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.errors import ContractError
from fedjax_pfl.losses import masked_mean
from fedjax_pfl.types import Array, Client, Scores, Task


def squared_error(outputs: Array, y: Array, mask: Array) -> Array:
    """Mean squared error of outputs and targets [B, D] over the valid rows, []."""
    return masked_mean(jnp.mean((outputs - y) ** 2, axis=-1), mask)


def binary_cross_entropy(outputs: Array, y: Array, mask: Array) -> Array:
    """Mean binary cross entropy of logits [B, D] and labels [B, D] bool over the valid
    rows, []."""
    each = optax.losses.sigmoid_binary_cross_entropy(outputs, y.astype(outputs.dtype))
    return masked_mean(jnp.mean(each, axis=-1), mask)


def kind(dtype: Any) -> str:
    """Returns `class`, `regression` or `labels` of the type of labels."""
    return {"f": "regression", "b": "labels"}.get(np.dtype(dtype).kind, "class")


LOSSES = {"regression": squared_error, "labels": binary_cross_entropy}
# the primary score, and which of its values are better
HEADLINES = {"regression": ("mse", "min"), "labels": ("f1", "max")}


def headline(task: Task, given: tuple[str, str]) -> tuple[str, str]:
    """Returns the primary score of a method on a task, `given` for classes."""
    return HEADLINES.get(kind(task.label.dtype), given)


def scores(outputs: Array, y: Array, mask: Array, client: Client) -> Scores:
    """Computes the scores of outputs [B, D]; masked rows do not count.

    Regression has `mse`, `mae` and `r2`, 1 - squared error / squared distance from the
    mean of the client's test targets, averaged over targets; `mse_mean` is the error of
    that mean. Several labels, predicted where a logit is positive, have `f1`, the mean
    over the labels that occur or are predicted, `exact`, the share of examples with all
    labels right, and `hamming`, the share of right labels.
    """
    if getattr(outputs, "shape", None) != y.shape:
        found = getattr(outputs, "shape", type(outputs).__name__)
        raise ContractError(f"the predictor must return {list(y.shape)}, got {found}.")
    rows, count = mask[:, None], jnp.sum(mask)
    total = lambda values: jnp.sum(jnp.where(rows, values, 0), axis=0)  # [B, D] -> [D]
    if kind(y.dtype) == "regression":
        gap, spread = outputs - y, total((y - _mean_target(client)[None]) ** 2)
        error = total(gap**2)
        return {
            "mse": (jnp.mean(error), count),
            "mae": (jnp.mean(total(jnp.abs(gap))), count),
            "r2": (spread - error, spread),
            "mse_mean": (jnp.mean(spread), count),
        }
    guess = outputs > 0
    both, either = total(guess & y), total(guess.astype(int) + y)
    right = guess == y
    exact = jnp.sum(jnp.all(right, axis=1) & mask)
    return {
        "f1": (2 * both, either),
        "exact": (exact, count),
        "hamming": (jnp.sum(right & rows), count * y.shape[1]),
    }


def _mean_target(client: Client) -> Array:
    """The mean of the client's test targets, [D]."""
    data = client.test
    y = data.examples.y[data.index]  # [M, D]
    here = jnp.arange(len(y)) < data.size
    mean: Array = jnp.sum(jnp.where(here[:, None], y, 0), axis=0)
    return mean / jnp.maximum(data.size, 1)
