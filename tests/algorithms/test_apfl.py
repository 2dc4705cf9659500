"""The properties of sheet 18: the chain rule of the mixture, the step of its weight, and its bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import assert_close, assert_same

from fedjax_pfl import losses, simulate, trees
from fedjax_pfl.algorithms import apfl as factory
from fedjax_pfl.algorithms.apfl import mixture, mixture_loss
from fedjax_pfl.checks import BadInput
from fedjax_pfl.types import Batch

KEY = jax.random.key(0)
TASK = toy.task()
BATCH = Batch(jax.random.normal(KEY, (6, *toy.SHAPE)), jnp.array([0, 2, 1, 3, 2, 0]), jnp.arange(6) < 5, jnp.arange(6))
V, W = (TASK.model.init(jax.random.key(i)) for i in range(2))


@pytest.mark.parametrize("mix", ["params", "outputs"])
def test_the_gradient_of_the_weight_is_the_finite_difference(mix):
    loss = lambda a: mixture_loss(TASK, mix)(V, a, W, BATCH, KEY)[0]
    h = 1e-2
    np.testing.assert_allclose(jax.grad(loss)(0.3), (loss(0.3 + h) - loss(0.3 - h)) / (2 * h), atol=2e-3)


def test_gradients_of_mixed_parameters_follow_the_chain_rule():
    a = jnp.float32(0.3)
    by_v, by_a = jax.grad(lambda v, a: mixture_loss(TASK, "params")(v, a, W, BATCH, KEY)[0], argnums=(0, 1))(V, a)
    by_mixture = jax.grad(lambda u: losses.classification(TASK.model)(u, BATCH, KEY)[0])(mixture(V, a, W))
    assert_close(by_v, trees.scale(a, by_mixture))
    inner = sum(jnp.vdot(x - y, g) for x, y, g in zip(*map(jax.tree.leaves, (V, W, by_mixture)), strict=True))
    np.testing.assert_allclose(by_a, inner, rtol=1e-5)


def state_after(rounds=1, task=TASK, **hparams):
    program = simulate.program(factory, task, hparams)
    f = toy.federation()
    run = jax.jit(lambda numbers: simulate.curve(program, KEY, numbers, f, rounds=rounds))
    return program.init(KEY, program.numbers), *run(program.numbers)


def test_two_rounds_by_hand():
    task, lr, decay = toy.task(), 0.1, 0.3
    keys, states, _ = oracle.run(factory, task, alpha=0.4, lr_alpha=0.5, alpha_decay=decay)
    w, f = oracle.variables(states[0].server), oracle.federation()
    own, alpha = [w] * toy.N, [0.4] * toy.N
    for t, here in enumerate(oracle.ROUNDS):
        models = []
        for i in here:
            local, v, a = w, own[i], alpha[i]
            for k, ((x, y),) in enumerate(oracle.batches(f, i, keys[t], task)):
                by_mixture = oracle.gradient([a * p + (1 - a) * q for p, q in zip(v, local, strict=True)], x, y)
                slope = sum(np.sum((p - q) * g) for p, q, g in zip(v, local, by_mixture, strict=True))
                next_a = min(max(a - 0.5 * (slope + decay * a), 0), 1) if k == 0 else a
                local = [p - lr * g for p, g in zip(local, oracle.gradient(local, x, y), strict=True)]
                v = [p - lr * a * g for p, g in zip(v, by_mixture, strict=True)]
                a = next_a
            own[i], alpha[i] = v, a
            models.append(local)
        w = oracle.mean(models, [int(f.train.size[i]) for i in here])
        oracle.close(states[t + 1].server, w)
        np.testing.assert_allclose(states[t + 1].clients["alpha"], alpha, rtol=1e-5)
        for i in range(toy.N):
            oracle.close(trees.gather(states[t + 1].clients["v"], i), own[i])


def test_the_weight_takes_one_step_a_round():
    many = state_after(task=toy.task("linear", batch_size=1, epochs=3), lr_alpha=0.5)[1]
    one = state_after(task=toy.task("linear", batch_size=1, epochs=None, steps=1), lr_alpha=0.5)[1]
    assert_close(many.clients["alpha"], one.clients["alpha"])


def test_the_weight_moves_against_its_gradient_and_stays_within_bounds():
    _, state, metrics, _ = state_after(rounds=3, lr_alpha=1000.0)
    assert np.all((metrics["alpha"] >= 0) & (metrics["alpha"] <= 1))
    assert np.any(metrics["alpha"] == 0) or np.any(metrics["alpha"] == 1)
    assert_same(state.clients["alpha"], metrics["alpha"][-1])


def test_a_fixed_weight_never_moves_and_decay_shrinks_it():
    np.testing.assert_array_equal(state_after(rounds=2, adaptive=False)[1].clients["alpha"], 0.5)
    alpha = state_after(lr_alpha=0.1, alpha_decay=1.0)[1].clients["alpha"]  # v = w in round 0: the gradient is 0
    np.testing.assert_allclose(alpha, 0.45, rtol=1e-6)


def test_without_a_personal_share_the_personal_model_is_the_global_one():
    begin, state, _, _ = state_after(rounds=2, alpha=0.0, adaptive=False)
    assert_same(state.clients["v"], begin.clients["v"])
    algorithm = factory(TASK, alpha=0.0)
    mine = trees.gather(state.clients, 1)
    x = toy.federation().examples.x[:7]
    got = algorithm.predict(state.server, mine, None)(x, jnp.ones(7, bool))
    assert_close(got, TASK.model.apply(state.server, x)[0])


@pytest.mark.parametrize("mix", ["params", "outputs"])
@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
def test_batch_norm(mix, bn_stats):
    _, state, metrics, last = state_after(rounds=2, task=toy.task("norm", bn_stats=bn_stats), mix=mix)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last)))
    assert bool(jax.tree.leaves(state.clients["own"])) == (bn_stats == "local")


@pytest.mark.parametrize("wrong", [{"alpha": 1.5}, {"lr_alpha": -1.0}, {"alpha_decay": -1.0}, {"mix": "models"}])
def test_bad_input(wrong):
    with pytest.raises(BadInput):
        factory(TASK, **wrong)
