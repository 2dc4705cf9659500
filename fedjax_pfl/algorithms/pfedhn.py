"""pFedHN: a hypernetwork on the server generates every client's model from an embedding
of the client.

Reference: Shamsian, Navon, Fetaya & Chechik, Personalized federated learning using
hypernetworks (ICML 2021), Algorithm 1.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt, Interval

from fedjax_pfl import averaging, evaluation, local_training, losses, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.errors import InputError
from fedjax_pfl.models.layers import uniform
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Cohort,
    Metrics,
    Predictor,
    PyTree,
    State,
    Task,
    Traffic,
)

LARGEST = 2**28  # parameters of a hypernetwork: with its momentum and gradient, 3 GiB


def hypernetwork(
    key: Array, embedding: int, hidden: int, layers: int, target: PyTree
) -> PyTree:
    """Parameters psi: 1 + `layers` hidden linear layers, and a linear head for each
    leaf of `target`."""

    def linear(key: Array, din: int, shape: tuple[int, ...]) -> PyTree:
        key_kernel, key_bias = jax.random.split(key)
        draw = uniform(din)
        return {
            "kernel": draw(key_kernel, (din, *shape)),
            "bias": draw(key_bias, shape),
        }

    key_hidden, key_heads = jax.random.split(key)
    leaves, structure = jax.tree.flatten(target)
    sizes = (embedding, *(hidden for _ in range(layers)))
    mlp = [
        linear(k, din, (hidden,))
        for k, din in zip(jax.random.split(key_hidden, len(sizes)), sizes, strict=True)
    ]
    keys = jax.random.split(key_heads, len(leaves))
    heads = [linear(k, hidden, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return {"hidden": mlp, "heads": jax.tree.unflatten(structure, heads)}


def check_size(make: Callable[[Array], PyTree]) -> None:
    """Raises InputError if the hypernetwork that `make` (key -> psi) makes has more
    than LARGEST parameters."""
    count = trees.size(jax.eval_shape(make, jax.random.key(0)))
    if count > LARGEST:
        raise InputError(
            f"pFedHN's hypernetwork for this model would have {count:,} parameters, "
            f"more than {LARGEST:,}: "
            "take a smaller model, or a smaller hidden."
        )


def generate(psi: PyTree, e: Array, target: PyTree) -> PyTree:
    """The client's parameters theta = h(e; psi), in the shapes and types of `target`,
    from its embedding e [d_e]."""
    x = e
    for i, layer in enumerate(psi["hidden"]):
        x = (x if i == 0 else jax.nn.relu(x)) @ layer["kernel"] + layer["bias"]
    head = lambda like, head: (
        jnp.tensordot(x, head["kernel"], 1) + head["bias"]
    ).astype(like.dtype)
    return jax.tree.map(head, target, psi["heads"])


def clipped_sgd(
    lr: Any, momentum: Any, decay: Any, clip: Any
) -> optax.GradientTransformation:
    """PyTorch's SGD on gradients clipped to the global norm `clip`; the state is the
    velocity, in the types given."""

    def update(
        gradient: PyTree, velocity: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        norm = jnp.sqrt(trees.sq_dist(gradient, optax.tree.scale(0, gradient)))
        factor = jnp.where(norm > clip, clip / norm, 1)
        new = jax.tree.map(
            lambda v, g, x: momentum * v + factor * g + decay * x,
            velocity,
            gradient,
            params,
        )
        new = optax.tree.cast_like(new, velocity)
        return optax.tree.scale(-lr, new), new

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )


class Hypernetwork(NamedTuple):
    """The generator of the clients' parameters: h = {"psi", "embeddings" [N, d_e]} and
    how it is trained."""

    target: PyTree  # the shapes and types of a client's parameters
    optimizer: optax.GradientTransformation
    learns: Callable[[Array], Array]  # `local_training.learns` of the task

    def generated(self, h: PyTree, id: Array) -> PyTree:
        """theta of client `id` []."""
        return generate(h["psi"], h["embeddings"][id], self.target)

    def descend(
        self, h: PyTree, velocity: PyTree, gradient: PyTree, here: Array
    ) -> tuple[PyTree, PyTree]:
        """One step of psi and of the embeddings of the clients `here` [N]: the new h
        and velocity."""
        updates, new = self.optimizer.update(gradient, velocity, h)

        def kept(new: PyTree, old: PyTree) -> PyTree:
            psi = trees.choose(jnp.any(here), new["psi"], old["psi"])
            return {
                "psi": psi,
                "embeddings": jnp.where(
                    here[:, None], new["embeddings"], old["embeddings"]
                ),
            }

        return kept(optax.apply_updates(h, updates), h), kept(new, velocity)


# (client, its theta, its row) -> how far training moved theta against its gradient, and
# what is reported and kept
Train = Callable[[Client, PyTree, PyTree], tuple[PyTree, PyTree]]


def sequential(
    hyper: Hypernetwork, train: Train, state: State, cohort: Cohort
) -> tuple[tuple[PyTree, PyTree], PyTree]:
    """A step of the hypernetwork after each client: (h, velocity), and the clients'
    results."""
    everybody = jnp.arange(state.server["h"]["embeddings"].shape[0])

    def one(c: Client, carry: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
        h, velocity = carry
        # theta = h(e_i; psi) is sent
        theta, pullback = jax.vjp(lambda h: hyper.generated(h, c.id), h)
        change, results = train(c, theta, own)  # its change comes back
        (gradient,) = pullback(change)  # by the chain rule of psi and of e_i
        return hyper.descend(
            h, velocity, gradient, (everybody == c.id) & hyper.learns(c.train.size)
        ), results

    return cohort.scan(
        one, (state.server["h"], state.server["velocity"]), state.clients
    )


def batched(
    hyper: Hypernetwork, train: Train, state: State, cohort: Cohort
) -> tuple[tuple[PyTree, PyTree], PyTree]:
    """One step of the hypernetwork along the sum of the clients' gradients; returns as
    `sequential`."""
    h, velocity = state.server["h"], state.server["velocity"]
    # so that the sum over the clients is in one order, whatever the cohort's
    order = jnp.argsort(cohort.ids)
    theta, pullback = jax.vjp(
        lambda h: jax.vmap(lambda id: hyper.generated(h, id))(cohort.ids[order]), h
    )
    change, results = cohort.map(
        train, trees.gather(theta, jnp.argsort(order)), state.clients
    )
    learned = hyper.learns(cohort.sizes)
    change = jax.tree.map(
        lambda x: jnp.where(trees.expand(learned, x.ndim), x, 0), change
    )
    (gradient,) = pullback(trees.gather(change, order))
    here = jnp.zeros(h["embeddings"].shape[0], bool).at[cohort.ids].set(learned)
    return hyper.descend(h, velocity, gradient, here), results


@register("pfedhn")
def pfedhn(
    task: Task,
    *,
    mode: Literal["sequential", "batched"] = "sequential",
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
      mode: one of sequential (a step of the hypernetwork for each client, one after
        another, as the authors do), batched (one step a round, along the sum of the
        clients' gradients).
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
    width = 1 + task.num_clients // 4 if embedding is None else embedding
    length: dict[str, Any] = (
        {} if inner_steps is None else {"epochs": None, "steps": inner_steps}
    )
    inner = task._replace(
        lr=inner_lr,
        optimizer=lambda lr: clipped_sgd(lr, inner_momentum, inner_decay, clip),
        **length,
    )
    loss, split = losses.classification(task.model), averaging.split(task)
    shapes = jax.eval_shape(task.model.init, jax.random.key(0))
    learns = functools.partial(local_training.learns, task=task)
    hyper = Hypernetwork(
        params(shapes), clipped_sgd(hyper_lr, momentum, decay, clip), learns
    )
    make: Callable[[Array], PyTree] = lambda key: hypernetwork(
        key, width, hidden, hidden_layers, hyper.target
    )
    check_size(make)
    step = {"sequential": sequential, "batched": batched}[mode]

    def init(key: Array) -> State:
        key_psi, key_embeddings, key_model = jax.random.split(key, 3)
        embeddings = jax.random.normal(
            key_embeddings, (task.num_clients, width), jnp.float32
        )
        h = {"psi": make(key_psi), "embeddings": embeddings}
        shared, own = split.send(task.model.init(key_model))
        server = {"h": h, "velocity": hyper.optimizer.init(h), "stats": shared["stats"]}
        return State(server, trees.replicate(own, task.num_clients))

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        last = state.server["stats"]

        # k local steps from theta; the client sends how far they moved it
        def train(c: Client, theta: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
            w, value = local_training.sgd(
                c.key,
                c.train,
                loss,
                split.receive({**theta, "stats": last}, own),
                inner,
            )
            shared, own = split.send(w)
            change = jax.tree.map(jnp.subtract, theta, params(w))
            return change, (
                shared["stats"],
                own,
                value,
                evaluation.post(cohort, c, predictor(task.model, w)),
            )

        (h, velocity), (shared, own, value, post) = step(hyper, train, state, cohort)
        keep = lambda c, stats: (stats,)
        stats, _ = cohort.mean(keep, shared, weight=cohort.sizes, default=last, phase=1)
        return State({"h": h, "velocity": velocity, "stats": stats}, own), Metrics(
            value, post
        )

    def predict(server: PyTree, own: PyTree, c: Client) -> Predictor:
        theta = hyper.generated(server["h"], c.id)
        return predictor(
            task.model, split.receive({**theta, "stats": server["stats"]}, own)
        )

    def sent(state: State, cohort: Cohort, metrics: Metrics) -> Traffic:
        return traffic.both_ways(
            cohort, {"theta": hyper.target, "stats": state.server["stats"]}
        )

    return Algorithm(init, round, predict, evaluation.classification, sent)
