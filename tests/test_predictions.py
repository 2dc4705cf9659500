"""What a client predicts for an example."""

import pytest
import toy
from toy import assert_close


@pytest.mark.parametrize("method", ["fedcp", "pfedc", "fedrod", "fedproto"])  # those with a predictor of their own
def test_a_prediction_does_not_depend_on_the_other_examples_of_its_batch(method):
    got = toy.train(method, toy.task("norm"), 0)
    assert_close(got.outputs(6)[:1], got.outputs(1))
