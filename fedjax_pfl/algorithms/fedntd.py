"""FedNTD: FedAvg that distils the global model's predictions for the classes that are
not the label's.

Reference: Lee et al., Preservation of the global knowledge by not-true distillation in
federated learning (NeurIPS 2022); authors' code: Lee-Gihun/FedNTD.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt
from chex import Numeric

from fedjax_pfl import averaging, local_training, losses
from fedjax_pfl.algorithms.registry import READS_LABELS, register
from fedjax_pfl.types import Array, Method, Task, Update


def not_true(logits: Array, y: Array, tau: Numeric) -> Array:
    """Returns the log softmax [B, C] of logits / tau over the classes other than the
    labels y [B]; 0 at the label."""
    label = jax.nn.one_hot(y, logits.shape[1], dtype=bool)
    log_p = jax.nn.log_softmax(jnp.where(label, -jnp.inf, logits / tau))
    return jnp.where(label, 0, log_p)


@register("fedntd", excludes={"mix": READS_LABELS}, trainings=1)
def fedntd(
    task: Task,
    *,
    beta: Annotated[float, Ge(0)] = 1.0,
    tau: Annotated[float, Gt(0)] = 1.0,
) -> Method:
    """Adds beta KL(q^g || q) to the cross entropy, the softmax q and the global
    model's q^g taken at temperature tau without the label's class.

    Args:
      beta: weight of the distillation (β) in [0, inf); 1 as in the authors'
        configuration. With 0 it is FedAvg.
      tau: temperature (τ) in (0, inf); 1 as there.

    Note:
      The divergence is multiplied by tau^2, as in the authors' code. The global model
      uses its running statistics.
    """
    sgd, split = local_training.bind(task), averaging.split(task)

    def client(c, server, own):
        received = split.receive(server, own)
        taught = averaging.predictor(c.model, received)

        def loss(w, batch, key):
            z, stats = c.model.apply(w, batch.x, mask=batch.mask, train=True, key=key)
            teacher = not_true(taught(batch.x, batch.mask), batch.y, tau)
            p = jnp.exp(teacher) * (1 - jax.nn.one_hot(batch.y, z.shape[1]))
            gap = jnp.sum(p * (teacher - not_true(z, batch.y, tau)), axis=1)
            gap = tau**2 * losses.masked_mean(gap, batch.mask)
            return losses.of(task)(z, batch.y, batch.mask) + beta * gap, stats

        w, value = sgd(c, received, loss=loss)
        upload, own = split.send(w)
        return Update(upload, own, averaging.predictor(c.model, w), value)

    def predict(server, own, c):
        return averaging.predictor(c.model, split.receive(server, own))

    averages = averaging.BODY_AND_HEAD
    return averaging.from_client(split.init, client, predict, averages=averages)
