"""GPFL: a conditional valve makes of each feature a generic one, guided by global class
embeddings, and a personalised one for the head.

Reference: Zhang et al., GPFL: simultaneously learning global and personalized feature
information for personalized federated learning (ICCV 2023), Algorithm 1; authors' code:
TsingZ0/GPFL.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge
from flax import nnx

from fedjax_pfl import averaging, keys, local_training, losses, models, trees
from fedjax_pfl.algorithms.registry import READS_LABELS, register
from fedjax_pfl.models import layers
from fedjax_pfl.types import Array, Method, State, Task, Update

PARTS = ("body", "head", "gce", "cov")
TINY = 1e-12


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    EMBEDDING = 50, "the class embeddings"
    VALVE = 51, "the conditional valve"


class Valve(nnx.Module):
    """CoV: relu((gamma + 1) h + beta), gamma and beta functions of the condition, each
    a linear layer, a ReLU and a layer norm."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        norm = lambda: nnx.LayerNorm(
            width, epsilon=1e-5, use_fast_variance=False, rngs=rngs
        )
        self.gamma, self.gamma_norm = layers.linear(width, width, rngs), norm()
        self.beta, self.beta_norm = layers.linear(width, width, rngs), norm()

    def __call__(self, inputs: tuple[Array, Array]) -> Array:
        h, condition = inputs  # [B, K], [1, K]
        gamma = self.gamma_norm(jax.nn.relu(self.gamma(condition)))
        beta = self.beta_norm(jax.nn.relu(self.beta(condition)))
        return jax.nn.relu(h * (gamma + 1) + beta)


def unit(x: Array) -> Array:
    """Returns the rows of x [B, K] at length 1."""
    square = jnp.sum(x * x, axis=1, keepdims=True)
    return x / jnp.sqrt(jnp.maximum(square, TINY))


@register("gpfl", excludes={"mix": READS_LABELS})
def gpfl(
    task: Task,
    *,
    lam: Annotated[float, Ge(0)] = 0.01,
    mu: Annotated[float, Ge(0)] = 0.1,
) -> Method:
    """Minimises CE(head(h^p), y) + CE(cos(h^g, e), y) + lam ||h^g - e_y||, where h^p =
    CoV(h, p_i) and h^g = CoV(h, g).

    The conditions are g = mean_c e_c and p_i = sum_c (n_i^c / n_i) e_c of the received
    class embeddings e (GCE). Body, embeddings and valve (CoV) are averaged, the head
    is kept.

    Args:
      lam: weight of the distance to the received embeddings (λ) in [0, inf); 0.01 as in
        the authors' script.
      mu: weight decay of embeddings and valve (μ) in [0, inf); 0.1 as there.

    Note:
      The distance is the Frobenius norm over the batch, as in the authors' code. Their
      conditions come from the embeddings that the client trained last, zeros at first;
      here, as in the paper, from the received ones.
    """
    model, sgd, width = task.model, local_training.bind(task), task.model.num_features
    valve = models.network(lambda rngs: Valve(width, rngs))

    def start(key):
        shape = (task.num_classes, width)
        draw = keys.fold(key, Start.EMBEDDING)
        gce = jax.random.normal(draw, shape, jnp.float32)
        cov = valve.init(keys.fold(key, Start.VALVE))["params"]
        return model.init(key) | {"gce": gce, "cov": cov}

    shapes = jax.eval_shape(start, jax.random.key(0))
    split = averaging.split(task, ("head",), variables=shapes)

    def init(key):
        shared, own = split.send(start(key))
        return State(shared, trees.replicate(own, task.num_clients))

    def through(w, h, condition):
        inputs = h, condition[None]
        return valve.apply({"params": w["cov"], "stats": {}}, inputs)[0]

    def conditions(c, gce):
        share = c.class_counts / jnp.maximum(jnp.sum(c.class_counts), 1)
        return jnp.mean(gce, axis=0), share @ gce

    def predictor(w, personal):
        def predict(x, mask):
            h, _ = model.features(w, x, mask=mask, train=False)
            return model.head(w["head"], through(w, h, personal))

        return predict

    def client(c, server, own):
        received = split.receive(server, own)
        generic, personal = conditions(c, received["gce"])

        def loss(w, batch, key):
            h, stats = model.features(w, batch.x, mask=batch.mask, train=True, key=key)
            own, common = through(w, h, personal), through(w, h, generic)
            value = losses.of(task)(model.head(w["head"], own), batch.y, batch.mask)
            cosine = unit(common) @ unit(w["gce"]).T
            value += losses.cross_entropy(cosine, batch.y, batch.mask)
            gap = (common - received["gce"][batch.y]) * batch.mask[:, None]
            norm = jnp.sqrt(jnp.maximum(jnp.sum(gap**2), TINY))
            return value + lam * norm, stats

        # Weight decay of the embeddings and the valve.
        def extra(w):
            rate = {"body": 0.0, "head": 0.0, "gce": mu, "cov": mu}
            return {k: jax.tree.map(lambda x, k=k: rate[k] * x, w[k]) for k in w}

        w, value = sgd(c, received, loss=loss, train=PARTS, extra=extra)
        upload, own = split.send(w)
        return Update(upload, own, predictor(w, conditions(c, w["gce"])[1]), value)

    def predict(server, own, c):
        w = split.receive(server, own)
        return predictor(w, conditions(c, w["gce"])[1])

    return averaging.from_client(init, client, predict, averages=("body", "gce", "cov"))
