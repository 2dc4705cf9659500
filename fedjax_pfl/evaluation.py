"""Scores of one client, and statistics over clients."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import local_training, losses, trees
from fedjax_pfl.errors import ContractError
from fedjax_pfl.kernels.platform import platform
from fedjax_pfl.types import Array, Batch, Client, Cohort, Data, Predictor, Scores, Task

BATCH = 256  # test examples predicted at once
# exp(mean cross entropy) over a client's examples, or over all their positions
PERPLEXITY = "perplexity"
# scores of generated answers, computed after the last round by `experiment.answers`
GENERATED = ("exact_match", "rouge_l")
# of a round, by the server: the error of averaging A and B of LoRA by themselves
LORA_ERROR = "lora_error"
Score = Callable[[Any, Array, Array, Client], Scores]
# (probabilities [M, C], labels [M] or [M, C] bool, mask [M]) -> []
Metric = Callable[[Array, Array, Array], Array]


def batch_size(rows: float) -> int:
    """Returns the smallest power of two from `rows` on, at most BATCH.

    Seeds with similar client sizes get the same batch size and share compilations.
    """
    return min(BATCH, 1 << max(0, math.ceil(math.log2(max(rows, 1)))))


def width(data: Data, num_classes: int) -> int:
    """Returns the examples of a client predicted at once: at most BATCH, and of labels
    per position as many as have `losses.PIECE` logits."""
    labels, most = data.examples.y, BATCH
    if labels.ndim == 2 and jnp.issubdtype(labels.dtype, jnp.integer):
        most = min(most, max(1, losses.PIECE // (labels.shape[1] * num_classes)))
    return min(most, data.index.shape[0])


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
    baseline that predicts the client's most frequent training class; of several labels
    `several_labels`, of targets `regression`."""
    if not jnp.issubdtype(y.dtype, jnp.integer):
        return accuracies(outputs, y, mask, client)
    majority = y == jnp.argmax(client.class_counts)
    return accuracies(outputs, y, mask, client) | {
        "acc_majority": (jnp.sum(majority & mask), jnp.sum(mask))
    }


def accuracies(outputs: Array, y: Array, mask: Array, client: Client) -> Scores:
    """Computes the scores of logits [B, C]: `acc`, argmax over all classes, and
    `acc_present`, argmax over the classes of the client's training examples.

    Masked rows do not count, and a row with a NaN logit is wrong. Other labels than
    classes have the scores of `classification`.
    """
    if not jnp.issubdtype(y.dtype, jnp.integer):
        score = several_labels if y.dtype == bool else regression
        return score(outputs, y, mask, client)
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


def regression(outputs: Array, y: Array, mask: Array, client: Client) -> Scores:
    """Computes the scores of outputs and targets [B, D]: `mse`, `mae`, `r2`, and
    `mse_mean`, the error of the mean of the client's test targets.

    `r2` is 1 - squared error / squared distance from that mean, averaged over targets.
    """
    _check_targets(outputs, y)
    held = client.test
    here = (jnp.arange(len(held.index)) < held.size)[:, None]
    own = jnp.where(here, held.examples.y[held.index], 0)
    mean = jnp.sum(own, axis=0) / jnp.maximum(held.size, 1)  # [D]

    def total(values: Array) -> Array:  # [B, D] -> [D]
        return jnp.sum(jnp.where(mask[:, None], values, 0), axis=0)

    error, spread = total((outputs - y) ** 2), total((y - mean[None]) ** 2)
    count = jnp.sum(mask)
    return {
        "mse": (jnp.mean(error), count),
        "mae": (jnp.mean(total(jnp.abs(outputs - y))), count),
        "r2": (spread - error, spread),
        "mse_mean": (jnp.mean(spread), count),
    }


