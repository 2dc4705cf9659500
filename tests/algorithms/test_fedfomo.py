"""The properties of sheet 14: benefits, mixing weights, who is sent what, the split,
and two rounds by hand."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import SIZES, N, assert_close, assert_same

from fedjax_pfl import averaging, keys, local_training, trees
from fedjax_pfl.algorithms import fedfomo as factory
from fedjax_pfl.algorithms.fedfomo import benefit, mixing, select
from fedjax_pfl.types import Metrics, State, Subset

KEY = jax.random.key(0)
TASK = toy.task("linear")
W = list(map(jax.device_get, map(TASK.model.init, map(jax.random.key, range(N)))))
# nothing stays at home
OWN = trees.partition(W[0], averaging.split(TASK).personal[0])[0]
ALL = np.arange(N)
HELD = np.array([1, 4, 0, 2, 1])  # a fifth of 7, 19, 1, 12, 4 examples
# for validation examples, which nobody has yet
ROOM = Subset(toy.federation().test.index, np.zeros(N, np.int32))
F = toy.federation()._replace(val=ROOM)
X, Y = np.asarray(F.examples.x, np.float64), np.asarray(F.examples.y)


def replicated(tree):
    return jax.tree.map(lambda x: np.stack([x] * N), tree)


def store(models):
    """A server that holds these models, and clients that all began at the first of
    W."""
    stacked = jax.tree.map(lambda *x: np.stack(x), *models)
    server = {
        "models": stacked,
        "known": np.ones(N, bool),
        "affinity": np.eye(N, dtype=np.float32),
    }
    return State(server, replicated({"start": W[0], "own": OWN}))


@jax.jit
def step(state, federation, ids, lr, evaluated):
    rows = State(state.server, trees.gather(state.clients, ids))
    here = toy.cohort(TASK, ids, ids < N, federation, KEY, evaluated=evaluated)
    return toy.round_of(factory(TASK._replace(lr=lr)), TASK)(KEY, rows, here)


def round_of(state, federation=F, ids=ALL, lr=TASK.lr, evaluated=True):
    """One round of the clients `ids`; with a rate of zero they mix and do not train."""
    # every cohort is the same compilation
    places = np.append(ids, N + np.arange(N - len(ids))).astype(np.int32)
    return step(state, federation, places, lr, evaluated)


def test_only_the_models_received_are_counted():
    """28 parameters; a client that received none, and one that is absent."""
    cohort = types.SimpleNamespace(active=np.array([True, True, True, False]))
    method = factory(TASK)
    state = jax.eval_shape(method.init, jax.random.key(0))
    sent = method.traffic(
        state, cohort, Metrics(clients={"received": np.array([0, 2, 5, 5])})
    )
    assert_same(
        tuple(sent)[:4],
        tuple(
            map(
                np.array, ([0, 56, 140, 0], [33, 33, 33, 0], [0, 2, 5, 0], [1, 2, 2, 0])
            )
        ),
    )


def held_out(i):
    row = np.asarray(F.train.index[i])[SIZES[i] - HELD[i] : SIZES[i]]
    return X[row], Y[row]


def gradient(kernel, bias, x, y):
    """Returns the gradient of a linear model's mean cross entropy, in NumPy."""
    z = x @ kernel + bias
    p = np.exp(z - z.max(1, keepdims=True))
    error = (p / p.sum(1, keepdims=True) - np.eye(toy.C)[y]) / len(y)
    return x.T @ error, error.sum(0)


def val_loss(w, i):
    """Mean cross entropy of a linear model on a client's holdout, in NumPy."""
    x, y = held_out(i)
    z = x @ np.asarray(w["head"]["kernel"]) + np.asarray(w["head"]["bias"])
    return np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y])


def vector(w):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(w)])


@pytest.mark.slow
def test_models_like_the_start_have_no_weight_and_change_nothing():
    state, metrics = round_of(store([W[0]] * N), lr=0.0)
    assert_same(state.server["models"], replicated(W[0]))
    assert_same(state.server["affinity"], np.eye(N))
    np.testing.assert_array_equal(metrics.clients["own_weight"], 1)


def stepped(i, rate):
    """The first of W after a step along the gradient of client i's validation loss."""
    head = [W[0]["head"][k] for k in ("kernel", "bias")]
    kernel, bias = (
        np.float32(w - rate * g)
        for w, g in zip(head, gradient(*head, *held_out(i)), strict=True)
    )
    return W[0] | {"head": {"kernel": kernel, "bias": bias}}


# the latter goes in the opposite direction
GOOD, WORSE = stepped(1, 0.1), stepped(1, -0.3)


