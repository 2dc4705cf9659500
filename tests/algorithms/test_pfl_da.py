"""PFL-DA: two rounds by hand."""

import by_hand
import jax
import numpy as np
import oracle
import toy

from fedjax_pfl import keys


def test_two_rounds_by_hand():
    lam = 0.4
    states, _ = by_hand.run("pfl_da", lam=lam)
    models = [oracle.variables(by_hand.row(states[0], 0))] * 5
    head = models[0][2:]
    for t in range(2):
        sent = []
        for i in by_hand.LEARN[t]:
            w = models[i]
            key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[t], 0), i)
            for x, y in by_hand.shuffled(keys.fold(key, keys.Client.HEAD_PHASE), i, 2):
                g, gap = (
                    oracle.gradient(w, x, y),
                    [a - b for a, b in zip(w[2:], head, strict=True)],
                )
                moved = [
                    a - by_hand.LR * (b + 2 * lam * d)
                    for a, b, d in zip(w[2:], g[2:], gap, strict=True)
                ]
                w = [*w[:2], *moved]
            under = by_hand.descend([*w[:2], *head], i, t)
            models[i] = [*under[:2], *w[2:]]
            sent.append(under[2:])
        head = oracle.mean(sent, by_hand.sizes(t))
        for name, wanted in zip(("kernel", "bias"), head, strict=True):
            got = states[t + 1].server["head"][name]
            np.testing.assert_allclose(got, wanted, atol=2e-5)
        for i in (0, 1, 2, 4):
            oracle.close(by_hand.row(states[t + 1], i), models[i])


def test_pfllibs_penalty_has_no_gradient():
    ours, _ = by_hand.run("pfl_da", lam=0.4, variant="pfllib")
    without, _ = by_hand.run("pfl_da", lam=0.0)
    toy.assert_same(ours[2], without[2])


def test_the_first_rounds_head_is_fedavgs():
    """All heads are equal then, and the head under which the body is trained too."""
    ours, _ = by_hand.run("pfl_da", rounds=[[0, 1, 2]], lam=0.4)
    theirs, _ = by_hand.run("fedavg", rounds=[[0, 1, 2]])
    toy.assert_close(ours[1].server["head"], theirs[1].server["head"], 1e-5)
