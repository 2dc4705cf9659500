"""Federations: a data set and a partition as the device arrays of a jitted round."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.datasets import Dataset, check_inputs, checked, label_type
from fedjax_pfl.data.partition import Partition, checked as checked_rows, class_counts
from fedjax_pfl.types import Examples, Federation, Subset

ROOM = (1, 0, 1)  # least widths in train, val and test


def federate(
    dataset: Dataset,
    partition: Partition,
    room: Sequence[int] = ROOM,
    public: Dataset | None = None,
) -> Federation:
    """Puts the examples on the device once, and the row numbers of the clients.

    Args:
      dataset: n examples; uint8 images stay uint8.
      partition: rows of N clients; their order is kept, so any tail is a random
        holdout.
      room: least widths of `index` in train, val and test. Partitions of equal widths
        share a compiled program; nothing else depends on it.
      public: data set of the public pool, whose labels are not used; None: no pool.

    Returns:
      a Federation whose `val.index` may be [N, 0]. Widths are rounded up by at most an
      eighth, so that most seeds of a partition have equal ones.

    Raises:
      InputError: a client lacks training or test examples, a row is out of range, or
        one is there more than once (test examples may be those of several clients).
    """
    checked(dataset)
    if public is not None:
        check_inputs(public)
    partition = checked_rows("partition", partition, dataset)
    pool = None if public is None else _examples(public)
    return _federation(dataset, partition, room, _examples(dataset), pool)


def _examples(dataset: Dataset) -> Examples:
    y = jnp.asarray(dataset.y, label_type(dataset.y))
    return Examples(jnp.asarray(dataset.x), y)


def others(
    federation: Federation,
    dataset: Dataset,
    partition: Partition,
    room: Sequence[int] = ROOM,
) -> Federation:
    """Returns the federation of other clients over the same device arrays; arguments as
    of `federate`."""
    partition = checked_rows("partition", partition, dataset)
    return _federation(dataset, partition, room, federation.examples, federation.public)


def _federation(
    dataset: Dataset,
    partition: Partition,
    room: Sequence[int],
    examples: Examples,
    public: Examples | None,
) -> Federation:
    train, val, test = room
    return Federation(
        examples=examples,
        train=_rows(partition.train, partition.train_sizes, train),
        val=_rows(partition.val, partition.val_sizes, val),
        test=_rows(partition.test, partition.test_sizes, test),
        class_counts=jnp.asarray(class_counts(partition, dataset)),
        public=public,
    )


def _rows(index: np.ndarray, sizes: np.ndarray, least_width: int) -> Subset:
    width = max(index.shape[1], least_width)
    unit = 2 ** max(width.bit_length() - 4, 0)
    missing = -(-width // unit) * unit - index.shape[1]
    return Subset(
        jnp.asarray(np.pad(index, ((0, 0), (0, missing)))), jnp.asarray(sizes)
    )
