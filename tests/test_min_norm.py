"""The minimum-norm point: closed forms, optimality conditions, and the projection it
stands on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import aggregate
from fedjax_pfl.algorithms.pfedc import min_norm

FISTA = jax.jit(min_norm.fista)


def gradients(seed, tasks=6, width=40):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(tasks, width)) + rng.normal(size=width)
    ) * 10.0 ** rng.uniform(-1, 1, (tasks, 1))


def test_two_gradients_have_a_closed_form():
    for seed in range(20):
        d = gradients(seed, tasks=2)
        m = jnp.asarray(d @ d.T, jnp.float32)
        alpha = FISTA(m, jnp.ones(2, bool))
        gamma = np.clip((d[1] - d[0]) @ d[1] / np.sum((d[0] - d[1]) ** 2), 0, 1)
        np.testing.assert_allclose(alpha, [gamma, 1 - gamma], atol=2e-3)


@pytest.mark.parametrize("seed", range(5))
def test_optimality_on_the_active_set(seed):
    d = gradients(seed)
    mask = jnp.array([True, True, False, True, True, False])
    m = jnp.asarray(d @ d.T, jnp.float32)
    alpha = np.asarray(FISTA(m, mask))
    assert (
        np.all(alpha >= 0)
        and abs(alpha.sum() - 1) < 1e-5
        and not alpha[~np.asarray(mask)].any()
    )
    point = alpha @ d
    norm = point @ point
    slope = d @ point
    # KKT; also: the point descends every loss
    assert np.all(slope[np.asarray(mask)] >= norm * (1 - 1e-3))
    np.testing.assert_allclose(slope[alpha > 1e-3], norm, rtol=0.05)


def test_masked_gram_may_hold_anything():
    m = jnp.full((3, 3), jnp.nan).at[0, 0].set(2.0)
    np.testing.assert_array_equal(FISTA(m, jnp.array([True, False, False])), [1, 0, 0])


def test_no_active_task_gives_no_weight():
    np.testing.assert_array_equal(FISTA(jnp.eye(3), jnp.zeros(3, bool)), [0, 0, 0])


def test_diagonal_gram_is_inverse_squared_norm_weighting():
    norms = np.array([1.0, 4.0, 0.25], np.float32)
    expected = (1 / norms) / np.sum(1 / norms)
    np.testing.assert_allclose(
        FISTA(jnp.diag(norms), jnp.ones(3, bool)), expected, atol=1e-3
    )


@pytest.mark.parametrize("small", [1e-2, 1e-4, 1e-6, 1e-8])
def test_norms_may_differ_by_orders_of_magnitude(small):
    d = np.array([1, small, 4 * small])
    alpha = FISTA(jnp.diag(jnp.asarray(d, jnp.float32)), jnp.ones(3, bool))
    np.testing.assert_allclose(alpha, (1 / d) / np.sum(1 / d), atol=1e-4)


@pytest.mark.parametrize("tasks, width", [(10, 64), (20, 15)])
def test_gap_of_wide_spreads_is_below_the_sheets_bound(tasks, width):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        d = (
            rng.normal(size=(tasks, width)) + rng.normal(size=width)
        ) * 10.0 ** rng.uniform(-2, 2, (tasks, 1))
        m = jnp.asarray(d @ d.T, jnp.float32)
        alpha = FISTA(m, jnp.ones(tasks, bool))
        assert min_norm.gap(m, jnp.ones(tasks, bool), alpha) <= 1e-3 * (
            alpha @ m @ alpha
        )


def test_opposed_gradients_cancel():
    d = np.array([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0]])
    alpha = FISTA(jnp.asarray(d @ d.T, jnp.float32), jnp.ones(3, bool))
    assert np.linalg.norm(alpha @ d) < 1e-3 and np.isclose(alpha.sum(), 1)


def test_scale_of_the_gradients_does_not_matter():
    d = gradients(3)
    mask = jnp.ones(6, bool)
    small, large = (
        FISTA(jnp.asarray(d @ d.T * s, jnp.float32), mask) for s in (1e-20, 1e20)
    )
    np.testing.assert_allclose(small, large, atol=1e-3)


@pytest.mark.parametrize(
    "v, total, expected",
    [
        ((0.5, 0.4, 0.3), 1.0, (0.433333, 0.333333, 0.233333)),
        ((1.2, 0.3, -0.1), 1.0, (0.95, 0.05, 0)),
        ((0.5, 0.4, 0.3), 0.6, (0.3, 0.2, 0.1)),
    ],
)
def test_simplex_projection_golden_numbers(v, total, expected):
    got = aggregate.project_simplex(jnp.array(v), jnp.ones(3, bool), total)
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_simplex_projection_of_large_values_keeps_the_sum(size):
    v, mask = (
        size * np.random.default_rng(0).normal(size=100).astype(np.float32),
        np.arange(100) % 3 > 0,
    )
    got = np.asarray(aggregate.project_simplex(jnp.asarray(v), jnp.asarray(mask), 0.7))
    np.testing.assert_allclose(got.sum(), 0.7, rtol=1e-6)
    assert got.min() >= 0 and not got[~mask].any()
    np.testing.assert_array_equal(
        aggregate.project_simplex(jnp.asarray(v), jnp.zeros(100, bool)), 0
    )


def test_simplex_projection_ignores_masked_entries():
    got = aggregate.project_simplex(
        jnp.array([9.0, 0.5, 0.4, 0.3]), jnp.array([False, True, True, True])
    )
    np.testing.assert_allclose(got, (0, 0.433333, 0.333333, 0.233333), atol=1e-6)


def test_shares_by_column():
    weight = jnp.array([[1.0, 0, 0], [3, 0, 2], [5, 7, 9]])
    got = aggregate.shares(weight, jnp.array([True, True, False]))
    np.testing.assert_allclose(got, [[0.25, 0, 0], [0.75, 0, 1], [0, 0, 0]])


@pytest.mark.slow
def test_a_weight_that_is_not_finite_is_seen_in_the_mean():
    """Else the server would stay where it is, and the run go on."""
    active, x, default = (
        np.array([True, True, False]),
        jnp.array([1.0, 3, jnp.nan]),
        jnp.float32(9),
    )

    def mean(w, x=x):
        share = aggregate.shares(w, active)
        return aggregate.filled(
            share, jnp.sum(jax.vmap(aggregate.weigh)(share, x), axis=0), default
        )

    assert mean(jnp.zeros(3)) == 9 and mean(jnp.array([1.0, 3, 7])) == 2.5
    for weight in ([np.nan, 1, 1], [np.inf, 1, 1], [3e38, 3e38, 1]):
        assert np.isnan(mean(jnp.array(weight, jnp.float32)))
    assert np.isfinite(jax.grad(mean)(jnp.array([1.0, 3, 7]))).all()
    assert np.isfinite(jax.grad(mean, 1)(jnp.array([1.0, 3, 7]), x)).all()


def test_a_gradient_of_zero_is_the_minimum():
    norms = jnp.array([0.166, 0.0, 7.77, 3507.0])
    np.testing.assert_array_equal(
        FISTA(jnp.diag(norms), jnp.ones(4, bool)), [0, 1, 0, 0]
    )


def test_the_gap_is_that_of_the_active_tasks():
    """Else the solver never stopped before its last iteration."""
    half = np.float32([0.5, 0.5, 0])
    assert (
        min_norm.gap(
            np.diag(np.float32([1, 1, 0])), np.array([True, True, False]), half
        )
        == 0
    )
