"""FedGH: its limit and two rounds by hand."""

import by_hand
import jax
import numpy as np
import oracle
import pytest

from fedjax_pfl import keys
from fedjax_pfl.algorithms.prototypes import Draw


def order(i, t):
    """The random numbers of client i's mean features."""
    key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[t], 0), i)
    return jax.random.uniform(keys.fold(key, Draw.ORDER), (4,))


@pytest.mark.slow
def test_a_server_step_of_zero_keeps_the_head():
    states, _ = by_hand.run("fedgh", server_lr=0.0, server_epochs=2)
    for name in ("kernel", "bias"):
        head = [state.server["head"][name] for state in states]
        np.testing.assert_array_equal(head[0], head[2])


def test_two_rounds_by_hand():
    lr = 0.3
    states, _ = by_hand.run("fedgh", server_lr=lr, server_epochs=2)
    head = [np.asarray(states[0].server["head"][k], float) for k in ("kernel", "bias")]
    layer = by_hand.row(states[0], 0)["body"]["layers"]["0"]
    body = [np.asarray(layer[k], float) for k in ("kernel", "bias")]
    bodies = [body] * 5
    for t in range(2):
        means = []
        for i in by_hand.LEARN[t]:
            w = by_hand.descend([*bodies[i], *head], i, t)
            bodies[i] = w[:2]
            x, y = by_hand.examples(i)
            h, draws = oracle.forward(w, x)[0], order(i, t)
            means += [(draws[c], h[y == c].mean(axis=0), c) for c in set(y)]
        means.sort(key=lambda row: row[0])
        for _ in range(2):
            for s in range(0, len(means), 4):
                _, h, y = map(np.array, zip(*means[s : s + 4], strict=True))
                dz = oracle.by_logits(h @ head[0] + head[1], y)
                head = [head[0] - lr * h.T @ dz, head[1] - lr * dz.sum(axis=0)]
        for k, wanted in zip(("kernel", "bias"), head, strict=True):
            np.testing.assert_allclose(states[t + 1].server["head"][k], wanted, 2e-4)
        layer = by_hand.row(states[t + 1], 1)["body"]["layers"]["0"]
        np.testing.assert_allclose(layer["kernel"], bodies[1][0], atol=2e-5)
