"""FedL2G: its warm-up, and the guidance by finite differences."""

import by_hand
import jax
import numpy as np
import oracle

from fedjax_pfl import keys, local_training
from fedjax_pfl.algorithms.fedl2g import Draw


def test_the_servers_gradient_is_clipped():
    clip = 1e-3
    states, _ = by_hand.run("fedl2g", server_lr=2.0, warmup=1, quiz=0.3, clip=clip)
    change = states[1].server["guide"] - states[0].server["guide"]
    np.testing.assert_allclose(np.linalg.norm(change), 2 * clip, rtol=1e-3)


def drawn(i, t, stream, rows):
    """One batch of these positions of client i's examples."""
    key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[t], 0), i)
    order = local_training.shuffle(keys.fold(key, stream), 19, len(rows))
    x, y = by_hand.examples(i)
    at = rows[np.asarray(order)[: len(rows)][:4]]
    return x[at], y[at]


def guided(w, guide, x, y):
    """The gradient of the guided loss."""
    z = oracle.forward(w, x)[1]
    dz = oracle.by_logits(z, y) + 2 * (z - guide[y]) / z.size
    return oracle.backward(w, x, dz)


def meta(w, guide, study, test):
    moved = [
        a - by_hand.LR * g for a, g in zip(w, guided(w, guide, *study), strict=True)
    ]
    return oracle.cross_entropy(oracle.forward(moved, test[0])[1], test[1])


def slope(w, guide, study, test):
    found = np.zeros_like(guide)
    for k in np.ndindex(guide.shape):
        e = np.zeros_like(guide)
        e[k] = 1e-5
        ends = [meta(w, guide + s * e, study, test) for s in (1, -1)]
        found[k] = (ends[0] - ends[1]) / 2e-5
    return found


def test_two_rounds_by_hand():
    """The first only learns the guidance."""
    lr = 50.0
    states, _ = by_hand.run("fedl2g", server_lr=lr, warmup=1, quiz=0.3, clip=1e6)
    models = [oracle.variables(by_hand.row(states[0], 0))] * 5
    guide = np.asarray(states[0].server["guide"], float)
    for t in range(2):
        total, count = np.zeros((4, 4)), np.zeros(4)
        for i in by_hand.LEARN[t]:
            n = len(by_hand.examples(i)[1])
            held = min(max(round(0.3 * n), 1), n - 1)
            if t == 1:
                step = lambda v, x, y, g=guide: guided(v, g, x, y)
                key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[t], 0), i)
                for x, y in by_hand.shuffled(key, i, 2, n - held):
                    g = step(models[i], x, y)
                    models[i] = [a - 0.1 * b for a, b in zip(models[i], g, strict=True)]
            if held == 0:
                continue
            study = drawn(i, t, Draw.STUDY, np.arange(n - held))
            test = drawn(i, t, Draw.QUIZ, np.arange(n - held, n))
            has = np.isin(np.arange(4), study[1])
            total += slope(models[i], guide, study, test) * has[:, None]
            count += has
        guide = guide - lr * total / np.maximum(count, 1)[:, None]
        np.testing.assert_allclose(states[t + 1].server["guide"], guide, atol=2e-3)
        for i in (0, 1, 2, 4):
            oracle.close(by_hand.row(states[t + 1], i), models[i])