def test_the_only_better_model_is_taken_over():
    models = [GOOD if j == 3 else WORSE for j in range(N)]
    assert val_loss(GOOD, 1) < val_loss(W[0], 1) < val_loss(WORSE, 1)
    state, metrics = round_of(store(models), lr=0.0)
    assert_same(toy.rows(state.server["models"], 1), GOOD)
    assert metrics.clients["own_weight"][1] == 0
    assert state.server["affinity"][1, 3] > 0 > state.server["affinity"][1, 2]


def test_without_a_better_model_the_own_stays():
    state, metrics = round_of(store([WORSE] * N), lr=0.0)
    assert_same(toy.rows(state.server["models"], 1), WORSE)
    assert_same(toy.rows(state.clients["start"], 1), WORSE)
    assert metrics.clients["own_weight"][1] == 1


@pytest.mark.parametrize("seed", range(3))
def test_weights_are_on_the_simplex_or_all_zero(seed):
    d, weights = (
        np.random.default_rng(seed).normal(size=6).astype(np.float32),
        jax.jit(mixing),
    )
    p = np.asarray(weights(d))
    assert np.all(p >= 0) and np.all((p > 0) == (d > 0))
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-6)
    np.testing.assert_array_equal(weights(-np.abs(d)), 0)


def test_a_benefit_at_twice_the_distance_is_half():
    far = jax.tree.map(lambda a, b: a + 2 * (b - a), W[0], W[1])
    of = jax.jit(benefit)
    near, twice = (of(0.4, 1.0, w, W[0]) for w in (W[1], far))
    np.testing.assert_allclose(near, 2 * np.asarray(twice), rtol=1e-4)
    assert near > 0 > of(1.0, 0.4, W[1], W[0])
    np.testing.assert_array_equal(of(1.0, 1.0, W[0], W[0]), 0)


@pytest.mark.slow  # the split is in the plain loop, too: below
def test_with_its_own_model_only_it_is_local_on_the_split():
    f = toy.federation()
    split = f._replace(
        train=f.train._replace(size=np.asarray(f.train.size) - HELD.astype(np.int32))
    )
    mine, metrics, scores = toy.train(factory, TASK, key=KEY, received=1)
    alone, _, alone_scores = toy.train("local", TASK, key=KEY, federation_=split)
    assert_close(mine.server["models"], alone.clients)
    assert_same(scores["acc"], alone_scores["acc"])
    np.testing.assert_array_equal(
        metrics.clients["received"], [[0] * N, [1] * N, [1] * N]
    )
    np.testing.assert_array_equal(metrics.clients["own_weight"], 1)


@jax.jit
def orders(i, size):
    """The library's shuffles of client i's rows, [epochs, 19]."""
    key = keys.fold(
        jax.random.fold_in(jax.random.fold_in(KEY, 0), i), keys.Client.SHUFFLE
    )
    return [
        local_training.shuffle(jax.random.fold_in(key, epoch), 19, size)
        for epoch in range(TASK.epochs)
    ]


def train_by_hand(i, w, size):
    """Plain SGD on a client's first `size` rows, in the order of the library's
    shuffle."""
    kernel, bias = (np.asarray(w["head"][k], np.float64) for k in ("kernel", "bias"))
    for order in orders(i, size):
        row = np.asarray(F.train.index[i])[np.asarray(order)[:size]]
        for s in range(0, size, TASK.batch_size):
            b = row[s : s + TASK.batch_size]
            by_kernel, by_bias = gradient(kernel, bias, X[b], Y[b])
            kernel, bias = kernel - 0.1 * by_kernel, bias - 0.1 * by_bias
    return {"body": {}, "head": {"kernel": kernel, "bias": bias}, "stats": {}}


def test_two_rounds_are_the_plain_loop():
    start, models, affinity = [W[0]] * N, list(W), np.eye(N)
    state = store(W)
    for _ in range(2):
        state, _ = round_of(state, evaluated=False)
        trained = []
        for i in range(N):
            loss = [val_loss(w, i) if HELD[i] else 0.0 for w in (start[i], *models)]
            d = [
                (loss[0] - loss[1 + j])
                / (np.linalg.norm(vector(models[j]) - vector(start[i])) + 1e-5)
                for j in ALL
            ]
            c = np.maximum(d, 0)
            if c.sum() > 0:
                start[i] = jax.tree.map(
                    lambda *w, c=c: sum(
                        p * x for p, x in zip(c / c.sum(), w, strict=True)
                    ),
                    *models,
                )
            else:
                start[i] = models[i]
            affinity[i] += d
            trained.append(train_by_hand(i, start[i], SIZES[i] - HELD[i]))
        models = trained
    assert np.any(affinity > 0.05) and np.any(affinity < -0.05)
    for i in range(N):
        assert_close(toy.rows(state.server["models"], i), models[i], 1e-4)
        assert_close(toy.rows(state.clients["start"], i), start[i], 1e-4)
    np.testing.assert_allclose(state.server["affinity"], affinity, atol=1e-3)


