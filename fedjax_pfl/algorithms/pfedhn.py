"""pFedHN: a hypernetwork on the server generates every client's model from an embedding
of the client.

Reference: Shamsian, Navon, Fetaya & Chechik, Personalized federated learning using
hypernetworks (ICML 2021), Algorithm 1; authors' code: AvivSham/pFedHN.
"""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt, Interval

from fedjax_pfl import averaging, evaluation, local_training, traffic, trees
from fedjax_pfl.algorithms.hypernetworks import generate, hypernetwork
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Metrics,
    PyTree,
    State,
    Task,
)


def clipped_sgd(
    lr: Any, momentum: Any, decay: Any, clip: Any
) -> optax.GradientTransformation:
    """Makes PyTorch's SGD on gradients clipped to the global norm `clip`; the state is
    the velocity, in the types of the parameters."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(gradient, velocity, params):
        norm = jnp.sqrt(trees.sq_dist(gradient, optax.tree.scale(0, gradient)))
        factor = jnp.where(norm > clip, clip / norm, 1)

        def moved(v, g, x):
            return momentum * v + factor * g + decay * x

        new = jax.tree.map(moved, velocity, gradient, params)
        new = optax.tree.cast_like(new, velocity)
        return optax.tree.scale(-lr, new), new

    return optax.GradientTransformation(init, update)


def descend(
    optimizer: optax.GradientTransformation,
    h: PyTree,
    velocity: PyTree,
    gradient: PyTree,
    here: Array,
) -> tuple[PyTree, PyTree]:
    """Takes one step of h = {"psi", "embeddings" [N, d_e]}, of the embeddings those of
    the clients `here` [N]: the new h and velocity."""
    updates, new = optimizer.update(gradient, velocity, h)

    def kept(new, old):
        psi = trees.choose(jnp.any(here), new["psi"], old["psi"])
        rows = jnp.where(here[:, None], new["embeddings"], old["embeddings"])
        return {"psi": psi, "embeddings": rows}

    return kept(optax.apply_updates(h, updates), h), kept(new, velocity)


@register("pfedhn", targets=True)
def pfedhn(
    task: Task,
    *,
    hyper_lr: Annotated[float, Ge(0)] = 0.01,
    momentum: Annotated[float, Interval(ge=0, le=1)] = 0.9,
    decay: Annotated[float, Ge(0)] = 0.001,
    embedding: Annotated[int, Interval(ge=1, le=10_000)] | None = None,
    hidden: Annotated[int, Interval(ge=1, le=10_000)] = 100,
    hidden_layers: Annotated[int, Interval(ge=0, le=100)] = 3,
    inner_steps: Annotated[int, Interval(ge=0, le=10_000)] | None = 50,
    inner_lr: Annotated[float, Ge(0)] = 0.005,
    inner_momentum: Annotated[float, Interval(ge=0, le=1)] = 0.9,
    inner_decay: Annotated[float, Ge(0)] = 0.00005,
    clip: Annotated[float, Gt(0)] = 50.0,
) -> Algorithm:
    """Sends theta = h(e_i), gets back how far the client moved it, and takes that
    change back through h.

    Args:
      hyper_lr: learning rate of hypernetwork and embeddings, in [0, inf); 0.01 as in
        the authors' code.
      momentum: of the hypernetwork's SGD, in [0, 1]; 0.9 as in the authors' code.
      decay: weight decay of hypernetwork and embeddings, in [0, inf); 0.001 as in the
        authors' code.
      embedding: d_e in [1, 10000]; default 1 + N // 4, as in the authors' code.
      hidden: width of the hypernetwork in [1, 10000]; 100 as in the authors' code.
      hidden_layers: its hidden layers after the first, in [0, 100]; 3 as in the
        authors' code.
      inner_steps: k in [0, 10000], local steps; 50 as in the authors' code, none: the
        task's own local work.
      inner_lr: learning rate of local training in [0, inf); 0.005 as in the authors'
        code.
      inner_momentum: of local training, in [0, 1]; 0.9 as in the authors' code.
      inner_decay: weight decay of local training, in [0, inf); 0.00005 as in the
        authors' code.
      clip: largest global norm of a gradient, of the hypernetwork's and of local ones,
        in (0, inf); 50 as in the authors' code.

    Note:
      A round is one step for each of its clients, in random order; the authors draw one
      client a step, with replacement. The task's lr and optimizer are not used, its
      batch size is (the authors' is 64). Decay and momentum move a client's embedding
      in its own steps only; in the authors' code also in the others'. Running
      statistics are not generated but averaged. Inner steps walk through epochs, a
      short last batch included unless dropped, where the authors' each begin a new
      order. Their variant with personal heads (pFedHN-PC) is not built.
    """
    n, split = task.num_clients, averaging.split(task)
    width = 1 + n // 4 if embedding is None else embedding
    length: dict[str, Any] = (
        {} if inner_steps is None else {"epochs": None, "steps": inner_steps}
    )
    inner = task._replace(
        lr=inner_lr,
        optimizer=lambda lr: clipped_sgd(lr, inner_momentum, inner_decay, clip),
        **length,
    )
    sgd = local_training.bind(inner)
    target = params(jax.eval_shape(task.model.init, jax.random.key(0)))
    optimizer = clipped_sgd(hyper_lr, momentum, decay, clip)

    def init(key):
        key_psi, key_embeddings, key_model = jax.random.split(key, 3)
        embeddings = jax.random.normal(key_embeddings, (n, width), jnp.float32)
        psi = hypernetwork(key_psi, width, hidden, hidden_layers, target)
        h = {"psi": psi, "embeddings": embeddings}
        shared, own = split.send(task.model.init(key_model))
        server = {"h": h, "velocity": optimizer.init(h), "stats": shared["stats"]}
        return State(server, trees.replicate(own, n))

    def generated(h, id):
        return generate(h["psi"], h["embeddings"][id], target)

    def round(key, state, cohort):
        last = state.server["stats"]

        def client(c, carry, own):
            h, velocity = carry
            # theta = h(e_i; psi) is sent.
            theta, pullback = jax.vjp(lambda h: generated(h, c.id), h)
            # k local steps from theta; the client sends how far they moved it.
            w, value = sgd(c, split.receive({**theta, "stats": last}, own))
            shared, own = split.send(w)
            change = jax.tree.map(jnp.subtract, theta, params(w))
            post = evaluation.post(cohort, c, predictor(task.model, w))
            # The step of psi and e_i by the chain rule.
            (gradient,) = pullback(change)
            here = (jnp.arange(n) == c.id) & local_training.learns(c.train.size, task)
            moved = descend(optimizer, h, velocity, gradient, here)
            return moved, (shared["stats"], own, value, post)

        start = state.server["h"], state.server["velocity"]
        (h, velocity), results = cohort.scan(client, start, state.clients)
        stats, own, value, post = results
        weight = cohort.sizes
        stats, _ = cohort.mean(
            lambda c, stats: (stats,), stats, weight=weight, default=last, phase=1
        )
        server = {"h": h, "velocity": velocity, "stats": stats}
        return State(server, own), Metrics(value, post)

    def predict(server, own, c):
        whole = {**generated(server["h"], c.id), "stats": server["stats"]}
        return predictor(task.model, split.receive(whole, own))

    def sent(state, cohort, metrics):
        model = {"theta": target, "stats": state.server["stats"]}
        return traffic.both_ways(cohort, model)

    return Algorithm(init, round, predict, evaluation.classification, sent)
