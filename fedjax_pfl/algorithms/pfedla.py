"""pFedLA: a client's model is a mixture of all models, layer by layer, whose weights a
hypernetwork of the client makes from its embedding.

Reference: Ma et al., Layer-wised model aggregation for personalized federated learning
(CVPR 2022), Algorithm 1.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, keys, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.models.layers import uniform
from fedjax_pfl.types import Algorithm, Array, Metrics, PyTree, State, Task

DEPTH = 3  # hidden layers of a hypernetwork, as in KarhouTam/pFedLA


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    EMBEDDINGS = 50, "the clients' embeddings"
    LAYERS = 51, "the hidden layers of the hypernetworks"
    HEADS = 52, "their last layers"


def numbered(w: PyTree) -> tuple[PyTree, int]:
    """Returns for each leaf of a model the number of its layer, and the number of
    layers. A layer is the leaves of one module, with its running statistics."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(w)
    names = [jax.tree_util.keystr(path[:-1]) for path, _ in leaves]
    names = [name.replace("['stats']", "['body']", 1) for name in names]
    order = list(dict.fromkeys(names))
    numbers = [order.index(name) for name in names]
    return jax.tree.unflatten(structure, numbers), len(order)


def hypernetwork(
    key: Array, embedding: int, hidden: int, layers: int, n: int
) -> PyTree:
    """Draws the parameters psi of a hypernetwork, without its embedding."""
    sizes = (embedding, *(hidden for _ in range(DEPTH)))
    draws = jax.random.split(keys.fold(key, Start.LAYERS), (DEPTH, 2))
    mlp = [
        {"kernel": uniform(i)(a, (i, o)), "bias": uniform(i)(b, (o,))}
        for (a, b), i, o in zip(draws, sizes[:-1], sizes[1:], strict=True)
    ]
    shape = (hidden, layers, n)
    kernel = jax.random.uniform(keys.fold(key, Start.HEADS), shape, jnp.float32)
    bias = jnp.zeros((layers, n), jnp.float32)
    return {"mlp": mlp, "head": {"kernel": kernel, "bias": bias}}


def weights(psi: PyTree, v: Array, here: Array, i: Array) -> Array:
    """Returns alpha_i [L, N] of the embedding v: what the models of the clients `here`
    [N] contribute to each layer of client i, with the sum 1. Where all are 0, only its
    own counts."""
    x = v
    for layer in psi["mlp"]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    out = jnp.tensordot(x, psi["head"]["kernel"], 1) + psi["head"]["bias"]
    alpha = jnp.where(here[None], jax.nn.relu(out), 0)
    total = jnp.sum(alpha, axis=1, keepdims=True)
    alone = jnp.arange(len(here)) == i
    return jnp.where(total > 0, alpha / jnp.where(total > 0, total, 1), alone[None])


def mixture(alpha: Array, w: PyTree, i: Array, layer: PyTree) -> PyTree:
    """Returns sum_j alpha_ij w_j of all models w [N, ...], leaf by leaf with the
    weights alpha [L, N] of its `layer`."""

    def mix(x: Array, number: int) -> Array:
        rest = x.astype(jnp.float32)
        # Relative to client i's: where all are equal it is theirs to the last bit.
        change = jnp.tensordot(
            alpha[number],
            rest - rest[i][None],
            1,
            precision=jax.lax.Precision.HIGHEST,
        )
        return (rest[i] + change).astype(x.dtype)

    return jax.tree.map(mix, w, layer)


@register("pfedla", targets=True)
def pfedla(
    task: Task,
    *,
    hyper_lr: Annotated[float, Ge(0)] = 50.0,
    embedding: Annotated[int, Interval(ge=1, le=10_000)] = 100,
    hidden: Annotated[int, Interval(ge=1, le=10_000)] = 100,
) -> Algorithm:
    """Trains from the mixture w'_i = sum_j alpha_ij w_j (`weights`, `mixture`), and
    takes the change w_i - w'_i back to psi_i and v_i by the chain rule.

    Args:
      hyper_lr: step size of hypernetworks and embeddings (η) in [0, inf); 50.
        KarhouTam/pFedLA has 0.005, at which `self_weight` remains 1/N and the method
        is uniform averaging.
      embedding: length of an embedding in [1, 10000]; 100 as in KarhouTam/pFedLA.
      hidden: width of a hypernetwork in [1, 10000]; 100 as there.

    Note:
      The authors published no code; KarhouTam/pFedLA is of another author. The models
      of the clients before the round are mixed; there one client trains after another,
      all begin at different models, and the step of the hypernetwork has the other
      sign. `self_weight` is the client's
      alpha_ii, the mean over the layers. Layers are modules, there tensors. Clients
      that have not trained do not contribute. Running statistics are mixed as the
      body's layer. HeurpFedLA is not built.
    """
    sgd, split, n = local_training.bind(task), averaging.split(task), task.num_clients
    shapes, _ = split.send(jax.eval_shape(task.model.init, jax.random.key(0)))
    layer, layers = numbered(shapes)

    def init(key):
        shared, own = split.send(task.model.init(key))
        psi = hypernetwork(key, embedding, hidden, layers, n)
        draw = keys.fold(key, Start.EMBEDDINGS)
        v = jax.random.normal(draw, (n, embedding), jnp.float32)
        server = {"w": trees.replicate(shared, n), "seen": jnp.zeros(n, bool)}
        rows = {"hyper": {"psi": trees.replicate(psi, n), "v": v}}
        return State(server, rows | {"own": trees.replicate(own, n)})

    def known(server, id):
        # The clients whose models are mixed.
        return server["seen"] | (jnp.arange(n) == id)

    def mixed(server, hyper, id):
        alpha = weights(**hyper, here=known(server, id), i=id)
        return mixture(alpha, server["w"], id, layer)

    def round(key, state, cohort):
        server = state.server

        def client(c, row):
            start, pullback = jax.vjp(
                lambda hyper: mixed(server, hyper, c.id), row["hyper"]
            )
            w, value = sgd(c, split.receive(start, row["own"]))
            post = evaluation.post(cohort, c, predictor(c.model, w))
            shared, own = split.send(w)
            # The gradient is from w_i to w'_i; that of running statistics is 0.
            slope = jax.tree.map(jnp.subtract, start, shared)
            slope["stats"] = jax.tree.map(jnp.zeros_like, slope["stats"])
            (gradient,) = pullback(slope)
            alpha = weights(**row["hyper"], here=known(server, c.id), i=c.id)
            own_weight = jnp.mean(alpha[:, c.id])
            hyper = jax.tree.map(lambda x, g: x - hyper_lr * g, row["hyper"], gradient)
            hyper = optax.tree.cast_like(hyper, row["hyper"])
            return shared, {"hyper": hyper, "own": own}, value, post, own_weight

        w, rows, value, post, own_weight = cohort.map(client, state.clients)
        server = {
            "w": trees.scatter(server["w"], cohort.ids, w, cohort.trained),
            "seen": server["seen"].at[cohort.ids].max(cohort.trained),
        }
        return State(server, rows), Metrics(value, post, {"self_weight": own_weight})

    def predict(server, row, c):
        start = mixed(server, row["hyper"], c.id)
        return predictor(c.model, split.receive(start, row["own"]))

    def sent(state, cohort, metrics):
        return traffic.both_ways(cohort, trees.size(state.server["w"]) // n)

    return Algorithm(init, round, predict, evaluation.classification, sent)
