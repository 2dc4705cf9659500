"""Two rounds of a method on the toy federation, for slow NumPy loops over them.

The rounds are compiled once for all values of a method's floats. Client 3 has no
examples, and clients 0 and 2 miss the second round.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import toy

from fedjax_pfl import keys, local_training
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.types import State

TASK, LR = toy.task(), 0.1
F = oracle.federation()
# the clients with examples in each round
LEARN = [[i for i in ids if i != 3] for ids in oracle.ROUNDS]
KEYS = [jax.random.key(10 + t) for t in range(2)]
IDS = jnp.arange(toy.N, dtype=jnp.int32)


@functools.cache
def _compiled(method, static):
    def make(values):
        return ALGORITHMS[method](TASK, **dict(static), **values)

    @jax.jit
    def step(key, state, active, t, values):
        cohort = toy.cohort(TASK, IDS, active, F, key, t)
        new, metrics = toy.round_of(make(values), TASK)(key, state, cohort)
        rows = jax.tree.map(
            lambda a, b: jnp.where(active.reshape(-1, *[1] * (a.ndim - 1)), a, b),
            new.clients,
            state.clients,
        )
        return State(new.server, rows), metrics

    return jax.device_get(make({}).init(jax.random.key(0))), step


def run(method, begin=None, rounds=oracle.ROUNDS, **hparams):
    """Returns the states before, between and after the rounds, on the host, and their
    metrics."""
    values = {k: jnp.float32(x) for k, x in hparams.items() if isinstance(x, float)}
    static = tuple((k, x) for k, x in hparams.items() if not isinstance(x, float))
    start, step = _compiled(method, static)
    states, reports = [start if begin is None else begin], []
    for t, (key, here) in enumerate(zip(KEYS, rounds, strict=False)):
        active = jnp.isin(IDS, jnp.array(here))
        new, metrics = step(key, states[-1], active, jnp.int32(t), values)
        states.append(jax.device_get(new))
        reports.append(jax.device_get(metrics))
    return states, reports


def batches(i, t):
    """The minibatches (x, y) of client i in round t."""
    return [step[0] for step in oracle.batches(F, i, KEYS[t], TASK)]


def shuffled(key, i, epochs, first=None):
    """The minibatches of client i, or of its `first` examples, under another key."""
    rows, (x, y) = int(F.train.size[i]) if first is None else first, examples(i)
    length, steps = F.train.index.shape[1], []
    for epoch in range(epochs):
        draw = jax.random.fold_in(keys.fold(key, keys.Client.SHUFFLE), epoch)
        order = np.asarray(local_training.shuffle(draw, length, rows))[:rows]
        for s in range(0, rows, TASK.batch_size):
            at = order[s : s + TASK.batch_size]
            steps.append((x[at], y[at]))
    return steps


def examples(i):
    """All examples (x, y) of client i, in order."""
    rows = np.asarray(F.train.index[i])[: int(F.train.size[i])]
    return np.asarray(F.examples.x, np.float64)[rows], np.asarray(F.examples.y)[rows]


def sizes(t):
    """Training examples of the clients that learn in round t."""
    return [int(F.train.size[i]) for i in LEARN[t]]


def descend(w, i, t, slope=oracle.gradient):
    """The local training of client i from w along slope(w, x, y)."""
    for x, y in batches(i, t):
        w = [a - LR * g for a, g in zip(w, slope(w, x, y), strict=True)]
    return w


def row(state, i, *path):
    """A client's row of State.clients, or one entry of the row."""
    part = toy.rows(state.clients, i)
    for name in path:
        part = part[name]
    return part


def same_server(method, other, **hparams):
    """Checks that a limiting case has the server's model of another method."""
    (_, *found), _ = run(method, **hparams)
    (_, *wanted), _ = run(other)
    for a, b in zip(found, wanted, strict=True):
        get = lambda s: s.get("w", s)
        toy.assert_close(
            *({k: get(s.server)[k] for k in ("body", "head")} for s in (a, b)), 1e-5
        )
