"""FedDBE: its first round and two rounds by hand."""

import by_hand
import numpy as np
import oracle
import pytest


def model(state):
    return oracle.variables(state.server["w"])


@pytest.mark.slow
def test_the_first_round_is_fedavgs():
    states, _ = by_hand.run("feddbe", kappa=2.0, momentum=0.7)
    wanted, _ = by_hand.run("fedavg")
    oracle.close(states[1].server["w"], oracle.variables(wanted[1].server))
    assert states[1].server["known"]
    np.testing.assert_array_equal(states[1].clients["z"], 0)


def test_two_rounds_by_hand():
    kappa, mu = 2.0, 0.7
    states, _ = by_hand.run("feddbe", kappa=kappa, momentum=mu)
    w, z, center = model(states[0]), np.zeros((5, 8)), None
    for t in range(2):
        models, means = [], []
        for i in by_hand.LEARN[t]:
            v, running = w, np.zeros(8)
            for x, y in by_hand.batches(i, t):
                h, _ = oracle.forward(v, x)
                running = (1 - mu) * running + mu * h.mean(axis=0)
                dz = oracle.by_logits((h + z[i]) @ v[2] + v[3], y)
                dh = 0
                if center is not None:
                    dh = kappa * mu * (running - center)[None] / 8 / len(y)
                slope = oracle.backward(v, x, dz, dh)
                slope[2] = (h + z[i]).T @ dz
                if center is not None:
                    z[i] -= by_hand.LR * (dz @ v[2].T).sum(axis=0)
                v = [a - by_hand.LR * g for a, g in zip(v, slope, strict=True)]
            models.append(v)
            means.append([running])
        w = oracle.mean(models, by_hand.sizes(t))
        if center is None:
            center = oracle.mean(means, by_hand.sizes(t))[0]
        oracle.close(states[t + 1].server["w"], w)
        for got, wanted in (("mean", center), ("z", z)):
            where = states[t + 1].server if got == "mean" else states[t + 1].clients
            np.testing.assert_allclose(where[got], wanted, atol=2e-5)
