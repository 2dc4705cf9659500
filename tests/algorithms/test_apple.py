"""APPLE: its schedule and two rounds by hand."""

import by_hand
import numpy as np
import oracle
import toy

from fedjax_pfl.algorithms.apple import schedule
from fedjax_pfl.types import State


def test_the_penalty_ends():
    for shape in ("cosine", "exponential"):
        values = [float(schedule(np.float32(t), 4.0, shape)) for t in (0, 2, 4, 9)]
        middle = 0.5 if shape == "cosine" else 1e-3**0.5
        np.testing.assert_allclose(values, [1, middle, 0, 0], atol=1e-6)


def test_two_rounds_by_hand():
    mu, lr = 0.3, 0.05
    given = {"mu": mu, "coef_lr": lr, "last": 1.0, "scheduler": "cosine"}
    states, _ = by_hand.run("apple", coef_momentum=0.6, **given)
    get = lambda s, i: oracle.variables(toy.rows(s.server["core"], i))
    table = [get(states[0], i) for i in range(5)]
    p0 = toy.SIZES / toy.SIZES.sum()
    p = np.stack([p0] * 5)
    for t in range(2):
        weight = mu * (np.cos(np.pi * t / 3) + 1) / 2
        found = {}
        for i in by_hand.LEARN[t]:
            cores, pace = list(table), 0.0
            for x, y in by_hand.batches(i, t):
                w = [
                    sum(q * v[k] for q, v in zip(p[i], cores, strict=True))
                    for k in range(4)
                ]
                g = oracle.gradient(w, x, y)
                # Coefficients by the models as received, but the own one.
                slope = [
                    sum(np.sum(a * b) for a, b in zip(g, v, strict=True)) for v in cores
                ]
                cores[i] = [
                    a - by_hand.LR * p[i, i] * b
                    for a, b in zip(cores[i], g, strict=True)
                ]
                pace = 0.6 * pace + np.array(slope) + weight * (p[i] - p0)
                p[i] = p[i] - lr * pace
            found[i] = cores[i]
        for i, w in found.items():
            table[i] = w
        np.testing.assert_allclose(states[t + 1].clients["p"], p, atol=2e-5)
        for i in range(5):
            for a, b in zip(get(states[t + 1], i), table[i], strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5)


def test_core_models_begin_separately():
    at = lambda start: by_hand.run("apple", rounds=[], start=start)[0][0].server["core"]
    kernels = [at(x)["head"]["kernel"] for x in ("separate", "common")]
    assert [len(np.unique(x[:, 0, 0])) for x in kernels] == [5, 1]


def test_with_the_own_model_alone_it_is_local():
    given = {"mu": 0.3, "coef_lr": 0.0, "last": 1.0, "scheduler": "cosine"}
    given["start"] = "common"
    start = by_hand.run("apple", rounds=[], **given)[0][0]
    own = State(start.server, start.clients | {"p": np.eye(5, dtype=np.float32)})
    states, _ = by_hand.run("apple", begin=own, **given)
    local, _ = by_hand.run("local")
    for a, b in zip(states, local, strict=True):
        core = {k: a.server["core"][k] for k in ("body", "head")}
        toy.assert_close(core, {k: b.clients[k] for k in core}, 1e-5)
