"""FedCross: its partners, its invariant and a round by hand."""

import by_hand
import jax.numpy as jnp
import numpy as np
import oracle
import toy

from fedjax_pfl.algorithms.fedcross import partner


def test_partners():
    w = jnp.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    assert list(partner(w, jnp.int32(0), "lowest")) == [2, 2, 0]
    assert list(partner(w, jnp.int32(0), "highest")) == [1, 0, 1]
    assert list(partner(w, jnp.int32(1), "order")) == [2, 0, 1]


def models(state):
    return [oracle.variables(toy.rows(state.server, j)) for j in range(5)]


def test_without_mixing_every_model_is_one_clients_training():
    """Four clients train a model each, and the fifth model is as before."""
    states, _ = by_hand.run("fedcross", rounds=[[0, 1, 2, 3, 4]], alpha=1.0)
    start, found = models(states[0])[0], models(states[1])
    wanted = [by_hand.descend(start, i, 0) for i in by_hand.LEARN[0]] + [start]
    distance = lambda a, b: sum(np.sum((x - y) ** 2) for x, y in zip(a, b, strict=True))
    gaps = np.array([[distance(a, b) for b in wanted] for a in found])
    assert sorted(gaps.argmin(axis=1)) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(gaps.min(axis=1), 0, atol=1e-8)


def test_mixing_by_hand():
    """The same models are trained, whatever alpha is."""
    plain, mixed = (
        models(by_hand.run("fedcross", rounds=[[0, 1, 2, 3, 4]], alpha=a)[0][1])
        for a in (1.0, 0.8)
    )
    flat = np.stack([np.concatenate([x.ravel() for x in w]) for w in plain])
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    other = (unit @ unit.T + 2 * np.eye(5)).argmin(axis=1)
    for j, k in enumerate(other):
        pairs = zip(mixed[j], plain[j], plain[k], strict=True)
        for got, a, b in pairs:
            np.testing.assert_allclose(got, 0.8 * a + 0.2 * b, atol=1e-5)
