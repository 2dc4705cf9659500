"""FedSR: FedAvg of a stochastic representation whose norm and information about the
input are limited.

Reference: Nguyen et al., FedSR: a simple and effective domain generalization method for
federated learning (NeurIPS 2022); authors' code: atuannguyen/FedSR.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, keys, local_training, losses, models, trees
from fedjax_pfl.algorithms.registry import READS_LABELS, register
from fedjax_pfl.models import layers
from fedjax_pfl.types import Array, Method, PyTree, State, Task, Update

PARTS = ("body", "head", "map", "prior")
TINY = 1e-12


class Draw(keys.Stream):
    """Streams below the keys of the initial state, of a step and of a client."""

    MAP = 50, "the map of features to means and deviations"
    NOISE = 51, "samples of the representation"


def divergence(mean: Array, sigma: Array, prior: PyTree, y: Array) -> Array:
    """Returns KL(N(C m, (C s)^2) || r(z | y)) [B] of means m and deviations s [B, K],
    r_y = N(prior["mean"]_y, softplus(prior["sigma"])_y^2) and C = prior["scale"]."""
    r_mean, r = prior["mean"][y], jax.nn.softplus(prior["sigma"])[y]
    mean, sigma = mean * prior["scale"], sigma * prior["scale"]
    gap = (sigma**2 + (mean - r_mean) ** 2) / (2 * r**2)
    return jnp.sum(jnp.log(r) - jnp.log(sigma) + gap - 0.5, axis=1)


@register("fedsr", excludes={"mix": READS_LABELS}, trainings=1)
def fedsr(
    task: Task,
    *,
    l2r: Annotated[float, Ge(0)] = 0.01,
    cmi: Annotated[float, Ge(0)] = 5e-4,
    samples: Annotated[int, Interval(ge=1, le=1000)] = 20,
) -> Method:
    """Minimises CE(head(z), y) + l2r E||z|| + cmi KL(p(z | x) || r(z | y)) for z ~ N(m,
    s^2), (m, softplus^-1(s)) a linear map of the features.

    Body, map and head are averaged; the client keeps its r(z | y).

    Args:
      l2r: weight of the norm in [0, inf); 0.01 as in the authors' code.
      cmi: weight of the divergence in [0, inf); 0.0005 as there.
      samples: of z whose predictions are averaged, in [1, 1000]; 20 as there.

    Note:
      The norm is not squared, as in the authors' code. z has as many entries as the
      features, of which the map is the last layer, as there. The mean over the clients
      is uniform, as there. The outputs are logarithms of probabilities.
    """
    model, sgd, width = task.model, local_training.bind(task), task.model.num_features
    network = models.network(lambda rngs: layers.linear(width, 2 * width, rngs))

    def start(key):
        shape = (task.num_classes, width)
        prior = {
            "mean": jnp.zeros(shape, jnp.float32),
            "sigma": jnp.ones(shape, jnp.float32),
            "scale": jnp.ones((), jnp.float32),
        }
        theta = network.init(keys.fold(key, Draw.MAP))["params"]
        return model.init(key) | {"map": theta, "prior": prior}

    shapes = jax.eval_shape(start, jax.random.key(0))
    split = averaging.split(task, ("prior",), variables=shapes)

    def init(key):
        shared, own = split.send(start(key))
        return State(shared, trees.replicate(own, task.num_clients))

    def gaussian(theta, h):
        out, _ = network.apply({"params": theta, "stats": {}}, h)
        mean, sigma = jnp.split(out, 2, axis=1)
        return mean, jax.nn.softplus(sigma)

    def loss(w, batch, key):
        h, stats = model.features(w, batch.x, mask=batch.mask, train=True, key=key)
        mean, sigma = gaussian(w["map"], h)
        noise = jax.random.normal(keys.fold(key, Draw.NOISE), mean.shape, jnp.float32)
        z = mean + sigma * noise
        norm = jnp.sqrt(jnp.maximum(jnp.sum(z * z, axis=1), TINY))
        value = losses.of(task)(model.head(w["head"], z), batch.y, batch.mask)
        value += l2r * losses.masked_mean(norm, batch.mask)
        gap = divergence(mean, sigma, w["prior"], batch.y)
        return value + cmi * losses.masked_mean(gap, batch.mask), stats

    def predictor(c, w):
        def predict(x, mask):
            h, _ = model.features(w, x, mask=mask, train=False)
            mean, sigma = gaussian(w["map"], h)

            def one(i):
                key = jax.random.fold_in(keys.fold(c.key, Draw.NOISE), i)
                noise = jax.random.normal(key, mean.shape, jnp.float32)
                return jax.nn.softmax(model.head(w["head"], mean + sigma * noise))

            total = jax.lax.fori_loop(
                1, samples, lambda i, total: total + one(i), one(0)
            )
            return jnp.log(jnp.maximum(total / samples, 1e-30))

        return predict

    def client(c, server, own):
        w, value = sgd(c, split.receive(server, own), loss=loss, train=PARTS)
        upload, own = split.send(w)
        return Update(upload, own, predictor(c, w), value)

    def predict(server, own, c):
        return predictor(c, split.receive(server, own))

    return averaging.from_client(
        init,
        client,
        predict,
        weight=lambda cohort: cohort.trained,
        averages=("body", "head", "map"),
    )
