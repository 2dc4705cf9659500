"""FedDyn: its stationary point and two rounds by hand."""

import by_hand
import numpy as np
import oracle


def test_two_rounds_by_hand():
    alpha = 0.3
    states, _ = by_hand.run("feddyn", alpha=alpha)
    w = oracle.variables(states[0].server["w"])
    h, g = [0 * x for x in w], [[0 * x for x in w] for _ in range(5)]
    for t in range(2):
        models = []
        for i in by_hand.LEARN[t]:

            def slope(v, x, y, w=w, mine=g[i]):
                terms = zip(oracle.gradient(v, x, y), mine, v, w, strict=True)
                return [d - m + alpha * (a - b) for d, m, a, b in terms]

            v = by_hand.descend(w, i, t, slope)
            g[i] = [m - alpha * (a - b) for m, a, b in zip(g[i], v, w, strict=True)]
            models.append(v)
        moved = [sum(v[k] - w[k] for v in models) / 5 for k in range(4)]
        h = [a - alpha * b for a, b in zip(h, moved, strict=True)]
        mean = oracle.mean(models, [1] * len(models))
        w = [a - b / alpha for a, b in zip(mean, h, strict=True)]
        oracle.close(states[t + 1].server["w"], w)
        oracle.close(states[t + 1].server["h"], h)
        for i in range(5):
            oracle.close(by_hand.row(states[t + 1], i, "g"), g[i])


def test_h_is_the_mean_of_the_clients_gradients():
    """h^t = (1/N) sum_k g_k^t for any participation (the paper's proof)."""
    states, _ = by_hand.run("feddyn", alpha=0.1)
    for state in states[1:]:
        mean = [np.mean(x, axis=0) for x in rows(state.clients["g"])]
        for a, b in zip(mean, rows(state.server["h"]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def rows(tree):
    layer = tree["body"]["layers"]["0"]
    return [layer["kernel"], layer["bias"], *tree["head"].values()]
