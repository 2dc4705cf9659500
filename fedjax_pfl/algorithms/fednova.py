"""FedNova: FedAvg of changes per local step, so that clients with more steps do not
pull the global model to their own optimum.

Reference: Wang et al., Tackling the objective inconsistency problem in heterogeneous
federated optimization (NeurIPS 2020); authors' code: JYWa/FedNova.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import averaging, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import PLAIN_SGD, register
from fedjax_pfl.averaging import params
from fedjax_pfl.types import Method, Task, Update


@register("fednova", targets=True, excludes={"optimizer": PLAIN_SGD}, trainings=1)
def fednova(task: Task) -> Method:
    """Moves the global model by the mean number of steps times the mean change per
    step.

    Note:
      Plain SGD, whose normaliser is the number of steps; the paper's forms for momentum
      and proximal terms are not built. Means are weighted by training examples. Running
      statistics are averaged. With equal steps it is FedAvg.
    """
    sgd, split = local_training.bind(task), averaging.split(task)

    def client(c, server, own):
        start = split.receive(server, own)
        w, value = sgd(c, start)
        steps = local_training.count(c.train, task).astype(jnp.float32)
        # d_i = (x - x_i) / tau_i.
        change = jax.tree.map(
            lambda a, b: (a - b) / jnp.maximum(steps, 1), params(start), params(w)
        )
        shared, own = split.send(w)
        upload = shared | {"steps": steps} | optax.tree.cast_like(change, params(w))
        return Update(upload, own, averaging.predictor(c.model, w), value)

    def default(server):
        still = jax.tree.map(jnp.zeros_like, params(server))
        return server | {"steps": jnp.zeros((), jnp.float32)} | still

    def update(key, server, mean, mass):
        # x+ = x - tau_eff sum p_i d_i.
        old = params(server)
        new = jax.tree.map(lambda x, d: x - mean["steps"] * d, old, params(mean))
        rest = {name: mean[name] for name in server}
        return rest | optax.tree.cast_like(new, old)

    def predict(server, own, c):
        return averaging.predictor(c.model, split.receive(server, own))

    def sent(state, cohort, metrics):
        size = trees.size(state.server)
        return traffic.both_ways(cohort, size, size + 1)  # up the number of steps, too

    return averaging.from_client(
        split.init,
        client,
        predict,
        default=default,
        update=update,
        averages=averaging.BODY_AND_HEAD,
        traffic=sent,
    )
