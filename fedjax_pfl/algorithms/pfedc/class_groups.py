"""Classes in groups: the loss of each group's task, and the scores of a classifier task
by task (pFedC, 26.2-26.5).

A task t owns a group of classes G_t (`task_maps`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from optax.losses import sigmoid_binary_cross_entropy as binary_cross_entropy

from fedjax_pfl import evaluation, trees
from fedjax_pfl.algorithms.pfedc import min_norm
from fedjax_pfl.algorithms.pfedc.task_maps import Branches
from fedjax_pfl.types import Array, Batch, Client, PyTree, Scores, Task

# a task with less than this share of the largest squared gradient norm counts as solved
NEGLIGIBLE = 1e-12


def columns(head: PyTree, h: Array) -> Array:
    """Computes all branches' logits [B, L] of a linear head and features h [B, K]."""
    return h @ head["kernel"] + head["bias"][None]


def gram(b: Branches, residual: Array, kernel: Array) -> Array:
    """<D_s, D_t> of the tasks' gradients in the feature space, D_t = R_t W_t^T, in
    closed form for a linear head.

    Args:
      residual: R [B, L], the gradient of each logit's own task loss by it; kernel: W
        [K, L].

    Returns:
      [T, T]: the sums over the groups' blocks of (R^T R) * (W^T W).
    """
    owns = jnp.asarray(b.owns, residual.dtype)
    return owns @ ((residual.T @ residual) * (kernel.T @ kernel)) @ owns.T


def class_logits(b: Branches, z: Array) -> Array:
    """Returns the logits [B, C] of columns z [B, L]; where a task is open, against a no
    of 0.

    With group_binary the classes of a group share its logit.
    """
    if b.head == "group_binary":
        return z[:, b.of]
    return (
        z if b.head == "group_softmax" else z[:, : len(b.of)] - _reject(b, z)[:, b.of]
    )


def _reject(b: Branches, z: Array) -> Array:
    """Returns the reject logit of every task, [B, T]; 0 where it has none."""
    column = len(b.of) + np.cumsum(~b.binary) - 1
    return jnp.where(b.binary[None], 0, z[:, np.where(b.binary, 0, column)])


def task_losses(
    b: Branches, z: Array, y: Array, mask: Array, task_loss: str = "class"
) -> tuple[Array, Array]:
    """Computes the loss of every task on one batch (Eq. 3; which samples enter: see the
    Note of `pfedc`).

    Args:
      z: columns [B, L]; y: labels [B]; mask: [B] bool.
      task_loss: what the sum over a task's samples is divided by: "class", its samples
        within the group (D_i^c of Eq. 3, per minibatch); "batch", all of them;
        "balanced", each side by its own, so that it is the mean over the samples in
        the group plus that over the others. group_softmax has no others.

    Returns:
      losses [T], 0 where there is nothing to divide by; and whether there is, [T] bool.
    """
    rows, inside = samples(b, y, mask), _inside(b, y)
    positives, negatives = (jnp.sum(rows & x, axis=0) for x in (inside, ~inside))
    count = positives + negatives if task_loss == "batch" else positives
    each = (
        binary_cross_entropy(z, inside)
        if b.head == "group_binary"
        else _class_losses(b, z, y)
    )
    if task_loss == "balanced":  # divided by `count` below
        ratio = count / jnp.maximum(negatives, 1)
        each = jnp.where(inside, each, each * ratio[None])
    total = jnp.sum(jnp.where(rows & (count > 0)[None], each, 0), axis=0)
    return total / jnp.maximum(count, 1), count > 0


def _class_losses(b: Branches, z: Array, y: Array) -> Array:
    """Returns the loss of every sample under every task whose logits are those of
    its classes, [B, T]."""
    no, z = _reject(b, z) if b.head == "group_reject" else None, z[:, : len(b.of)]
    hit = jax.nn.one_hot(y, z.shape[1], dtype=bool)
    # [C, T], by which the product only selects: it must not round
    member = b.member.T.astype(z.dtype)
    # of use for one class
    bce = jnp.dot(
        binary_cross_entropy(z, hit), member, precision=jax.lax.Precision.HIGHEST
    )
    label = jnp.take_along_axis(z, y[:, None], axis=1)  # [B, 1]
    ce = jax.nn.logsumexp(z[:, None, :], axis=-1, where=b.member[None])  # [B, T]
    # without a reject logit of use for the label's own group
    ce = (
        ce - label
        if no is None
        else jnp.logaddexp(ce, no) - jnp.where(_inside(b, y), label, no)
    )
    return jnp.where(b.binary[None], bce, ce)


