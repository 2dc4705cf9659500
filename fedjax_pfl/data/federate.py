"""From a data set and a partition on the host to the one big argument of a jitted
round."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.datasets import Dataset, check_inputs, checked
from fedjax_pfl.data.partition import Partition, checked as checked_rows, class_counts
from fedjax_pfl.types import Examples, Federation, Subset

ROOM = (1, 0, 1)  # of a client in train, val and test, at least


def federate(
    dataset: Dataset,
    partition: Partition,
    room: Sequence[int] = ROOM,
    public: Dataset | None = None,
) -> Federation:
    """Puts the examples once on the device, and the clients' rows beside them.

    Args:
      dataset: n examples; uint8 images stay uint8.
      partition: rows of N clients; their order is kept, so any tail is a random
        holdout.
      room: the least widths of `index` in train, val and test: partitions of which all
        have room share a compiled program, and nothing else depends on it.
      public: whose examples are the public pool, each with y = -1 if they have no
        labels; None: no pool.

    Returns:
      a Federation whose `val.index` may be [N, 0]. Widths are rounded up by at most an
      eighth, so that most seeds of a partition have the same.

    Raises:
      InputError: a client lacks training or test examples, a row is out of range, or
        one is there more than once (test examples may be those of several clients).
    """
    checked(dataset)
    if public is not None:
        public_classes(public)
    partition = checked_rows("partition", partition, dataset)
    examples = Examples(jnp.asarray(dataset.x), jnp.asarray(dataset.y, jnp.int32))
    pool = (
        None
        if public is None
        else Examples(jnp.asarray(public.x), jnp.asarray(public.y, jnp.int32))
    )
    return _federation(dataset, partition, room, examples, pool)


def public_classes(public: Dataset) -> int:
    """Returns the number of a public pool's classes; 0 if it has no labels, which is
    every y -1.

    Raises:
      InputError: as of `checked`.
    """
    check_inputs(public)
    if not np.array_equal(public.y, np.full(len(public.x), -1)):
        return checked(public).num_classes
    return 0


def others(
    federation: Federation,
    dataset: Dataset,
    partition: Partition,
    room: Sequence[int] = ROOM,
) -> Federation:
    """The federation of other clients over the same examples, which stay where they
    are; arguments as of `federate`."""
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
