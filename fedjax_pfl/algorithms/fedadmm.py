"""FedADMM: clients keep a model and dual variables of the constraint that it is the
global one.

Reference: Gong et al., FedADMM: a robust federated deep learning framework with
adaptivity to system heterogeneity (ICDE 2022), Algorithm 1; authors' code:
YonghaiGong/FedADMM.
"""

import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt

from fedjax_pfl import averaging, local_training, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.errors import check
from fedjax_pfl.types import Method, State, Task, Update

LEAST = 0.1  # rho where local training starts from the client's own model


@register("fedadmm", targets=True, trainings=1)
def fedadmm(
    task: Task,
    *,
    rho: Annotated[float, Gt(0)] | None = None,
    server_lr: Annotated[float, Ge(0)] = 1.0,
    start: Literal["server", "client"] = "server",
) -> Method:
    """Minimises f_i(w) + <y_i, w - theta> + rho/2 ||w - theta||^2, then adds rho (w_i -
    theta) to y_i.

    A client sends the change of w + y_i / rho in its local work, and the server adds
    the mean change times `server_lr` to theta.

    Args:
      rho: the penalty (ρ) in (0, inf); default 0.01 as in the authors' code. With
        start=client it is at least 0.1, the default there: below, the dual variables
        outweigh the shared model.
      server_lr: the server's step (η) in [0, inf); 1 as in the authors' code, where it
        is 0.5 from round 60.
      start: where local training begins, at theta (server, as in the authors' code) or
        at the client's last w_i (client, as in the paper).

    Note:
      From theta the change is 2 (w - theta), as in the authors' code. The clients'
      local work is the task's; the authors draw the epochs at random and have momentum
      0.5. The mean is uniform over the clients with training examples, and one without
      a batch sends no change. Running statistics are averaged. The reported loss is
      f_i.
    """
    sgd, split = local_training.bind(task), averaging.split(task)
    own_start = start == "client"
    if rho is None:
        rho = LEAST if own_start else 0.01
    if own_start:
        check("fedadmm: rho", rho, LEAST, math.inf, why="start=client needs it")

    def init(key):
        w = task.model.init(key)
        shared, own = split.send(w)
        zero = jax.tree.map(jnp.zeros_like, params(w))
        rows = {"y": zero, "own": own} | ({"w": params(w)} if own_start else {})
        return State({"w": shared}, trees.replicate(rows, task.num_clients))

    def client(c, server, row):
        received = split.receive(server["w"], row["own"])
        theta = params(received)
        pull = trees.proximal(theta, rho)
        begin = row["w"] if own_start else theta
        gradient = lambda w: trees.add(row["y"], pull(w))
        w, value = sgd(c, received | begin, extra=gradient)
        # y_i+ = y_i + rho (w_i - theta).
        learned = local_training.count(c.train, task) > 0
        y = optax.tree.cast_like(trees.add(row["y"], pull(params(w))), row["y"])
        y = trees.choose(learned, y, row["y"])
        change = jax.tree.map(
            lambda new, old, y, before: new - old + (y - before) / rho,
            params(w),
            begin,
            y,
            row["y"],
        )
        shared, own = split.send(w)
        upload = {**shared, **optax.tree.cast_like(change, params(w))}
        new = {"y": y, "own": own} | ({"w": params(w)} if own_start else {})
        return Update(upload, new, predictor(c.model, w), value)

    def default(server):
        return server["w"] | jax.tree.map(jnp.zeros_like, params(server["w"]))

    def update(key, server, mean, mass):
        old = params(server["w"])
        new = jax.tree.map(lambda w, d: w + server_lr * d, old, params(mean))
        return {"w": mean | optax.tree.cast_like(new, old)}

    def predict(server, row, c):
        return predictor(c.model, split.receive(server["w"], row["own"]))

    return averaging.from_client(
        init,
        client,
        predict,
        weight=lambda cohort: cohort.trained,
        default=default,
        update=update,
    )
