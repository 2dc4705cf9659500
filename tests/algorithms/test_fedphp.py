"""The properties of sheet 15: what the teacher teaches, and how it inherits the trained
models."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import SIZES, C, N, assert_close, assert_same

from fedjax_pfl import simulate
from fedjax_pfl.algorithms import fedphp as factory
from fedjax_pfl.algorithms.fedphp import momentum, transfer_loss
from fedjax_pfl.engine import unseen
from fedjax_pfl.types import Batch, State

# the package has the factory of that name
php = importlib.import_module("fedjax_pfl.algorithms.fedphp")

KEY = jax.random.key(0)
TASK = toy.task()
LR, EPOCHS = 0.3, 3
# full batches: no shuffling to imitate
FULL = toy.task("linear", lr=LR, batch_size=32, epochs=EPOCHS, rounds=4)
X = np.random.default_rng(2).normal(size=(6, *toy.SHAPE)).astype(np.float32)
BATCH = Batch(X, np.array([0, 2, 1, 3, 2, 0]), np.arange(6) < 5, np.arange(6))
W, H, OTHER = map(jax.device_get, map(TASK.model.init, map(jax.random.key, range(3))))


def test_the_old_average_weighs_more_with_every_participation():
    got = jax.jit(lambda z: momentum(z, 0.9, 4.0))(np.array([0, 1, 3, 4, 7]))
    np.testing.assert_allclose(got, [0, 0.225, 0.675, 0.9, 0.9], rtol=1e-6)
    # less than one is expected
    np.testing.assert_allclose(momentum(jnp.int32(1), 0.9, 0.3), 0.9, rtol=1e-6)


def test_the_loss_by_hand():
    """In NumPy over the five valid rows, pair by pair."""
    x, y = X[:5].astype(np.float64), BATCH.y[:5]
    (h, z), (u, _) = (oracle.forward(oracle.variables(w), x) for w in (W, H))
    log_p = np.log(oracle.softmax(z))
    ce = -np.mean([log_p[i, y[i]] for i in range(5)])
    k = lambda a, b: sum(
        np.exp(-((a - b) ** 2).sum() / (2 * v)) for v in (10, 15, 20, 50)
    )
    r = np.mean(
        [
            [k(h[i], h[j]) + k(u[i], u[j]) - 2 * k(h[i], u[j]) for j in range(5)]
            for i in range(5)
        ]
    )
    got = jax.jit(lambda w: transfer_loss(TASK, H, 0.3)(w, BATCH, KEY)[0])(W)
    np.testing.assert_allclose(got, 0.7 * ce + 0.3 * r, rtol=1e-5)


def test_the_teacher_normalises_by_its_running_statistics():
    task = toy.task("norm")
    w, h = (task.model.init(jax.random.key(seed)) for seed in (0, 1))
    taught = jax.jit(lambda h: transfer_loss(task, h, 1.0)(w, BATCH, KEY)[0])
    other = {**h, "stats": jax.tree.map(lambda x: x + 1, h["stats"])}
    assert abs(taught(h) - taught(other)) > 1e-3


def test_an_equal_teacher_teaches_nothing():
    taught = lambda w, teacher: transfer_loss(TASK, teacher, 1.0)(w, BATCH, KEY)[0]
    learn = jax.jit(jax.value_and_grad(taught))
    value, by_w = learn(W, W)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    nothing = jax.tree.map(np.zeros_like, W)
    assert_close(by_w, nothing)
    assert distance(learn(W, H)[1], nothing) > 1e-4


def distance(a, b):
    """Squared, of two trees."""
    return sum(
        np.sum((np.asarray(x) - y) ** 2)
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def test_the_teacher_is_held_still_and_the_gradient_is_the_finite_difference():
    w, h, towards = (jax.tree.map(np.float64, tree) for tree in (W, H, OTHER))
    with jax.enable_x64(True):
        batch = BATCH._replace(x=X.astype(np.float64))
        both = jax.jit(
            jax.value_and_grad(lambda w: transfer_loss(TASK, h, 0.4)(w, batch, KEY)[0])
        )
        moved = lambda e: both(jax.tree.map(lambda a, b: a + e * b, w, towards))[0]
        slope = sum(
            np.vdot(a, b)
            for a, b in zip(*map(jax.tree.leaves, (both(w)[1], towards)), strict=True)
        )
        np.testing.assert_allclose(
            slope, (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-6
        )
        assert abs(slope) > 1e-4


# --- whole rounds


F = toy.federation()
LINEAR = FULL._replace(participation=(0.4, 0.8))


@functools.cache
def compiled(net):
    task = {"mlp": TASK, "linear": LINEAR}[net]

    @jax.jit
    def run(state, federation, ids, numbers):
        here = toy.cohort(task, ids, ids < N, federation, KEY)
        return toy.one_round(factory(task, **numbers), KEY, state, here)[0]

    return jax.device_get(factory(task).init(KEY)), run


def rounds(cohorts, net="mlp", start=None, federation=F, **numbers):
    """The states before, between and after rounds of the clients `cohorts`, a list of
    at most three ids."""
    begin, run = compiled(net)
    states, numbers = (
        [begin if start is None else start],
        {"lam": 0.01, "mu0": 0.9} | numbers,
    )
    for ids in cohorts:
        # every cohort is the same compilation
        places = np.append(ids, N + np.arange(3 - len(ids))).astype(np.int32)
        states.append(jax.device_get(run(states[-1], federation, places, numbers)))
    return states


def inherited():
    """A start in which everybody's average is H."""
    begin = compiled("mlp")[0]
    return State(
        begin.server,
        {**begin.clients, "h": jax.tree.map(lambda x: np.stack([x] * N), H)},
    )


