"""The properties of sheet 15: what the teacher teaches, and how it inherits the trained models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import SIZES, C, N, assert_close, assert_same

from fedjax_pfl import simulate, trees
from fedjax_pfl.algorithms import fedphp as factory
from fedjax_pfl.algorithms.fedphp import momentum, transfer_loss
from fedjax_pfl.checks import BadInput
from fedjax_pfl.clients import Cohort
from fedjax_pfl.types import Batch, State

KEY = jax.random.key(0)
TASK = toy.task()
LR, EPOCHS = 0.3, 3
FULL = toy.task("linear", lr=LR, batch_size=32, epochs=EPOCHS, rounds=4)  # full batches: no shuffling to imitate
BATCH = Batch(jax.random.normal(KEY, (6, *toy.SHAPE)), jnp.array([0, 2, 1, 3, 2, 0]), jnp.arange(6) < 5, jnp.arange(6))
W, H = (TASK.model.init(jax.random.key(i)) for i in range(2))


def test_the_old_average_weighs_more_with_every_participation():
    got = [float(momentum(jnp.int32(z), 0.9, 4.0)) for z in (0, 1, 3, 4, 7)]
    np.testing.assert_allclose(got, [0, 0.225, 0.675, 0.9, 0.9], rtol=1e-6)
    np.testing.assert_allclose(momentum(jnp.int32(1), 0.9, 0.3), 0.9, rtol=1e-6)  # less than one is expected


@pytest.mark.parametrize("regularizer", ["mmd", "kd"])
def test_the_loss_by_hand(regularizer):
    """In NumPy over the five valid rows, pair by pair."""
    x, y = (np.asarray(a, np.float64)[:5] for a in (BATCH.x, BATCH.y))

    def forward(w):
        (layer,) = w["body"]["layers"].values()
        h = np.maximum(x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]), 0)
        z = h @ np.asarray(w["head"]["kernel"]) + np.asarray(w["head"]["bias"])
        return h, z, z - np.log(np.exp(z).sum(axis=1, keepdims=True))

    (h, _, log_p), (u, z_u, _) = forward(W), forward(H)
    ce = -np.mean([log_p[i, int(y[i])] for i in range(5)])
    if regularizer == "mmd":
        k = lambda a, b: sum(np.exp(-((a - b) ** 2).sum() / (2 * v)) for v in (10, 15, 20, 50))
        r = np.mean([[k(h[i], h[j]) + k(u[i], u[j]) - 2 * k(h[i], u[j]) for j in range(5)] for i in range(5)])
    else:
        p = np.exp(z_u / 4) / np.exp(z_u / 4).sum(axis=1, keepdims=True)
        r = -np.mean((p * log_p).sum(axis=1))
    got = transfer_loss(TASK, H, 0.3, regularizer)(W, BATCH, KEY)[0]
    np.testing.assert_allclose(got, 0.7 * ce + 0.3 * r, rtol=1e-5)


def test_an_equal_teacher_teaches_nothing():
    value, by_w = jax.value_and_grad(lambda w: transfer_loss(TASK, W, 1.0, "mmd")(w, BATCH, KEY)[0])(W)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    assert_close(by_w, trees.scale(0, by_w))
    other = jax.grad(lambda w: transfer_loss(TASK, H, 1.0, "mmd")(w, BATCH, KEY)[0])(W)
    assert trees.sq_dist(other, by_w) > 1e-4


@pytest.mark.parametrize("regularizer", ["mmd", "kd"])
def test_the_teacher_is_held_still_and_the_gradient_is_the_finite_difference(regularizer):
    with jax.enable_x64(True):
        w, h, towards = (
            jax.tree.map(lambda x: x.astype(jnp.float64), TASK.model.init(jax.random.key(i))) for i in range(3)
        )
        batch = BATCH._replace(x=BATCH.x.astype(jnp.float64))
        value = jax.jit(lambda w: transfer_loss(TASK, h, 0.4, regularizer)(w, batch, KEY)[0])
        moved = lambda e: value(jax.tree.map(lambda a, b: a + e * b, w, towards))
        by_w = jax.grad(value)(w)
        slope = sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (by_w, towards)), strict=True))
        np.testing.assert_allclose(slope, (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-6)
        assert abs(slope) > 1e-4


# --- whole rounds


def rounds(cohorts, task=TASK, start=None, federation=None, **hparams):
    """The states before, between and after rounds of the clients `cohorts`, a list of ids."""
    f = toy.federation() if federation is None else federation
    algorithm = factory(task, **hparams)

    @jax.jit
    def run(state, ids):
        rows = State(state.server, trees.gather(state.clients, ids))
        now = {"key": KEY, "round": jnp.int32(0), "evaluated": jnp.bool(False)}
        new, _ = algorithm.round(KEY, rows, Cohort(f, task.prepare, ids, ids >= 0, width=1, **now))
        return State(new.server, trees.scatter(state.clients, ids, new.clients, ids >= 0))

    states = [algorithm.init(KEY) if start is None else start]
    for ids in cohorts:
        states.append(run(states[-1], jnp.asarray(ids, jnp.int32)))
    return states


def test_without_inheritance_the_average_is_the_last_model():
    for state in rounds([[1], [1], [1]], mu0=0.0)[1:]:
        assert_close(trees.gather(state.clients["h"], 1), state.server)  # alone in the round: w^{t+1} = w_i


def test_the_first_average_is_the_first_model():
    first, second = rounds([[1], [1]])[1:]
    assert_close(trees.gather(first.clients["h"], 1), first.server)
    mu = 0.9 * 1 / TASK.rounds
    expected = trees.lerp(mu, trees.gather(first.clients["h"], 1), second.server)
    assert_close(trees.gather(second.clients["h"], 1), expected)


def test_taught_alone_labels_have_no_influence():
    f = toy.federation()
    other = f._replace(examples=f.examples._replace(y=(f.examples.y + 1) % C))
    begin = factory(TASK).init(KEY)
    start = State(begin.server, {**begin.clients, "h": trees.replicate(H, N)})
    here, there = (rounds([[0, 1, 3]] * 2, start=start, federation=g, lam=1.0)[-1] for g in (f, other))
    assert_same(here, there)
    assert trees.sq_dist(here.server, begin.server) > 1e-6


def test_rounds_by_hand():
    """Softmax regression distilled from h_i, with clients that come and go; mu counts each one's participations."""
    f, lam, mu0, cohorts = toy.federation(), 0.4, 0.8, [[0, 1, 3], [1, 4, 2], [1, 0, 3]]
    task = FULL._replace(participation=(0.4, 0.8))
    states = rounds(cohorts, task, lam=lam, mu0=mu0, regularizer="kd")
    head = lambda tree: tuple(np.asarray(tree["head"][name], np.float64) for name in ("kernel", "bias"))
    softmax = lambda z: np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    w, count = head(states[0].server), np.zeros(N)
    h = [w] * N
    for ids, got in zip(cohorts, states[1:], strict=True):
        trained = {}
        for i in ids:
            rows = np.asarray(f.train.index[i][: SIZES[i]])
            x, y = np.asarray(f.examples.x, np.float64)[rows], np.eye(C)[np.asarray(f.examples.y)[rows]]
            taught, v = softmax((x @ h[i][0] + h[i][1]) / 4), w
            for _ in range(EPOCHS):
                p = softmax(x @ v[0] + v[1])
                r = ((1 - lam) * (p - y) + lam * (p - taught)) / len(x)
                v = (v[0] - LR * x.T @ r, v[1] - LR * r.sum(axis=0))
            mu = min(mu0, mu0 * count[i] / (0.6 * 4))
            h[i] = tuple(mu * a + (1 - mu) * b for a, b in zip(h[i], v, strict=True))
            trained[i] = v
            count[i] += 1
        share = SIZES[ids] / SIZES[ids].sum()
        w = tuple(sum(p * trained[i][part] for p, i in zip(share, ids, strict=True)) for part in range(2))
        np.testing.assert_array_equal(got.clients["count"], count)
        for mine, expected in [(got.server, w), *((trees.gather(got.clients["h"], i), h[i]) for i in range(N))]:
            np.testing.assert_allclose(head(mine)[0], expected[0], atol=1e-5)
            np.testing.assert_allclose(head(mine)[1], expected[1], atol=1e-5)


