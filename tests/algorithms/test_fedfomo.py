"""The properties of sheet 14: benefits, mixing weights, who is sent what, the split, and two rounds by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import SIZES, N, assert_close, assert_same

from fedjax_pfl import local, simulate, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms import fedfomo as factory
from fedjax_pfl.algorithms.fedfomo import benefit, mixing, select
from fedjax_pfl.checks import BadInput
from fedjax_pfl.clients import Cohort
from fedjax_pfl.sharing import personal_mask
from fedjax_pfl.types import Rows, State

KEY = jax.random.key(0)
TASK = toy.task("linear")
STILL = toy.task("linear", epochs=0)  # clients mix and do not train
W = [TASK.model.init(jax.random.key(i)) for i in range(N)]
OWN = trees.partition(W[0], personal_mask(TASK))[0]  # nothing stays at home
ALL = jnp.arange(N, dtype=jnp.int32)
HELD = np.array([1, 4, 0, 2, 1])  # a fifth of 7, 19, 1, 12, 4 examples


def store(models, known=True):
    """A server that holds these models, and clients that all began at the first of W."""
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *models)
    server = {"models": stacked, "known": jnp.broadcast_to(jnp.asarray(known), (N,)), "affinity": jnp.eye(N)}
    return State(server, trees.replicate({"start": W[0], "own": OWN}, N))


def round_of(task, state, federation=None, ids=ALL, evaluated=True, **hparams):
    f = toy.federation() if federation is None else federation
    algorithm = factory(task, **hparams)

    def run(state):
        rows = State(state.server, trees.gather(state.clients, ids))
        here = {"key": KEY, "round": jnp.int32(0), "evaluated": jnp.bool(evaluated), "width": 1}
        return algorithm.round(KEY, rows, Cohort(f, task.prepare, ids, ids >= 0, **here))

    return jax.jit(run)(state)


def val_loss(w, i):
    """Mean cross entropy of a linear model on a client's holdout, in NumPy."""
    f = toy.federation()
    row = np.asarray(f.train.index[i])[SIZES[i] - HELD[i] : SIZES[i]]
    z = np.asarray(f.examples.x[row]) @ np.asarray(w["head"]["kernel"]) + np.asarray(w["head"]["bias"])
    return np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(row)), np.asarray(f.examples.y[row])])


def vector(w):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(w)])


def test_models_like_the_start_have_no_weight_and_change_nothing():
    state, metrics = round_of(STILL, store([W[0]] * N))
    assert_same(state.server["models"], trees.replicate(W[0], N))
    assert_same(state.server["affinity"], jnp.eye(N))
    np.testing.assert_array_equal(metrics["own_weight"], 1)


def better(i):
    """The first of W after steps along the gradient of client i's validation loss."""
    f = toy.federation()
    row = np.asarray(f.train.index[i])[SIZES[i] - HELD[i] : SIZES[i]]
    z = lambda w: TASK.model.apply(w, f.examples.x[row])[0]
    loss = lambda w: jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(z(w), f.examples.y[row]))
    return jax.tree.map(lambda w, g: w - 0.1 * g, W[0], jax.grad(loss)(W[0]))


def test_the_only_better_model_is_taken_over():
    good = better(1)
    worse = jax.tree.map(lambda w, b: w - 3 * (b - w), W[0], good)  # the opposite direction
    models = [good if j == 3 else worse for j in range(N)]
    assert val_loss(good, 1) < val_loss(W[0], 1) < val_loss(worse, 1)
    state, metrics = round_of(STILL, store(models))
    assert_same(trees.gather(state.server["models"], 1), good)
    assert metrics["own_weight"][1] == 0
    assert state.server["affinity"][1, 3] > 0 > state.server["affinity"][1, 2]


def test_without_a_better_model_the_own_stays():
    worse = jax.tree.map(lambda w, b: w - 3 * (b - w), W[0], better(1))
    state, metrics = round_of(STILL, store([worse] * N))
    assert_same(trees.gather(state.server["models"], 1), worse)
    assert_same(trees.gather(state.clients["start"], 1), worse)
    assert metrics["own_weight"][1] == 1


@pytest.mark.parametrize("seed", range(3))
def test_weights_are_on_the_simplex_or_all_zero(seed):
    d = jax.random.normal(jax.random.key(seed), (6,))
    p = mixing(d)
    assert np.all(p >= 0) and np.all((p > 0) == (d > 0))
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-6)
    np.testing.assert_array_equal(mixing(-jnp.abs(d)), 0)


