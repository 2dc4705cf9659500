"""FedPAC: its weights in a limit and two rounds by hand."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import oracle

from fedjax_pfl import keys
from fedjax_pfl.algorithms.fedpac import combination


def test_equal_statistics_are_weighted_by_their_inverse_variances():
    v, here = jnp.array([1.0, 2.0, 4.0, 0.1]), jnp.array([True, True, True, False])
    alpha = combination(v, jnp.ones((4, 6)), here)
    np.testing.assert_allclose(alpha[0], np.array([4, 2, 1, 0]) / 7, atol=1e-3)


def test_small_weights_are_dropped():
    v = jnp.array([1.0, 1.0, 2000.0])
    alpha = combination(v, jnp.ones((3, 6)), jnp.ones(3, bool))
    np.testing.assert_allclose(alpha[0], [0.5, 0.5, 0], atol=1e-4)
    assert alpha[0, 2] == 0


def test_a_client_unlike_all_others_keeps_its_head():
    h = jnp.array([[1e3, 0.0], [0.0, 1.0], [0.0, 1.1]])
    alpha = combination(jnp.full(3, 0.1), h, jnp.ones(3, bool))
    np.testing.assert_allclose(alpha[0], [1, 0, 0], atol=1e-4)


def statistics(w, i):
    """v_i, h_i and the class means."""
    x, y = by_hand.examples(i)
    h, n = oracle.forward(w, x)[0], len(y)
    means = np.stack(
        [h[y == c].mean(axis=0) if c in y else np.zeros(8) for c in range(4)]
    )
    p = np.bincount(y, minlength=4) / n
    v = (np.mean(np.sum(h**2, axis=1)) - np.sum((p[:, None] * means) ** 2)) / n
    return v, p[:, None] * means, means


def weights(v, h):
    """The quadratic programs by many small steps of exponentiated gradients."""
    found = []
    for mine in h:
        d = np.stack([(mine - other).ravel() for other in h])
        gram, a = d @ d.T + np.diag(v), np.full(len(v), 1 / len(v))
        for _ in range(20_000):
            a = a * np.exp(-0.5 / np.abs(gram).max() * gram @ a)
            a /= a.sum()
        a = np.where(a > 1e-3, a, 0)
        found.append(a / a.sum())
    return np.stack(found)


def head_batches(i, t):
    """Those of the head's phase, one epoch."""
    key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[t], 0), i)
    return by_hand.shuffled(keys.fold(key, keys.Client.HEAD_PHASE), i, 1)


def test_two_rounds_by_hand():
    lam, rate = 0.5, 0.1 * 3
    states, _ = by_hand.run("fedpac", lam=lam, head_lr=3.0)
    start = oracle.variables(
        {**states[0].server["w"], "head": by_hand.row(states[0], 0)["head"]}
    )
    body, heads = start[:2], [start[2:]] * 5
    proto, known = np.zeros((4, 8)), np.zeros(4, bool)
    for t in range(2):
        learn, models, means, v, h = by_hand.LEARN[t], {}, [], [], []
        for i in learn:
            w = [*body, *heads[i]]
            stats = statistics(w, i)
            v, h = [*v, stats[0]], [*h, stats[1]]
            for x, y in head_batches(i, t):
                g = oracle.gradient(w, x, y)
                w = [*w[:2], w[2] - rate * g[2], w[3] - rate * g[3]]
            for x, y in by_hand.batches(i, t):
                f, z = oracle.forward(w, x)
                dh = 2 * lam * (f - proto[y]) * known[y][:, None] / 8 / len(y)
                g = oracle.backward(w, x, oracle.by_logits(z, y), dh)
                w = [w[0] - 0.1 * g[0], w[1] - 0.1 * g[1], *w[2:]]
            models[i] = w
            means.append(statistics(w, i)[2])
        count = np.asarray(by_hand.F.class_counts, float)[learn]
        body = oracle.mean([models[i][:2] for i in learn], by_hand.sizes(t))
        seen = count.sum(axis=0) > 0
        new = np.einsum("sc,sck->ck", count, means)
        proto = np.where(
            seen[:, None], new / np.maximum(count.sum(axis=0), 1)[:, None], proto
        )
        known |= seen
        alpha = weights(np.array(v), np.array(h))
        for a, i in zip(alpha, learn, strict=True):
            heads[i] = oracle.mean([models[j][2:] for j in learn], a)
        after = states[t + 1]
        np.testing.assert_allclose(after.server["proto"].T, proto, atol=2e-5)
        for i in range(5):
            got = {**after.server["w"], "head": by_hand.row(after, i)["head"]}
            for a, b in zip(oracle.variables(got), [*body, *heads[i]], strict=True):
                np.testing.assert_allclose(a, b, atol=3e-3)
