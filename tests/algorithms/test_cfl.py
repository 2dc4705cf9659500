"""CFL: its bipartition, its splits and a round of two clusters by hand."""

import itertools

import by_hand
import jax.numpy as jnp
import numpy as np
import oracle
import toy

from fedjax_pfl.algorithms.cfl import bipartition, split_clusters
from fedjax_pfl.types import State


def test_the_bipartition_is_the_best_of_all():
    rng = np.random.default_rng(0)
    for _ in range(5):
        x = rng.normal(size=(6, 3))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        cosine, member = x @ x.T, np.array([True] * 5 + [False])
        cost = lambda half, c=cosine: max(
            c[i, j] for i in half for j in set(range(5)) - set(half)
        )
        halves = [h for k in range(1, 5) for h in itertools.combinations(range(5), k)]
        found = bipartition(jnp.float32(cosine), jnp.asarray(member))
        half = tuple(np.flatnonzero(found))
        assert not found[0] and not found[5]
        assert np.isclose(cost(half), min(map(cost, halves)))


def test_only_the_clusters_that_divide_are_split():
    cosine = jnp.float32(np.kron(np.eye(2), np.ones((2, 2))))
    cluster, yes = jnp.zeros(4, jnp.int32), jnp.ones(4, bool)
    assert list(split_clusters(cluster, cosine, yes)) == [0, 0, 2, 2]
    assert list(split_clusters(cluster, cosine, ~yes)) == [0, 0, 0, 0]


def test_updates_are_averaged_within_clusters():
    states, _ = by_hand.run("cfl", eps1=0.0, eps2=1e9, first=0, smallest=1)
    server = {**states[0].server, "cluster": np.array([0, 0, 2, 0, 2], np.int32)}
    states, _ = by_hand.run(
        "cfl",
        State(server, states[0].clients),
        eps1=0.0,
        eps2=1e9,
        first=0,
        smallest=1,
    )
    get = lambda s, i: oracle.variables(toy.rows(s.server["w"], i))
    w = {0: get(states[0], 0), 2: get(states[0], 0)}
    for t in range(2):
        for name, members in ((0, (0, 1, 3)), (2, (2, 4))):
            here = [i for i in members if i in by_hand.LEARN[t]]
            trained = [by_hand.descend(w[name], i, t) for i in here]
            w[name] = oracle.mean(trained, [1] * len(trained))
            for i in members:
                for a, b in zip(get(states[t + 1], i), w[name], strict=True):
                    np.testing.assert_allclose(a, b, atol=2e-5)


def test_clusters_are_split_by_their_norms():
    """With everybody: the toy's clients hold different classes."""
    given = {"first": 0, "smallest": 1, "eps1": 100.0}
    kept = toy.train("cfl", toy.task(), 1, eps2=1e9, **given)
    split = toy.train("cfl", toy.task(), 1, eps2=0.0, **given)
    assert kept.metrics.server["clusters"][0] == 1
    assert split.metrics.server["clusters"][0] == 2