def test_a_benefit_at_twice_the_distance_is_half():
    far = jax.tree.map(lambda a, b: a + 2 * (b - a), W[0], W[1])
    near, twice = (benefit(jnp.float32(0.4), jnp.float32(1.0), w, W[0]) for w in (W[1], far))
    np.testing.assert_allclose(near, 2 * twice, rtol=1e-4)
    assert near > 0 > benefit(jnp.float32(1.0), jnp.float32(0.4), W[1], W[0])
    np.testing.assert_array_equal(benefit(jnp.float32(1.0), jnp.float32(1.0), W[0], W[0]), 0)


def test_with_its_own_model_only_it_is_local_on_the_split():
    f = toy.federation()
    split = f._replace(train=f.train._replace(size=f.train.size - jnp.asarray(HELD)))

    def after(factory, federation, **hparams):
        program = simulate.program(factory, TASK, hparams)
        return jax.jit(lambda: simulate.curve(program, KEY, program.numbers, federation, rounds=3))()

    mine, metrics, scores = after(factory, f, received=1)
    alone, _, alone_scores = after(ALGORITHMS["local"], split)
    assert_close(mine.server["models"], alone.clients)
    assert_same(scores["acc"], alone_scores["acc"])
    np.testing.assert_array_equal(metrics["received"], [[0] * N, [1] * N, [1] * N])
    np.testing.assert_array_equal(metrics["own_weight"], 1)


def train_by_hand(i, w):
    """Plain SGD on the split's training rows, in the order of the library's shuffle."""
    f, size = toy.federation(), int(SIZES[i] - HELD[i])
    client_key = jax.random.fold_in(jax.random.fold_in(KEY, 0), i)
    kernel, bias = (np.asarray(w["head"][k], np.float64) for k in ("kernel", "bias"))
    for epoch in range(TASK.epochs):
        key = jax.random.fold_in(jax.random.fold_in(client_key, local.SHUFFLE), epoch)
        order = np.asarray(local.shuffle(key, f.train.index.shape[1], jnp.int32(size)))[:size]
        for s in range(0, size, TASK.batch_size):
            row = np.asarray(f.train.index[i])[order[s : s + TASK.batch_size]]
            x, y = np.asarray(f.examples.x[row], np.float64), np.asarray(f.examples.y[row])
            z = x @ kernel + bias
            p = np.exp(z - z.max(1, keepdims=True))
            error = (p / p.sum(1, keepdims=True) - np.eye(toy.C)[y]) / len(y)
            kernel, bias = kernel - 0.1 * x.T @ error, bias - 0.1 * error.sum(0)
    return {"body": {}, "head": {"kernel": kernel, "bias": bias}, "stats": {}}


def test_two_rounds_are_the_plain_loop():
    start, models, affinity = [W[0]] * N, list(W), np.eye(N)
    state = store(W)
    for _ in range(2):
        state, _ = round_of(TASK, state, evaluated=False)
        trained = []
        for i in range(N):
            loss = [val_loss(w, i) if HELD[i] else 0.0 for w in (start[i], *models)]
            d = [(loss[0] - loss[1 + j]) / (np.linalg.norm(vector(models[j]) - vector(start[i])) + 1e-5) for j in ALL]
            c = np.maximum(d, 0)
            if c.sum() > 0:
                start[i] = jax.tree.map(
                    lambda *w, c=c: sum(p * x for p, x in zip(c / c.sum(), w, strict=True)), *models
                )
            else:
                start[i] = models[i]
            affinity[i] += d
            trained.append(train_by_hand(i, start[i]))
        models = trained
    assert np.any(affinity > 0.05) and np.any(affinity < -0.05)
    for i in range(N):
        assert_close(trees.gather(state.server["models"], i), jax.tree.map(jnp.float32, models[i]), 1e-4)
        assert_close(trees.gather(state.clients["start"], i), jax.tree.map(jnp.float32, start[i]), 1e-4)
    np.testing.assert_allclose(state.server["affinity"], affinity, atol=1e-3)


AFFINITY = jnp.array([0.1, 0.9, 0.5, -1.0, 0.0])


def test_the_server_sends_the_own_model_and_the_nearest_uploaded():
    known = jnp.array([True, False, True, True, True])
    pick = lambda count, known=known: set(np.asarray(select(KEY, AFFINITY, known, jnp.int32(3), count, 0.0)).tolist())
    assert select(KEY, AFFINITY, known, jnp.int32(3), 3, 0.0)[0] == 3
    assert pick(1) == {3} and pick(2) == {3, 2} and pick(3) == {3, 2, 0} and pick(4) == {3, 2, 0, 4}
    ids = np.asarray(select(KEY, AFFINITY, known, jnp.int32(0), 5, 1.0))
    assert ids[0] == 0 and ids[-1] == 1  # nobody has uploaded model 1