@pytest.mark.slow
def test_without_inheritance_the_average_is_the_last_model():
    for state in rounds([[1], [1], [1]], mu0=0.0)[1:]:
        # alone in the round: w^{t+1} = w_i
        assert_close(toy.rows(state.clients["h"], 1), state.server)


def test_the_first_average_is_the_first_model():
    first, second = rounds([[1], [1]])[1:]
    h = toy.rows(first.clients["h"], 1)
    assert_close(h, first.server)
    mu = 0.9 * 1 / TASK.rounds
    expected = jax.tree.map(lambda a, b: mu * a + (1 - mu) * b, h, second.server)
    assert_close(toy.rows(second.clients["h"], 1), expected)


def test_taught_alone_labels_have_no_influence():
    other = F._replace(
        examples=F.examples._replace(y=(np.asarray(F.examples.y) + 1) % C)
    )
    start = inherited()
    here, there = (
        rounds([[0, 1, 3]] * 2, start=start, federation=g, lam=1.0)[-1]
        for g in (F, other)
    )
    assert_same(here, there)
    assert distance(here.server, start.server) > 1e-6


def test_rounds_by_hand():
    """Softmax regression, whose features are the inputs and have no teacher, with
    clients that come and go; mu counts each one's participations."""
    lam, mu0, cohorts = 0.4, 0.8, [[0, 1, 3], [1, 4, 2], [1, 0, 3]]
    states = rounds(cohorts, "linear", lam=lam, mu0=mu0)
    head = lambda tree: tuple(
        np.asarray(tree["head"][name], np.float64) for name in ("kernel", "bias")
    )
    softmax = lambda z: np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    w, count = head(states[0].server), np.zeros(N)
    h = [w] * N
    for ids, got in zip(cohorts, states[1:], strict=True):
        trained = {}
        for i in ids:
            rows = np.asarray(F.train.index[i])[: SIZES[i]]
            x, y = (
                np.asarray(F.examples.x, np.float64)[rows],
                np.eye(C)[np.asarray(F.examples.y)[rows]],
            )
            v = w
            for _ in range(EPOCHS):
                p = softmax(x @ v[0] + v[1])
                r = (1 - lam) * (p - y) / len(x)
                v = (v[0] - LR * x.T @ r, v[1] - LR * r.sum(axis=0))
            mu = min(mu0, mu0 * count[i] / (0.6 * 4))
            h[i] = tuple(mu * a + (1 - mu) * b for a, b in zip(h[i], v, strict=True))
            trained[i] = v
            count[i] += 1
        share = SIZES[ids] / SIZES[ids].sum()
        w = tuple(
            sum(p * trained[i][part] for p, i in zip(share, ids, strict=True))
            for part in range(2)
        )
        np.testing.assert_array_equal(got.clients["count"], count)
        for mine, expected in [
            (got.server, w),
            *((toy.rows(got.clients["h"], i), h[i]) for i in range(N)),
        ]:
            np.testing.assert_allclose(head(mine)[0], expected[0], atol=1e-5)
            np.testing.assert_allclose(head(mine)[1], expected[1], atol=1e-5)


