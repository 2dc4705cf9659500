"""CCVR: its covariances, its Gaussians, and its limit."""

import by_hand
import jax
import numpy as np
import toy

from fedjax_pfl.algorithms.ccvr import covariance, gaussian

RNG = np.random.default_rng(0)
H = [RNG.normal(size=(n, 3)) @ RNG.normal(size=(3, 3)) for n in (7, 2, 1)]


def moments():
    first = np.stack([h.mean(axis=0) for h in H], axis=1)
    second = np.stack([h.T @ h / len(h) for h in H], axis=2)
    return np.float32(first), np.float32(second), np.array([7, 2, 1])


def test_the_covariance_is_that_of_all_examples():
    cov = covariance(*moments())
    np.testing.assert_allclose(cov[..., 0], np.cov(H[0].T), atol=1e-5)
    np.testing.assert_allclose(cov[..., 1], np.cov(H[1].T), atol=1e-5)
    np.testing.assert_array_equal(cov[..., 2], 0)


def test_virtual_features_have_the_moments():
    first, second, count = moments()
    cov = covariance(first, second, count)
    h = np.asarray(gaussian(jax.random.key(0), first, cov, 4000))
    np.testing.assert_allclose(h.mean(axis=0), first, atol=0.15)
    np.testing.assert_allclose(np.cov(h[..., 0].T), cov[..., 0], atol=0.3)
    np.testing.assert_allclose(h[..., 2], np.stack([first[:, 2]] * 4000), atol=1e-6)


def test_training_is_fedavg_and_a_step_of_zero_keeps_the_head():
    small = {"samples": 5, "server_epochs": 1}
    by_hand.same_server("ccvr", "fedavg", server_lr=0.0, **small)
    states, _ = by_hand.run("ccvr", server_lr=0.0, **small)
    for state in states:
        toy.assert_same(state.server["head"], state.server["w"]["head"])
    moved, _ = by_hand.run("ccvr", server_lr=0.1, **small)
    assert (moved[2].server["head"]["bias"] != states[2].server["head"]["bias"]).any()
