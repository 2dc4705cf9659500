import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.kernels.rows import layer_norm, softmax
from fedjax_pfl.models.transformer import ACTIVATIONS


def _theirs(x, scale, bias):
    layer = nnx.LayerNorm(x.shape[-1], epsilon=1e-5, rngs=nnx.Rngs(0))
    layer.scale[...], layer.bias[...] = scale, bias
    return layer(x)


def _ours(x, scale, bias):
    return layer_norm(x, scale, bias, 1e-5)


FUNCTIONS = {
    "softmax": (lambda x, *_: softmax(x), lambda x, *_: jax.nn.softmax(x, axis=-1)),
    "layer_norm": (_ours, _theirs),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 5)], ids=str)
def test_values_and_derivatives_are_those_of_the_libraries(name, shape):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    scale, bias, weights = (
        jnp.asarray(rng.normal(size=n), jnp.float32) for n in (5, 5, shape)
    )
    results = []
    for f in FUNCTIONS[name]:
        loss = lambda *a, f=f: jnp.sum(weights * f(*a) ** 2)
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        # forwards over backwards, as in Per-FedAvg
        second = jax.jvp(gradient, (x, scale, bias), (weights, bias, scale))
        results.append((f(x, scale, bias), *second))
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_statistics_of_bfloat16_are_float32():
    x = jnp.full((1, 512), 1000.0, jnp.bfloat16).at[0, 0].set(1016)
    one = jnp.ones(512, jnp.bfloat16)
    y = layer_norm(x, one, 0 * one, 1e-5)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(float(y[0, 0]), 22.6, rtol=0.01)  # sqrt(511)


def test_gradients_of_bfloat16_are_those_of_float32():
    rng = np.random.default_rng(0)
    x, scale, bias, weights = (
        jnp.asarray(rng.normal(size=n), jnp.bfloat16)
        for n in ((8, 512), 512, 512, (8, 512))
    )

    def gradients(dtype):
        loss = lambda x, *a: jnp.sum(weights.astype(dtype) * _ours(x, *a))
        arguments = (a.astype(dtype) for a in (x, scale, bias))
        return jax.grad(loss, argnums=(0, 1, 2))(*arguments)

    for low, high in zip(gradients(jnp.bfloat16), gradients(jnp.float32), strict=True):
        assert low.dtype == jnp.bfloat16
        difference = jnp.linalg.norm(low.astype(jnp.float32) - high)
        assert difference < 0.01 * jnp.linalg.norm(high)


def test_gelu_of_bfloat16_does_not_cancel():
    x = jnp.linspace(-4, 4, 101, dtype=jnp.bfloat16)
    exact = jax.nn.gelu(x.astype(jnp.float32), approximate=False)
    y = ACTIVATIONS["gelu"](x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-7, atol=1e-6)