def several_labels(outputs: Array, y: Array, mask: Array, client: Client) -> Scores:
    """Computes the scores of logits and labels [B, D] bool, positive logits being
    predicted labels.

    `f1` is the mean over labels that occur or are predicted, `exact` the share of
    examples with all labels right, `hamming` the share of right labels. A NaN logit is
    wrong.
    """
    _check_targets(outputs, y)
    count, row = jnp.sum(mask), mask[:, None]
    guess = (outputs > 0) & row
    right = ((outputs > 0) == y) & ~jnp.isnan(outputs) & row
    both, either = (guess & y), guess.astype(jnp.int32) + (y & row)
    return {
        "f1": (2 * jnp.sum(both, axis=0), jnp.sum(either, axis=0)),
        "exact": (jnp.sum(jnp.all(right, axis=1)), count),
        "hamming": (jnp.sum(right), count * y.shape[1]),
    }


def _check_targets(outputs: Array, y: Array) -> None:
    if getattr(outputs, "shape", None) != y.shape:
        found = getattr(outputs, "shape", type(outputs).__name__)
        raise ContractError(f"the predictor must return {list(y.shape)}, got {found}.")


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
    c: Client,
    predictor: Predictor,
    score: Score = classification,
    metrics: tuple[str, ...] = (),
) -> dict[str, Array]:
    """Computes the scores of one client's predictor on its test examples, {name: []};
    NaN without examples.

    Args:
      metrics: further scores, names in FURTHER.
    """
    classes = len(c.class_counts)

    def batch_scores(batch: Batch) -> Scores:
        outputs = predictor(batch.x, batch.mask)
        found = score(outputs, batch.y, batch.mask, c)
        if PERPLEXITY in metrics:
            z = class_logits(outputs, classes)
            found |= {PERPLEXITY: cross_entropy(z, batch.y, batch.mask)}
        return found

    sums = local_training.sweep(c.test, batch_scores, width(c.test, classes))
    found = {name: ratio(*pair) for name, pair in sums.items()}
    if PERPLEXITY in metrics:
        found[PERPLEXITY] = jnp.exp(found[PERPLEXITY])
    names = tuple(name for name in metrics if name in METRICS)
    if names:
        found |= whole(c.test, predictor, classes, names)
    return found


def training_loss(c: Client, predictor: Predictor, task: Task) -> Array:
    """Computes the mean loss of one client's predictor on its training examples, []; 0
    without examples."""
    loss = losses.of(task)

    def batch_loss(batch: Batch) -> tuple[Array, Array]:
        count = jnp.sum(batch.mask)
        mean = loss(predictor(batch.x, batch.mask), batch.y, batch.mask)
        return jnp.where(count > 0, mean, 0) * count, count

    size = max(1, width(c.train, task.num_classes))
    total, count = local_training.sweep(c.train, batch_loss, size)
    return total / jnp.maximum(count, 1)


def whole(
    data: Data, predictor: Predictor, num_classes: int, metrics: tuple[str, ...]
) -> dict[str, Array]:
    """Computes scores {name: []} in METRICS that are no sums over examples; NaN where a
    score is not defined.

    Returns:
      also `nan_rows`, the number of rows with a NaN logit, NaN if there are none. With
      `auc` or `ap` also `positives`, the rows of the rarest class that they average.
    """
    size, labels = width(data, num_classes), data.examples.y
    several = labels.dtype == bool
    positions = 1 if several or labels.ndim == 1 else labels.shape[1]
    length = (data.index.shape[0] + -data.index.shape[0] % size) * positions

    def collect(
        carry: tuple[Array, Array, Array], batch: Batch
    ) -> tuple[Array, Array, Array]:
        z = class_logits(predictor(batch.x, batch.mask), num_classes)
        at = batch.row[:, None] * positions + jnp.arange(positions)[None]
        at = jnp.where(batch.mask, at.reshape(-1), length)
        logits, y, seen = carry
        return (
            logits.at[at].set(z, mode="drop"),
            y.at[at].set(batch.y, mode="drop"),
            seen.at[at].set(True, mode="drop"),
        )

    start = (
        jnp.zeros((length, num_classes)),
        jnp.zeros((length, *([num_classes] if several else [])), labels.dtype),
        jnp.zeros(length, bool),
    )
    logits, y, mask = local_training.fold(data, collect, start, size)
    p = jax.nn.sigmoid(logits) if several else jax.nn.softmax(logits)
    found = {name: METRICS[name](p, y, mask) for name in metrics}
    unknown = jnp.sum(jnp.any(jnp.isnan(p), axis=1) & mask)
    found["nan_rows"] = jnp.where(unknown > 0, unknown, jnp.nan)
    if {"auc", "ap"} & set(metrics):
        found["positives"] = _positives(p, y, mask)
    return found


