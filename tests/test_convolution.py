"""Winograd's convolution against XLA's, values and both gradients, and which shapes get
it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pfl.kernels import convolution

NHWC = ("NHWC", "HWIO", "NHWC")
# images, kernels, paddings; odd sizes, tiles that reach over the edge; the error that
# is promised
SHAPES = [
    ((3, 9, 7, 2), (3, 3, 2, 4), "SAME", 1e-6),
    ((1, 8, 4, 3), (3, 3, 3, 2), "VALID", 1e-6),
    ((5, 2, 2, 3), (3, 3, 3, 2), "SAME", 1e-6),
    ((2, 4, 7, 2), (3, 3, 2, 3), [(0, 0), (0, 1)], 1e-6),
    ((2, 7, 10, 2), (5, 5, 2, 3), [(2, 0), (1, 2)], 1e-6),
    ((2, 8, 7, 2), (5, 5, 2, 3), [(0, 0), (2, 3)], 3e-6),
]


def xla(x, w, padding):
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=NHWC)


def both(conv, x, w, slope, padding):
    """[values, gradient of the images, gradient of the kernel]"""
    y, pullback = jax.vjp(lambda x, w: conv(x, w, padding), x, w)
    return [y, *pullback(slope)]


@pytest.mark.parametrize("tile, side", convolution.POINTS)
def test_the_matrices_make_a_correlation(tile, side):
    window, back, weights = convolution._winograd(tile, side)
    x, w = np.random.default_rng(side).normal(size=(2, tile + side - 1))
    ours = back @ ((window @ x) * (weights @ w[:side]))
    np.testing.assert_allclose(ours, np.correlate(x, w[:side], "valid"), rtol=1e-12)


@pytest.mark.parametrize("shape, kernel, padding, bound", SHAPES)
def test_winograd_is_the_convolution(shape, kernel, padding, bound):
    """In float64 to its rounding; in float32 to the bound that is promised, for images
    with an offset as after ReLU."""
    rng = np.random.default_rng(0)
    x, w = np.maximum(rng.normal(size=shape), 0) + 1, rng.normal(size=kernel)
    with jax.enable_x64(True):
        slope = rng.normal(size=jax.eval_shape(lambda: xla(x, w, padding)).shape)

        @jax.jit
        def run(x, w, slope):
            single = [a.astype(jnp.float32) for a in (x, w, slope)]
            ours = [
                both(convolution.winograd_conv, *args, padding)
                for args in (single, (x, w, slope))
            ]
            return (
                *ours,
                both(xla, x, w, slope, padding),
                both(xla, *map(jnp.abs, (x, w, slope)), padding),
            )

        for single, double, exact, scale in zip(
            *jax.device_get(run(x, w, slope)), strict=True
        ):
            assert (
                single.dtype == np.float32
                and single.shape == double.shape == exact.shape
            )
            assert np.abs(double - exact).max() <= 1e-8 * bound * scale.max()
            assert np.abs(single - exact).max() <= bound * scale.max()


def test_winograd_with_a_kernel_for_each_client_and_forward_over_reverse():
    rng = np.random.default_rng(0)
    x, w = (
        rng.normal(size=s).astype(np.float32)
        for s in ((2, 1, 4, 5, 2), (2, 3, 3, 2, 2))
    )

    def hessian_times_w(conv):
        gradient = jax.grad(lambda w, x: jnp.sum(jnp.tanh(conv(x, w, "SAME")) ** 2))
        return jax.vmap(lambda w, x: jax.jvp(lambda w: gradient(w, x), (w,), (w,)))(
            w, x
        )

    ours, exact = jax.jit(
        lambda: [hessian_times_w(conv) for conv in (convolution.winograd_conv, xla)]
    )()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), ours, exact
    )


@pytest.mark.parametrize("side", [3, 5])
def test_all_products_of_winograd_are_of_the_highest_precision(side):
    """A GPU's default is TF32, whose rounding the transforms would magnify."""
    x, w = jnp.zeros((2, 8, 8, 2)), jnp.zeros((side, side, 2, 2))
    gradients = jax.grad(
        lambda x, w: convolution.winograd_conv(x, w, "SAME").sum(), (0, 1)
    )
    lowered = jax.jit(gradients).lower(x, w).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    assert products and all(
        "precision = [HIGHEST, HIGHEST]" in line for line in products
    )


# batch, side of the image, channels in and out, side of the kernel, stride; whether
# Winograd's is taken
CHOICES = [
    *(
        (16, size, channels, channels, 3, 1, size > 4)
        for size, channels in ((32, 64), (16, 128), (8, 256), (4, 512))
    ),
    (16, 32, 3, 64, 3, 1, False),
    (16, 32, 64, 128, 3, 2, False),
    (16, 32, 64, 128, 1, 2, False),
    (10, 14, 32, 64, 5, 1, True),
    (10, 14, 6, 16, 5, 1, False),
    (10, 28, 1, 32, 5, 1, False),
    (16, 14, 64, 64, 4, 1, False),
    (16, 6, 64, 64, 3, 1, True),
    (16, 5, 64, 64, 3, 1, False),
    (1, 8, 64, 64, 3, 1, False),
    (32, 2, 64, 64, 3, 1, True),
]


@pytest.mark.parametrize("batch, size, channels, out, side, stride, expected", CHOICES)
def test_the_form_depends_on_the_shape(
    batch, size, channels, out, side, stride, expected
):
    x = jax.ShapeDtypeStruct((batch, size, size, channels), jnp.float32)
    w = jax.ShapeDtypeStruct((side, side, channels, out), jnp.float32)

    for form in convolution.CONVOLUTIONS:

        def conv(x, w, form=form):
            with convolution.convolution(form):
                return convolution.conv_general_dilated(
                    x, w, (stride, stride), "SAME", dimension_numbers=NHWC
                )

        program = str(jax.make_jaxpr(conv)(x, w))
        taken = expected and convolution.form(form) in convolution.WINOGRAD
        assert ("_winograd_conv" in program) == taken
        direct = convolution.form(form) in convolution.XLA
        assert ("conv_general_dilated" in program) == direct


def test_half_precision_keeps_to_plain_products():
    x, w = (
        jnp.zeros((16, 8, 8, 16), jnp.bfloat16),
        jnp.zeros((3, 3, 16, 16), jnp.bfloat16),
    )
    assert not convolution.winograd_is_faster(x, w, (1, 1), ((1, 1), (1, 1)))
