"""SCAFFOLD: FedAvg whose local steps are corrected by control variates, estimates of
the clients' gradients.

Reference: Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated
learning (ICML 2020), Algorithm 1.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge

from fedjax_pfl import averaging, local_training, trees
from fedjax_pfl.algorithms.registry import PLAIN_SGD, register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import Method, State, Task, Update


@register("scaffold", targets=True, excludes={"optimizer": PLAIN_SGD}, trainings=1)
def scaffold(task: Task, *, server_lr: Annotated[float, Ge(0)] = 1.0) -> Method:
    """Takes local steps along g(y) - c_i + c, and averages the clients' changes of y
    and of their control variates c_i.

    Args:
      server_lr: step of the server (η_g) in [0, inf); 1 as in the paper's experiments
        (FedRep's script uses 0.1).

    Note:
      The new c_i follows from the steps taken (the paper's option II; option I is not
      built). It divides by the learning rate, so c_i estimates a gradient for plain SGD
      only. Models are averaged uniformly over the clients with training examples.
      Running statistics have no control variate and are averaged as the models are. A
      client keeps c_i as it was before any `transform` of uploads.
    """
    sgd, split = local_training.bind(task), averaging.split(task)

    def init(key):
        w = task.model.init(key)
        shared, own = split.send(w)
        zero = jax.tree.map(jnp.zeros_like, params(w))
        rows = trees.replicate({"c": zero, "own": own}, task.num_clients)
        return State({"w": shared, "c": zero}, rows)

    def client(c, server, row):
        # Local steps along g(y) - c_i + c.
        x = split.receive(server["w"], row["own"])
        correction = jax.tree.map(jnp.subtract, server["c"], row["c"])
        y, value = sgd(c, x, extra=lambda _: correction)
        # c_i+ = c_i - c + (x - y) / (K lr).
        count = local_training.count(c.train, task)
        rate = local_training.rate(c.train, task)
        drift = jax.tree.map(jnp.subtract, params(x), params(y))
        new = jax.tree.map(
            lambda d, g: d / (jnp.maximum(count, 1) * rate) - g, drift, correction
        )
        new = trees.choose(count > 0, optax.tree.cast_like(new, row["c"]), row["c"])
        change = jax.tree.map(jnp.subtract, new, row["c"])
        shared, own = split.send(y)
        upload, row = {"w": shared, "c": change}, {"c": new, "own": own}
        return Update(upload, row, predictor(c.model, y), value)

    def default(server):
        return {"w": server["w"], "c": jax.tree.map(jnp.zeros_like, server["c"])}

    def update(key, server, mean, mass):
        new, old, control = params(mean["w"]), params(server["w"]), server["c"]
        moved = trees.lerp(server_lr, new, old)
        w = {**mean["w"], **trees.choose(mass > 0, moved, old)}
        # c moves by |S| / N of the mean change.
        part = mass / task.num_clients
        c = jax.tree.map(lambda c, d: c + part * d, control, mean["c"])
        return {"w": w, "c": optax.tree.cast_like(c, control)}

    def predict(server, row, c):
        return predictor(c.model, split.receive(server["w"], row["own"]))

    return averaging.from_client(
        init,
        client,
        predict,
        weight=lambda cohort: cohort.trained,
        default=default,
        update=update,
        averages=("w",),
    )