def class_logits(outputs: Any, num_classes: int) -> Array:
    """Returns the logits [B, C] of a predictor."""
    z = outputs
    z = z[..., 0] if getattr(z, "ndim", 0) == 3 else z  # the personal model's
    if getattr(z, "shape", ())[1:] != (num_classes,):
        raise ContractError(f"`metrics` need a predictor of logits [B, {num_classes}].")
    return z


def _of_numbers(score: Metric) -> Metric:
    """Returns a score that is NaN if a valid row of p has a NaN."""

    @functools.wraps(score)
    def known(p: Array, y: Array, mask: Array) -> Array:
        wrong = jnp.any(jnp.isnan(p) & mask[:, None])
        return jnp.where(wrong, jnp.nan, score(p, y, mask))

    return known


@_of_numbers
def auc(p: Array, y: Array, mask: Array) -> Array:
    """Area under the ROC curve of each class against the rest, the mean over classes
    with examples of both kinds.

    Args:
      p: probabilities [M, C].
      y: labels [M], or several [M, C] bool.
      mask: [M] bool.
    """

    def one(p: Array, hit: Array) -> Array:
        below, upto = _ranks(p, mask & ~hit)
        n, wins = jnp.sum(mask & ~hit), jnp.where(mask & hit, (below + upto) / 2, 0)
        return jnp.sum(wins) / (n * jnp.sum(mask & hit))

    return _over_classes(one, p, y, mask)


@_of_numbers
def average_precision(p: Array, y: Array, mask: Array) -> Array:
    """Average precision of each class against the rest, as `auc`; of two classes that
    of the class 1, as in scikit-learn."""
    if y.ndim == 1 and p.shape[1] == 2:
        p, y = p[:, 1:], (y == 1)[:, None]

    def one(p: Array, hit: Array) -> Array:
        positive, every = mask & hit, jnp.sum(mask)
        above = every - _ranks(p, mask)[0]
        right = jnp.sum(positive) - _ranks(p, positive)[0]
        each = jnp.where(positive, right / jnp.maximum(above, 1), 0)
        return jnp.sum(each) / jnp.sum(positive)

    return _over_classes(one, p, y, mask)


@_of_numbers
def ece(p: Array, y: Array, mask: Array, bins: int = 15) -> Array:
    """Expected calibration error: mean |accuracy - confidence| over bins of equal width
    of the largest probability (Guo et al., ICML 2017)."""
    sure, right = jnp.max(p, axis=1), jnp.argmax(p, axis=1) == y
    bin = jnp.clip(jnp.ceil(sure * bins).astype(jnp.int32) - 1, 0, bins - 1)
    gaps = jnp.zeros(bins).at[bin].add(jnp.where(mask, right - sure, 0))
    count = jnp.sum(mask)
    return jnp.where(count > 0, jnp.sum(jnp.abs(gaps)) / count, jnp.nan)


@_of_numbers
def balanced_accuracy(p: Array, y: Array, mask: Array) -> Array:
    """Recall of each class, the mean over classes with examples."""
    right = (jnp.argmax(p, axis=1) == y) & mask
    true = jax.nn.one_hot(y, p.shape[1]) * mask[:, None]
    return ratio(jnp.sum(true * right[:, None], axis=0), jnp.sum(true, axis=0))


@_of_numbers
def macro_f1(p: Array, y: Array, mask: Array) -> Array:
    """F1 of each class, the mean over classes that are a label or a prediction."""
    classes = p.shape[1]
    guess = jax.nn.one_hot(jnp.argmax(p, axis=1), classes) * mask[:, None]
    true = jax.nn.one_hot(y, classes) * mask[:, None]
    both, any_ = jnp.sum(guess * true, axis=0), jnp.sum(guess + true, axis=0)
    return ratio(2 * both, any_)


