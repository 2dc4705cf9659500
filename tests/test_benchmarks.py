"""What the benchmark compares with is the same network."""

import jax
import pytest

from benchmarks import pytorch
from fedjax_pfl.models import model, num_parameters


@pytest.mark.parametrize("name", [*pytorch.NETS, "resnet18"])
def test_pytorchs_networks_have_our_parameters(name):
    pytest.importorskip("torch")
    shape = (28, 28, 1) if name in ("mlp28", "lenet") else (32, 32, 3)
    variables = jax.eval_shape(model(name.removesuffix("28"), shape, 10).init, jax.random.key(0))
    net = pytorch._network(name, shape, 10)
    assert sum(x.numel() for x in net.parameters()) == num_parameters(variables)
