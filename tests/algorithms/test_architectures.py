"""Methods whose clients may be of several architectures: grouping does not matter, and
mixed federations learn."""

import numpy as np
import pytest
import toy

METHODS = ("fedproto", "fd", "fml", "fedkd", "fedapen")
OF = np.array([0, 1, 0, 1, 0])


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
