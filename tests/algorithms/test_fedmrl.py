"""FedMRL: two rounds by hand, and the width of its shared model."""

import by_hand
import jax
import numpy as np
import oracle
import pytest
import toy

from fedjax_pfl.algorithms import fedmrl
from fedjax_pfl.errors import InputError


def step(own, small, proj, x, y):
    """One step of all three."""
    h, _ = oracle.forward(own, x)
    h_small, _ = oracle.forward(small, x)
    both = np.concatenate([h_small, h], axis=1)
    r = both @ proj[1] + proj[0][None]
    dz = oracle.by_logits(r @ own[2] + own[3], y)
    dz_small = oracle.by_logits(r[:, :5] @ small[2] + small[3], y)
    dr = dz @ own[2].T
    dr[:, :5] += dz_small @ small[2].T
    d_both = dr @ proj[1].T
    nothing = np.zeros_like(dz)
    g = oracle.backward(own, x, nothing, d_both[:, 5:])
    g_small = oracle.backward(small, x, nothing, d_both[:, :5])
    g[2:] = [r.T @ dz, dz.sum(axis=0)]
    g_small[2:] = [r[:, :5].T @ dz_small, dz_small.sum(axis=0)]
    g_proj = [dr.sum(axis=0), both.T @ dr]
    pairs = ((own, g), (small, g_small), (proj, g_proj))
    return [[a - by_hand.LR * b for a, b in zip(w, s, strict=True)] for w, s in pairs]


def test_two_rounds_by_hand():
    states, _ = by_hand.run("fedmrl")
    small = oracle.variables(states[0].server)
    own = [oracle.variables(by_hand.row(states[0], 0, "w"))] * 5
    leaves = lambda s, i: jax.tree.leaves(by_hand.row(s, i, "projector"))
    proj = [[np.asarray(x, float) for x in leaves(states[0], 0)]] * 5
    for t in range(2):
        sent = []
        for i in by_hand.LEARN[t]:
            w = small
            for x, y in by_hand.batches(i, t):
                own[i], w, proj[i] = step(own[i], w, proj[i], x, y)
            sent.append(w)
        small = oracle.mean(sent, by_hand.sizes(t))
        oracle.close(states[t + 1].server, small)
        for i in range(5):
            oracle.close(by_hand.row(states[t + 1], i, "w"), own[i])
            for a, b in zip(leaves(states[t + 1], i), proj[i], strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_shared_model_that_is_too_wide():
    task = toy.task()
    task = task._replace(shared=task.model, models=(task.shared,))
    with pytest.raises(InputError, match="narrower"):
        fedmrl(task)
