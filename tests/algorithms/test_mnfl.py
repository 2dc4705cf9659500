"""The properties of sheet 2.13.b: the coefficients' gradient and step, and two rounds against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.flatten_util import ravel_pytree
from toy import SIZES, N, assert_close, assert_same

from fedjax_pfl import local, losses, simulate, trees
from fedjax_pfl.algorithms import mnfl as factory
from fedjax_pfl.algorithms.mnfl import descend, gradient, mix
from fedjax_pfl.checks import BadInput
from fedjax_pfl.clients import Cohort
from fedjax_pfl.types import State

KEY = jax.random.key(0)
TASK = toy.task()
EVERY = jnp.ones(N, bool)


def models(seed=3, task=TASK):
    """N different models, stacked, without batch-norm moments."""
    rows = [task.model.init(jax.random.key(seed * 100 + i)) for i in range(N)]
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)


def rows_of_a(seed=0):
    a = np.random.default_rng(seed).dirichlet(np.ones(N), size=N)
    return jnp.asarray(a, jnp.float32)


def flat(stacked):
    """[N, P] in float64."""
    return np.stack([np.asarray(ravel_pytree(trees.gather(stacked, i))[0], np.float64) for i in range(N)])


def round_of(server, ids=range(N), active=None, task=TASK, key=KEY, **hparams):
    f, ids = toy.federation(), jnp.asarray(list(ids), jnp.int32)
    active = jnp.ones(len(ids), bool) if active is None else jnp.asarray(active)
    cohort = Cohort(f, task.prepare, ids, active, key=key, round=jnp.int32(0), evaluated=jnp.bool(False), width=1)
    own = trees.gather(factory(task).init(KEY).clients, ids)
    run = jax.jit(lambda server, own: factory(task, **hparams).round(key, State(server, own), cohort))
    return run(server, own)


def server_of(w=None, a=None):
    return {"w": models() if w is None else w, "coefficients": rows_of_a() if a is None else a}


def project(v, mass):
    """By bisection on the threshold: independent of the sorted formula."""
    low, high = v.min() - mass, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > mass else (low, middle)
    return np.maximum(v - low, 0)


def oracle(server, ids, coef_lr, rho, lam, steps=1, penalty="implicit", residual="sent", start="replace"):
    """One round: the clients' SGD by the library, everything between the clients in loops of NumPy."""
    f, loss = toy.federation(), losses.classification(TASK.model)
    a, old = np.asarray(server["coefficients"], np.float64), flat(server["w"])
    unravel = ravel_pytree(trees.gather(server["w"], 0))[1]
    new = old.copy()
    for i in ids:
        v = sum(a[i, m] * old[m] for m in range(N))
        if start == "step":
            w = old[i]
            for _ in range(3):
                w = w - 0.25 * (w - v)
            v = w
        nothing = {"round": jnp.int32(0), "evaluated": jnp.bool(False)}
        cohort = Cohort(f, TASK.prepare, jnp.array([i]), jnp.array([True]), key=KEY, width=1, **nothing)
        train = lambda c, v=v: local.sgd(c.key, c.train, loss, unravel(jnp.asarray(v, jnp.float32)), TASK)[0]
        new[i] = np.asarray(ravel_pytree(trees.gather(jax.jit(lambda t=train, c=cohort: c.map(t))(), 0))[0])
    base, after = (old if residual == "sent" else new), a.copy()
    for i in ids:
        for _ in range(steps):
            r = sum(after[i, m] * base[m] for m in range(N)) - new[i]
            g = np.array([base[m] @ r for m in range(N)]) / (new[i] @ new[i])
            step = after[i] - coef_lr * lam * SIZES[i] / SIZES.sum() * g
            if penalty == "implicit":
                step = (step + 2 * coef_lr * rho / N) / (1 + 2 * coef_lr * rho)
            else:
                step = step - 2 * coef_lr * rho * (after[i] - 1 / N)
            after[i, ids] = project(step[ids], after[i, ids].sum())
    return new, after


@pytest.mark.parametrize(
    "ids, steps, penalty, residual, start",
    [
        (range(N), 1, "implicit", "sent", "replace"),
        ([3, 1, 4], 3, "explicit", "sent", "step"),
        ([2, 0, 4], 2, "implicit", "fresh", "replace"),
    ],
)
def test_two_rounds_are_the_plain_loops(ids, steps, penalty, residual, start):
    numbers = {"coef_lr": 2.0, "rho": 0.05, "lam": 3.0}  # large, so that coefficients move and some reach 0
    names = {"coef_steps": steps, "penalty": penalty, "residual": residual, "transfer": start}
    server = server_of()
    for _ in range(2):
        w, a = oracle(server, list(ids), steps=steps, penalty=penalty, residual=residual, start=start, **numbers)
        begin = server
        server = round_of(server, ids, **numbers, **names, transfer_lr=0.25, transfer_steps=3)[0].server
        np.testing.assert_allclose(flat(server["w"]), w, atol=2e-5)
        np.testing.assert_allclose(server["coefficients"], a, atol=2e-5)
        assert np.abs(a - np.asarray(begin["coefficients"])).max() > 1e-2


