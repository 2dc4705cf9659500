"""Scores of one client, and statistics over clients."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import local_training, trees
from fedjax_pfl.errors import ContractError
from fedjax_pfl.types import Array, Batch, Client, Cohort, Predictor, Scores

BATCH = 256  # test examples predicted at once
Score = Callable[[Any, Array, Array, Client], Scores]


def batch_size(rows: float) -> int:
    """Returns the smallest power of two from `rows` on, at most BATCH.

    Seeds with similar client sizes get the same batch size and share compilations.
    """
    return min(BATCH, 1 << max(0, math.ceil(math.log2(max(rows, 1)))))


def pass_size(sizes: np.ndarray) -> int:
    """Returns the batch size of a pass over training sets of these sizes [N] that
    computes little padding.

    For clients of equal size a multiple of 8, at most 128, in equal batches. Else a
    power of two from 8 to BATCH that adds less than an eighth to a largest client of 64
    rows or more. Seeds with similar sizes get the same batch size and share
    compilations.
    """
    largest = int(max(sizes))
    if min(sizes) >= 0.9 * largest > 0:
        parts = -(-largest // 128)
        return -(-largest // (8 * parts)) * 8
    return batch_size(max(8, largest / 16))


def classification(outputs: Array, y: Array, mask: Array, client: Client) -> Scores:
    """Computes the scores of logits [B, C]: `accuracies`, and `acc_majority`, the
    baseline that predicts the client's most frequent training class."""
    majority = y == jnp.argmax(client.class_counts)
    return accuracies(outputs, y, mask, client) | {
        "acc_majority": (jnp.sum(majority & mask), jnp.sum(mask))
    }


def accuracies(outputs: Array, y: Array, mask: Array, client: Client) -> Scores:
    """Computes the scores of logits [B, C]: `acc`, argmax over all classes, and
    `acc_present`, argmax over the classes of the client's training examples.

    Masked rows do not count, and a row with a NaN logit is wrong.
    """
    count, held = jnp.sum(mask), client.class_counts > 0
    wanted, found = [*mask.shape, *held.shape], getattr(outputs, "shape", None)
    if found is None or list(found) != wanted:
        given = type(outputs).__name__ if found is None else list(found)
        raise ContractError(
            f"the predictor must return logits {wanted} for accuracies, got {given}."
        )

    def hits(z: Array) -> Array:
        known = ~jnp.any(jnp.isnan(z), axis=-1)  # argmax would name the first NaN
        return jnp.sum((jnp.argmax(z, axis=-1) == y) & known & mask)

    present = hits(jnp.where(held[None], outputs, -jnp.inf))
    return {
        "acc": (hits(outputs), count),
        "acc_present": (jnp.where(jnp.any(held), present, 0), count),
    }


def cross_entropy(outputs: Array, y: Array, mask: Array) -> tuple[Array, Array]:
    """Computes sum and count over the valid rows of the cross entropy of logits
    [B, C]."""
    each = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
    return jnp.sum(jnp.where(mask, each, 0)), jnp.sum(mask)


def ratio(total: Array, count: Array) -> Array:
    """Computes total / count, averaged over the last axis until a scalar is left;
    entries without a count are left out."""
    value = jnp.where(count > 0, total / jnp.where(count > 0, count, 1), jnp.nan)
    while value.ndim:
        seen = ~jnp.isnan(value)
        n = jnp.sum(seen, axis=-1)
        value = jnp.where(
            n > 0,
            jnp.sum(jnp.where(seen, value, 0), axis=-1) / jnp.where(n > 0, n, 1),
            jnp.nan,
        )
    return value


def client(
    c: Client, predictor: Predictor, score: Score = classification
) -> dict[str, Array]:
    """Computes the scores of one client's predictor on its test examples, {name: []};
    NaN without examples."""

    def batch_scores(batch: Batch) -> Scores:
        return score(predictor(batch.x, batch.mask), batch.y, batch.mask, c)

    sums = local_training.sweep(c.test, batch_scores, min(BATCH, c.test.index.shape[0]))
    return {name: ratio(*pair) for name, pair in sums.items()}


def post(
    cohort: Cohort, c: Client, predictor: Predictor, score: Score = classification
) -> dict[str, Array]:
    """Computes the scores right after local training if `cohort.evaluated`, else
    NaN."""
    run = trees.traced_once(lambda: client(c, predictor, score))
    nothing = {
        name: jnp.full(x.shape, jnp.nan, x.dtype)
        for name, x in jax.eval_shape(run).items()
    }
    return jax.lax.cond(cohort.evaluated, run, lambda: nothing)


def statistics(values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Computes statistics over clients of one score.

    Args:
      values: [N], NaN where a client has none.
      weights: [N] test examples.

    Returns:
      macro (mean over clients), micro (weighted by `weights`), std, and the means of
      the worst and the best 10 % of clients.
    """
    values = np.asarray(values, np.float64)
    seen = ~np.isnan(values)
    if not seen.any():
        return dict.fromkeys(("macro", "micro", "std", "worst10", "best10"), math.nan)
    v = np.sort(values[seen])
    tenth = max(1, math.ceil(0.1 * len(v) - 1e-9))
    return {
        "macro": float(v.mean()),
        "micro": float(np.average(values[seen], weights=weights[seen])),
        "std": float(v.std()),
        "worst10": float(v[:tenth].mean()),
        "best10": float(v[-tenth:].mean()),
    }
