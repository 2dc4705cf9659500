"""FLUTE: its simplex, its limit and two rounds by hand."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy

from fedjax_pfl import keys
from fedjax_pfl.algorithms.flute import collapse


def test_a_simplex_has_no_distance():
    """Columns of I - 1 1^T / C, of any length."""
    kernel = 3 * (jnp.eye(4) - 1 / 4)
    assert collapse(kernel, jnp.ones(4, bool)) < 1e-5
    assert collapse(kernel, jnp.array([True, False, True, True])) > 0.1


@pytest.mark.slow
def test_without_penalties_it_is_fedper():
    off = {"lam1": 0.0, "lam2": 0.0, "lam3": 0.0, "server_lr": 0.0, "head_epochs": 0}
    (*_, got), _ = by_hand.run("flute", **off)
    (*_, wanted), _ = by_hand.run("fedper")
    toy.assert_close(got.server["body"], wanted.server["body"], 1e-6)
    toy.assert_close(got.clients["head"], wanted.clients["head"], 1e-6)


def slope_of(kernel, has):
    """The gradient of the distance to the simplex."""
    gram = kernel.T @ kernel
    size = np.linalg.norm(gram)
    target = (np.eye(4) - 1 / 4) / np.sqrt(3) * np.outer(has, has)
    gap = gram / size - target
    d = gap / np.linalg.norm(gap)
    return 2 * kernel @ (d - gram * np.sum(d * gram) / size**2) / size


def test_two_rounds_by_hand():
    lam1, lam2, lam3, rate = 0.3, 0.02, 0.005, 0.2
    given = {"lam1": lam1, "lam2": lam2, "lam3": lam3, "server_lr": rate}
    states, _ = by_hand.run("flute", head_epochs=1, **given)
    first = {**states[0].server, "head": by_hand.row(states[0], 0)["head"]}
    start = oracle.variables(first)
    body, heads = start[:2], [start[2:]] * toy.N
    for t in range(2):
        bodies = []
        for i in by_hand.LEARN[t]:
            has = np.bincount(by_hand.examples(i)[1], minlength=4) > 0

            def slope(w, x, y, weight=lam3, has=has):
                h, z = oracle.forward(w, x)
                g = oracle.backward(w, x, oracle.by_logits(z, y), 2 * weight * h)
                g[2] = g[2] + lam1 * slope_of(w[2], has) + 2 * lam2 * w[2]
                return g

            w = [*body, *heads[i]]
            key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[t], 0), i)
            key = keys.fold(key, keys.Client.HEAD_PHASE)
            for x, y in by_hand.shuffled(key, i, 1):
                g = slope(w, x, y, 0)
                w = [
                    *w[:2],
                    *(a - by_hand.LR * b for a, b in zip(w[2:], g[2:], strict=True)),
                ]
            w = by_hand.descend(w, i, t, slope)
            bodies.append(w[:2])
            heads[i] = [w[2] - rate * slope_of(w[2], has), w[3]]
        body = oracle.mean(bodies, by_hand.sizes(t))
        after = states[t + 1]
        for i in range(toy.N):
            got = {**after.server, "head": by_hand.row(after, i)["head"]}
            oracle.close(got, [*body, *heads[i]])
