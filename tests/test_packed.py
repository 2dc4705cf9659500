"""Blocks of convolution and pooling for accelerators against XLA's, run on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax import lax

from fedjax_pfl import models
from fedjax_pfl.errors import InputError
from fedjax_pfl.kernels import packed, pooled
from fedjax_pfl.kernels.convolution import form
from fedjax_pfl.kernels.platform import on
from fedjax_pfl.models import layers


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def plain(x, kernel, bias, padding):
    pads, numbers = [(padding, padding)] * 2, ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, kernel, (1, 1), pads, dimension_numbers=numbers)
    window = (1, 2, 2, 1)
    y = lax.reduce_window(
        y + bias[None, None, None], -jnp.inf, lax.max, window, window, "VALID"
    )
    return jax.nn.relu(y)


def energy(block, padding):
    return lambda *args: jnp.sum(jnp.tanh(block(*args, padding)) ** 2)


def gradient(block, padding):
    return jax.vmap(jax.grad(energy(block, padding), (0, 1, 2)))


def curvature(block, padding):
    """The Hessian of a kernel times the kernel, forward over reverse."""

    def one(x, kernel, bias):
        slope = jax.grad(lambda kernel: energy(block, padding)(x, kernel, bias))
        return jax.jvp(slope, (kernel,), (kernel,))[1]

    return jax.vmap(one)


def gradient_of_gradient(block, padding):
    def one(x, kernel, bias):
        slope = jax.grad(lambda kernel: energy(block, padding)(x, kernel, bias))
        return jax.grad(lambda kernel: jnp.sum(slope(kernel) ** 2))(kernel)

    return jax.vmap(one)


def shared_kernel(block, padding):
    return lambda x, kernel, bias: jax.vmap(
        lambda x: block(x, kernel[0], bias[0], padding)
    )(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "of",
    [gradient, *map(toy.slow, (curvature, gradient_of_gradient, shared_kernel))],
)
@pytest.mark.parametrize(
    "clients, channels, out, padding",
    [(4, 3, 32, 0), toy.slow(6, 1, 6, 2), toy.slow(5, 8, 16, 0)],
)
@pytest.mark.parametrize("form", [packed, pooled])
def test_block_equals_xla(form, of, clients, channels, out, padding):
    args = (
        normal(0, clients, 2, 8, 7, channels),
        normal(1, clients, 3, 3, channels, out),
        normal(2, clients, out),
    )
    found = jax.jit(of(form.conv_relu_pool, padding))(*args)
    expected = jax.jit(of(plain, padding))(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize(
    "clients, channels, out, expected",
    [(20, 3, 32, 4), (20, 32, 64, 4), (20, 1, 6, 20), (7, 3, 32, 1), (8, 64, 64, 2)],
)
def test_clients_fill_the_lanes(clients, channels, out, expected):
    assert packed.side_by_side(clients, channels, out) == expected


@pytest.mark.parametrize(
    "name", ["lenet", *map(toy.slow, ("cnn", "lenet_bn", "cnn_dropout"))]
)
def test_platforms_give_the_same_network(name):
    def gradients(platform):
        with on(platform):
            model = models.model(name, (28, 28, 1), 10)
            weights = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 4))

            def loss(weights, x):
                y = model.apply(weights, x, train=True, key=jax.random.key(1))[0]
                return jnp.sum(jnp.sin(y))

            slope = jax.grad(loss, allow_int=True)
            return jax.tree.leaves(jax.jit(jax.vmap(slope))(weights, images))

    images = normal(1, 4, 3, 28, 28, 1)
    expected = gradients("cpu")
    for platform in ("gpu", "tpu"):
        for a, b in zip(gradients(platform), expected, strict=True):
            if jnp.issubdtype(a.dtype, jnp.floating):
                atol = 1e-4 * (np.abs(b).max() + 1)
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=atol)


def test_platform_chooses_the_form():
    assert form("auto") == "winograd"
    with on("gpu"):
        assert form("auto") == "pooled"
    with on("tpu"):
        assert form("auto") == "packed"
        assert form("matmul") == "matmul"
    with pytest.raises(InputError, match="platform"), on("npu"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("pool", [layers.max_pool, layers.max_pool_3])
def test_platforms_pool_alike(pool):
    def both(platform):
        with on(platform):
            y, pullback = jax.vjp(jax.vmap(pool), x)
            return y, pullback(jnp.cos(y))

    x = normal(3, 4, 2, 7, 6, 5)
    for a, b in zip(*map(jax.tree.leaves, map(both, ("tpu", "cpu"))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
