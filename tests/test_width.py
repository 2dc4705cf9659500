"""The static choice of the clients per vmapped batch."""

import pytest
import toy

from benchmarks import setting
from fedjax_pfl.engine.width import automatic_width
from fedjax_pfl.kernels.platform import on

CASES = [
    ("cpu", "mlp", 4),
    ("cpu", "cnn", 1),
    ("gpu", "cnn", 20),
    ("tpu", "cnn", 4),
    ("tpu", "lenet", 20),
    toy.slow("tpu", "resnet18", 1),
    ("tpu", "mlp28", 20),
]


@pytest.mark.parametrize("platform, model, width", CASES)
def test_width_by_platform_and_network(platform, model, width):
    with on(platform):
        task, _ = setting.build(model, clients=20)
        assert automatic_width(task, 20) == width
        assert automatic_width(task, 6, devices=2) <= 3