def test_without_examples_nothing_is_inherited():
    size = np.array(F.train.size)
    size[[0, 3]] = 0
    nothing, start = F._replace(train=F.train._replace(size=size)), inherited()
    state = rounds([[0, 1, 3]], start=start, federation=nothing)[1]
    assert_same(
        toy.rows(state.clients["h"], [0, 3]), toy.rows(start.clients["h"], [0, 3])
    )
    np.testing.assert_array_equal(state.clients["count"], [0, 1, 0, 0, 0])
    assert_same(
        rounds([[0, 3]], start=start, federation=nothing)[1].server, start.server
    )


@pytest.mark.slow
def test_the_average_has_the_batch_norm_of_the_model_too():
    """With mu0 = 0 it is the trained model, which the server has, too, where nobody
    else trains."""
    f = toy.federation()
    alone = f._replace(
        train=f.train._replace(
            size=np.where(np.arange(N) == 1, SIZES, 0).astype(np.int32)
        )
    )
    state = toy.train(
        factory, toy.task("norm"), rounds=1, federation_=alone, mu0=0.0
    ).state
    h, begin = toy.rows(state.clients["h"], 1), toy.rows(state.clients["h"], 0)
    assert_close(h, state.server)
    assert distance(h["stats"], begin["stats"]) > 1e-4


@pytest.mark.slow
def test_who_takes_no_step_inherits_nothing():
    """With drop_last, clients of fewer examples than a batch."""
    task = toy.task(drop_last=True, batch_size=8, epochs=1)
    trained = toy.train(factory, task, rounds=1)
    counts = np.asarray(trained.state.clients["count"])
    np.testing.assert_array_equal(counts, SIZES >= 8)
    idle = SIZES < 8
    assert_same(
        toy.rows(trained.state.clients["h"], idle),
        toy.rows(trained.begin.clients["h"], idle),
    )


def expectations(monkeypatch):
    """Returns the expected number of a client's participations."""
    seen = []
    monkeypatch.setattr(
        php,
        "momentum",
        lambda count, mu0, expected: (
            seen.append(expected) or momentum(count, mu0, expected)
        ),
    )
    return seen


@pytest.mark.parametrize(
    "participation, share",
    [(0.05, 1 / 5), (0.39, 1 / 5), ((0.3, 0.9), 2.5 / 5), (1.0, 1.0)],
)
def test_expected_are_the_clients_that_are_drawn(participation, share, monkeypatch):
    """0.05 and 0.39 of five clients are one client each."""
    seen = expectations(monkeypatch)
    simulate.program(
        "fedphp", toy.task(rounds=50)._replace(participation=participation)
    )
    assert seen and np.allclose(seen, 50 * share)


def test_unseen_clients_follow_the_schedule_of_those_who_train(monkeypatch):
    seen = expectations(monkeypatch)
    given = simulate.program(
        "fedphp", toy.task(rounds=50)._replace(participation=0.2), checked=False
    ).task
    apart = unseen.among(given, np.arange(2))  # of which 0.2 would be one, a half
    run, f = unseen.scorer("fedphp", given, apart), toy.federation()
    few = f._replace(
        train=toy.rows(f.train, [0, 1]),
        test=toy.rows(f.test, [0, 1]),
        val=toy.rows(f.val, [0, 1]),
    )
    few = few._replace(class_counts=f.class_counts[:2])
    server = jax.eval_shape(factory(given).init, jax.random.key(0)).server
    jax.eval_shape(run, jax.random.key(0), few, server, jnp.int32(0))
    assert seen and np.allclose(seen, 10)
