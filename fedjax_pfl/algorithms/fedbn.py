"""FedBN: FedAvg that leaves every batch-norm layer, parameters and running statistics,
with its client.

Reference: Li et al., FedBN: federated learning on non-IID features via local batch
normalization (ICLR 2021); authors' code: med-air/FedBN.
"""

import jax
from absl import logging

from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import partial_averaging, split
from fedjax_pfl.types import Method, Task


@register("fedbn", targets=True)
def fedbn(task: Task) -> Method:
    """Averages all but the batch-norm layers, which are found by module type; equals
    FedAvg where there are none."""
    if not any(jax.tree.leaves(task.model.bn_mask)):
        logging.log_first_n(
            logging.WARNING,
            "fedbn: this model has no batch norm, so FedBN is FedAvg here.",
            1,
        )
    return partial_averaging(task, split(task, batch_norm=True))