def _inside(b: Branches, y: Array) -> Array:
    """Returns the membership of each label in each group, [B, T] bool."""
    return jnp.asarray(b.of)[y][:, None] == np.arange(len(b.member))[None]


def samples(b: Branches, y: Array, mask: Array) -> Array:
    """Returns the samples of each task, [B, T] bool: all if it is open, else those
    with a label in its group."""
    return (_inside(b, y) | b.open[None]) & mask[:, None]


def min_norm_weights(m: Array, losses: Array, active: Array, normalise: str) -> Array:
    """Computes alpha [T] on the simplex over `active` [T]; tasks with a negligible
    gradient are left out (26.2, step 2)."""
    norms = jnp.diag(m)
    scale = losses * jnp.sqrt(norms) if normalise == "loss+" else jnp.ones_like(norms)
    moving = active & (norms > NEGLIGIBLE * jnp.max(jnp.where(active, norms, 0)))
    s = jnp.where(moving & (scale > 0), scale, 1)
    return jnp.where(
        jnp.any(moving),
        min_norm.fista(m / (s[:, None] * s[None, :]), moving),
        min_norm.uniform(active, m.dtype),
    )


def weight_shares(
    b: Branches, alpha: Array, y: Array, mask: Array, one_class: Array
) -> dict[str, Array]:
    """Computes the share [] of the weights alpha [T] on tasks with a sample of their
    group in the batch, the others answering "no", and on the tasks `one_class` [T]."""
    positive = jnp.any(_inside(b, y) & mask[:, None], axis=0)
    on = {"weight_on_positives": positive, "weight_on_one_class": one_class}
    total = jnp.maximum(jnp.sum(alpha), jnp.finfo(alpha.dtype).tiny)
    return {name: alpha @ tasks / total for name, tasks in on.items()}


def branch_loss(
    task: Task,
    b: Branches,
    active: Array,
    weighting: str,
    weight_scale: str,
    normalise: str,
    head_grad: str,
    task_loss: str = "class",
    one_class: Array | bool = False,
    absent: Array | None = None,
) -> Callable[[PyTree, Batch, Array], tuple[Array, PyTree, dict[str, Array]]]:
    """Returns the weighted sum of a client's task losses (Eq. 5 with MGDA-UB's
    weights), as `local_training.sgd` takes it.

    Args:
      active: [T] bool, the tasks the client holds.
      one_class: [T] bool, those of whose classes it holds one.
      absent: [T] bool, open tasks the client does not hold, whose branches learn to
        answer no: at weight 1, without a gradient by the body.

    Returns:
      (variables, batch, key) -> (loss [], new stats, `weight_shares` and under
      unweighted_loss the mean of the tasks' losses).
    """
    model = task.model

    def each(z, batch):
        return task_losses(b, z, batch.y, batch.mask, task_loss)

    # a duality gap of 1e-5 is below the noise of shorter products
    @jax.default_matmul_precision("highest")
    def weights(z, kernel, batch):
        """alpha [T], and which tasks learn from this batch, [T] bool."""
        values, usable = each(z, batch)
        on = active & usable
        if weighting == "uniform":
            alpha = min_norm.uniform(on, z.dtype)
        else:
            residual = jax.grad(lambda z: jnp.sum(each(z, batch)[0]))(z)
            alpha = min_norm_weights(gram(b, residual, kernel), values, on, normalise)
        return alpha * jnp.sum(on) if weight_scale == "mean_one" else alpha, on

    def loss(variables, batch, key):
        h, stats = model.features(
            variables, batch.x, mask=batch.mask, train=True, key=key
        )
        z = columns(variables["head"], h)
        alpha, on = jax.lax.stop_gradient(
            weights(*jax.lax.stop_gradient((z, variables["head"]["kernel"])), batch)
        )
        values = each(z, batch)[0]
        seen = weight_shares(
            b, alpha, batch.y, batch.mask, jnp.broadcast_to(one_class, alpha.shape)
        )
        seen["unweighted_loss"] = values @ min_norm.uniform(on, z.dtype)
        value, alone = alpha @ values, jnp.zeros((), z.dtype)
        by_head = columns(variables["head"], jax.lax.stop_gradient(h))
        if head_grad == "unscaled":
            by_body = columns(jax.lax.stop_gradient(variables["head"]), h)
            value = alpha @ each(by_body, batch)[0]
            alone += each(by_head, batch)[0] @ on.astype(z.dtype)
        if absent is not None:
            no = task_losses(b, by_head, batch.y, batch.mask, "batch")[0]
            alone += no @ absent.astype(z.dtype)
        # `alone` trains the branches, and is no part of the reported loss
        return value + alone - jax.lax.stop_gradient(alone), stats, seen

    return loss


