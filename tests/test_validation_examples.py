"""Validation examples choose: no method trains on them."""

import numpy as np
import pytest
import toy

from fedjax_pfl.types import Subset

FAST = ("ditto",)
F = toy.federation()
METHODS = [name if name in FAST else toy.slow(name) for name in toy.METHODS]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_trained_on_validation_examples(method):
    """The test examples stand for them, and no client has any."""
    found = [
        Subset(F.test.index, size) for size in (F.test.size, np.zeros_like(F.test.size))
    ]
    runs = [
        toy.train(method, toy.method_task(method), 2, federation_=F._replace(val=val))
        for val in found
    ]
    toy.assert_same(runs[0].state, runs[1].state)
    toy.assert_same(runs[0].last, runs[1].last)
