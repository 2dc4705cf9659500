"""Floco: its projection, its limit and two rounds by hand."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy

from fedjax_pfl import keys
from fedjax_pfl.algorithms.floco import Draw, centers, components, corners, project

RNG = np.random.default_rng(0)


def principal(rows, count):
    """The components of PCA, by the rows' covariance."""
    centred = rows - rows.mean(axis=0)
    _, _, v = np.linalg.svd(centred, full_matrices=False)
    kappa = centred @ v[:count].T
    kappa = np.pad(kappa, ((0, 0), (0, count - kappa.shape[1])))
    largest = np.argmax(np.abs(kappa), axis=0)
    return kappa * np.where(kappa[largest, np.arange(count)] < 0, -1, 1)


def nearest(row, z):
    """The projection to the simplex of sum z, by bisection, divided by z."""
    low, high = row.min() - z, row.max()
    for _ in range(80):
        middle = (low + high) / 2
        enough = np.maximum(row - middle, 0).sum() > z
        low, high = (middle, high) if enough else (low, middle)
    return np.maximum(row - low, 0) / z


def regions(rows, count):
    best, least = None, np.inf
    kappa = principal(rows, count)
    for z in np.linspace(1e-4, 1, 1000):
        points = np.stack([nearest(row, z) for row in kappa])
        d2 = [np.sum((a - b) ** 2) for i, a in enumerate(points) for b in points[:i]]
        if (found := np.sum(1 / np.maximum(d2, 1e-8))) < least:
            best, least = points, found
    return best


@pytest.mark.slow
def test_components_are_those_of_pca():
    rows = RNG.normal(size=(6, 4))
    here = jnp.array([True] * 5 + [False])
    got = components(jnp.array(rows @ rows.T), here, 3)
    np.testing.assert_allclose(got[:5], principal(rows[:5], 3), atol=1e-4)
    np.testing.assert_allclose(got[5], 0, atol=1e-5)


@pytest.mark.slow
def test_points_of_the_simplex_are_nearest():
    kappa = RNG.normal(size=(4, 3))
    got = project(jnp.array(kappa), 0.3)
    wanted = [nearest(row, 0.3) for row in kappa]
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_opposite_updates_have_opposite_corners():
    rows = np.array([[1.0, 0], [1.1, 0], [-1, 0.1], [-1.1, 0.1]])
    got = centers(jnp.array(rows @ rows.T), jnp.ones(4, bool), 2)
    np.testing.assert_allclose(got[:2, 0], 1, atol=1e-3)
    np.testing.assert_allclose(got[2:, 1], 1, atol=1e-3)


@pytest.mark.slow
def test_one_corner_is_fedavg():
    (_, *found), _ = by_hand.run("floco", endpoints=1, rho=0.0, warmup=0.0)
    (_, *wanted), _ = by_hand.run("fedavg")
    for got, other in zip(found, wanted, strict=True):
        w = got.server["w"]
        kernel, bias = (w["head"][name] for name in ("kernel", "bias"))
        w = w | {"head": {"kernel": kernel[0], "bias": bias}}
        toy.assert_close(w, other.server, 1e-6)


def test_corners_are_draws_of_xaviers_normal_distribution():
    head = {"kernel": jnp.ones((30, 20)), "bias": jnp.full(20, 0.5)}
    found = corners(jax.random.key(0), head, 4)
    assert found["kernel"].shape == (4, 30, 20)
    deviation = found["kernel"].std(axis=(1, 2))
    np.testing.assert_allclose(deviation, np.sqrt(2 / 50), rtol=0.1)
    np.testing.assert_array_equal(found["bias"], head["bias"])


def mixed(alpha, w):
    return [*w[:2], np.tensordot(alpha, w[2], 1), w[3]]


def points(i, t, center):
    """The points of client i's steps; `center` None: of the whole simplex."""
    key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[t], 0), i)
    for s in range(100):
        step = jax.random.fold_in(keys.fold(key, keys.Client.STEP), s)
        loss = keys.fold(step, keys.Step.LOSS)
        edges = jax.random.exponential(keys.fold(loss, Draw.EDGES), (3,))
        alpha = np.asarray(edges / edges.sum(), np.float64)
        draw = keys.fold(loss, Draw.DIRECTION)
        cube = np.asarray(jax.random.uniform(draw, (3,), minval=-1), np.float64)
        length = jax.random.uniform(keys.fold(loss, Draw.RADIUS), ())
        move = 0.4 * float(length) * cube / np.abs(cube).sum()
        yield alpha if center is None else center + move


def test_two_rounds_by_hand():
    """The regions are assigned between them."""
    hparams = {"endpoints": 3, "warmup": 0.0, "rho": 0.4}
    states, _ = by_hand.run("floco", **hparams)
    w, center = oracle.variables(states[0].server["w"]), [None] * 5
    for t in range(2):
        models = []
        for i in by_hand.LEARN[t]:
            v, alphas = w, points(i, t, center[i])

            def slope(v, x, y, alphas=alphas):
                alpha = next(alphas)
                g = oracle.gradient(mixed(alpha, v), x, y)
                return [*g[:2], np.multiply.outer(alpha, g[2]), g[3]]

            models.append(by_hand.descend(v, i, t, slope))
        if t == 0:
            updates = [(w[2] - v[2]).ravel() for v in models]
            found = regions(np.stack(updates), 3)
            for i, point in zip(by_hand.LEARN[0], found, strict=True):
                center[i] = point
        w = oracle.mean(models, by_hand.sizes(t))
        after = states[t + 1].server
        oracle.close(after["w"], w)
        for i in by_hand.LEARN[0]:
            np.testing.assert_allclose(after["center"][i], center[i], atol=2e-4)
        assert list(after["assigned"]) == [i != 3 for i in range(5)]
        np.testing.assert_allclose(after["center"][3], 1 / 3)
