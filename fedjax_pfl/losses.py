"""Losses as means over the valid rows of a batch, and the loss of a model that local
training takes."""

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Interval
from chex import Numeric
from jax import lax

from fedjax_pfl.errors import check
from fedjax_pfl.types import Array, Batch, Hidden, Model, PyTree, Task

# (logits [B, C], labels [B] or [B, C], mask [B]) -> []
Loss = Callable[[Array, Array, Array], Array]

# of the four Gaussian kernels of `mmd`, as in FedCP's code
VARIANCES = (10.0, 15.0, 20.0, 50.0)
# logits of a batch, beyond which they are computed in pieces of at most as many
PIECE = 2**24


def masked_mean(values: Array, mask: Array) -> Array:
    """Mean of values [B] over the rows where `mask` [B] is not zero; 0 if there is
    none. `mask` may hold weights."""
    weight = mask.astype(values.dtype)
    total = jnp.sum(weight)
    return jnp.sum(jnp.where(weight > 0, values, 0) * weight) / jnp.where(
        total > 0, total, 1
    )


def cross_entropy(logits: Array, y: Array, mask: Array) -> Array:
    """Mean cross entropy of logits [B, C] and labels [B], or probabilities [B, C], over
    the valid rows, []."""
    if y.ndim == 2:
        return masked_mean(optax.losses.softmax_cross_entropy(logits, y), mask)
    return masked_mean(cross_entropy_of_rows(logits, y), mask)


