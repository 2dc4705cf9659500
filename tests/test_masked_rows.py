"""Networks that divide by something of a row, in batches that are not full."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx

from fedjax_pfl import local_training, models
from fedjax_pfl.models import layers, nets
from fedjax_pfl.types import Data, Examples


def standardised(x):
    """Standardises each image, as a PyTorch transform would."""
    return (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)


def unit_length(x):
    return x / jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))


def largest_is_one(x):
    return x / jnp.max(jnp.abs(x), axis=1, keepdims=True)


def shares(x):
    """Shares of a histogram, on a logarithmic scale."""
    x = x * x
    return jnp.log(x / x.sum(1, keepdims=True))


DIVIDING = {f.__name__: f for f in (standardised, unit_length, largest_is_one, shares)}


class Body(nnx.Module):
    def __init__(self, divide, rngs):
        self.divide, self.inner = divide, layers.linear(*toy.SHAPE, 8, rngs)

    def __call__(self, x):
        return unit_length(jax.nn.softplus(self.inner(self.divide(x))))


def network(divide):
    def make(input_shape, num_classes, rngs):
        return nets.Net(Body(divide, rngs), layers.linear(8, num_classes, rngs))

    return models.model(make, toy.SHAPE, toy.C)


@pytest.mark.slow
def test_zeros_would_be_missed():
    """The gradient at a row of zeros is NaN, for each of these networks."""
    for divide in DIVIDING.values():
        model = network(divide)
        slope = jax.grad(lambda v, f: jnp.sum(f(v, jnp.zeros((1, 6)))[0]))(
            model.init(jax.random.key(0)), model.features
        )
        assert not np.isfinite(slope["body"]["inner"]["kernel"]).all()


@pytest.mark.parametrize(
    "divide", [x if x == "standardised" else toy.slow(x) for x in DIVIDING]
)
@pytest.mark.parametrize("method", ["fedavg", toy.slow("fedmd")])
def test_short_batches_train(method, divide):
    model = network(DIVIDING[divide])
    task = toy.task(models=(model,), public=toy.POOL)
    assert any(task.sizes % task.batch_size) and toy.PUBLIC % task.batch_size
    got = toy.train(method, task, 2)
    for leaf in jax.tree.leaves(got.state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert np.isfinite(leaf).all()
    assert np.isfinite(got.metrics.loss).all()
    assert np.isfinite(got.last["acc"]).all()


def test_masked_rows_hold_the_first_example_of_the_client():
    examples = Examples(jnp.arange(5.0)[:, None] + 1, jnp.arange(5))
    row, mask = jnp.arange(4), jnp.array([True, True, False, False])
    for dtype in (jnp.float32, jnp.int32, jnp.uint8):
        typed = examples._replace(x=examples.x.astype(dtype))
        own = Data(typed, jnp.array([3, 1, 99]), jnp.int32(2), lambda x: x)
        batch = local_training.take(own, row, mask)
        np.testing.assert_array_equal(batch.x[:, 0], [4, 2, 4, 4])
        np.testing.assert_array_equal(batch.y, [3, 1, 3, 3])
        assert batch.x.dtype == dtype
    # a client without examples reads the data set's first one, and takes no step
    empty = own._replace(index=jnp.array([99, 99]), size=jnp.int32(0))
    batch = local_training.take(empty, row, jnp.zeros(4, bool))
    np.testing.assert_array_equal(batch.x[:, 0], [1, 1, 1, 1])
