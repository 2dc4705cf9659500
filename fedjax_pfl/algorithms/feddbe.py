"""FedDBE: FedAvg whose clients keep a vector that they add to the features, and whose
mean features are drawn to a common mean.

Reference: Zhang et al., Eliminating domain bias for federated learning in
representation space (NeurIPS 2023), Algorithm 1; authors' code: TsingZ0/DBE.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, local_training, losses, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.types import Method, State, Task, Update


@register("feddbe", targets=True)
def feddbe(
    task: Task,
    *,
    kappa: Annotated[float, Ge(0)] = 50.0,
    momentum: Annotated[float, Interval(ge=0, le=1)] = 1.0,
) -> Method:
    """Trains the model on features h + z_i, z_i the client's vector, with the penalty
    kappa/2 mean((m - m^g)^2).

    m [K] is the running mean of the client's features h during local training, m <- (1
    - momentum) m + momentum mean(h), and m^g the mean of the clients' m in the
    initialisation round.

    Args:
      kappa: weight of the penalty (κ) in [0, inf); 50 as in the authors' script.
      momentum: weight of a batch's mean (μ) in [0, 1]; 1 as in the authors' script.

    Note:
      The first round in which clients train is the initialisation: there z_i = 0 and
      there is no penalty, as in FedAvg. Its models are averaged; the authors' code has
      one further round for it, of all clients, and discards the models. The gradient of
      m is that of the last batch's share, and 1/2 and the mean over the features are
      those of the authors' code.
    """
    model, sgd = task.model, local_training.bind(task)
    width = model.num_features

    def start(key):
        return model.init(key) | {"z": jnp.zeros(width, jnp.float32)}

    shapes = jax.eval_shape(start, jax.random.key(0))
    split = averaging.split(task, ("z",), variables=shapes)

    def init(key):
        shared, own = split.send(start(key))
        server = {"w": shared, "mean": jnp.zeros(width), "known": jnp.bool(False)}
        return State(server, trees.replicate(own, task.num_clients))

    def predictor(w):
        def predict(x, mask):
            h, _ = model.features(w, x, mask=mask, train=False)
            return model.head(w["head"], h + w["z"][None])

        return predict

    def client(c, server, own):
        known = server["known"]

        def loss(w, batch, key):
            running = w["stats"]
            w = w | {"stats": running["model"]}
            h, stats = model.features(w, batch.x, mask=batch.mask, train=True, key=key)
            weight = batch.mask / jnp.maximum(jnp.sum(batch.mask), 1)
            old = jax.lax.stop_gradient(running["mean"])
            mean = (1 - momentum) * old + momentum * (weight @ h)
            z = model.head(w["head"], h + jnp.where(known, w["z"], 0)[None])
            value = losses.of(task)(z, batch.y, batch.mask)
            gap = jnp.mean((mean - server["mean"]) ** 2) / 2
            value += kappa * jnp.where(known, gap, 0)
            return value, {"model": stats, "mean": mean.astype(old.dtype)}

        w = split.receive(server["w"], own)
        w["stats"] = {"model": w["stats"], "mean": jnp.zeros(width)}
        w, value = sgd(c, w, loss=loss, train=("body", "head", "z"))
        mean, w = w["stats"]["mean"], w | {"stats": w["stats"]["model"]}
        shared, own = split.send(w)
        upload = {"w": shared, "mean": mean}
        return Update(upload, own, predictor(w), value)

    def update(key, server, mean, mass):
        known = server["known"]
        center = jnp.where(known, server["mean"], mean["mean"])
        here = known | (mass > 0)
        return {"w": mean["w"], "mean": center, "known": here}

    def predict(server, own, c):
        return predictor(split.receive(server["w"], own))

    return averaging.from_client(
        init,
        client,
        predict,
        default=lambda server: {"w": server["w"], "mean": server["mean"]},
        update=update,
        averages=("w",),
    )