# the primary score by the kind of labels, and which of its values are better
HEADLINES = {"f": ("mse", "min"), "b": ("f1", "max")}
# scores of all of a client's test examples
METRICS: dict[str, Metric] = {
    "auc": auc,
    "ap": average_precision,
    "balanced_accuracy": balanced_accuracy,
    "ece": ece,
    "f1": macro_f1,
}
FURTHER = (*METRICS, PERPLEXITY, LORA_ERROR)  # names that `Task.metrics` may have


def _ranks(p: Array, among: Array) -> tuple[Array, Array]:
    """Returns how many of the rows `among` [M] are below each p [M], and how many are
    at most as large."""
    ordered = jnp.sort(jnp.where(among, p, jnp.inf))
    below, upto = (jnp.searchsorted(ordered, p, side) for side in ("left", "right"))
    return below, upto


def _over_classes(
    one: Callable[[Array, Array], Array], p: Array, y: Array, mask: Array
) -> Array:
    """Averages one(p [M], hit [M]) over classes with examples inside and outside."""
    hits, _, both = _hits(p, y, mask)
    values = jax.vmap(one)(p.T, hits)
    return ratio(jnp.where(both, values, 0), both.astype(jnp.float32))


def _hits(p: Array, y: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Returns the rows of each class [C, M] bool, their number [C], and the classes [C]
    with examples inside and outside."""
    hits = y.T if y.ndim == 2 else y[None] == jnp.arange(p.shape[1])[:, None]
    count = jnp.sum(hits & mask[None], axis=1)
    return hits, count, (count > 0) & (count < jnp.sum(mask))


def _positives(p: Array, y: Array, mask: Array) -> Array:
    """Returns the rows of the rarest class that `auc` averages, NaN if there is
    none."""
    _, count, both = _hits(p, y, mask)
    least = jnp.min(jnp.where(both, count, len(mask)))
    return jnp.where(jnp.any(both), least.astype(jnp.float32), jnp.nan)


def post(
    cohort: Cohort, c: Client, predictor: Predictor, score: Score = classification
) -> dict[str, Array]:
    """Computes the scores right after local training if `cohort.evaluated`, else
    NaN."""
    if platform() == "tpu":
        # Without examples instead of a cond, whose branches read the weights from main
        # memory: the compiler would then also train them there.
        size = jnp.where(cohort.evaluated, c.test.size, 0)
        seen = c._replace(test=c.test._replace(size=size))
        found = client(seen, predictor, score, cohort.metrics)
        return {
            name: jnp.where(cohort.evaluated, x, jnp.nan).astype(x.dtype)
            for name, x in found.items()
        }
    run = trees.traced_once(lambda: client(c, predictor, score, cohort.metrics))
    nothing = {
        name: jnp.full(x.shape, jnp.nan, x.dtype)
        for name, x in jax.eval_shape(run).items()
    }
    return jax.lax.cond(cohort.evaluated, run, lambda: nothing)


# over clients, see `statistics`
STATISTICS = ("macro", "micro", "std", "worst10", "best10", "clients")


def statistics(values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Computes statistics over clients of one score.

    Args:
      values: [N], NaN where a client has none.
      weights: [N] test examples.

    Returns:
      macro (mean over clients), micro (weighted by `weights`), std, the means of the
      lowest and the highest 10 % of clients, and the number of clients.
    """
    values = np.asarray(values, np.float64)
    seen = ~np.isnan(values)
    if not seen.any():
        return dict.fromkeys(STATISTICS, math.nan)
    v = np.sort(values[seen])
    tenth = max(1, math.ceil(0.1 * len(v) - 1e-9))
    return {
        "macro": float(v.mean()),
        "micro": float(np.average(values[seen], weights=weights[seen])),
        "std": float(v.std()),
        "worst10": float(v[:tenth].mean()),
        "best10": float(v[-tenth:].mean()),
        "clients": len(v),
    }
