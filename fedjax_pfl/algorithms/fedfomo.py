"""FedFomo: a client mixes the models of others by how much each would lower its own
validation loss.

Reference: Zhang et al., Personalized federated learning with first order model
optimization (ICLR 2021), Eq. 4-6; authors' code: NVlabs/FedFomo.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Interval
from chex import Numeric

from fedjax_pfl import averaging, evaluation, keys, local_training, losses, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Data,
    Metrics,
    Model,
    PyTree,
    State,
    Task,
    Traffic,
)

TINY = 1e-5  # added to a distance, as in PFLlib


def select(
    key: Array,
    affinity: Array,
    known: Array,
    id: Array,
    received: int,
    epsilon: Numeric,
) -> Array:
    """Selects the models [M] that the server sends to client `id`: its own, then those
    it has the largest affinity to.

    Ties are broken at random. With probability epsilon, each rank after the first goes
    to a random model instead.

    Args:
      affinity: the client's row of Q [N].
      known: [N] bool, uploaded; where fewer than M are, the others come last.
    """
    keys_of = [jax.random.fold_in(key, i) for i in range(3)]
    tie, draw = (jax.random.bits(k, affinity.shape, jnp.uint32) for k in keys_of[:2])
    cost = jnp.where(known, -affinity, jnp.inf)
    cost = jnp.where(jnp.arange(len(known)) == id, -jnp.inf, cost)
    rank = jnp.argsort(jnp.lexsort((tie, cost)))
    explore = jax.random.uniform(keys_of[2], (received - 1,), jnp.float32) < epsilon
    greedy = received - jnp.sum(explore)
    # After the greedy ranks `draw` decides, the unknown last.
    order = jnp.where(rank < greedy, rank, len(known))
    return jnp.lexsort((draw, ~known, order))[:received]


def benefit(loss: Array, base_loss: Array, w: PyTree, base: PyTree) -> Array:
    """Computes how much lower the validation loss is at w than at `base`, per unit of
    distance between their parameters, []."""
    distance = jnp.sqrt(trees.sq_dist(params(w), params(base)))
    return (base_loss - loss) / (distance + TINY)


def mixing(benefits: Array) -> Array:
    """Returns the weights of the models [M]: the positive benefits, normalised; all
    zero where none is positive."""
    positive = jnp.maximum(benefits, 0)
    total = jnp.sum(positive)
    return positive / jnp.where(total > 0, total, 1)


def mean_loss(
    model: Model,
    variables: PyTree,
    data: Data,
    batch_size: int,
    of: losses.Loss = losses.cross_entropy,
) -> Array:
    """Computes the mean loss [] of a model over all rows of the data; 0
    without any."""

    def loss(batch):
        logits = predictor(model, variables)(batch.x, batch.mask)
        value = of(logits, batch.y, batch.mask)
        return jnp.sum(batch.mask) * value

    total = local_training.sweep(data, loss, batch_size)
    return total / jnp.maximum(data.size, 1)


@register("fedfomo", targets=True)
def fedfomo(
    task: Task,
    *,
    received: Annotated[int, Ge(1)] = 5,
    val: Annotated[float, Interval(ge=0, le=1)] = 0.2,
    epsilon: Annotated[float, Interval(ge=0, le=1)] = 0.0,
    epsilon_decay: Annotated[float, Ge(0)] = 0.05,
) -> Algorithm:
    """Starts a client's training from the models that beat its last start on its
    validation examples, in a mixture.

    Args:
      received: models a round (M) in [1, inf), the own one among them; 5 as in PFLlib.
      val: the part of a client's training examples in [0, 1] that it validates on; 0.2
        as in the codes.
      epsilon: chance in [0, 1] that a rank goes to a random model in round 0; 0 as in
        PFLlib, 0.3 in the authors'.
      epsilon_decay: how much less epsilon is each round, in [0, inf); 0.05 as in the
        authors' code (there an epoch).

    Note:
      A client trains on what it does not validate on: the holdout is the tail of its
      rows, at least one and not all; a client with one example has none and keeps its
      model. So does a client for which no benefit is positive: it goes on from its own
      trained model. A client that takes no step (with `drop_last`, one without a whole
      batch besides its holdout) uploads nothing, and is scored by the model it had.
      The candidates are the last
      uploads of all clients so far, as in PFLlib, where a client receives no more of
      them than the last round had (the authors' code: of those of the last round). The
      distance is Euclidean over the parameters, the server adds the raw benefits to the
      affinities; the authors' code normalises them and takes the L1 norm by default.
      `acc` at `pre` is of the client's own trained model, before it mixes (PFLlib);
      `mixed_acc` at `post` is of the mixture, before training. `own_weight` is the
      share of the own model in it. Running statistics are mixed, or stay.
    """
    split, sgd, n = averaging.split(task), local_training.bind(task), task.num_clients
    received = min(received, n)
    # small enough that a usual holdout is not padded many times
    batch_size = evaluation.batch_size(task.sizes.max() / 5)

    def init(key):
        shared, own = split.send(task.model.init(key))
        models, known = trees.replicate(shared, n), jnp.zeros(n, bool)
        server = {"models": models, "known": known, "affinity": jnp.eye(n)}
        return State(server, trees.replicate({"start": shared, "own": own}, n))

    def mix(models, ids, there, mine, c, held):
        # The mixture, and the benefits [M]; one model of the table at a time.
        base = split.receive(mine["start"], mine["own"])
        kind = losses.of(task)
        base_loss = mean_loss(task.model, base, held, batch_size, kind)

        def one(j):
            w = split.receive(trees.gather(models, j), mine["own"])
            value = mean_loss(task.model, w, held, batch_size, kind)
            return benefit(value, base_loss, w, base)

        benefits = jnp.where(there, jax.lax.map(one, ids), 0)
        weights = mixing(benefits)

        def add(m, total):
            def plus(x, table):
                return x + (weights[m] * table[ids[m]]).astype(x.dtype)

            return jax.tree.map(plus, total, models)

        current = trees.gather(models, c.id)
        nothing = jax.tree.map(jnp.zeros_like, current)
        mixed = jax.lax.fori_loop(0, received, add, nothing)
        return trees.choose(jnp.sum(weights) > 0, mixed, current), benefits

    def round(key, state, cohort):
        server = state.server

        def client(c, mine):
            rest, held = local_training.holdout(c.train, val)
            # The client receives the models it has the largest affinity to, and mixes
            # them by their benefits (Eq. 4-6).
            affinity, known = server["affinity"][c.id], server["known"]
            chance = jnp.maximum(epsilon - epsilon_decay * cohort.round, 0)
            draw = keys.fold(c.key, keys.Client.SELECT)
            ids = select(draw, affinity, known, c.id, received, chance)
            there = known[ids]
            mixed, benefits = mix(server["models"], ids, there, mine, c, held)
            # It trains the mixture, the base of the next round's benefits.
            before = split.receive(mixed, mine["own"])
            w, value = sgd(c, before, data=rest)
            post, of_mixture = (
                evaluation.post(cohort, c, predictor(task.model, x))
                for x in (w, before)
            )
            post |= {f"mixed_{k}": x for k, x in of_mixture.items()}
            # It sends its model and the benefits, which the server adds to its
            # affinities.
            shared, own = split.send(w)
            own_weight = 1 - jnp.sum(mixing(benefits)[1:])
            seen = {"received": jnp.sum(there), "own_weight": own_weight}
            learned = local_training.learns(rest.size, task)
            row, affinity = {"start": mixed, "own": own}, affinity.at[ids].add(benefits)
            return shared, row, affinity, learned, value, post, seen

        results = cohort.map(client, state.clients)
        w, rows, affinity, learned, value, post, seen = results
        known = jnp.ones(len(cohort.ids), bool)
        uploads = {"models": w, "known": known, "affinity": affinity}
        # Clients without training examples have nothing to offer.
        here = learned & cohort.active
        server = trees.scatter(server, cohort.ids, uploads, here)
        return State(server, rows), Metrics(value, post, seen)

    def predict(server, mine, c):
        w = split.receive(trees.gather(server["models"], c.id), mine["own"])
        return predictor(task.model, w)

    def sent(state, cohort, metrics):
        size = trees.size(state.server["models"]) // n
        active = cohort.active.astype(jnp.int32)
        count = metrics.clients["received"].astype(jnp.int32) * active
        return Traffic(count * size, (size + n) * active, count, active + (count > 0))

    return Algorithm(init, round, predict, evaluation.classification, sent)
