"""The properties of sheet 6: the three meta-gradients, small clients, and an evaluation
that leaves no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from absl import logging
from toy import SIZES, assert_close, assert_same

from fedjax_pfl import averaging, keys, losses
from fedjax_pfl.algorithms import per_fedavg as factory
from fedjax_pfl.algorithms.perfedavg import meta_gradient
from fedjax_pfl.types import Batch, Context

KEY = jax.random.key(0)
TASK = toy.task(epochs=1)
LOSS = losses.classification(TASK.model)
W = TASK.model.init(KEY)


def batch(seed):
    rng = np.random.default_rng(seed)
    x, y = (
        rng.normal(size=(6, *toy.SHAPE)).astype(np.float32),
        rng.integers(0, toy.C, 6).astype(np.int32),
    )
    return Batch(x, y, np.arange(6) < 5, np.arange(6, dtype=np.int32))


@jax.jit
def meta(w, inner, outer, alpha):
    return meta_gradient(LOSS, w, inner, outer, KEY, alpha)[:2]


SLOPE = jax.jit(jax.grad(lambda w, batch: LOSS(w, batch, KEY)[0]))


def sq_dist(a, b):
    """Computes trees.sq_dist on the host."""
    return sum(
        np.sum((np.asarray(x) - np.asarray(y)) ** 2)
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def parts(tree):
    return averaging.params(tree)


def test_first_order_leaves_the_hessian_out():
    b1, b2 = (batch(i) for i in range(2))
    adapted = jax.tree.map(
        lambda x, g: np.asarray(x) - np.float32(0.3) * np.asarray(g), W, SLOPE(W, b1)
    )
    assert_close(meta(W, b1, b2, 0.3)[0], parts(SLOPE(adapted, b2)))


def test_without_an_inner_step_it_is_the_gradient_of_the_outer_batch():
    batches = batch(0), batch(1)
    assert_close(meta(W, *batches, 0.0)[0], parts(SLOPE(W, batches[1])))


def test_two_rounds_by_hand():
    task, alpha, beta = toy.task(), 0.3, 0.05
    keys, states, _ = oracle.run(factory, task, alpha=alpha, beta=beta)
    w, f = oracle.variables(states[0].server), oracle.federation()
    for t, here in enumerate(oracle.ROUNDS):
        models = []
        for i in here:
            local = w
            for outer, inner in oracle.batches(f, i, keys[t], task, 2):
                adapted = [
                    p - alpha * g
                    for p, g in zip(local, oracle.gradient(local, *inner), strict=True)
                ]
                local = [
                    p - beta * g
                    for p, g in zip(
                        local, oracle.gradient(adapted, *outer), strict=True
                    )
                ]
            models.append(local)
        w = oracle.mean(models, [int(f.train.size[i]) for i in here])
        oracle.close(states[t + 1].server, w)


@pytest.mark.slow
def test_a_client_with_one_example_uses_it_for_every_batch():
    f, only = toy.federation(), np.arange(toy.N) == 2
    assert SIZES[2] == 1
    f = f._replace(train=f.train._replace(size=np.where(only, f.train.size, 0)))
    run = toy.train(factory, TASK, 1, KEY, f)
    before, after = run.begin.server, run.state.server
    row = np.asarray(f.train.index)[2][:1]
    one = Batch(*toy.rows(f.examples, row), np.ones(1, bool), row)
    gradient, value = meta(before, one, one, 0.1)
    expected = jax.tree.map(
        lambda w, g: np.asarray(w) - 0.1 * np.asarray(g), parts(before), gradient
    )
    assert_close(parts(after), expected, 1e-5)
    np.testing.assert_allclose(run.metrics.loss[0, 2], value, rtol=1e-5)


@pytest.mark.parametrize("drop_last", [False, True])
def test_evaluation_takes_one_step_and_leaves_no_trace(drop_last):
    f, task = toy.federation(), toy.task("linear", batch_size=20, drop_last=drop_last)
    program = toy.program(factory, task, {"alpha": 0.5})
    state = program.init(KEY, program.traced)
    copy, x = jax.tree.map(np.array, state), np.asarray(f.examples.x)[:4]
    (own, y), w = (
        toy.rows(f.examples, f.train.index[1][: SIZES[1]]),
        copy.server["head"],
    )
    dz = oracle.by_logits(own.astype(np.float64) @ w["kernel"] + w["bias"], y)
    expected = x @ (w["kernel"] - 0.5 * own.T @ dz) + w["bias"] - 0.5 * dz.sum(axis=0)
    got = jax.jit(program.predict)(
        Context(KEY, program.traced, f, jnp.int32(0)), state, 1, x
    )
    assert_close(got, expected, 1e-5)
    assert_same(state, copy)


@pytest.mark.slow  # as the rounds by hand
def test_outer_step_size():
    still, moved = (
        toy.train(factory, TASK, 1, KEY, **beta) for beta in ({"beta": 0.0}, {})
    )
    assert_close(still.begin.server, still.state.server)
    assert sq_dist(moved.begin.server, moved.state.server) > 1e-3


def test_clients_too_small_for_separate_batches_are_named(caplog):
    """Two batches of 4: the clients of 7, 1 and 4 examples."""
    logging._log_counter_per_token.clear()  # type: ignore[attr-defined]
    with caplog.at_level("WARNING"):
        factory(TASK), factory(TASK)
    assert [r.getMessage() for r in caplog.records] == [
        "per_fedavg: the batches of a meta-step share examples at 3 clients."
    ]


def test_the_inner_batch_draws_dropout_of_its_own():
    """On (n w)^2 / 2, where n is drawn: two gradients of one n each."""
    drawn = lambda w, batch, key: (
        (jax.random.normal(key) * w["body"]) ** 2 / 2,
        w["stats"],
    )
    w = {"body": jnp.float32(2), "head": {}, "stats": {}}
    found, _, _ = meta_gradient(drawn, w, batch(0), batch(0), KEY, 0.3)
    outer, inner = (
        jax.random.normal(KEY),
        jax.random.normal(keys.fold(KEY, keys.Loss.INNER)),
    )
    np.testing.assert_allclose(
        found["body"], outer**2 * 2 * (1 - 0.3 * inner**2), rtol=1e-5
    )
