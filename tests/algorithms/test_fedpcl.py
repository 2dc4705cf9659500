"""FedPCL: two rounds by hand, the first of which trains nothing."""

import by_hand
import numpy as np
import oracle
import toy


def full(w):
    """The body, with a head that nothing uses."""
    layer = w["body"]["layers"]["0"]
    body = [np.asarray(layer[k], float) for k in ("kernel", "bias")]
    return [*body, np.zeros((8, 4)), np.zeros(4)]


def unit(h):
    return h / np.linalg.norm(h, axis=1, keepdims=True)


def means(w, i):
    x, y = by_hand.examples(i)
    u = unit(oracle.forward(w, x)[0])
    return np.stack(
        [u[y == c].mean(axis=0) if c in y else np.zeros(8) for c in range(4)]
    )


def test_two_rounds_by_hand():
    tau = 0.5
    states, _ = by_hand.run("fedpcl", tau=tau, clip=1e6)
    models = [full(by_hand.row(states[0], 0, "w"))] * 5
    np.testing.assert_array_equal(
        states[1].clients["w"]["body"]["layers"]["0"]["bias"],
        states[0].clients["w"]["body"]["layers"]["0"]["bias"],
    )
    has = np.asarray(by_hand.F.class_counts) > 0
    table = np.stack(
        [means(models[i], i) if i != 3 else np.zeros((4, 8)) for i in range(5)]
    )
    np.testing.assert_allclose(
        states[1].server["proto"], table.transpose(0, 2, 1), atol=1e-5
    )
    seen = has.any(axis=0)
    center = table.sum(axis=0) / np.maximum(has.sum(axis=0), 1)[:, None]
    sets = np.where(has[:, :, None], table, center[None])
    for i in by_hand.LEARN[1]:

        def slope(v, x, y):
            h, _ = oracle.forward(v, x)
            u, du = unit(h), 0
            for p, weight in [(center, 1), *((p, 0.2) for p in sets)]:
                z = np.where(seen, u @ p.T / tau, -1e9)
                du = du + weight * oracle.by_logits(z, y) @ p / tau
            norm = np.linalg.norm(h, axis=1, keepdims=True)
            dh = (du - u * np.sum(u * du, axis=1, keepdims=True)) / norm
            return oracle.backward(v, x, np.zeros((len(y), 4)), dh)

        models[i] = by_hand.descend(models[i], i, 1, slope)
        got = full(by_hand.row(states[2], i, "w"))
        for a, b in zip(got, models[i], strict=True):
            np.testing.assert_allclose(a, b, atol=5e-5)
        found = by_hand.row(states[2], i, "proto").T
        np.testing.assert_allclose(found, means(models[i], i), atol=5e-5)


def test_nothing_is_learned_at_an_infinite_temperature():
    states, _ = by_hand.run("fedpcl", tau=1e12, clip=1e6)
    toy.assert_close(states[2].clients["w"], states[0].clients["w"], 1e-6)
