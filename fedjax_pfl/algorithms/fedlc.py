"""FedLC: FedAvg whose clients subtract a margin from the logits of their rare classes
in training.

Reference: Zhang et al., Federated learning with label distribution skew via logits
calibration (ICML 2022).
"""

from typing import Annotated

import jax.numpy as jnp
from annotated_types import Ge

from fedjax_pfl import averaging, local_training, losses
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.types import Array, Method, Task, Update


def margin(class_counts: Array) -> Array:
    """Returns n_c^(-1/4) [C] of the class counts n [C]; 1e9 for a class without
    examples."""
    count = jnp.maximum(class_counts, 1).astype(jnp.float32)
    return jnp.where(class_counts > 0, count**-0.25, 1e9)


@register("fedlc")
def fedlc(task: Task, *, tau: Annotated[float, Ge(0)] = 1.0) -> Method:
    """Minimises the cross entropy of the logits z_c - tau n_c^(-1/4), n_c the client's
    examples of class c.

    Args:
      tau: weight of the margins (τ) in [0, inf); 1 as in PFLlib and FL-bench. With 0 it
        is FedAvg.

    Note:
      A class without examples on the client takes no part in its softmax, the limit
      n -> 0, unless tau is 0. The softmax includes the label's own class, as in both
      libraries. The paper's loss has only the other classes in its denominator, and so
      no lower bound. PFLlib takes the counts of all clients, and so one margin for all;
      here, as in the paper, they are the client's.
    """
    sgd, split = local_training.bind(task), averaging.split(task)

    def client(c, server, own):
        def loss(w, batch, key):
            z, stats = c.model.apply(w, batch.x, mask=batch.mask, train=True, key=key)
            z = z - tau * margin(c.class_counts)[None]
            return losses.of(task)(z, batch.y, batch.mask), stats

        w, value = sgd(c, split.receive(server, own), loss=loss)
        upload, own = split.send(w)
        return Update(upload, own, averaging.predictor(c.model, w), value)

    def predict(server, own, c):
        return averaging.predictor(c.model, split.receive(server, own))

    averages = averaging.BODY_AND_HEAD
    return averaging.from_client(split.init, client, predict, averages=averages)
