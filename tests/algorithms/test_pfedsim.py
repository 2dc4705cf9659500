"""pFedSim: its limit and two rounds by hand."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import toy

from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.pfedsim import similarity, weights


def test_only_warming_up_is_fedavg():
    states, _ = by_hand.run("pfedsim", warmup=1.0)
    wanted, _ = by_hand.run("fedavg")
    for a, b in zip(states, wanted, strict=True):
        for i in (0, 3):
            toy.assert_close(toy.rows(a.server["w"], i), b.server, 1e-5)


def test_weights_are_the_logarithms_of_the_dissimilarities():
    phi = np.float32([0.9999, 0.5, 0.0])
    log = -np.log(1 - np.array([0.9999, 0.5, 0]))
    np.testing.assert_allclose(weights(phi), log / log.sum(), rtol=1e-3, atol=1e-7)


def cosine(a, b):
    norms = np.linalg.norm(a, axis=0) * np.linalg.norm(b, axis=0)
    return max(0, np.mean(np.sum(a * b, axis=0) / norms))


def test_two_rounds_by_hand():
    states, _ = by_hand.run("pfedsim", warmup=0.0)
    get = lambda state, i: oracle.variables(toy.rows(state.server["w"], i))
    models, phi = [get(states[0], i) for i in range(5)], np.eye(5)
    for t in range(2):
        np.fill_diagonal(phi, 0.9999)
        a = -np.log(1 - phi)
        a /= a.sum(axis=1, keepdims=True)
        found = {}
        for i in by_hand.LEARN[t]:
            body = [
                sum(p * w[k] for p, w in zip(a[i], models, strict=True)) for k in (0, 1)
            ]
            found[i] = by_hand.descend([*body, *models[i][2:]], i, t)
        for i, w in found.items():
            models[i] = w
        for i in found:
            for j in found:
                if i != j:
                    phi[i, j] = cosine(models[i][2], models[j][2])
        for i in range(5):
            for got, wanted in zip(get(states[t + 1], i), models[i], strict=True):
                np.testing.assert_allclose(got, wanted, atol=1e-4)
        np.fill_diagonal(phi, 1)
        np.testing.assert_allclose(states[t + 1].server["phi"], phi, atol=1e-4)


def test_a_client_with_a_head_of_its_own_receives_a_body_only():
    states, _ = by_hand.run("pfedsim", warmup=0.0)
    algorithm = ALGORITHMS["pfedsim"](by_hand.TASK)
    cohort = toy.cohort(by_hand.TASK, [0, 3])  # client 3 does not train
    states = jax.tree.map(jnp.asarray, states[:2])
    found = [algorithm.traffic(state, cohort, None) for state in states]
    size, head = 6 * 8 + 8 + 8 * 4 + 4, 8 * 4 + 4
    np.testing.assert_array_equal([x.up for x in found], size)
    np.testing.assert_array_equal(found[0].down, size)
    np.testing.assert_array_equal(found[1].down, [size - head, size])


def test_similarity_by_hand():
    kernels = np.random.default_rng(1).normal(size=(3, 5, 4)).astype(np.float32)
    wanted = [[cosine(a, b) for b in kernels] for a in kernels]
    np.testing.assert_allclose(similarity(kernels), wanted, atol=1e-6)