AFFINITY = np.array([0.1, 0.9, 0.5, -1.0, 0.0], np.float32)


@pytest.mark.slow
def test_the_server_sends_the_own_model_and_the_nearest_uploaded():
    known = np.array([True, False, True, True, True])
    sent = jax.jit(
        lambda id, count, epsilon: select(KEY, AFFINITY, known, id, count, epsilon),
        static_argnums=1,
    )
    pick = lambda count: set(np.asarray(sent(3, count, 0.0)).tolist())
    assert sent(3, 3, 0.0)[0] == 3
    assert (
        pick(1) == {3}
        and pick(2) == {3, 2}
        and pick(3) == {3, 2, 0}
        and pick(4) == {3, 2, 0, 4}
    )
    ids = np.asarray(sent(0, 5, 1.0))
    assert ids[0] == 0 and ids[-1] == 1  # nobody has uploaded model 1


def test_exploration_and_ties_are_random():
    known = np.ones(N, bool)
    draw = jax.jit(
        jax.vmap(
            lambda k, q, e: select(k, q, known, jnp.int32(0), 3, e), (0, None, None)
        )
    )
    draws = jax.random.split(KEY, 400)
    for q, epsilon in ((np.zeros_like(AFFINITY), 0.0), (AFFINITY, 1.0)):
        ids = np.asarray(draw(draws, q, epsilon))
        assert np.all(ids[:, 0] == 0) and np.all(np.diff(np.sort(ids)) > 0)
        np.testing.assert_allclose(
            [np.mean(ids == j) * 3 for j in range(1, N)], 0.5, atol=0.1
        )
    explored = np.mean(
        np.any(np.asarray(draw(draws, AFFINITY, 0.3)) == 3, axis=1)
    )  # the farthest comes only by exploring
    np.testing.assert_allclose(explored, 0.42 / 3 + 0.09 * 2 / 4, atol=0.06)


def test_absent_clients_are_not_candidates_until_they_upload():
    begin = factory(TASK).init(KEY)
    state, metrics = round_of(begin, ids=[3, 1])
    np.testing.assert_array_equal(
        state.server["known"], [False, True, False, True, False]
    )
    np.testing.assert_array_equal(metrics.clients["received"][:2], 0)
    away = [0, 2, 4]
    assert_same(
        toy.rows(state.server["models"], away), toy.rows(begin.server["models"], away)
    )
    state, metrics = round_of(State(state.server, begin.clients), ids=[0, 1])
    np.testing.assert_array_equal(metrics.clients["received"][:2], 2)
    np.testing.assert_array_equal(
        (np.asarray(state.server["affinity"]) - np.eye(N))[:, away], 0
    )
    assert state.server["affinity"][0, 3] != 0


def test_the_mixture_is_scored_before_and_the_model_after_training():
    _, still = round_of(store(W), lr=0.0)
    assert_same(still.post["mixed_acc"], still.post["acc"])
    _, trained = round_of(store(W))
    assert_same(trained.post["mixed_acc"], still.post["mixed_acc"])
    assert np.any(np.asarray(trained.post["acc"]) != np.asarray(still.post["acc"]))


@pytest.mark.slow
def test_epsilon_loses_as_much_in_every_round(monkeypatch):
    seen = set()

    def noted(key, affinity, known, id, received, epsilon):
        jax.debug.callback(lambda epsilon: seen.add(round(float(epsilon), 4)), epsilon)
        return select(key, affinity, known, id, received, epsilon)

    monkeypatch.setitem(mixing.__globals__, "select", noted)
    toy.train(
        functools.partial(factory), TASK, 4, key=KEY, epsilon=0.5, epsilon_decay=0.2
    )
    jax.effects_barrier()
    assert seen == {0.5, 0.3, 0.1, 0.0}


@pytest.mark.slow
def test_a_client_without_a_batch_beside_its_holdout_uploads_nothing():
    """Client 0 has a batch of its seven examples, and none of the six that it does not
    hold out."""
    got = toy.train(factory, toy.task("linear", batch_size=7, drop_last=True), 1, KEY)
    np.testing.assert_array_equal(got.state.server["known"], SIZES - HELD >= 7)
    assert_same(
        toy.rows(got.state.server["models"], 0), toy.rows(got.begin.server["models"], 0)
    )
