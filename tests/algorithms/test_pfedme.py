"""The properties of sheet 7: where theta goes, how w follows, and what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import assert_close

from fedjax_pfl import losses
from fedjax_pfl.algorithms import pfedme as factory
from fedjax_pfl.types import Model

KEY = jax.random.key(0)
TASK = toy.task()
ONE_STEP = toy.task("linear", batch_size=19, epochs=1)  # one full batch


def round_of(task, ids, **hparams):
    """The server before a round of these clients, and the state after it; the others
    have no examples."""
    f = toy.federation()
    size = np.where(np.isin(np.arange(toy.N), ids), f.train.size, 0)
    run = toy.train(
        factory, task, 1, KEY, f._replace(train=f.train._replace(size=size)), **hparams
    )
    return run.begin.server, run.state


def gradient(w, i):
    """Returns the gradient of a linear model's mean loss over client i's examples."""
    f = toy.federation()
    x, y = toy.rows(f.examples, f.train.index[i][: toy.SIZES[i]])
    x, head = x.astype(np.float64), w["head"]
    dz = oracle.by_logits(x @ np.asarray(head["kernel"]) + np.asarray(head["bias"]), y)
    return {
        "body": {},
        "head": {"kernel": x.T @ dz, "bias": dz.sum(axis=0)},
        "stats": {},
    }


def step(w, g, by):
    return jax.tree.map(lambda w, g: np.asarray(w) - by * g, w, g)


def test_two_rounds_by_hand():
    task, lr, inner_lr, lam, beta = TASK, 0.1, 0.05, 4.0, 0.6
    keys, states, _ = oracle.run(
        factory,
        task,
        inner_steps=3,
        inner_lr=inner_lr,
        lam=lam,
        beta=beta,
    )
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
                        p - inner_lr * (d + lam * (p - q))
                        for p, d, q in zip(theta, g, local, strict=True)
                    ]
                local = [
                    q - lr * lam * (q - p) for q, p in zip(local, theta, strict=True)
                ]
            own[i] = theta
            models.append(local)
        average = oracle.mean(models, [int(f.train.size[i]) for i in here])
        w = [(1 - beta) * p + beta * q for p, q in zip(w, average, strict=True)]
        oracle.close(states[t + 1].server, w)
        for i in range(toy.N):
            oracle.close(toy.rows(states[t + 1].clients["theta"], i), own[i])


def test_theta_of_a_quadratic_is_the_proximal_point(monkeypatch):
    """f(theta) = theta' A theta / 2 - b' theta: theta -> (A + lam I)^-1 (b + lam w)."""
    rng = np.random.default_rng(0)
    root, b, lam = rng.normal(size=(4, 4)), rng.normal(size=4).astype(np.float32), 2.0
    a = (root @ root.T / 4).astype(np.float32)
    w = rng.normal(size=4).astype(np.float32)
    fixed: Model = ONE_STEP.model._replace(
        init=lambda key: {"body": {}, "head": {"w": jnp.asarray(w)}, "stats": {}},
        apply=lambda w, x, **options: (jnp.zeros((len(x), toy.C)), {}),
        bn_mask={"body": {}, "head": {"w": False}, "stats": {}},
    )

    def quadratic(*_):
        return lambda v, batch, key: (
            v["head"]["w"] @ a @ v["head"]["w"] / 2 - b @ v["head"]["w"],
            v["stats"],
        )

    monkeypatch.setattr(losses, "classification", quadratic)
    _, after = round_of(
        ONE_STEP._replace(models=(fixed,)), [1], inner_steps=1000, inner_lr=0.1, lam=lam
    )
    expected = np.linalg.solve(a + lam * np.eye(4), b + lam * w)
    np.testing.assert_allclose(
        np.asarray(after.clients["theta"]["head"]["w"])[1], expected, atol=1e-5
    )


@pytest.mark.slow
def test_beta_one_is_the_average_and_beta_a_half_stays_half_way():
    w, whole = round_of(ONE_STEP, [0, 1], beta=1.0)
    _, half = round_of(ONE_STEP, [0, 1], beta=0.5)
    alone = [round_of(ONE_STEP, [i])[1].server for i in (0, 1)]
    share = toy.SIZES[0] / (toy.SIZES[0] + toy.SIZES[1])
    between = lambda p, a, b: jax.tree.map(
        lambda a, b: p * np.asarray(a) + (1 - p) * np.asarray(b), a, b
    )
    assert_close(whole.server, between(share, *alone))
    assert_close(half.server, between(0.5, whole.server, w))


@pytest.mark.slow  # two compilations
def test_every_inner_step_draws_dropout_of_its_own(monkeypatch):
    """The loss is n b with a random n: without a proximal term a step is -n."""
    drawn = lambda model, task: (
        lambda w, batch, key: (
            jax.random.normal(key) * w["head"]["bias"].sum(),
            w["stats"],
        )
    )
    monkeypatch.setattr(losses, "classification", drawn)
    fresh, bias = (
        functools.partial(factory),
        lambda state: state.clients["theta"]["head"]["bias"][:, 0],
    )
    runs = [
        toy.train(fresh, ONE_STEP, 1, KEY, inner_steps=count, inner_lr=1.0, lam=0.0)
        for count in (1, 2)
    ]
    once, twice = (bias(run.state) - bias(run.begin) for run in runs)
    assert (np.abs(twice - 2 * once) > 1e-3).all()
