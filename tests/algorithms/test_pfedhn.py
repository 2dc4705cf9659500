"""The properties of sheet 20: the chain rule through the hypernetwork, whom a step
moves, and rounds in plain NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import N, assert_close, assert_same

from fedjax_pfl import local_training, losses, simulate
from fedjax_pfl.algorithms import pfedhn as factory
from fedjax_pfl.algorithms.hypernetworks import generate
from fedjax_pfl.types import Batch, State

KEY = jax.random.key(0)
TASK = toy.task()
SHAPES = jax.eval_shape(TASK.model.init, KEY)
TARGET = {part: SHAPES[part] for part in ("body", "head")}
PLAIN = {
    "momentum": 0.0,
    "decay": 0.0,
    "inner_momentum": 0.0,
    "inner_decay": 0.0,
    "clip": 1e9,
}
SMALL = {"hidden": 7, "hidden_layers": 2, "embedding": 3}
DEFAULTS = simulate.hyperparameters(factory) | SMALL | {"inner_steps": 3}


def cohort_of(ids, active=True, federation=None, key=KEY):
    return toy.cohort(TASK, ids, active, federation, key)


@functools.cache
def begin():
    return jax.device_get(factory(TASK, **SMALL).init(KEY))


def start():
    rng = np.random.default_rng(0)
    # velocities of rounds before
    noise = lambda x: (0.01 * rng.normal(size=x.shape)).astype(np.float32)
    return begin()._replace(
        server={
            **begin().server,
            "velocity": jax.tree.map(noise, begin().server["velocity"]),
        }
    )


@functools.cache
def compiled(steps, static):
    """One program for all states, clients, keys and numbers."""
    task = TASK if steps is None else toy.task(epochs=None, steps=steps)

    def run(key, f, state, ids, active, numbers):
        return (
            factory(task, **dict(static), **numbers)
            .round(key, state, cohort_of(ids, active, f, key))[0]
            .server
        )

    return jax.jit(run)


def round_of(
    state, ids, active=None, steps=None, federation=None, key=KEY, places=N, **hparams
):
    """The server after one round, whose cohort is padded; with `steps` the task's local
    work is that many batches."""
    f = toy.federation() if federation is None else federation
    padding = np.arange(N, N + places - len(ids))
    active = np.append(
        np.ones(len(ids), bool) if active is None else active, padding < 0
    )
    ids, given = np.append(ids, padding).astype(np.int32), DEFAULTS | hparams
    numbers = {name: value for name, value in given.items() if isinstance(value, float)}
    static = tuple(
        (name, value) for name, value in given.items() if name not in numbers
    )
    here = State(state.server, toy.rows(state.clients, np.minimum(ids, N - 1)))
    return jax.device_get(compiled(steps, static)(key, f, here, ids, active, numbers))


@jax.jit
def order_of(ids, key):
    """Who comes when in a sequential round."""
    client = lambda c, carry: ((carry[0].at[carry[1]].set(c.id), carry[1] + 1), 0)
    return cohort_of(ids, key=key).scan(client, (jnp.zeros(len(ids), jnp.int32), 0))[0][
        0
    ]


@functools.partial(jax.jit, static_argnums=1)
def mean_gradient(h, i):
    """Returns the gradient of client i's mean loss at h(e_i) with respect to psi and the embeddings, by
    autodiff through everything."""
    f = toy.federation()
    row = f.train.index[i][: toy.SIZES[i]]
    batch = Batch(f.examples.x[row], f.examples.y[row], jnp.ones(len(row), bool), row)
    theta = lambda h: {**generate(h["psi"], h["embeddings"][i], TARGET), "stats": {}}
    return jax.grad(
        lambda h: losses.classification(TASK.model)(theta(h), batch, KEY)[0]
    )(h)


def distance(a, b):
    return (
        sum(
            np.sum((x - y) ** 2)
            for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
        )
        ** 0.5
    )


@pytest.mark.slow
def test_one_plain_step_is_a_gradient_step_of_the_hypernetwork():
    h = begin().server["h"]
    hparams = PLAIN | {
        "inner_steps": None,
        "inner_lr": 0.3,
        "hyper_lr": 0.7,
    }
    # whose examples are one batch
    after = round_of(begin(), [4], steps=1, **hparams)["h"]
    expected = jax.tree.map(
        lambda x, g: x - 0.7 * 0.3 * np.asarray(g), h, mean_gradient(h, 4)
    )
    assert_close(after, expected)
    assert distance(after, h) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "still",
    [{"inner_lr": 0.0}, {"inner_steps": 0}],
)
def test_without_a_change_of_the_models_only_decay_moves(still):
    after = round_of(begin(), [1, 4], momentum=0.0, decay=0.5, hyper_lr=0.1, **still)[
        "h"
    ]
    psi, embeddings = (
        begin().server["h"]["psi"],
        begin().server["h"]["embeddings"].copy(),
    )
    assert_close(after["psi"], jax.tree.map(lambda x: 0.95**2 * x, psi))
    embeddings[[1, 4]] *= 0.95
    np.testing.assert_allclose(after["embeddings"], embeddings, rtol=1e-6)


@pytest.mark.slow
def test_the_others_embeddings_stay():
    state = start()
    after = round_of(state, [3, 0, 4], [True, False, True])
    for name in ("h", "velocity"):
        old, new = (x[name]["embeddings"] for x in (state.server, after))
        assert_same(new[[0, 1, 2]], old[[0, 1, 2]])
        assert np.all(new[[3, 4]] != old[[3, 4]])
    gradient = np.asarray(mean_gradient(state.server["h"], 4)["embeddings"])
    assert np.all(gradient[4] != 0) and not np.any(np.delete(gradient, 4, axis=0))


def test_ids_and_embeddings_may_be_permuted_together():
    state, order = start(), np.array([2, 4, 0, 1, 3], np.int32)
    x, h = np.asarray(toy.federation().examples.x)[:6], state.server["h"]
    permuted = {**state.server, "h": {**h, "embeddings": h["embeddings"][order]}}

    @jax.jit
    def outputs(server, ids):
        # holes: without batch norm nothing stays
        predict, own = factory(TASK, **SMALL).predict, state.clients
        return cohort_of(ids).map(
            lambda c: predict(server, own, c)(x, jnp.ones(6, bool))
        )

    everybody = np.arange(N, dtype=np.int32)
    assert_same(outputs(permuted, everybody), outputs(state.server, order))
    assert not np.array_equal(
        outputs(permuted, everybody), outputs(state.server, everybody)
    )


class Oracle:
    """The hypernetwork in NumPy, with its gradient written out."""

    def __init__(self, h):
        self.hidden = [
            (np.array(x["kernel"], float), np.array(x["bias"], float))
            for x in h["psi"]["hidden"]
        ]
        pair = lambda like, head: (
            np.array(head["kernel"], float),
            np.array(head["bias"], float),
        )
        pairs = jax.tree.map(pair, TARGET, h["psi"]["heads"])
        self.heads = jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, tuple))
        self.embeddings = np.array(h["embeddings"], float)

    def arrays(self):
        return [x for pair in (*self.hidden, *self.heads) for x in pair]

    def forward(self, e):
        inputs, x = [e], e @ self.hidden[0][0] + self.hidden[0][1]
        for kernel, bias in self.hidden[1:]:
            inputs.append(np.maximum(x, 0))
            x = inputs[-1] @ kernel + bias
        return (
            inputs,
            x,
            [np.tensordot(x, kernel, 1) + bias for kernel, bias in self.heads],
        )

    def backward(self, e, changes):
        inputs, x, _ = self.forward(e)
        heads, back = [], np.zeros_like(x)
        for (kernel, _), change in zip(self.heads, changes, strict=True):
            heads += [np.multiply.outer(x, change), change]
            back += np.tensordot(kernel, change, change.ndim)
        layers = []
        for i in reversed(range(len(self.hidden))):
            layers = [np.outer(inputs[i], back), back, *layers]
            back = self.hidden[i][0] @ back
            back = back * (inputs[i] > 0) if i else back
        return [*layers, *heads], back

    def set(self, arrays):
        count = len(self.hidden)
        pairs = [(arrays[2 * i], arrays[2 * i + 1]) for i in range(len(arrays) // 2)]
        self.hidden, self.heads = pairs[:count], pairs[count:]


HYPER = {"hyper_lr": 0.2, "momentum": 0.8, "decay": 0.05, "clip": 0.05, "inner_lr": 0.2}


@jax.jit
def trained(i, key, theta):
    """The client's model after local SGD made of optax's own parts."""
    sgd = lambda lr: optax.chain(
        optax.clip_by_global_norm(0.05),
        optax.add_decayed_weights(5e-5),
        optax.sgd(lr, momentum=0.9),
    )
    task, loss = (
        TASK._replace(lr=0.2, optimizer=sgd, epochs=None, steps=3),
        losses.classification(TASK.model),
    )
    w = {**jax.tree.unflatten(jax.tree.structure(TARGET), theta), "stats": {}}
    return cohort_of(i[None], key=key).map(
        lambda c: local_training.sgd(c.key, c.train, loss, w, task)[0]
    )


def change_of(i, theta, key):
    """theta - theta~ of client i."""
    after = trained(np.int32(i), key, [x.astype(np.float32) for x in theta])
    return [
        x - np.asarray(y[0], float)
        for x, y in zip(theta, jax.tree.leaves(after), strict=True)
    ]


def test_rounds_are_the_plain_loops():
    state, oracle, ids = (
        begin(),
        Oracle(begin().server["h"]),
        np.array([3, 0, 1], np.int32),
    )
    speed, own_speed = [np.zeros_like(x) for x in oracle.arrays()], np.zeros((N, 3))
    for t in range(2):
        key = jax.random.key(50 + t)
        state = State(round_of(state, ids, key=key, **HYPER), state.clients)
        for group in [[i] for i in np.asarray(order_of(ids, key))]:
            total, own = [np.zeros_like(x) for x in oracle.arrays()], {}
            for i in group:
                theta = oracle.forward(oracle.embeddings[i])[2]
                gradient, own[i] = oracle.backward(
                    oracle.embeddings[i], change_of(i, theta, key)
                )
                total = [x + y for x, y in zip(total, gradient, strict=True)]
            norm = np.sqrt(sum((x**2).sum() for x in [*total, *own.values()]))
            factor = min(1, 0.05 / norm)
            assert factor < 1
            arrays = oracle.arrays()
            speed = [
                0.8 * v + factor * g + 0.05 * x
                for v, g, x in zip(speed, total, arrays, strict=True)
            ]
            oracle.set([x - 0.2 * v for x, v in zip(arrays, speed, strict=True)])
            for i in group:
                own_speed[i] = (
                    0.8 * own_speed[i] + factor * own[i] + 0.05 * oracle.embeddings[i]
                )
                oracle.embeddings[i] = oracle.embeddings[i] - 0.2 * own_speed[i]
        got = Oracle(state.server["h"])
        np.testing.assert_allclose(got.embeddings, oracle.embeddings, atol=2e-5)
        for x, y in zip(got.arrays(), oracle.arrays(), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


def test_a_step_is_no_longer_than_the_clip():
    after = round_of(
        begin(), [1], momentum=0.0, decay=0.0, clip=0.001, hyper_lr=2.0, inner_lr=100.0
    )
    np.testing.assert_allclose(
        distance(after["h"], begin().server["h"]), 0.002, rtol=1e-2
    )


@pytest.mark.slow
def test_the_tasks_own_local_work():
    assert_same(
        round_of(start(), [1], steps=3, inner_steps=None),
        round_of(start(), [1], inner_steps=3),
    )


def test_nothing_moves_without_training_examples():
    f = toy.federation()
    f = f._replace(train=f.train._replace(size=np.zeros(N, np.int32)))
    assert_same(round_of(start(), range(N), federation=f), start().server)


def test_the_authors_size_of_an_embedding():
    assert jax.eval_shape(factory(TASK).init, KEY).server["h"]["embeddings"].shape == (
        N,
        1 + N // 4,
    )
