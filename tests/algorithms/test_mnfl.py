"""The properties of sheet 2.13.b: the coefficients' gradient and step, and two rounds
against plain NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import SIZES, N, assert_close, assert_same

from fedjax_pfl import local_training, losses, simulate, trees
from fedjax_pfl.algorithms import mnfl as factory
from fedjax_pfl.algorithms.mnfl import descend, gradient, mix
from fedjax_pfl.types import State

KEY = jax.random.key(0)
TASK = toy.task()
DEFAULTS = simulate.hyperparameters(factory)
slope = jax.jit(gradient)


@functools.cache
def models(seed=3):
    """N different models, stacked, without batch-norm moments."""
    init = lambda seed: jax.vmap(TASK.model.init)(
        jax.random.split(jax.random.key(seed), N)
    )
    return jax.device_get(init(seed))


def copies():
    """N equal models."""
    return jax.tree.map(lambda x: np.repeat(x[:1], N, axis=0), models())


def rows_of_a(seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(N), size=N).astype(np.float32)


def flat(stacked):
    """[N, P] in float64."""
    return np.concatenate(
        [np.reshape(x, (len(x), -1)) for x in jax.tree.leaves(stacked)], axis=1
    ).astype(float)


def unflat(v):
    """One model of its variables [P]."""
    leaves, structure = jax.tree.flatten(toy.rows(models(), 0))
    parts = np.split(v.astype(np.float32), np.cumsum([x.size for x in leaves])[:-1])
    return jax.tree.unflatten(
        structure,
        [x.reshape(like.shape) for x, like in zip(parts, leaves, strict=True)],
    )


def cohort_of(ids, active, task=TASK):
    return toy.cohort(task, ids, active, key=KEY)


@functools.cache
def compiled(epochs, static):
    """One program for all servers, clients and numbers."""
    task = toy.task(epochs=epochs)

    def run(state, ids, active, numbers):
        return factory(task, **dict(static), **numbers).round(
            KEY, state, cohort_of(ids, active, task)
        )

    return jax.jit(run)


def round_of(server, ids=range(N), active=None, epochs=TASK.epochs, **hparams):
    """(server, metrics) after one round, whose cohort is padded to N places; the
    clients have no state of their own."""
    padding = np.arange(N, 2 * N - len(ids))
    active = np.append(
        np.ones(len(ids), bool) if active is None else active, padding < 0
    )
    given, own = DEFAULTS | hparams, jax.tree.map(lambda x: None, models())
    numbers = {name: value for name, value in given.items() if isinstance(value, float)}
    static = tuple(
        (name, value) for name, value in given.items() if name not in numbers
    )
    args = (
        State(server, own),
        np.append(ids, padding).astype(np.int32),
        active,
        numbers,
    )
    state, metrics = jax.device_get(compiled(epochs, static)(*args))
    return state.server, metrics


def server_of(w=None, a=None):
    return {
        "w": models() if w is None else w,
        "coefficients": rows_of_a() if a is None else a,
    }


@jax.jit
def trained(i, w):
    """A client's model after its local SGD, by the library."""
    loss = losses.classification(TASK.model)
    return cohort_of(i[None], jnp.array([True])).map(
        lambda c: local_training.sgd(c.key, c.train, loss, w, TASK)[0]
    )


def project(v, mass):
    """By bisection on the threshold: independent of the sorted formula."""
    low, high = v.min() - mass, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.maximum(v - middle, 0).sum() > mass else (low, middle)
        )
    return np.maximum(v - low, 0)


def oracle(
    server,
    ids,
    coef_lr,
    rho,
    lam,
    coef_steps=1,
):
    """One round: the clients' SGD by the library, everything between the clients in
    loops of NumPy."""
    a, old = server["coefficients"].astype(np.float64), flat(server["w"])
    new = old.copy()
    for i in ids:
        v = sum(a[i, m] * old[m] for m in range(N))
        new[i] = flat(trained(np.int32(i), unflat(v)))[0]
    base, after = old, a.copy()
    for i in ids:
        for _ in range(coef_steps):
            r = sum(after[i, m] * base[m] for m in range(N)) - new[i]
            g = np.array([base[m] @ r for m in range(N)]) / (new[i] @ new[i])
            step = after[i] - coef_lr * lam * SIZES[i] / SIZES.sum() * g
            step = (step + 2 * coef_lr * rho / N) / (1 + 2 * coef_lr * rho)
            after[i, ids] = project(step[ids], after[i, ids].sum())
    return new, after


