"""Grad-CAM of networks whose maps are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import models
from fedjax_pfl.attention import grad_cam
from fedjax_pfl.errors import InputError

X = jax.random.normal(jax.random.key(0), (3, 8, 8, 2))
KERNEL = jax.random.normal(jax.random.key(1), (3, 3, 2, 4))
CLASSES = jnp.array([2, 0, 2])


def channels(x):
    """Feature maps [B, 8, 8, 4], with bias."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, KERNEL, (1, 1), "SAME", dimension_numbers=layout
    ) + jnp.arange(4.0).reshape(1, 1, 1, 4)


def of_one_channel(x, maps=channels):
    """Logits of class c: c times the sum of one channel's map."""
    total = jnp.sum(maps(x)[..., 1], axis=(1, 2))
    return total[:, None] * jnp.arange(3.0)[None]


@pytest.mark.parametrize("change", [lambda f: f, jax.jit])
def test_a_linear_logit_of_one_channel_gives_its_map(change):
    found = grad_cam(change(of_one_channel), X, CLASSES)
    wanted = CLASSES[:, None, None] * jax.nn.relu(channels(X)[..., 1])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_maps_are_those_before_pooling_and_of_the_last_convolution():
    """ReLU belongs to the maps; another convolution that the logits do not use does
    not."""

    def logits(x):
        maps = jax.nn.relu(channels(x))
        pooled = maps.reshape(-1, 4, 2, 4, 2, 4).mean((2, 4))
        channels(-x)
        return of_one_channel(x, lambda x: 4 * pooled)

    found = jax.jit(lambda x: grad_cam(logits, x, CLASSES))(X)
    wanted = CLASSES[:, None, None] * jax.nn.relu(channels(X)[..., 1])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["lenet", toy.slow("resnet18")])
def test_networks_have_maps(name):
    model = models.model(name, (32, 32, 3), 3, conv="xla")
    x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0))

    def maps(variables, x):
        return grad_cam(lambda x: model.apply(variables, x)[0], x, jnp.arange(2))

    side = {"lenet": 12, "resnet18": 4}[name]
    assert jax.eval_shape(maps, variables, x).shape == (2, side, side)


def test_a_network_without_a_convolution_is_refused():
    with pytest.raises(InputError, match="convolution"):
        grad_cam(lambda x: x.reshape(3, -1), X, CLASSES)
