"""FedDyn: each client's loss has a linear and a proximal term that make the clients'
optima agree with the global one.

Reference: Acar et al., Federated learning based on dynamic regularization (ICLR 2021),
Algorithm 1; authors' code: alpemreacar/FedDyn.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Gt

from fedjax_pfl import averaging, local_training, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import Method, State, Task, Update


@register("feddyn", targets=True, trainings=1)
def feddyn(task: Task, *, alpha: Annotated[float, Gt(0)] = 0.01) -> Method:
    """Minimises L_k(w) - <g_k, w> + alpha/2 ||w - w^t||^2 on each client.

    A client then updates its estimate g_k of grad L_k to g_k - alpha (w_k - w^t). The
    server updates h to h - alpha/N sum_k (w_k - w^t), and w^(t+1) is the mean of the
    w_k minus h / alpha.

    Args:
      alpha: weight of the dynamic regulariser (α) in (0, inf); 0.01, of the paper's
        grid 0.1, 0.01, 0.001.

    Note:
      Models are averaged uniformly over the clients with training examples, as in the
      paper. The authors' code divides alpha by a client's relative size, and clips
      gradients at 10. PFLlib's proximal term is the norm, not its square; here it is
      the paper's. Running statistics are averaged as the models are. The reported loss
      is L_k.
    """
    sgd, split = local_training.bind(task), averaging.split(task)

    def init(key):
        w = task.model.init(key)
        shared, own = split.send(w)
        zero = jax.tree.map(jnp.zeros_like, params(w))
        rows = trees.replicate({"g": zero, "own": own}, task.num_clients)
        return State({"w": shared, "h": zero}, rows)

    def client(c, server, row):
        received = split.receive(server["w"], row["own"])
        anchor = trees.proximal(params(received), alpha)

        # The gradient of the linear and of the proximal term.
        def extra(w):
            return jax.tree.map(jnp.subtract, anchor(w), row["g"])

        w, value = sgd(c, received, extra=extra)
        g = jax.tree.map(jnp.subtract, row["g"], anchor(params(w)))
        upload, own = split.send(w)
        row = {"g": optax.tree.cast_like(g, row["g"]), "own": own}
        return Update(upload, row, predictor(c.model, w), value)

    def update(key, server, mean, mass):
        old, h = params(server["w"]), server["h"]
        part = mass / task.num_clients
        new = jax.tree.map(
            lambda h, m, w: h - alpha * part * (m - w), h, params(mean), old
        )
        w = jax.tree.map(lambda m, h: m - h / alpha, params(mean), new)
        moved = optax.tree.cast_like(
            {"w": {**mean, **w}, "h": new}, {"w": mean, "h": h}
        )
        return trees.choose(mass > 0, moved, server)

    def predict(server, row, c):
        return predictor(c.model, split.receive(server["w"], row["own"]))

    return averaging.from_client(
        init,
        client,
        predict,
        weight=lambda cohort: cohort.trained,
        default=lambda server: server["w"],
        update=update,
    )