def test_exploration_and_ties_are_random():
    known = jnp.ones(N, bool)
    draw = jax.jit(jax.vmap(lambda k, q, e: select(k, q, known, jnp.int32(0), 3, e), (0, None, None)))
    keys = jax.random.split(KEY, 400)
    for q, epsilon in ((jnp.zeros(N), 0.0), (AFFINITY, 1.0)):
        ids = np.asarray(draw(keys, q, epsilon))
        assert np.all(ids[:, 0] == 0) and np.all(np.diff(np.sort(ids)) > 0)
        np.testing.assert_allclose([np.mean(ids == j) * 3 for j in range(1, N)], 0.5, atol=0.1)
    explored = np.mean(np.any(draw(keys, AFFINITY, 0.3) == 3, axis=1))  # the farthest comes only by exploring
    np.testing.assert_allclose(explored, 0.42 / 3 + 0.09 * 2 / 4, atol=0.06)


def test_epsilon_shrinks_from_round_to_round():
    run = lambda **hparams: simulate.program(factory, TASK, {"received": 2, **hparams})
    programs = [run(epsilon=1.0, epsilon_decay=1.0), run(epsilon=0.0), run(epsilon=1.0, epsilon_decay=0.0)]
    curve = lambda p: jax.jit(lambda: simulate.curve(p, KEY, p.numbers, toy.federation(), rounds=4))()[0]
    shrunk, greedy, always = (curve(p).server["affinity"] for p in programs)  # in round 0 nothing is sent
    assert_same(shrunk, greedy)
    assert np.any(np.asarray(greedy) != np.asarray(always))


def test_absent_clients_are_not_candidates_until_they_upload():
    ids = jnp.array([3, 1], jnp.int32)
    begin = factory(TASK).init(KEY)
    state, metrics = round_of(TASK, begin, ids=ids)
    np.testing.assert_array_equal(state.server["known"], [False, True, False, True, False])
    np.testing.assert_array_equal(metrics["received"], 0)
    away = np.array([0, 2, 4])
    assert_same(trees.gather(state.server["models"], away), trees.gather(begin.server["models"], away))
    again = State(state.server, begin.clients)
    state, metrics = round_of(TASK, again, ids=jnp.array([0, 1], jnp.int32))
    np.testing.assert_array_equal(metrics["received"], 2)
    np.testing.assert_array_equal(np.asarray(state.server["affinity"] - jnp.eye(N))[:, [0, 2, 4]], 0)
    assert state.server["affinity"][0, 3] != 0


def test_validation_examples_of_the_federation_replace_the_holdout():
    f = toy.federation()
    given = f._replace(val=Rows(f.test.index, f.test.size.at[1].set(0)))  # client 1 has none
    models = round_of(TASK, store([W[0]] * N), given)[0].server["models"]
    split = round_of(TASK, store([W[0]] * N))[0].server["models"]
    algorithm = ALGORITHMS["local"](TASK)
    here = {"key": KEY, "round": jnp.int32(0), "evaluated": jnp.bool(False), "width": 1}
    cohort = Cohort(f, TASK.prepare, ALL, ALL >= 0, **here)
    begin = State(algorithm.init(KEY).server, trees.replicate(W[0], N))
    alone = jax.jit(lambda begin: algorithm.round(KEY, begin, cohort))(begin)[0].clients
    assert_close(trees.gather(models, jnp.array([0, 2, 3, 4])), trees.gather(alone, jnp.array([0, 2, 3, 4])))
    assert_same(trees.gather(models, 1), trees.gather(split, 1))
    assert trees.sq_dist(trees.gather(models, 0), trees.gather(split, 0)) > 0


def test_the_mixture_is_scored_before_and_the_model_after_training():
    _, still = round_of(STILL, store(W))
    assert_same(still["post"]["mixed_acc"], still["post"]["acc"])
    _, trained = round_of(TASK, store(W))
    assert_same(trained["post"]["mixed_acc"], still["post"]["mixed_acc"])
    assert np.any(np.asarray(trained["post"]["acc"] != still["post"]["acc"]))


@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
def test_batch_norm(bn_stats):
    task = toy.task("norm", bn_stats=bn_stats)
    program = simulate.program(factory, task)
    state, metrics, last = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, toy.federation(), rounds=3))()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last)))
    assert bool(jax.tree.leaves(state.clients["own"])) == (bn_stats == "local")


@pytest.mark.parametrize("wrong", [{"received": 0}, {"val": 1.5}, {"epsilon": -0.1}, {"epsilon_decay": -1.0}])
def test_bad_input(wrong):
    with pytest.raises(BadInput):
        factory(TASK, **wrong)