def cross_entropy_of_rows(logits: Array, y: Array) -> Array:
    """Computes the cross entropy [B] of logits [B, C] and labels [B] in [0, C).

    The logits of the labels are a sum, because the gradient of an index is a scatter.
    """
    own = y[:, None] == jnp.arange(logits.shape[-1])[None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(
        jnp.where(own, logits, 0), axis=-1
    )


def of(task: Task) -> Loss:
    """Returns the task's loss of outputs, by default that of its labels: cross entropy
    of classes, binary cross entropy of bool, squared error of real numbers."""
    if task.loss is not None:
        return task.loss
    kinds = {"b": binary_cross_entropy, "f": squared_error}
    return kinds.get(np.dtype(task.label.dtype).kind, cross_entropy)


def squared_error(outputs: Array, y: Array, mask: Array) -> Array:
    """Mean squared error of outputs and targets [B, D] over the valid rows, []."""
    return masked_mean(jnp.mean((outputs - y) ** 2, axis=-1), mask)


def binary_cross_entropy(outputs: Array, y: Array, mask: Array) -> Array:
    """Mean binary cross entropy of logits [B, D] and labels [B, D] bool over the valid
    rows, []."""
    each = optax.losses.sigmoid_binary_cross_entropy(outputs, y.astype(outputs.dtype))
    return masked_mean(jnp.mean(each, axis=-1), mask)


def label_smoothing(epsilon: Annotated[float, Interval(ge=0, le=1)] = 0.1) -> Loss:
    """Returns the cross entropy with labels mixed with the uniform distribution, by
    epsilon in [0, 1]."""
    check("epsilon", epsilon, 0, 1)

    def loss(logits: Array, y: Array, mask: Array) -> Array:
        labels = _soft(y, logits)
        return cross_entropy(logits, optax.smooth_labels(labels, epsilon), mask)

    return loss


def focal(gamma: Annotated[float, Ge(0)] = 2.0) -> Loss:
    """Returns the focal loss -(1 - p)^gamma log p of the label's probability p (Lin et
    al., ICCV 2017), gamma in [0, inf)."""
    check("gamma", gamma, 0, math.inf)

    def loss(logits: Array, y: Array, mask: Array) -> Array:
        log_p = jax.nn.log_softmax(logits)
        # positive: the derivative of 0^gamma is infinite
        rest = jnp.maximum(-jnp.expm1(log_p), jnp.finfo(log_p.dtype).tiny)
        each = rest**gamma * log_p
        return masked_mean(-jnp.sum(_soft(y, logits) * each, axis=-1), mask)

    return loss


def class_balanced(
    beta: Annotated[float, Interval(ge=0, lt=1)], class_counts: np.ndarray
) -> Loss:
    """Returns the cross entropy with weights (1 - beta) / (1 - beta^n_c) of the classes
    (Cui et al., CVPR 2019).

    Args:
      beta: in [0, 1); 0 weighs all alike.
      class_counts: [C] examples, or [N, C] of the clients. The weights of the classes
        with examples have the mean 1.
    """
    check("beta", beta, 0, 1, open_high=True)
    n = np.reshape(class_counts, (-1, np.shape(class_counts)[-1])).sum(axis=0)
    with np.errstate(divide="ignore"):  # log 0
        left = -np.expm1(np.maximum(n, 1) * np.log1p(beta - 1))  # 1 - beta^n
    raw = np.where(n > 0, (1 - beta) / left, 0)
    weights = jnp.asarray(raw * (n > 0).sum() / raw.sum(), jnp.float32)

    def loss(logits: Array, y: Array, mask: Array) -> Array:
        each = -_soft(y, logits) * jax.nn.log_softmax(logits) * weights[None]
        return masked_mean(jnp.sum(each, axis=-1), mask)

    return loss


def _soft(y: Array, logits: Array) -> Array:
    """Returns labels [B] or [B, C] as probabilities [B, C]."""
    return jax.nn.one_hot(y, logits.shape[-1]) if y.ndim == 1 else y


def balanced_softmax(
    logits: Array, y: Array, mask: Array, class_counts: Array, gamma: Numeric = 1.0
) -> Array:
    """Mean cross entropy of logits [B, C] + gamma log class_counts [C] over the valid
    rows, [].

    A class without a count takes no part (unless gamma is 0), so it must not be a
    label.
    """
    # finite: 0 * inf is NaN
    prior = jnp.where(class_counts > 0, jnp.log(jnp.maximum(class_counts, 1)), -1e9)
    return cross_entropy(logits + gamma * prior[None], y, mask)


def classification(
    model: Model,
    task: Task | None = None,
) -> Callable[[PyTree, Batch, Array], tuple[Array, PyTree]]:
    """The loss of ordinary training, as `local_training.sgd` takes it: the task's loss
    of the model's logits; None: cross entropy."""
    value = cross_entropy if task is None else of(task)
    classes = 0 if task is None or value is not cross_entropy else task.num_classes

    def loss(variables: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        pieces = -(-len(batch.y) * classes // PIECE)
        if pieces > 1 and batch.y.ndim == 1:
            return _in_pieces(model, variables, batch, key, pieces)
        logits, stats = model.apply(
            variables, batch.x, mask=batch.mask, train=True, key=key
        )
        return value(logits, batch.y, batch.mask), stats

    return loss


def _in_pieces(
    model: Model, variables: PyTree, batch: Batch, key: Array, pieces: int
) -> tuple[Array, PyTree]:
    """The cross entropy of a model's logits, and its new running statistics.

    The derivative computes the logits [n, C] of each piece of the rows again, so that
    those of all rows [B, C] are never in memory.
    """
    x: Any = Hidden(batch.x) if model.unembeds else batch.x
    h, stats = model.features(variables, x, mask=batch.mask, train=True, key=key)

    def piece(given: tuple[Array, Array]) -> Array:
        h, y = given
        if model.unembeds:
            h, _ = model.features(variables, Hidden(h=h), train=True)
        return cross_entropy_of_rows(model.head(variables["head"], h), y)

    def divided(a: Array) -> Array:
        rest = [(0, -len(a) % pieces), *[(0, 0)] * (a.ndim - 1)]
        return jnp.pad(a, rest).reshape(pieces, -1, *a.shape[1:])

    step = jax.checkpoint(piece, prevent_cse=False)
    each = lax.map(step, (divided(h), divided(batch.y)))
    return masked_mean(each.reshape(-1)[: len(batch.y)], batch.mask), stats


def mmd(h: Array, u: Array, mask: Array) -> Array:
    """Squared maximum mean discrepancy of features h and u [B, K] over the valid rows,
    [].

    The biased V-statistic, a mean over all pairs of rows, of the kernel sum_a exp(-d^2
    / 2a) with a in VARIANCES.
    """
    weight = mask / jnp.maximum(jnp.sum(mask), 1)
    h, u = (jnp.where(mask[:, None], x, 0) for x in (h, u))
    # the same distances, and squares of large features would lose them
    middle = lax.stop_gradient(weight @ (h + u) / 2)[None]
    h, u = h - middle, u - middle

    def kernel(p: Array, q: Array) -> Array:  # [B, B]
        square: Callable[[Array], Array] = lambda x: jnp.sum(x * x, axis=1)
        d2 = (
            square(p)[:, None]
            + square(q)[None]
            - 2 * jnp.dot(p, q.T, precision=lax.Precision.HIGHEST)
        )
        return sum(
            (jnp.exp(-jnp.maximum(d2, 0) / (2 * a)) for a in VARIANCES),
            jnp.zeros_like(d2),
        )

    return weight @ (kernel(h, h) + kernel(u, u) - 2 * kernel(h, u)) @ weight
