"""Task maps: which group of classes each task of a classifier owns, read from a name or
a list (pFedC, 26.1).

A group of one class is a yes-or-no question about every sample. A larger group is by
its head: group_softmax, a softmax over the samples whose label is in it; group_reject,
one over all samples with the further answer "none of these"; group_binary, the question
whether the label is in it at all. Tasks but those of group_softmax are open: they see
every sample, and one of their answers is no.
"""

import re
from typing import NamedTuple

import numpy as np

from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.types import Task

HEADS = ("group_softmax", "group_reject", "group_binary")
MAPS = ("class", "single", "consecutive", "superclass", "map")


class Branches(NamedTuple):
    """The task map, as host constants. A head has L logits, each of one task: columns
    [B, L]."""

    of: np.ndarray  # [C] int, the task of each class (tau)
    member: np.ndarray  # [T, C] bool, the classes of each task (G_t)
    # [T] bool: a group of one class is a yes-or-no task on all samples
    binary: np.ndarray
    head: str  # of larger groups, one of HEADS
    # [L] int, the task of each logit: of the classes, then the reject logits; or one a
    # task
    column: np.ndarray

    @property
    def open(self) -> np.ndarray:
        """Returns the tasks that see all samples and may answer no, [T] bool."""
        return self.binary | (self.head != "group_softmax")

    @property
    def owns(self) -> np.ndarray:
        """Returns the logits of each task, [T, L] bool."""
        return np.asarray(np.arange(len(self.member))[:, None] == self.column)


def branches(task: Task, tasks: str, head: str = "group_softmax") -> Branches:
    """Reads a task map: a name of `MAPS`, or the task of each class as map:0,0,1."""
    choose("head", head, HEADS)
    of = _tasks_of_classes(task, tasks)
    member = np.arange(of.max() + 1)[:, None] == of
    binary = (member.sum(1) == 1) & (len(of) > 1)
    if head == "group_binary" and len(member) == 1:
        raise InputError(
            "head='group_binary' asks whether a label is in the group: it needs tasks "
            "other than 'single'."
        )
    columns = {
        "group_softmax": of,
        "group_reject": np.append(of, np.flatnonzero(~binary)),
        "group_binary": np.arange(len(member)),
    }
    return Branches(of, member, binary, head, columns[head])


def _tasks_of_classes(task: Task, tasks: str) -> np.ndarray:
    """Returns tau [C], the task of each class, by a map's name."""
    name, _, value = tasks.partition(":")
    choose("tasks", name, MAPS)
    c = np.arange(task.num_classes)
    if name == "consecutive":
        if not value.isdecimal() or not 1 <= int(value) <= len(c):
            raise InputError(
                f"tasks={tasks!r}: consecutive needs a number of tasks from 1 to "
                f"{len(c)}, as consecutive:2."
            )
        return c * int(value) // len(c)
    if name == "superclass":
        if task.superclass is None:
            raise InputError(
                "tasks='superclass': this data set has no superclasses; cifar100 has."
            )
        if len(task.superclass) != len(c):
            raise InputError(
                f"tasks='superclass': the map has {len(task.superclass)} entries for "
                f"{len(c)} classes."
            )
        return np.unique(task.superclass, return_inverse=True)[1]
    if name == "map":
        return _checked_map(value, len(c))
    return c if name == "class" else 0 * c


def _checked_map(value: str, num_classes: int) -> np.ndarray:
    """Reads what follows map: as the task of each class."""
    words = value.split(",")
    if not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        raise InputError(
            f"tasks='map:{value[:40]}': write the task of each class as whole numbers "
            "from 0, as map:0,0,1."
        )
    of = np.array([int(word) for word in words])
    if len(of) != num_classes:
        raise InputError(
            f"The task map has {len(of)} entries for {num_classes} classes: write the "
            "task of each class."
        )
    missing = np.setdiff1d(np.arange(of.max()), of)
    if missing.size:
        raise InputError(
            f"The task map has a task {of.max()} but no class of task {missing[0]}: "
            "leave no number out."
        )
    return of
