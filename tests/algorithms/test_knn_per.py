"""kNN-Per: its limits and a prediction by hand."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy

from fedjax_pfl.algorithms.knn_per import neighbours

F = toy.federation()


def outputs(lam, k=3, scale=0.2):
    got = toy.train("knn_per", toy.task(), 1, lam=lam, k=k, scale=scale)
    return oracle.variables(got.state.server), np.asarray(got.outputs(12))


def test_a_prediction_by_hand():
    """Client 1, which has 19 examples, for 12 examples of others and its own."""
    lam, k, scale = 0.6, 3, 0.2
    w, found = outputs(lam, k, scale)
    x, y = np.asarray(F.examples.x, np.float64), np.asarray(F.examples.y)
    rows = np.asarray(F.train.index[1])[: toy.SIZES[1]]
    store, _ = oracle.forward(w, x[rows])
    h, z = oracle.forward(w, x[:12])
    p = oracle.softmax(z)
    for b in range(12):
        d2 = np.sum((store - h[b]) ** 2, axis=1)
        near = np.argsort(d2)[:k]
        weight = np.exp(-d2[near] / (8 * scale))
        votes = np.eye(toy.C)[y[rows[near]]].T @ weight / weight.sum()
        wanted = lam * votes + (1 - lam) * p[b]
        np.testing.assert_allclose(found[b, :, 0], wanted, atol=1e-5)
    np.testing.assert_allclose(found[..., 1], p, atol=1e-5)


def test_without_neighbours_it_is_the_global_model():
    _, found = outputs(0.0)
    np.testing.assert_array_equal(found[..., 0], found[..., 1])


@pytest.mark.slow
def test_one_neighbour_far_away_has_the_whole_vote():
    """Its weight alone would underflow."""
    store = jnp.array([[1e3, 0.0], [0.0, 0.0]]), jnp.array([2, -1])
    got = neighbours(jnp.zeros((1, 2)), store, 2, 1.0, 3)
    np.testing.assert_allclose(got, [[0, 0, 1]])