def test_without_examples_nothing_is_inherited():
    f = toy.federation()
    nothing = f._replace(train=f.train._replace(size=f.train.size.at[jnp.array([0, 3])].set(0)))
    begin = factory(TASK).init(KEY)
    start = State(begin.server, {**begin.clients, "h": trees.replicate(H, N)})
    state = rounds([[0, 1, 3]], start=start, federation=nothing)[1]
    assert_same(trees.gather(state.clients["h"], jnp.array([0, 3])), trees.replicate(H, 2))
    np.testing.assert_array_equal(state.clients["count"], [0, 1, 0, 0, 0])
    assert_same(rounds([[0, 3]], start=start, federation=nothing)[1].server, start.server)


def test_both_models_are_scored():
    program, f = simulate.program(factory, TASK, {"mu0": 1.0}), toy.federation()
    state, metrics, last = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, f, rounds=3))()
    assert_same(metrics["post"]["acc"][-1], last["acc"])  # h_i is kept until the next round
    assert not np.array_equal(metrics["post"]["global_acc"][-1], last["global_acc"])  # w_i is not
    x = f.examples.x[:7]
    got = program.predict(KEY, program.numbers, f, state, 0, 1, x)
    assert_close(got[..., 0], TASK.model.apply(trees.gather(state.clients["h"], 1), x)[0])
    assert_close(got[..., 1], TASK.model.apply(state.server, x)[0])


@pytest.mark.parametrize("regularizer, bn_stats", [("mmd", "aggregate"), ("kd", "local"), ("mmd", "batch")])
def test_batch_norm(regularizer, bn_stats):
    program = simulate.program(factory, toy.task("norm", bn_stats=bn_stats), {"regularizer": regularizer})
    f = toy.federation()
    state, metrics, last = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, f, rounds=2))()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last)))
    assert bool(jax.tree.leaves(state.clients["own"])) == (bn_stats == "local")
    assert bool(jax.tree.leaves(state.clients["h"]["stats"])) == (bn_stats != "batch")


@pytest.mark.parametrize("wrong", [{"lam": 1.5}, {"mu0": -0.1}, {"regularizer": "l2"}])
def test_bad_input(wrong):
    with pytest.raises(BadInput):
        factory(TASK, **wrong)
