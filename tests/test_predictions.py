"""Predictions of a client for an example."""

import pytest
import toy
from toy import assert_close


# those with a predictor of their own
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcp", "pfedc", "fedrod", "fedproto"])
def test_a_prediction_does_not_depend_on_the_other_examples_of_its_batch(method):
    got = toy.train(method, toy.task("norm"), 0)
    assert_close(got.outputs(6)[:1], got.outputs(1))
