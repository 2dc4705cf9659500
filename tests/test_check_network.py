"""`testing.check_network` on networks that are right, and on one that breaks each rule."""

import jax
import jax.numpy as jnp
import pytest
import toy
from flax import nnx

from fedjax_pfl import testing
from fedjax_pfl.models import layers, nets
from fedjax_pfl.testing import own_network


class Broken(nnx.Module):
    """A linear layer, after a function of (x, mask, train) that breaks a rule."""

    def __init__(self, function, rngs):
        self.function = function
        self.inner = layers.linear(*toy.SHAPE, 8, rngs)

    def __call__(self, x, mask=None, train=False):
        return self.inner(self.function(x, mask, train))


def of(function):
    return lambda shape, classes, rngs: nets.Net(
        Broken(function, rngs), layers.linear(8, classes, rngs)
    )


BROKEN = {
    "zeros": lambda x, mask, train: x / jnp.sum(x * x, axis=1, keepdims=True),
    "batch_of_one": lambda x, mask, train: x / jnp.where(len(x) > 1, 1.0, 0.0),
    "masked_rows": lambda x, mask, train: x - x.mean(axis=0, keepdims=True),
    "bfloat16": lambda x, mask, train: x / 0 if x.dtype == jnp.bfloat16 else x,
}


@pytest.mark.parametrize("net", [toy.tiny_mlp, toy.norm_net, toy.drop_net, "linear"])
def test_right_networks_pass(net):
    testing.check_network(net, toy.SHAPE, toy.C)


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule):
    with pytest.raises(testing.ContractViolation, match=f"^{rule}: "):
        testing.check_network(of(BROKEN[rule]), toy.SHAPE, toy.C)


def test_statistics_and_draws_that_change_are_named():
    """A network of pure functions, whose statistics count its predictions."""
    model = toy.task("linear").model
    made = own_network.Given(
        model,
        model.init(jax.random.key(0)),
        own_network.Batch(*(4 * [jnp.ones(8, int)])),
        None,
    )
    x = jax.random.normal(jax.random.key(0), (8, *toy.SHAPE))
    batch = own_network.Batch(
        x, jnp.arange(8) % toy.C, jnp.ones(8, bool), jnp.arange(8)
    )
    variables = made.variables | {"stats": {"count": jnp.zeros(())}}

    def apply(variables, x, mask=None, train=False, key=None):
        count = variables["stats"]["count"] + 1
        return model.apply(variables | {"stats": {}}, x)[0], {"count": count}

    given = made._replace(
        model=model._replace(apply=apply), variables=variables, batch=batch
    )
    with pytest.raises(testing.ContractViolation):
        own_network.statistics(given)