def scores(b: Branches, z: Array, y: Array, mask: Array, c: Client) -> Scores:
    """Returns the metrics of class logits [B, C] (26.5): `acc` and `acc_present` as
    every method, and the tasks' own.

    `acc_groups` is the argmax over the classes of the client's groups, and `coarse_acc`
    whether its group is right; `task_acc` the accuracy of each task it holds (on all
    samples, where no is the answer to other groups' labels, or within the group given
    the group); `task_bal` the mean of an open task's accuracy inside and outside its
    group, for a binary one (TPR + TNR) / 2; `recall_macro` the mean recall of
    `acc_present`'s predictions; `*_majority` their majority baselines: what always
    saying no, or always the client's majority class, scores on the same samples. With
    group_binary, which cannot distinguish the classes of a group, a group's prediction
    is the client's majority class in it, and a task's is a yes.
    """
    counts = c.class_counts
    held = b.member @ counts > 0  # [T]
    majority = jnp.argmax(jnp.where(b.member, counts[None], -1), axis=-1)  # [T]
    if b.head == "group_binary":
        z = jnp.where((majority[b.of] == np.arange(len(b.of)))[None], z, -jnp.inf)
    hit = jax.nn.one_hot(y, z.shape[1], dtype=bool) & mask[:, None]
    rows = samples(b, y, mask) & held[None]  # [B, T]
    truth, yes = hit @ b.member.T, (z > 0) @ b.member.T  # [B, T], of use where open

    def best(allowed):
        return jnp.argmax(jnp.where(trees.align(allowed, 2), z, -jnp.inf), axis=-1)

    # argmax would name the first NaN, and class 0 where the client holds none
    known = ~jnp.any(jnp.isnan(z), axis=-1) & jnp.any(held)
    # given the group
    own = (best(jnp.asarray(b.member)[jnp.asarray(b.of)[y]]) == y) & known
    named = jnp.ones_like(own) if b.head == "group_binary" else own
    right = jnp.where(
        b.open[None], jnp.where(truth, yes & named[:, None], ~yes), own[:, None]
    )
    lazy = jnp.where(b.open[None], ~truth, y[:, None] == majority[None])
    # [B, T, 2]
    split = jnp.stack([rows & truth, rows & ~truth], axis=-1) & b.open[None, :, None]
    guess = best(held[b.of])
    always = y == jnp.argmax(counts)
    n, per_task, per_class = jnp.sum(mask), jnp.sum(rows, axis=0), jnp.sum(hit, axis=0)
    return evaluation.classification(z, y, mask, c) | {
        "acc_groups": (jnp.sum((guess == y) & known & mask), n),
        "coarse_acc": (
            jnp.sum((jnp.asarray(b.of)[guess] == jnp.asarray(b.of)[y]) & known & mask),
            n,
        ),
        "task_acc": (jnp.sum(right & rows, axis=0), per_task),
        "task_acc_majority": (jnp.sum(lazy & rows, axis=0), per_task),
        "task_bal": (jnp.sum(split & right[..., None], axis=0), jnp.sum(split, axis=0)),
        "task_bal_majority": (
            jnp.sum(split & lazy[..., None], axis=0),
            jnp.sum(split, axis=0),
        ),
        "recall_macro": (
            jnp.sum(hit & ((best(counts > 0) == y) & known)[:, None], axis=0),
            per_class,
        ),
        "recall_majority": (jnp.sum(hit & always[:, None], axis=0), per_class),
    }
