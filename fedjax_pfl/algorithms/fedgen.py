"""FedGen: the server trains a generator of features per class on the clients' heads;
clients train their heads on what it generates, too.

Reference: Zhu et al., Data-free knowledge distillation for heterogeneous federated
learning (ICML 2021), Algorithm 1; authors' code: zhuangdizhu/FedGen.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval
from flax import nnx

from fedjax_pfl import (
    averaging,
    keys,
    local_training,
    losses,
    models,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.models import layers
from fedjax_pfl.types import Array, Method, Own, State, Task, Update


class Draw(keys.Stream):
    """Streams below the keys of the initial state, of the server and of a step."""

    GENERATOR = 50, "the generator"
    LABELS = 51, "labels of generated features"
    NOISE = 52, "noise of generated features"


class Generator(nnx.Module):
    """Features [B, K] of noise and a class, by one hidden layer with batch norm."""

    def __init__(self, inputs: int, hidden: int, width: int, rngs: nnx.Rngs):
        # The batch norm removes a bias, whose gradient would be rounding to Adam.
        self.inner = layers.linear(inputs, hidden, rngs, use_bias=False)
        self.norm = layers.BatchNorm(hidden, rngs=rngs)
        self.outer = layers.linear(hidden, width, rngs)

    def __call__(
        self, x: Array, mask: Array | None = None, train: bool = True
    ) -> Array:
        return self.outer(jax.nn.relu(self.norm(self.inner(x), mask, train)))


@register("fedgen", several_architectures=True)
def fedgen(
    task: Task,
    *,
    alpha: Annotated[float, Ge(0)] = 1.0,
    shared: Literal["model", "head"] = "model",
    noise: Annotated[int, Interval(ge=1, le=10_000)] = 32,
    hidden: Annotated[int, Interval(ge=1, le=100_000)] = 256,
    generator_lr: Annotated[float, Ge(0)] = 0.005,
    server_steps: Annotated[int, Interval(ge=0, le=100_000)] = 100,
) -> Method:
    """Adds alpha CE(head(G(z, y')), y') to the loss of the client; G minimises CE(sum_k
    p_k head_k(G(z, y')), y') at the server.

    Labels y' are drawn in proportion to all clients' training examples, and p_k are
    the shares of the examples.

    Args:
      alpha: weight of the generated features (α) in [0, inf); 1 as in PFLlib. With 0 it
        is FedAvg, with shared=head LG-FedAvg.
      shared: what is averaged, one of model, head (the client keeps its body: for
        clients of several architectures).
      noise: entries of z in [1, 10000], uniform in [0, 1) as in PFLlib (512 there);
        32 as the authors have it for MNIST.
      hidden: width of the generator's hidden layer in [1, 100000]; 256 as the authors
        have it for MNIST.
      generator_lr: step size of Adam for G in [0, inf); 0.005 as in PFLlib.
      server_steps: steps of G per round in [0, 100000]; 100 as in HtFLlib.

    Note:
      The heads must be one linear layer: the mean of their logits is then the logits of
      the mean head, and no client's head is needed by itself. The batch norm of G uses
      the moments of its batch. The authors' term that makes generated features differ
      is not built, as in PFLlib. In the client's loss the generated features are
      constants.
    """
    personal = ("body",) if shared == "head" else ()
    sgd, split = local_training.bind(task), averaging.split(task, personal)
    classes, width, batch = (
        task.num_classes,
        task.models[0].num_features,
        task.batch_size,
    )
    network = models.network(
        lambda rngs: Generator(noise + classes, hidden, width, rngs), bn_stats="batch"
    )
    adam = optax.adam(generator_lr)
    prior = jnp.log(jnp.maximum(jnp.sum(jnp.asarray(task.class_counts), axis=0), 1e-9))
    prior = prior.astype(jnp.float32)

    def generate(net, key):
        # A batch of features [B, K] and their labels [B].
        y = jax.random.categorical(keys.fold(key, Draw.LABELS), prior, shape=(batch,))
        z = jax.random.uniform(keys.fold(key, Draw.NOISE), (batch, noise), jnp.float32)
        x = jnp.concatenate([z, jax.nn.one_hot(y, classes, dtype=jnp.float32)], axis=1)
        mask = jnp.ones(batch, bool)
        w = {"params": net, "stats": {}}
        return network.apply(w, x, mask=mask, train=True)[0], y

    def head_loss(head, h, y):
        z = task.models[0].head(head, h)
        return losses.cross_entropy(z, y, jnp.ones(batch, bool))

    def init(key):
        state = split.init(key)
        averaging.check_linear_head(task.models[0].init(key), "fedgen")
        net = network.init(keys.fold(key, Draw.GENERATOR))["params"]
        return State(
            {"w": state.server, "net": net, "opt": adam.init(net)}, state.clients
        )

    def train(key, head, net, opt):
        def step(i, carry):
            net, opt = carry
            draw = jax.random.fold_in(key, i)
            slope = jax.grad(lambda net: head_loss(head, *generate(net, draw)))(net)
            updates, opt = adam.update(slope, opt, net)
            return optax.tree.cast_like((optax.apply_updates(net, updates), opt), carry)

        with jax.named_scope(local_training.ON_SERVER):
            return jax.lax.fori_loop(0, server_steps, step, (net, opt))

    def client(c, server, own):
        def loss(w, batch, key):
            z, stats = c.model.apply(w, batch.x, mask=batch.mask, train=True, key=key)
            made = jax.lax.stop_gradient(generate(server["net"], key))
            value = losses.of(task)(z, batch.y, batch.mask)
            return value + alpha * head_loss(w["head"], *made), stats

        w, value = sgd(c, split.receive(server["w"], own), loss=loss)
        upload, own = split.send(w, c.architecture)
        return Update(upload, Own(own), predictor(c.model, w), value)

    def update(key, server, mean, mass):
        # The generator is trained on the mean of the heads.
        trained = train(key, mean["head"], server["net"], server["opt"])
        before = server["net"], server["opt"]
        net, opt = trees.choose(mass > 0, trained, before)
        return {"w": mean, "net": net, "opt": opt}

    def predict(server, own, c):
        return predictor(c.model, split.receive(server["w"], own))

    def sent(state, cohort, metrics):
        size = trees.size(state.server["w"])
        down = size + trees.size(state.server["net"])
        return traffic.both_ways(cohort, down, size)

    return averaging.from_client(
        init,
        client,
        predict,
        default=lambda server: server["w"],
        update=update,
        traffic=sent,
    )
