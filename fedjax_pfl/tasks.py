"""Task maps: classes in groups, the loss of each group, and the scores of a classifier task by task (pFedC, 26.1-26.5).

A task t owns a group of classes G_t; a group of one class is a yes-or-no question about every sample, a larger group a
softmax over the samples whose label is in it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import evaluate, losses, trees
from fedjax_pfl.checks import BadInput, choose
from fedjax_pfl.types import Array, Client, Scores, Task


class Branches(NamedTuple):
    """The task map, as host constants."""

    of: np.ndarray  # [C] int, the task of each class (tau)
    member: np.ndarray  # [T, C] bool, the classes of each task (G_t)
    binary: np.ndarray  # [T] bool: a group of one class is a yes-or-no task on all samples


def branches(task: Task, tasks: str) -> Branches:
    """Reads a task map: class (T = C), single (T = 1), consecutive:T, or superclass (the data set's own)."""
    name, _, count = tasks.partition(":")
    choose("tasks", name, ("class", "single", "consecutive", "superclass"))
    c = np.arange(task.num_classes)
    if name == "consecutive":
        if not count.isdigit() or not 1 <= int(count) <= len(c):
            raise BadInput(
                f"tasks={tasks!r}: consecutive needs a number of tasks from 1 to {len(c)}, as consecutive:2."
            )
        of = c * int(count) // len(c)
    elif name == "superclass":
        if task.superclass is None:
            raise BadInput("tasks='superclass': this data set has no superclasses; cifar100 has.")
        if len(task.superclass) != len(c):
            raise BadInput(f"tasks='superclass': the map has {len(task.superclass)} entries for {len(c)} classes.")
        of = np.unique(task.superclass, return_inverse=True)[1]
    else:
        of = c if name == "class" else 0 * c
    member = np.arange(of.max() + 1)[:, None] == of
    return Branches(of, member, (member.sum(1) == 1) & (len(c) > 1))


def task_losses(b: Branches, z: Array, y: Array, mask: Array) -> tuple[Array, Array]:
    """The loss of every task on one batch (Eq. 3; which samples enter: see the Note of `pfedc`).

    Args:
      z: logits [B, C]; y: labels [B]; mask: [B] bool.

    Returns:
      losses [T], and whether the batch has a sample that the task can learn from, [T] bool.
    """
    hit = jax.nn.one_hot(y, z.shape[1], dtype=bool)
    bce = losses.sigmoid_bce(z, hit) @ b.member.T.astype(z.dtype)  # [B, T], of use where a group is one class
    label = jnp.take_along_axis(z, y[:, None], axis=1)  # [B, 1]
    ce = jax.nn.logsumexp(z[:, None, :], axis=-1, where=b.member[None]) - label  # [B, T], of use for the label's group
    rows = samples(b, y, mask)
    count = jnp.sum(rows, axis=0)
    total = jnp.sum(jnp.where(rows, jnp.where(b.binary[None], bce, ce), 0), axis=0)
    return total / jnp.maximum(count, 1), count > 0


def samples(b: Branches, y: Array, mask: Array) -> Array:
    """Which samples a task looks at, [B, T] bool: all if it is binary, else those with a label in its group."""
    inside = jnp.asarray(b.of)[y][:, None] == np.arange(len(b.member))[None]
    return (inside | b.binary[None]) & mask[:, None]


def scores(b: Branches, z: Array, y: Array, mask: Array, c: Client) -> Scores:
    """The metrics of logits [B, C] (26.5): `acc` and `acc_present` as every method, and the tasks' own.

    `acc_groups` is the argmax over the classes of the client's groups; `task_acc` the accuracy of each task it holds
    (yes or no on all samples, or within the group given the group); `task_bal` (TPR + TNR) / 2 of its binary tasks;
    `recall_macro` the mean recall of `acc_present`'s predictions; `*_trivial` what always saying no, or always the
    client's majority class, scores on the same samples.
    """
    counts = c.class_counts
    held = b.member @ counts > 0  # [T]
    hit = jax.nn.one_hot(y, z.shape[1], dtype=bool) & mask[:, None]
    rows = samples(b, y, mask) & held[None]  # [B, T]
    truth, yes = hit @ b.member.T, (z > 0) @ b.member.T  # [B, T], of use where binary

    def best(allowed: Array) -> Array:
        return jnp.argmax(jnp.where(trees.align(allowed, 2), z, -jnp.inf), axis=-1) == y

    right = jnp.where(b.binary[None], yes == truth, best(jnp.asarray(b.member)[jnp.asarray(b.of)[y]])[:, None])
    majority = jnp.argmax(jnp.where(b.member, counts[None], -1), axis=-1)  # [T]
    lazy = jnp.where(b.binary[None], ~truth, y[:, None] == majority[None])
    split = jnp.stack([rows & truth, rows & ~truth], axis=-1) & b.binary[None, :, None]  # [B, T, 2]
    always = y == jnp.argmax(counts)
    n, per_task, per_class = jnp.sum(mask), jnp.sum(rows, axis=0), jnp.sum(hit, axis=0)
    return evaluate.classification(z, y, mask, c) | {
        "acc_groups": (jnp.sum(best(held[b.of]) & mask), n),
        "acc_trivial": (jnp.sum(always & mask), n),
        "task_acc": (jnp.sum(right & rows, axis=0), per_task),
        "task_acc_trivial": (jnp.sum(lazy & rows, axis=0), per_task),
        "task_bal": (jnp.sum(split & right[..., None], axis=0), jnp.sum(split, axis=0)),
        "task_bal_trivial": (jnp.sum(split & lazy[..., None], axis=0), jnp.sum(split, axis=0)),
        "recall_macro": (jnp.sum(hit & best(counts > 0)[:, None], axis=0), per_class),
        "recall_trivial": (jnp.sum(hit & always[:, None], axis=0), per_class),
    }