def test_the_gradient_is_that_of_the_relative_distance():
    w, others, row = trees.gather(models(4), 0), models(), rows_of_a()[1]
    relative = lambda row: trees.sq_dist(mix(row, others), w) / (2 * trees.sq_dist(w, trees.scale(0, w)))
    np.testing.assert_allclose(gradient(row, w, others), jax.grad(relative)(row), rtol=1e-4, atol=1e-6)


def test_a_step_has_the_golden_numbers():
    slope = jnp.array([[0.927540, 1.257123], [1.153829, 0.945885]])
    step = jax.vmap(lambda g: descend(jnp.full(2, 0.5), 0.5 * g, jnp.ones(2, bool), 0.1, 0.7))
    np.testing.assert_allclose(step(slope), [[0.507228, 0.492772], [0.495440, 0.504560]], atol=1e-6)


def test_equal_models_leave_the_coefficients():
    w = trees.replicate(TASK.model.init(KEY), N)
    slope = gradient(rows_of_a()[0], trees.gather(models(), 1), w)
    np.testing.assert_allclose(slope, np.full(N, slope[0]), rtol=1e-5)
    after = round_of(server_of(w), rho=0.0, coef_lr=1.0)[0].server
    np.testing.assert_allclose(after["coefficients"], rows_of_a(), atol=1e-6)


def test_rows_stay_on_the_simplex_and_only_the_cohorts_block_moves():
    server = server_of()
    after = round_of(server, [3, 1, 4, 0], [True, True, True, False], coef_lr=300.0, rho=0.0)[0].server
    a, before = (np.asarray(x["coefficients"]) for x in (after, server))
    assert np.all(a >= 0) and np.any(a == 0)
    np.testing.assert_allclose(a.sum(axis=1), 1, rtol=1e-5)
    here = np.zeros(N, bool)
    here[[3, 1, 4]] = True
    block = here[:, None] & here[None]
    np.testing.assert_array_equal(a[~block], before[~block])
    assert np.all(np.any((a != before) & block, axis=1) == here)
    assert_same(trees.gather(after["w"], ~here), trees.gather(server["w"], ~here))
    assert trees.sq_dist(trees.gather(after["w"], here), trees.gather(server["w"], here)) > 1e-4


@pytest.mark.parametrize("rho", [1e6, 1e12])
def test_a_strong_penalty_makes_the_coefficients_uniform(rho):
    after = round_of(server_of(), rho=rho)[0].server
    np.testing.assert_allclose(after["coefficients"], 1 / N, atol=1e-4)


def test_no_step_of_equal_models_moves_nothing():
    w = trees.replicate(TASK.model.init(KEY), N)
    server = server_of(w, jnp.full((N, N), 1 / N))
    after = round_of(server, task=toy.task(epochs=0))[0].server
    assert_close(after, server)
    np.testing.assert_allclose(gradient(server["coefficients"][0], trees.gather(w, 0), w), 0, atol=1e-6)


def test_a_fresh_residual_prefers_the_own_model():
    w = trees.gather(models(), 1)
    np.testing.assert_allclose(gradient(jnp.eye(N)[1], w, models()), 0, atol=1e-7)
    state, metrics = round_of(server_of(a=jnp.full((N, N), 1 / N)), residual="fresh", coef_lr=1.0, lam=N)
    own = np.diagonal(state.server["coefficients"])
    assert np.all(own > 1 / N)
    assert_same(metrics["self_weight"], jnp.asarray(own))


def test_a_client_is_scored_with_the_model_it_trained():
    program, f = simulate.program(factory, TASK), toy.federation()
    _, metrics, last = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, f, rounds=2))()
    assert_close(jax.tree.map(lambda x: x[-1], metrics["post"]), last)


@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
def test_batch_norm(bn_stats):
    program, f = simulate.program(factory, toy.task("norm", bn_stats=bn_stats), {"coef_lr": 1.0}), toy.federation()
    state, metrics, last = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, f, rounds=2))()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last)))
    assert bool(jax.tree.leaves(state.clients)) == (bn_stats == "local")


@pytest.mark.parametrize(
    "wrong", [{"rho": -1.0}, {"coef_lr": float("nan")}, {"transfer_lr": 2.0}, {"penalty": "l1"}, {"transfer": "sum"}]
)
def test_bad_input(wrong):
    with pytest.raises(BadInput):
        factory(TASK, **wrong)
