"""From a data set and a partition on the host to the one big argument of a jitted round."""

import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.partition import Partition, class_counts
from fedjax_pfl.data.sources import Dataset
from fedjax_pfl.types import Examples, Federation, Rows


def federate(dataset: Dataset, partition: Partition) -> Federation:
    """Puts the examples once on the device, and the clients' rows beside them.

    Args:
      dataset: n examples; uint8 images stay uint8.
      partition: rows of N clients; their order is kept, so any tail is a random holdout.

    Returns:
      a Federation whose `train.index` and `test.index` are at least one wide; `val.index` may be [N, 0]. Widths are
      rounded up by at most an eighth, so that most seeds of a partition have the same and share a compiled program.
    """
    return Federation(
        examples=Examples(jnp.asarray(dataset.x), jnp.asarray(dataset.y)),
        train=_rows(partition.train, partition.train_sizes, 1),
        val=_rows(partition.val, partition.val_sizes, 0),
        test=_rows(partition.test, partition.test_sizes, 1),
        class_counts=jnp.asarray(class_counts(partition, dataset)),
    )


def _rows(index: np.ndarray, sizes: np.ndarray, least_width: int) -> Rows:
    width = max(index.shape[1], least_width)
    unit = 2 ** max(width.bit_length() - 4, 0)
    missing = -(-width // unit) * unit - index.shape[1]
    return Rows(jnp.asarray(np.pad(index, ((0, 0), (0, missing)))), jnp.asarray(sizes))
