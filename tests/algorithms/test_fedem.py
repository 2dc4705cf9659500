"""The properties of sheet 22: responsibilities, mixing weights, what EM never worsens, and two rounds by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import SIZES, N, assert_close, assert_same

from fedjax_pfl import local, simulate, trees
from fedjax_pfl.algorithms import fedem as factory
from fedjax_pfl.algorithms.fedem import e_step, mixture, responsibilities
from fedjax_pfl.checks import BadInput
from fedjax_pfl.clients import Cohort
from fedjax_pfl.sharing import personal_mask
from fedjax_pfl.types import Data, State

KEY = jax.random.key(0)
TASK = toy.task("linear")
ALL = jnp.arange(N, dtype=jnp.int32)
W = [TASK.model.init(jax.random.key(i)) for i in range(3)]
THETA = jax.tree.map(lambda *x: 3 * jnp.stack(x), *W)  # far apart
OWN = trees.partition(THETA, personal_mask(TASK))[0]  # nothing stays at home
PI = jnp.array([0.5, 0.3, 0.2])


def state_of(theta, pi):
    return State(theta, {"pi": jnp.broadcast_to(pi, (N, 3)), "own": OWN})


def round_of(task, state, ids=ALL, federation=None, **hparams):
    f = toy.federation() if federation is None else federation
    algorithm = factory(task, **hparams)

    def run(state):
        rows = State(state.server, trees.gather(state.clients, ids))
        here = {"key": KEY, "round": jnp.int32(0), "evaluated": jnp.bool(False), "width": 1}
        return algorithm.round(KEY, rows, Cohort(f, task.prepare, ids, ids >= 0, **here))

    return jax.jit(run)(state)


def train_data(i):
    f = toy.federation()
    return Data(f.examples, f.train.index[i], f.train.size[i], TASK.prepare)


def rows(i):
    f = toy.federation()
    row = np.asarray(f.train.index[i])[: SIZES[i]]
    return np.asarray(f.examples.x[row], np.float64), np.asarray(f.examples.y[row])


def log_probabilities(head, x):
    z = x @ head[0] + head[1]
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def heads(theta):
    return [tuple(np.asarray(theta["head"][k][m], np.float64) for k in ("kernel", "bias")) for m in range(3)]


def q_by_hand(heads, pi, i):
    x, y = rows(i)
    p = np.stack([np.exp(log_probabilities(h, x))[np.arange(len(y)), y] for h in heads], axis=1) * pi
    return p / p.sum(1, keepdims=True)


def train_by_hand(i, head, q):
    """SGD on a client's weighted rows, in the order of the library's shuffle."""
    (x, y), (kernel, bias), size = rows(i), head, int(SIZES[i])
    client_key = jax.random.fold_in(jax.random.fold_in(KEY, 0), i)
    for epoch in range(TASK.epochs):
        key = jax.random.fold_in(jax.random.fold_in(client_key, local.SHUFFLE), epoch)
        order = np.asarray(local.shuffle(key, 19, jnp.int32(size)))[:size]
        for s in range(0, size, TASK.batch_size):
            b = order[s : s + TASK.batch_size]
            error = np.exp(log_probabilities((kernel, bias), x[b])) - np.eye(toy.C)[y[b]]
            error *= q[b][:, None] / len(b)
            kernel, bias = kernel - 0.1 * x[b].T @ error, bias - 0.1 * error.sum(0)
    return kernel, bias


@pytest.mark.parametrize("average", ["round", "all"])
def test_two_rounds_are_the_plain_loop(average):
    state, ids = state_of(THETA, PI), [3, 0, 1]
    components, pi = heads(THETA), [np.asarray(PI, np.float64)] * N
    share = {i: SIZES[i] / (SIZES[ids].sum() if average == "round" else SIZES.sum()) for i in ids}
    for _ in range(2):
        new, _ = round_of(TASK, state, jnp.array(ids, jnp.int32), average=average)
        on = jnp.ones(3, bool)
        state = State(new.server, trees.scatter(state.clients, jnp.array(ids), new.clients, on))
        q = {i: q_by_hand(components, pi[i], i) for i in ids}
        for i in ids:
            pi[i] = q[i].mean(0)
        left = 1 - sum(share.values())  # of the absent, who count with the last models
        for m, head in enumerate(components):
            trained = [(share[i], train_by_hand(i, head, q[i][:, m])) for i in ids]
            components[m] = tuple(left * head[k] + sum(p * new[k] for p, new in trained) for k in range(2))
    for m, head in enumerate(components):
        np.testing.assert_allclose(state.server["head"]["kernel"][m], head[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state.server["head"]["bias"][m], head[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.clients["pi"], np.stack(pi), rtol=1e-4, atol=1e-5)


def test_identical_components_leave_the_weights_alone():
    same = trees.replicate(W[0], 3)
    q, pi = e_step(TASK, same, PI, train_data(1))
    assert_close(q[: SIZES[1]], jnp.broadcast_to(PI, (SIZES[1], 3)))
    assert_close(pi, PI)
    assert_close(round_of(TASK, state_of(same, PI))[0].clients["pi"], jnp.broadcast_to(PI, (N, 3)))


@pytest.mark.parametrize("i", range(N))
def test_responsibilities_and_weights_are_on_the_simplex(i):
    q, pi = e_step(TASK, THETA, PI, train_data(i))
    assert q.shape == (19, 3) and np.all(q >= 0)
    np.testing.assert_allclose(q[: SIZES[i]].sum(1), 1, rtol=1e-6)
    np.testing.assert_array_equal(q[SIZES[i] :], 0)  # no row of padding has any
    np.testing.assert_allclose(pi, q[: SIZES[i]].mean(0), rtol=1e-5)
    np.testing.assert_allclose(q[: SIZES[i]], q_by_hand(heads(THETA), np.asarray(PI), i), rtol=1e-4, atol=1e-6)


def test_em_on_fixed_components_never_lowers_the_likelihood():
    x, y = rows(1)
    by_component = np.stack([np.exp(log_probabilities(h, x))[np.arange(len(y)), y] for h in heads(THETA)], axis=1)
    step = jax.jit(lambda pi: e_step(TASK, THETA, pi, train_data(1))[1])
    pi, values = PI, []
    for _ in range(20):
        values.append(np.log(by_component @ np.asarray(pi, np.float64)).sum())
        pi = step(pi)
    assert np.all(np.diff(values) > -1e-5) and values[-1] > values[0] + 0.01


def test_a_weight_of_zero_stays_zero():
    q = responsibilities(jnp.array([0.0, 0.6, 0.4]), jnp.array([[0.1, 2.0, 3.0]]))
    assert np.isfinite(q).all() and q[0, 0] < 1e-20


def test_permuting_the_components_permutes_everything():
    order = jnp.array([2, 0, 1])
    task = toy.task("norm")
    theta = jax.tree.map(lambda *x: jnp.stack(x), *(task.model.init(jax.random.key(m)) for m in range(3)))
    own = trees.partition(theta, personal_mask(task))[0]
    start = State(theta, {"pi": jnp.broadcast_to(PI, (N, 3)), "own": own})
    turned = State(trees.gather(theta, order), {"pi": start.clients["pi"][:, order], "own": own})
    (a, losses), (b, other) = (round_of(task, state) for state in (start, turned))
    assert_close(trees.gather(a.server, order), b.server)
    assert_close(a.clients["pi"][:, order], b.clients["pi"])
    assert_close(losses["loss"], other["loss"])


def test_the_prediction_mixes_probabilities():
    x = toy.federation().examples.x[:7]
    got = mixture(TASK, THETA, PI)(x, jnp.ones(7, bool))
    p = sum(w * np.exp(log_probabilities(h, np.asarray(x))) for w, h in zip(np.asarray(PI), heads(THETA), strict=True))
    np.testing.assert_allclose(np.exp(got), p, rtol=1e-4, atol=1e-6)
    sure = mixture(TASK, THETA, jnp.array([0.0, 1.0, 0.0]))(x, jnp.ones(7, bool))
    assert_close(sure, jnp.asarray(log_probabilities(heads(THETA)[1], np.asarray(x)), jnp.float32), 1e-4)


def test_refitting_finds_the_weights_of_a_client_that_never_trained():
    x, ids = toy.federation().examples.x[:7], jnp.array([1], jnp.int32)
    here = {"key": KEY, "round": jnp.int32(0), "evaluated": jnp.bool(False), "width": 1}
    cohort = Cohort(toy.federation(), TASK.prepare, ids, ids >= 0, **here)
    mine = trees.gather(state_of(THETA, jnp.full(3, 1 / 3)).clients, ids)
    outputs = lambda refit: cohort.map(
        lambda c, row: factory(TASK, refit=refit).predict(THETA, row, c)(x, jnp.ones(7, bool)), mine
    )[0]
    pi = jnp.full(3, 1 / 3)
    assert_close(outputs(0), mixture(TASK, THETA, pi)(x, jnp.ones(7, bool)))
    for _ in range(2):
        pi = e_step(TASK, THETA, pi, train_data(1))[1]
    assert_close(outputs(2), mixture(TASK, THETA, pi)(x, jnp.ones(7, bool)), 1e-5)
    assert np.abs(outputs(2) - outputs(0)).max() > 0.01


def test_components_begin_apart_and_the_first_as_fedavgs_model():
    begin = factory(TASK).init(KEY)
    assert_same(trees.gather(begin.server, 0), TASK.model.init(KEY))
    assert trees.sq_dist(trees.gather(begin.server, 1), trees.gather(begin.server, 2)) > 1e-2
    np.testing.assert_allclose(begin.clients["pi"], 1 / 3, rtol=1e-6)


def test_a_client_without_examples_keeps_its_weights():
    f = toy.federation()
    f = f._replace(train=f.train._replace(size=f.train.size.at[0].set(0)))
    state, _ = round_of(TASK, state_of(THETA, PI), federation=f)
    assert_same(state.clients["pi"][0], PI)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
def test_batch_norm(bn_stats):
    program = simulate.program(factory, toy.task("norm", bn_stats=bn_stats), {"components": 2})
    state, metrics, last = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, toy.federation(), rounds=2))()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last)))
    assert bool(jax.tree.leaves(state.clients["own"])) == (bn_stats == "local")


@pytest.mark.parametrize("wrong", [{"components": 0}, {"average": "some"}, {"refit": -1}])
def test_bad_input(wrong):
    with pytest.raises(BadInput):
        factory(TASK, **wrong)
