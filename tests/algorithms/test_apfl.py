"""The properties of sheet 18: the chain rule of the mixture, the step of its weight,
and its bounds."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import assert_close, assert_same

from fedjax_pfl import losses
from fedjax_pfl.algorithms import apfl as factory
from fedjax_pfl.algorithms.apfl import mixture
from fedjax_pfl.types import Batch

KEY = jax.random.key(0)
TASK = toy.task()
X = np.random.default_rng(0).normal(size=(6, *toy.SHAPE)).astype(np.float32)
BATCH = Batch(X, np.array([0, 2, 1, 3, 2, 0]), np.arange(6) < 5, np.arange(6))
V, W = map(TASK.model.init, map(jax.random.key, range(2)))


def mixture_loss(v, a, w):
    return losses.classification(TASK.model)(mixture(v, a, w), BATCH, KEY)[0]


def test_the_gradient_of_the_weight_is_the_finite_difference():
    both = jax.jit(jax.value_and_grad(lambda a: mixture_loss(V, a, W)))
    h = 1e-2
    assert abs(both(0.3)[1]) > 1e-2
    np.testing.assert_allclose(
        both(0.3)[1], (both(0.3 + h)[0] - both(0.3 - h)[0]) / (2 * h), atol=2e-3
    )


def test_gradients_of_mixed_parameters_follow_the_chain_rule():
    a = np.float32(0.3)
    by_both = jax.grad(lambda v, a: mixture_loss(v, a, W), argnums=(0, 1))
    (by_v, by_a), u = jax.jit(lambda v, a: (by_both(v, a), mixture(v, a, W)))(V, a)
    by_mixture = jax.jit(
        jax.grad(lambda u: losses.classification(TASK.model)(u, BATCH, KEY)[0])
    )(u)
    assert_close(by_v, jax.tree.map(lambda g: a * np.asarray(g), by_mixture))
    leaves = lambda tree: [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    inner = sum(
        np.sum((x - y) * g)
        for x, y, g in zip(*map(leaves, (V, W, by_mixture)), strict=True)
    )
    np.testing.assert_allclose(by_a, inner, rtol=1e-5)


def train(rounds=1, task=TASK, **hparams):
    return toy.train(factory, task, rounds, key=KEY, **hparams)


def test_two_rounds_by_hand():
    task, lr = toy.task(), 0.1
    keys, states, _ = oracle.run(factory, task, alpha=0.4, lr_alpha=0.5)
    w, f = oracle.variables(states[0].server), oracle.federation()
    own, alpha = [w] * toy.N, [0.4] * toy.N
    for t, here in enumerate(oracle.ROUNDS):
        models = []
        for i in here:
            local, v, a = w, own[i], alpha[i]
            for k, ((x, y),) in enumerate(oracle.batches(f, i, keys[t], task)):
                by_mixture = oracle.gradient(
                    [a * p + (1 - a) * q for p, q in zip(v, local, strict=True)], x, y
                )
                slope = sum(
                    np.sum((p - q) * g)
                    for p, q, g in zip(v, local, by_mixture, strict=True)
                )
                next_a = min(max(a - 0.5 * slope, 0), 1) if k == 0 else a
                local = [
                    p - lr * g
                    for p, g in zip(local, oracle.gradient(local, x, y), strict=True)
                ]
                v = [p - lr * a * g for p, g in zip(v, by_mixture, strict=True)]
                a = next_a
            own[i], alpha[i] = v, a
            models.append(local)
        w = oracle.mean(models, [int(f.train.size[i]) for i in here])
        oracle.close(states[t + 1].server, w)
        np.testing.assert_allclose(states[t + 1].clients["alpha"], alpha, rtol=1e-5)
        for i in range(toy.N):
            oracle.close(toy.rows(states[t + 1].clients["v"], i), own[i])


@pytest.mark.slow
def test_the_weight_moves_against_its_gradient_and_stays_within_bounds():
    got = train(rounds=3, lr_alpha=1000.0)
    alpha = got.metrics.clients["alpha"]
    assert np.all((alpha >= 0) & (alpha <= 1))
    assert np.any(alpha == 0) or np.any(alpha == 1)
    assert_same(got.state.clients["alpha"], alpha[-1])


@pytest.mark.slow
def test_a_fixed_weight_never_moves():
    np.testing.assert_array_equal(
        train(rounds=2, adaptive=False).state.clients["alpha"], 0.5
    )


@pytest.mark.slow
def test_without_a_personal_share_the_personal_model_is_the_global_one():
    got = train(rounds=2, alpha=0.0, adaptive=False)
    assert_same(got.state.clients["v"], got.begin.clients["v"])
    (server, clients), x = got.state.method, toy.federation().examples.x[:7]
    predict = factory(TASK, alpha=0.0).predict
    client = SimpleNamespace(model=TASK.model)
    both = jax.jit(
        lambda mine: (
            predict(server, mine, client)(x, np.ones(7, bool)),
            TASK.model.apply(server, x)[0],
        )
    )
    assert_close(*both(toy.rows(clients, 1)))


@pytest.mark.slow
def test_the_loss_of_the_mixture_moves_the_personal_models_statistics():
    task, x = toy.task("norm"), jax.random.normal(KEY, (4, *toy.SHAPE))
    v, w = (task.model.init(jax.random.key(seed)) for seed in (1, 2))
    w["stats"] = jax.tree.map(lambda x: x + 7.0, w["stats"])
    batch = Batch(x, jnp.arange(4) % toy.C, jnp.ones(4, bool), jnp.arange(4))
    mixed = mixture(v, jnp.float32(1.0), w)
    _, stats = losses.classification(task.model)(mixed, batch, KEY)
    _, expected = task.model.apply(v, x, mask=batch.mask, train=True, key=KEY)
    assert_close(stats, expected)


def test_the_mixtures_running_statistics_are_the_personal_models():
    v, w = ({**x, "stats": {"mean": np.float32(i)}} for i, x in enumerate((V, W)))
    assert_same(mixture(v, np.float32(0.3), w)["stats"], v["stats"])
