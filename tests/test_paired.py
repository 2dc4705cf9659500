"""Pairs of pixels in the lanes of a TPU, against convolutions and batch norm of single
pixels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax import lax

from fedjax_pfl import models
from fedjax_pfl.kernels import paired
from fedjax_pfl.models import resnet

KEY = jax.random.key(0)


def plain(x, kernel, stride, padding):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def shifted(x):
    """With anything in the pixels outside the image."""
    wide = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)), constant_values=jnp.nan)
    return wide.reshape(*x.shape[:2], x.shape[2] // 2 + 1, -1)


def singles(x):
    row = x.reshape(*x.shape[:2], 2 * x.shape[2], -1)
    return row[:, :, 1:-1] if x.shape[2] % 2 else row


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2, 3])
@pytest.mark.parametrize("form", [paired.pairs, shifted])
def test_convolution_and_its_gradients_are_those_of_single_pixels(
    form, padding, stride
):
    rng, side = np.random.default_rng(0), 2 * padding + 1
    x = jnp.asarray(rng.normal(size=(2, 7, 8, 3)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(side, side, 3, 5)), jnp.float32)
    pads = [(padding, padding)] * 2

    def in_pairs(x, kernel):
        y = paired.conv(form(x), kernel, (stride, stride), pads)
        if stride == 2:
            return y
        assert paired.is_paired(y, 5) and paired.pixels(y) == 7 * 8
        assert y.shape[2] % 2 == (form(x).shape[2] + padding) % 2
        return singles(y)

    @functools.partial(jax.jit, static_argnums=0)
    def run(conv):
        y, pullback = jax.vjp(conv, x, kernel)
        return y, pullback(jnp.cos(y))

    expected = run(lambda x, kernel: plain(x, kernel, stride, padding))
    toy.assert_close(run(in_pairs), expected, 1e-4)


def test_second_derivatives_are_those_of_single_pixels():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 4, 8, 3)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(3, 3, 3, 5)), jnp.float32)

    def slope(conv):
        return jax.grad(lambda x, kernel: jnp.sum(jnp.sin(conv(x, kernel))), (0, 1))

    @functools.partial(jax.jit, static_argnums=0)
    def run(conv):
        norm = lambda *args: sum(jnp.sum(g**2) for g in slope(conv)(*args))
        return jax.grad(norm, (0, 1))(x, kernel)

    def in_pairs(x, kernel):
        return singles(paired.conv(paired.pairs(x), kernel, (1, 1), [(1, 1)] * 2))

    toy.assert_close(run(in_pairs), run(lambda x, k: plain(x, k, 1, 1)), 1e-3)


def narrow(input_shape, num_classes, rngs, **options):
    return resnet.resnet(input_shape, num_classes, rngs, widths=(4, 8), **options)


@pytest.mark.parametrize(
    "width, norm", [(8, "batch"), toy.slow(6, "batch"), toy.slow(8, "group")]
)
def test_residual_network_of_a_tpu_is_that_of_all_platforms(width, norm):
    """Logits, gradients and running statistics of three clients with a masked row."""

    def run(conv):
        net = functools.partial(narrow, norm=norm)
        model = models.model(net, (4, width, 3), 5, conv=conv)
        variables = jax.vmap(model.init)(jax.random.split(KEY, 3))

        def loss(params, stats, x):
            given = {**params, "stats": stats}
            y, new = model.apply(given, x, jnp.arange(4) != 1, train=True)
            return jnp.sum(jnp.sin(y).at[1].set(0)), (y.at[1].set(0), new)

        stats = variables.pop("stats")
        slope = jax.vmap(jax.value_and_grad(loss, has_aux=True))
        text = str(jax.make_jaxpr(slope)(variables, stats, x))
        return jax.jit(slope)(
            variables, stats, x
        ), f"[3,4,4,{width // 2 + 1},8]" in text

    x = jax.random.normal(KEY, (3, 4, 4, width, 3)).at[:, 1].set(jnp.nan)
    (expected, _), (got, has_pairs) = run("xla"), run("packed")
    assert has_pairs == (width == 8 and norm == "batch")
    toy.assert_close(got, expected, 1e-4)
