"""MOON: its loss, its limit and two rounds by hand."""

import by_hand
import numpy as np
import oracle


def pull(a, b):
    """The cosine of rows a and b, and its gradient by a."""
    na, nb = (np.maximum(np.linalg.norm(x, axis=1), 1e-8)[:, None] for x in (a, b))
    cos = np.sum(a * b, axis=1)[:, None] / (na * nb)
    return cos, (b / nb - cos * a / na) / na


def test_without_the_contrast_it_is_fedavg():
    by_hand.same_server("moon", "fedavg", mu=0.0, tau=0.5)


def test_two_rounds_by_hand():
    mu, tau = 0.7, 0.5
    states, _ = by_hand.run("moon", mu=mu, tau=tau)
    w = oracle.variables(states[0].server)
    previous = [w] * 5
    for t in range(2):
        models = []
        for i in by_hand.LEARN[t]:

            def slope(v, x, y, w=w, old=previous[i]):
                h, z = oracle.forward(v, x)
                near, by_near = pull(h, oracle.forward(w, x)[0])
                away, by_away = pull(h, oracle.forward(old, x)[0])
                share = 1 / (1 + np.exp((near - away) / tau))
                dh = mu * share * (by_away - by_near) / tau / len(y)
                return oracle.backward(v, x, oracle.by_logits(z, y), dh)

            models.append(by_hand.descend(w, i, t, slope))
            previous[i] = models[-1]
        w = oracle.mean(models, by_hand.sizes(t))
        oracle.close(states[t + 1].server, w)
        for i in (0, 1, 4):
            oracle.close(by_hand.row(states[t + 1], i, "previous"), previous[i])
