"""The properties of sheet 6: the three meta-gradients, small clients, and an evaluation
that leaves no trace."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import SIZES, assert_close, assert_same

from fedjax_pfl import averaging, keys, losses
from fedjax_pfl.algorithms import per_fedavg as factory
from fedjax_pfl.algorithms.perfedavg import Variant, _warn, curvature, meta_gradient
from fedjax_pfl.types import Batch

KEY = jax.random.key(0)
VARIANTS = get_args(Variant)
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


@functools.cache
def compiled(variant):
    return jax.jit(
        lambda w, batches, alpha, delta: meta_gradient(
            LOSS, w, batches, KEY, variant, alpha, delta
        )[:2]
    )


def meta(variant, batches, alpha=0.3, delta=1e-3):
    return compiled(variant)(W, batches, alpha, delta)[0]


SLOPE = jax.jit(jax.grad(lambda w, batch: LOSS(w, batch, KEY)[0]))


def sq_dist(a, b):
    """Computes trees.sq_dist on the host."""
    return sum(
        np.sum((np.asarray(x) - np.asarray(y)) ** 2)
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def parts(tree):
    return averaging.params(tree)


def test_exact_is_the_gradient_of_the_meta_loss():
    b, alpha = batch(1), 0.3

    def meta_loss(w):
        value = lambda w: LOSS(w, b, KEY)[0]
        return value(jax.tree.map(lambda x, g: x - alpha * g, w, jax.grad(value)(w)))

    assert_close(
        meta("exact", (b, b, b), alpha), parts(jax.jit(jax.grad(meta_loss))(W)), 1e-5
    )


def test_first_order_leaves_the_hessian_out():
    b1, b2, b3 = (batch(i) for i in range(3))
    adapted = jax.tree.map(
        lambda x, g: np.asarray(x) - np.float32(0.3) * np.asarray(g), W, SLOPE(W, b1)
    )
    v = parts(SLOPE(adapted, b2))
    assert_close(meta("fo", (b1, b2)), v)
    h = jax.jit(
        lambda v: curvature(
            lambda w: parts(SLOPE({**W, **w}, b3)), parts(W), v, "exact", 0
        )
    )(v)
    expected = jax.tree.map(lambda v, h: np.asarray(v) - 0.3 * np.asarray(h), v, h)
    assert_close(meta("exact", (b1, b2, b3)), expected, 1e-5)


@pytest.mark.parametrize("delta", [1.0, 0.01])
def test_the_difference_of_gradients_is_exact_on_a_quadratic(delta):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4))
    a, b, w, v = (
        x.astype(np.float32) for x in (root @ root.T, *rng.normal(size=(3, 4)))
    )
    both = jax.jit(
        lambda w: [
            curvature(lambda w: a @ w - b, w, v, variant, delta)
            for variant in ("hf", "exact")
        ]
    )
    difference, exact = both(w)
    np.testing.assert_allclose(exact, a @ v, rtol=1e-5)
    np.testing.assert_allclose(difference, exact, rtol=1e-3, atol=1e-3)


def test_the_difference_of_gradients_is_near_the_exact_one():
    batches = tuple(batch(i) for i in range(3))
    exact = meta("exact", batches)
    assert_close(meta("hf", batches, delta=0.01), exact, 1e-3)
    assert sq_dist(exact, meta("fo", batches[:2])) > 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_an_inner_step_all_are_the_gradient_of_the_outer_batch(variant):
    batches = tuple(batch(i) for i in range(3 if variant != "fo" else 2))
    assert_close(meta(variant, batches, alpha=0.0), parts(SLOPE(W, batches[1])))


def test_two_rounds_by_hand():
    task, alpha, beta = toy.task(), 0.3, 0.05
    keys, states, _ = oracle.run(factory, task, variant="fo", alpha=alpha, beta=beta)
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


@pytest.mark.parametrize("variant", [VARIANTS[0], *map(toy.slow, VARIANTS[1:])])
def test_a_client_with_one_example_uses_it_for_every_batch(variant):
    f, only = toy.federation(), np.arange(toy.N) == 2
    assert SIZES[2] == 1
    f = f._replace(train=f.train._replace(size=np.where(only, f.train.size, 0)))
    run = toy.train(
        factory,
        TASK,
        1,
        KEY,
        f,
        variant=variant,
        **({"delta": 0.01} if variant == "hf" else {}),
    )
    before, after = run.begin.server, run.state.server
    row = np.asarray(f.train.index)[2][:1]
    one = Batch(*toy.rows(f.examples, row), np.ones(1, bool), row)
    gradient, value = compiled(variant)(
        before, (one,) * (2 if variant == "fo" else 3), 0.1, 0.01
    )
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
    got = jax.jit(program.predict)(KEY, program.traced, f, state, jnp.int32(0), 1, x)
    assert_close(got, expected, 1e-5)
    assert_same(state, copy)


@pytest.mark.slow  # as the rounds by hand
def test_outer_step_size():
    still, moved = (
        toy.train(factory, TASK, 1, KEY, variant="fo", **beta)
        for beta in ({"beta": 0.0}, {})
    )
    assert_close(still.begin.server, still.state.server)
    assert sq_dist(moved.begin.server, moved.state.server) > 1e-3


def test_clients_too_small_for_separate_batches_are_named(caplog):
    """Two batches of 4: the clients of 7, 1 and 4 examples; said once, however often a
    method is made."""
    _warn.cache_clear()
    with caplog.at_level("WARNING"):
        factory(TASK), factory(TASK)
    assert [r.getMessage() for r in caplog.records] == [
        "per_fedavg: the batches of a meta-step must share examples at 3 clients, "
        "which hold fewer than 2 batches."
    ]


def test_the_inner_batch_draws_dropout_of_its_own():
    """On (n w)^2 / 2, where n is drawn: two gradients of one n each."""
    drawn = lambda w, batch, key: (
        (jax.random.normal(key) * w["body"]) ** 2 / 2,
        w["stats"],
    )
    w = {"body": jnp.float32(2), "head": {}, "stats": {}}
    found, _, _ = meta_gradient(drawn, w, (batch(0), batch(0)), KEY, "fo", 0.3, 1e-3)
    outer, inner = (
        jax.random.normal(KEY),
        jax.random.normal(keys.fold(KEY, keys.Loss.INNER)),
    )
    np.testing.assert_allclose(
        found["body"], outer**2 * 2 * (1 - 0.3 * inner**2), rtol=1e-5
    )
