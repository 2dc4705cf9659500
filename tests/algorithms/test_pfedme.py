"""The properties of sheet 7: where theta goes, how w follows, and what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import assert_close, assert_same

from fedjax_pfl import losses, simulate, trees
from fedjax_pfl.algorithms import pfedme as factory
from fedjax_pfl.checks import BadInput
from fedjax_pfl.clients import Cohort
from fedjax_pfl.types import Batch, Model, State

KEY = jax.random.key(0)
ONE_STEP = toy.task("linear", batch_size=19, epochs=1)  # one full batch


def round_of(task, ids, **hparams):
    f, ids = toy.federation(), jnp.asarray(ids, jnp.int32)
    algorithm = factory(task, **hparams)
    before = algorithm.init(KEY)
    rows = State(before.server, trees.gather(before.clients, ids))
    cohort = Cohort(f, task.prepare, ids, ids >= 0, key=KEY, round=jnp.int32(0), evaluated=jnp.bool(False), width=1)
    return before.server, jax.jit(lambda rows: algorithm.round(KEY, rows, cohort))(rows)[0]


def gradient(w, i):
    f = toy.federation()
    row = f.train.index[i][: toy.SIZES[i]]
    batch = Batch(f.examples.x[row], f.examples.y[row], jnp.ones(len(row), bool), row)
    return jax.grad(lambda w: losses.classification(ONE_STEP.model)(w, batch, KEY)[0])(w)


def test_one_inner_step_of_one_batch():
    lr, lam, inner_lr = 0.1, 7.0, 0.03
    w, after = round_of(ONE_STEP, [1], inner_steps=1, lam=lam, inner_lr=inner_lr)
    g = gradient(w, 1)
    assert_close(after.server, jax.tree.map(lambda w, g: w - lr * lam * inner_lr * g, w, g))
    assert_close(trees.gather(after.clients, 0), jax.tree.map(lambda w, g: w - inner_lr * g, w, g))


def test_two_rounds_by_hand():
    task, lr, inner_lr, lam, beta = toy.task(), 0.1, 0.05, 4.0, 0.6
    keys, states, _ = oracle.run(factory, task, inner_steps=3, inner_lr=inner_lr, lam=lam, beta=beta, inner_decay=0.2)
    w, f = oracle.variables(states[0].server), oracle.federation()
    own = [w] * toy.N
    for t, here in enumerate(oracle.ROUNDS):
        models = []
        for i in here:
            local, theta = w, w
            for ((x, y),) in oracle.batches(f, i, keys[t], task):
                for _ in range(3):
                    g = oracle.gradient(theta, x, y)
                    theta = [
                        p - inner_lr * (d + lam * (p - q) + 0.2 * p) for p, d, q in zip(theta, g, local, strict=True)
                    ]
                local = [q - lr * lam * (q - p) for q, p in zip(local, theta, strict=True)]
            own[i] = theta
            models.append(local)
        average = oracle.mean(models, [int(f.train.size[i]) for i in here])
        w = [(1 - beta) * p + beta * q for p, q in zip(w, average, strict=True)]
        oracle.close(states[t + 1].server, w)
        for i in range(toy.N):
            oracle.close(trees.gather(states[t + 1].clients, i), own[i])


def test_weight_decay_of_theta():
    w, after = round_of(ONE_STEP, [1], inner_steps=1, inner_lr=0.03, inner_decay=0.5)
    theta = jax.tree.map(lambda w, g: w - 0.03 * (g + 0.5 * w), w, gradient(w, 1))
    assert_close(trees.gather(after.clients, 0), theta)


def test_theta_of_a_quadratic_is_the_proximal_point(monkeypatch):
    """f(theta) = theta' A theta / 2 - b' theta: theta -> (A + lam I)^-1 (b + lam w)."""
    rng = np.random.default_rng(0)
    root, b, lam = rng.normal(size=(4, 4)), jnp.asarray(rng.normal(size=4), jnp.float32), 2.0
    a = jnp.asarray(root @ root.T / 4, jnp.float32)
    w = jnp.asarray(rng.normal(size=4), jnp.float32)
    fixed: Model = ONE_STEP.model._replace(
        init=lambda key: {"body": {}, "head": {"w": w}, "stats": {}},
        apply=lambda w, x, **options: (jnp.zeros((len(x), toy.C)), {}),
    )

    def quadratic(model):
        return lambda v, batch, key: (v["head"]["w"] @ a @ v["head"]["w"] / 2 - b @ v["head"]["w"], v["stats"])

    monkeypatch.setattr(losses, "classification", quadratic)
    _, after = round_of(ONE_STEP._replace(model=fixed), [1], inner_steps=1000, inner_lr=0.1, lam=lam)
    expected = np.linalg.solve(np.asarray(a) + lam * np.eye(4), np.asarray(b + lam * w))
    np.testing.assert_allclose(after.clients["head"]["w"][0], expected, atol=1e-5)


def state_after(rounds=3, task=None, **hparams):
    program = simulate.program(factory, task or toy.task(), hparams)
    f = toy.federation()
    run = jax.jit(lambda numbers: simulate.curve(program, KEY, numbers, f, rounds=rounds))
    return program.init(KEY, program.numbers), *run(program.numbers)


def test_beta_one_is_the_average_and_beta_a_half_stays_half_way():
    w, whole = round_of(ONE_STEP, [0, 1], beta=1.0)
    _, half = round_of(ONE_STEP, [0, 1], beta=0.5)
    alone = [round_of(ONE_STEP, [i])[1].server for i in (0, 1)]
    share = toy.SIZES[0] / (toy.SIZES[0] + toy.SIZES[1])
    assert_close(whole.server, trees.lerp(share, *alone))
    assert_close(half.server, trees.lerp(0.5, whole.server, w))


def test_theta_is_a_model_of_its_own():
    _, state, metrics, last = state_after()
    assert trees.sq_dist(trees.gather(state.clients, 1), state.server) > 1e-4
    assert not np.array_equal(metrics["post"]["acc"][-1], last["global_acc"])
    assert_same(metrics["post"]["acc_present"][-1], last["acc_present"])  # theta is kept until the next round


@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
def test_batch_norm(bn_stats):
    _, state, metrics, last = state_after(rounds=2, task=toy.task("norm", bn_stats=bn_stats))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last)))


@pytest.mark.parametrize("wrong", [{"inner_steps": -1}, {"lam": -1.0}, {"beta": -0.1}, {"inner_lr": float("nan")}])
def test_bad_input(wrong):
    with pytest.raises(BadInput):
        factory(toy.task(), **wrong)
