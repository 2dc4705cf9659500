"""FedAS: two rounds by hand."""

import by_hand
import jax
import numpy as np
import oracle
import toy

from fedjax_pfl import keys
from fedjax_pfl.algorithms.fedas import Draw


def aligned(w, old, i, t, lr):
    """The received model after one epoch of alignment."""
    x, y = by_hand.examples(i)
    h = oracle.forward(old, x)[0]
    key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[t], 0), i)
    for a, b in by_hand.shuffled(keys.fold(key, Draw.ALIGN), i, 1):
        dh = np.zeros((len(b), 8))
        for c in set(b):
            gap = oracle.forward(w, a[b == c])[0] - h[y == c].mean(axis=0)
            dh[b == c] = 2 * gap / gap.size
        g = oracle.backward(w, a, np.zeros((len(b), 4)), dh)
        w = [w[0] - lr * g[0], w[1] - lr * g[1], *w[2:]]
    return w


def trace(w, i):
    x, y = by_hand.examples(i)
    slopes = [
        oracle.gradient(w, x[s : s + 4], y[s : s + 4]) for s in range(0, len(y), 4)
    ]
    return sum(np.sum(g**2) for slope in slopes for g in slope)


def test_two_rounds_by_hand():
    lr = 0.05
    states, reports = by_hand.run("fedas", align_lr=lr)
    w = oracle.variables(by_hand.row(states[0], 0, "w"))
    body, models = w[:2], [w] * 5
    for t in range(2):
        learn, found = by_hand.LEARN[t], {}
        for i in learn:
            start = aligned([*body, *models[i][2:]], models[i], i, t, lr)
            found[i] = by_hand.descend(start, i, t)
            models[i] = found[i]
        fisher = [trace(models[i], i) for i in learn]
        np.testing.assert_allclose(
            reports[t].clients["fisher"][learn], fisher, rtol=1e-3
        )
        body = oracle.mean([models[i][:2] for i in learn], fisher)
        got = {**states[t + 1].server, "head": by_hand.row(states[0], 0, "w", "head")}
        for a, b in zip(oracle.variables(got)[:2], body, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        for i in (0, 1, 2, 4):  # client 3 takes the received body
            oracle.close(by_hand.row(states[t + 1], i, "w"), models[i])


def test_a_client_alone_without_alignment_is_fedpers():
    """Its weight is then 1, whatever its Fisher information."""
    alone = [[2], [4]]
    ours, _ = by_hand.run("fedas", rounds=alone, align_lr=0.0)
    theirs, _ = by_hand.run("fedper", rounds=alone)
    for a, b in zip(ours, theirs, strict=True):
        toy.assert_close(a.server["body"], b.server["body"], 1e-5)