@pytest.mark.parametrize(
    "ids, names",
    [(range(N), {}), ([2, 0, 4], {"coef_steps": 2})],
)
def test_two_rounds_are_the_plain_loops(ids, names):
    # large, so that coefficients move and some reach 0
    numbers = {"coef_lr": 2.0, "rho": 0.05, "lam": 3.0}
    server = server_of()
    for _ in range(2):
        w, a = oracle(server, list(ids), **names, **numbers)
        begin = server
        server, _ = round_of(server, ids, **names, **numbers)
        np.testing.assert_allclose(flat(server["w"]), w, atol=2e-5)
        np.testing.assert_allclose(server["coefficients"], a, atol=2e-5)
        assert np.abs(a - begin["coefficients"]).max() > 1e-2


def test_the_gradient_is_that_of_the_relative_distance():
    w, others, row = toy.rows(models(4), 0), models(), rows_of_a()[1]
    relative = lambda row: (
        trees.sq_dist(mix(row, others), w)
        / (2 * trees.sq_dist(w, optax.tree.scale(0, w)))
    )
    np.testing.assert_allclose(
        slope(row, w, others), jax.jit(jax.grad(relative))(row), rtol=1e-4, atol=1e-6
    )


def test_a_step_has_the_golden_numbers():
    slopes = np.array([[0.927540, 1.257123], [1.153829, 0.945885]], np.float32)
    step = jax.jit(
        jax.vmap(
            lambda g: descend(jnp.full(2, 0.5), 0.5 * g, jnp.ones(2, bool), 0.1, 0.7)
        )
    )
    np.testing.assert_allclose(
        step(slopes), [[0.507228, 0.492772], [0.495440, 0.504560]], atol=1e-6
    )


def test_equal_models_leave_the_coefficients():
    g = np.asarray(slope(rows_of_a()[0], toy.rows(models(), 1), copies()))
    np.testing.assert_allclose(g, np.full(N, g[0]), rtol=1e-5)
    after, _ = round_of(server_of(copies()), rho=0.0, coef_lr=1.0)
    np.testing.assert_allclose(after["coefficients"], rows_of_a(), atol=1e-6)


def test_rows_stay_on_the_simplex_and_only_the_cohorts_block_moves():
    server = server_of()
    after, _ = round_of(
        server, [3, 1, 4, 0], [True, True, True, False], coef_lr=300.0, rho=0.0
    )
    a, before = (x["coefficients"] for x in (after, server))
    assert np.all(a >= 0) and np.any(a == 0)
    np.testing.assert_allclose(a.sum(axis=1), 1, rtol=1e-5)
    here = np.zeros(N, bool)
    here[[3, 1, 4]] = True
    block = here[:, None] & here[None]
    np.testing.assert_array_equal(a[~block], before[~block])
    assert np.all(np.any((a != before) & block, axis=1) == here)
    assert_same(toy.rows(after["w"], ~here), toy.rows(server["w"], ~here))
    assert np.sum((flat(after["w"]) - flat(server["w"]))[here] ** 2) > 1e-4


@pytest.mark.parametrize("rho", [1e6, 1e12])
def test_a_strong_penalty_makes_the_coefficients_uniform(rho):
    after, _ = round_of(server_of(), rho=rho)
    np.testing.assert_allclose(after["coefficients"], 1 / N, atol=1e-4)


def test_no_step_of_equal_models_moves_nothing():
    server = server_of(copies(), np.full((N, N), 1 / N, np.float32))
    after, _ = round_of(server, epochs=0)
    assert_close(after, server)
    w = toy.rows(copies(), 0)
    np.testing.assert_allclose(
        slope(server["coefficients"][0], w, copies()), 0, atol=1e-6
    )
