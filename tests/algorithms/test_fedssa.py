"""FedSSA: its limit and two rounds by hand."""

import by_hand
import numpy as np
import oracle
import pytest
import toy


@pytest.mark.slow
def test_with_nothing_but_its_own_head_it_is_local():
    (*_, got), _ = by_hand.run("fedssa", mu=1.0, stable=100_000)
    (*_, wanted), _ = by_hand.run("local")
    toy.assert_close(got.clients, wanted.clients, 1e-5)


@pytest.mark.parametrize("variant", ["convex", toy.slow("code")])
def test_two_rounds_by_hand(variant):
    mu = 0.6
    states, _ = by_hand.run("fedssa", mu=mu, stable=3, variant=variant)
    models = [oracle.variables(by_hand.row(states[0], i)) for i in range(toy.N)]
    head = [np.asarray(states[0].server["head"][k], float) for k in ("kernel", "bias")]
    for t in range(2):
        share = mu * np.cos(np.pi * t / 6)
        rest = 1 - share if variant == "convex" else 1
        for i in by_hand.LEARN[t]:
            has = np.bincount(by_hand.examples(i)[1], minlength=4) > 0
            fused = [
                np.where(has, share * mine + rest * other, mine)
                for mine, other in zip(models[i][2:], head, strict=True)
            ]
            models[i] = by_hand.descend([*models[i][:2], *fused], i, t)
        for c in range(4):
            holders = [i for i in by_hand.LEARN[t] if c in by_hand.examples(i)[1]]
            for k in range(2):
                mean = np.mean([models[i][2 + k][..., c] for i in holders], axis=0)
                head[k][..., c] = mean
        after = states[t + 1]
        for name, wanted in zip(("kernel", "bias"), head, strict=True):
            np.testing.assert_allclose(after.server["head"][name], wanted, atol=2e-5)
        for i in range(toy.N):
            oracle.close(by_hand.row(after, i), models[i])
