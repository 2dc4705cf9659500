"""FedCAC: parameters that local training is sensitive to are averaged over similar
clients only, the others over all.

Reference: Wu et al., Bold but cautious: unlocking the potential of personalized
federated learning through cautiously aggressive collaboration (ICCV 2023), Algorithm 1;
authors' code: kxzxvbk/Fling.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Gt, Interval
from chex import Numeric

from fedjax_pfl import averaging, local_training, traffic, trees
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params, predictor
from fedjax_pfl.types import Array, Method, Metrics, PyTree, State, Task, Update


def critical(old: PyTree, new: PyTree, share: Numeric) -> PyTree:
    """Returns in each tensor the `share` of the entries whose sensitivity |(new - old)
    new| is largest, as booleans; entries of sensitivity 0 are never among them."""

    def mask(a: Array, b: Array) -> Array:
        value = jnp.abs((b - a) * b).reshape(-1)
        count = jnp.floor(share * value.size).astype(jnp.int32)
        least = largest(value, jnp.maximum(count, 1))
        chosen = (value >= least) & (value > 0) & (count > 0)
        return chosen.reshape(b.shape)

    return jax.tree.map(mask, old, new)


def largest(values: Array, k: Numeric) -> Array:
    """Returns the k-th largest [] of values [M] >= 0, k from 1 to M.

    Bit by bit, as numbers from 0 on are ordered as their bits: 31 counts are faster
    than a sort.
    """
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)

    def step(i: Array, low: Array) -> Array:
        higher = low | (jnp.int32(1) << (30 - i))
        return jnp.where(jnp.sum(bits >= higher) >= k, higher, low)

    found = jax.lax.fori_loop(0, 31, step, jnp.int32(0))
    return jax.lax.bitcast_convert_type(found, jnp.float32).astype(values.dtype)


def overlap(masks: PyTree) -> Array:
    """Returns O_ij = 1 - ||m_i - m_j||_1 / (2 ||m_i||_1) [S, S] of masks [S, ...]."""
    flat = [x.reshape(len(x), -1) for x in jax.tree.leaves(masks)]
    m = jnp.concatenate(flat, axis=1).astype(jnp.float32)
    size = jnp.sum(m, axis=1)
    both = jnp.dot(m, m.T, precision=jax.lax.Precision.HIGHEST)
    differ = size[:, None] + size[None] - 2 * both
    return 1 - differ / (2 * jnp.maximum(size, 1)[:, None])


def collaborators(o: Array, here: Array, progress: Numeric) -> Array:
    """Returns the clients [S, S] whose overlap o [S, S] with i is at least mean +
    progress (max - mean), of the pairs `here` [S], and i itself."""
    own = jnp.eye(len(o), dtype=bool)
    pairs = here[:, None] & here[None] & ~own
    count = jnp.sum(pairs)
    mean = jnp.sum(jnp.where(pairs, o, 0)) / jnp.maximum(count, 1)
    largest = jnp.max(jnp.where(pairs, o, -jnp.inf))
    largest = jnp.where(count > 0, largest, 0)
    near = o >= mean + progress * (largest - mean)
    return own | (pairs & near)


@register("fedcac", targets=True)
def fedcac(
    task: Task,
    *,
    tau: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    beta: Annotated[float, Gt(0)] = 100.0,
) -> Method:
    """Starts from m_i * w^i + (1 - m_i) * w, w the global model, w^i the mean over the
    clients that share critical parameters, m_i the mask of the critical ones.

    Args:
      tau: share (τ) of critical parameters in each tensor, in [0, 1]; 0.5 as in the
        authors' configuration. With 0 it is FedAvg.
      beta: rounds (β) in (0, inf) until a client has no collaborators; 100 as there. In
        round t the bound on the overlap is mean + (t + 1) / beta (max - mean).

    Note:
      A sensitivity of 0, as of a ReLU that is never active, is never critical. The
      authors' code first makes w^i in the second round and uses the initial model
      before; here w^i is that of every round, as in the paper. w^i is the uniform mean,
      w is weighted by training examples. Running statistics are averaged as w is.
    """
    sgd, split = local_training.bind(task), averaging.split(task)

    def init(key):
        w = task.model.init(key)
        shared, own = split.send(w)
        mask = jax.tree.map(lambda x: jnp.zeros(x.shape, bool), params(w))
        row = {"critical": params(w), "mask": mask, "own": own}
        return State(shared, trees.replicate(row, task.num_clients))

    def receive(server, row):
        w = split.receive(server, row["own"])
        mixed = jax.tree.map(jnp.where, row["mask"], row["critical"], params(w))
        return w | mixed

    def client(c, server, row):
        start = receive(server, row)
        w, value = sgd(c, start)
        mask = critical(params(start), params(w), tau)
        shared, own = split.send(w)
        kept = {**row, "own": own}
        sent = params(w), mask
        return Update(shared, kept, predictor(c.model, w), value, sent=sent)

    def finish(key, server, mean, sent, before, rows, cohort):
        w, mask = sent
        # Clients whose critical parameters overlap; sums in the order of the ids.
        order = jnp.argsort(cohort.ids)
        here, back = cohort.trained[order], jnp.argsort(order)
        known = trees.gather(cohort.replicated((w, mask)), order)
        zeros = jax.tree.map(jnp.zeros_like, known)
        models, masks = trees.where(here, known, zeros)
        with_me = collaborators(overlap(masks), here, (cohort.round + 1) / beta)
        a = with_me / jnp.sum(with_me, axis=1, keepdims=True)

        def mix(x):
            mixed = jnp.tensordot(a, x, 1, precision=jax.lax.Precision.HIGHEST)
            return mixed.astype(x.dtype)[back]

        new = {"critical": jax.tree.map(mix, models), "mask": mask}
        old = {name: before[name] for name in new}
        rows = {**trees.where(cohort.trained, new, old), "own": rows["own"]}
        seen = {"collaborators": jnp.sum(with_me, axis=1)[back]}
        return State(mean, rows), Metrics(clients=seen)

    def predict(server, row, c):
        return predictor(c.model, receive(server, row))

    def travels(state, cohort, metrics):
        # Down both models, up the model and a bit per parameter.
        size, words = (
            trees.size(state.server),
            -(-trees.size(params(state.server)) // 32),
        )
        count = traffic.both_ways(cohort, 2 * size, size)
        return count._replace(ints=words * cohort.active.astype(jnp.int32))

    return averaging.from_client(
        init,
        client,
        predict,
        finish=finish,
        traffic=travels,
        no_unseen="its critical parameters are averaged over the clients of a round",
    )
