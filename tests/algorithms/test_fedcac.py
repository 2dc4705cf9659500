"""FedCAC: its limit and two rounds by hand."""

import by_hand
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from fedjax_pfl.algorithms.fedcac import largest


def test_without_critical_parameters_it_is_fedavg():
    by_hand.same_server("fedcac", "fedavg", tau=0.0, beta=4.0)


def masks(old, new, tau):
    found = []
    for a, b in zip(old, new, strict=True):
        value = np.abs((b - a) * b)
        count = int(tau * value.size)
        least = np.sort(value.ravel())[::-1][count - 1]
        found.append((value >= least) & (value > 0))
    return found


def shared(masks_):
    """O of all pairs."""
    flat = [np.concatenate([m.ravel() for m in mask]).astype(float) for mask in masks_]
    return np.array(
        [[1 - np.abs(a - b).sum() / (2 * a.sum()) for b in flat] for a in flat]
    )


def test_two_rounds_by_hand():
    tau, beta = 0.5, 4.0
    states, reports = by_hand.run("fedcac", tau=tau, beta=beta)
    w = oracle.variables(states[0].server)
    critical, mask = [w] * 5, [[np.zeros(x.shape, bool) for x in w]] * 5
    for t in range(2):
        learn, models, new = by_hand.LEARN[t], [], []
        for i in learn:
            start = [
                np.where(m, a, b)
                for m, a, b in zip(mask[i], critical[i], w, strict=True)
            ]
            models.append(by_hand.descend(start, i, t))
            new.append(masks(start, models[-1], tau))
        o, pairs = shared(new), ~np.eye(len(learn), dtype=bool)
        mean, most = o[pairs].mean(), o[pairs].max()
        near = (o >= mean + (t + 1) / beta * (most - mean)) | ~pairs
        assert t > 0 or not near.all()
        for i, m, row in zip(learn, new, near, strict=True):
            critical[i], mask[i] = oracle.mean(models, row.astype(float)), m
        assert list(reports[t].clients["collaborators"][learn]) == list(
            near.sum(axis=1)
        )
        w = oracle.mean(models, by_hand.sizes(t))
        oracle.close(states[t + 1].server, w)
        for i in range(5):
            oracle.close(by_hand.row(states[t + 1], i, "critical"), critical[i])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_largest_is_that_of_a_sort(size):
    values = np.abs(np.random.default_rng(size).normal(size=size)).astype(np.float32)
    values[::3] = 0
    for k in {1, size // 2 + 1, size}:
        assert largest(jnp.asarray(values), k) == np.sort(values)[::-1][k - 1]
