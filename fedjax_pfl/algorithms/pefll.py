"""PeFLL: an embedding network describes a client by its examples, and a hypernetwork
generates the client's model from the description.

Reference: Scott, Zakerinia & Lampert, PeFLL: personalized federated learning by
learning to learn (ICLR 2024), Algorithm 1; authors' code: pefllauthors/PeFLL.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import (
    averaging,
    evaluation,
    keys,
    local_training,
    optimizers,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.hypernetworks import generate, hypernetwork
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.models.layers import uniform
from fedjax_pfl.types import Array, Batch, Method, Model, PyTree, State, Task, Update


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    BODY = 50, "the body of the embedding network"
    OUT = 51, "its last layer"
    HYPER = 52, "the hypernetwork"


class Draw(keys.Stream):
    """Streams below a client's key."""

    EXAMPLES = 50, "the examples that describe it"


def embed(model: Model, phi: PyTree, stats: PyTree, batch: Batch) -> Array:
    """Returns the sum [d] of the embeddings of a batch's valid examples: a linear layer
    of the features h and the class."""
    w = {"body": phi["body"], "stats": stats}
    h, _ = model.features(w, batch.x, mask=batch.mask, train=False)
    classes = phi["out"]["kernel"].shape[0] - h.shape[1]
    joint = jnp.concatenate([h, jax.nn.one_hot(batch.y, classes)], axis=1)
    out = joint @ phi["out"]["kernel"] + phi["out"]["bias"][None]
    return jnp.sum(jnp.where(batch.mask[:, None], out, 0), axis=0)


def normalised(v: Array) -> Array:
    """Returns v [d] with the mean 0 and the variance 1 over its entries; 0 of equal
    ones."""
    centred = v - jnp.mean(v)
    variance = jnp.sum(centred**2) / (len(v) - 1)
    return centred * jax.lax.rsqrt(jnp.where(variance > 0, variance, 1))


@register("pefll")
def pefll(
    task: Task,
    *,
    hyper_lr: Annotated[float, Ge(0)] = 0.0002,
    embedding: Annotated[int, Interval(ge=3, le=10_000)] | None = None,
    hidden: Annotated[int, Interval(ge=1, le=10_000)] = 100,
    hidden_layers: Annotated[int, Interval(ge=0, le=100)] = 3,
    mask_absent: bool = True,
) -> Method:
    """Sends theta = h(v_i; psi), v_i the mean of e(x, y; phi) over a batch of examples,
    gets back how far the client moved it, and takes that change back through both.

    Args:
      hyper_lr: step size of both networks in [0, inf); 0.0002 as in the authors' code.
      embedding: d, entries of v_i, in [3, 10000]; default 1 + N // 4, as in the
        authors' code, and at least 3.
      hidden: width of the hypernetwork in [1, 10000]; 100 as in the authors' code.
      hidden_layers: its hidden layers after the first, in [0, 100]; 3 as in the
        authors' code.
      mask_absent: true or false: sets the logits of classes without examples to 0 in a
        prediction; True as in the authors' code.

    Note:
      The embedding network is a body like the clients' and a linear layer of its
      features and the class; the authors' takes the class as channels of the image. Its
      batch norm has the initial statistics. v_i is normalised over its entries as in
      FL-bench; the authors' code shifts and scales by those of the first v. A
      prediction takes the mean over all training examples. Local work and optimizer are
      the task's; the authors take 50 steps of SGD with momentum. The server's optimizer
      is Adam, and no gradient is clipped. Running statistics are averaged.
    """
    model, split, classes = task.model, averaging.split(task), task.num_classes
    sgd, pass_size = local_training.bind(task), evaluation.pass_size(task.sizes)
    target = params(jax.eval_shape(model.init, jax.random.key(0)))
    width = max(3, 1 + task.num_clients // 4) if embedding is None else embedding
    adam = optimizers.in_param_types(optax.adam)(hyper_lr)

    def init(key):
        inputs, draw = model.num_features + classes, uniform
        key_kernel, key_bias = jax.random.split(keys.fold(key, Start.OUT))
        body = model.init(keys.fold(key, Start.BODY))
        out = {
            "kernel": draw(inputs)(key_kernel, (inputs, width)),
            "bias": draw(inputs)(key_bias, (width,)),
        }
        key_hyper = keys.fold(key, Start.HYPER)
        psi = hypernetwork(key_hyper, width, hidden, hidden_layers, target)
        shared, own = split.send(model.init(key))
        networks = {"phi": {"body": body["body"], "out": out}, "psi": psi}
        server = {
            "networks": networks,
            "fixed": body["stats"],
            "adam": adam.init(networks),
            "stats": shared["stats"],
        }
        return State(server, trees.replicate(own, task.num_clients))

    def generated(networks, total, count):
        v = normalised(total / jnp.maximum(count, 1))
        return generate(networks["psi"], v, target)

    def some(c):
        # A batch of examples in random order.
        length, size = c.train.index.shape[0], min(task.batch_size, len(c.train.index))
        key = keys.fold(c.key, Draw.EXAMPLES)
        rows = local_training.shuffle(key, length, c.train.size)[:size]
        return local_training.take(c.train, rows, jnp.arange(size) < c.train.size)

    def scored(c, w):
        plain = predictor(model, w)
        if not mask_absent:
            return plain
        held = c.class_counts > 0

        def masked(x, mask):
            return jnp.where(held[None], plain(x, mask), 0)

        return masked

    def client(c, server, own):
        batch = some(c)

        def made(networks):
            total = embed(model, networks["phi"], server["fixed"], batch)
            return generated(networks, total, jnp.sum(batch.mask))

        # theta = h(v_i; psi) is sent.
        theta, pullback = jax.vjp(made, server["networks"])
        w, value = sgd(c, split.receive({**theta, "stats": server["stats"]}, own))
        change = jax.tree.map(jnp.subtract, theta, params(w))
        (gradient,) = pullback(change)
        shared, own = split.send(w)
        upload = {"gradient": gradient, "stats": shared["stats"]}
        return Update(upload, own, scored(c, w), value)

    def weight(cohort):
        return {"gradient": cohort.trained, "stats": cohort.sizes}

    def default(server):
        zeros = jax.tree.map(jnp.zeros_like, server["networks"])
        return {"gradient": zeros, "stats": server["stats"]}

    def update(key, server, mean, mass):
        networks = server["networks"]
        updates, moments = adam.update(mean["gradient"], server["adam"], networks)
        moved = {"networks": optax.apply_updates(networks, updates), "adam": moments}
        kept = {name: server[name] for name in moved}
        return {
            **server,
            **trees.choose(mass["gradient"] > 0, moved, kept),
            "stats": mean["stats"],
        }

    def predict(server, own, c):
        networks = server["networks"]
        total = local_training.sweep(
            c.train,
            lambda batch: (
                embed(model, networks["phi"], server["fixed"], batch),
                jnp.sum(batch.mask),
            ),
            pass_size,
        )
        theta = generated(networks, *total)
        w = split.receive({**theta, "stats": server["stats"]}, own)
        return scored(c, w)

    def sent(state, cohort, metrics):
        theta = trees.size(target) + trees.size(state.server["stats"])
        phi = trees.size(state.server["networks"]["phi"])
        # Down the embedding network, theta and the gradient of v_i; up v_i, the change
        # of theta and the gradient of the embedding network.
        return traffic.both_ways(cohort, phi + theta + width)

    return averaging.from_client(
        init,
        client,
        predict,
        weight=weight,
        default=default,
        update=update,
        traffic=sent,
    )
