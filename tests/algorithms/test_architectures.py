"""Methods whose clients may be of several architectures: grouping does not matter, and
mixed federations learn."""

import jax
import numpy as np
import pytest
import toy
from toy import N, assert_close, assert_same

METHODS = ("fedproto", "fd", "fml", "fedkd", "fedapen")
OF = np.array([0, 1, 0, 1, 0])


def by_id(metrics):
    """What is known of the clients, by id: places of several architectures are grouped
    and padded."""
    order = [np.argsort(ids)[:N] for ids in metrics.ids]
    take = lambda x: np.stack([row[i] for row, i in zip(x, order, strict=True)])
    return jax.tree.map(
        take, (metrics.loss, metrics.post, metrics.clients, metrics.traffic)
    )


@pytest.mark.slow  # the contract has a round of each
@pytest.mark.parametrize("method", METHODS)
def test_grouping_does_not_matter(method):
    one = toy.task()
    two = toy.task(models=one.models * 2, architecture=OF)
    got, expected = (toy.train(method, task, 2) for task in (two, one))
    assert_close(got.state.server, expected.state.server, 1e-5)
    assert_close(by_id(got.metrics), by_id(expected.metrics), 1e-5)
    assert_same(got.last, expected.last)


# one feature width and two; FedProto refuses two, see its own tests
MIXED = [
    *((method, "norm") for method in METHODS),
    *((method, "linear") for method in METHODS if method != "fedproto"),
]


@pytest.mark.slow  # eight rounds; the contract has two architectures
@pytest.mark.parametrize("method, other", MIXED)
def test_architectures_mix(method, other):
    task = toy.task(models=(toy.task().model, toy.task(other).model), architecture=OF)
    got = toy.train(method, task, 8)
    loss = got.metrics.loss.mean(axis=1)
    # from the second round on, when there is something to learn from the others
    assert loss[-1] < loss[1]
    assert got.metrics.finite.all() and np.mean(got.last["acc_present"]) > 0.75
