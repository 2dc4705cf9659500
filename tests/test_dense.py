"""The product of a dense layer with its own gradients, against XLA's, and which shapes
get it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pfl.kernels import convolution, dense

NUMBERS = (((1,), (0,)), ((), ()))
ROWS, IN, OUT = 3, 4096, 64


def plain(x, w):
    return lax.dot_general(x, w, NUMBERS)


def ours(x, w):
    with convolution.convolution("winograd"):
        return dense.dot_general(x, w, NUMBERS)


def operands(*clients):
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(*clients, *shape)).astype(np.float32)
        for shape in ((ROWS, IN), (IN, OUT))
    ]


def close(a, b):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), a, b
    )


@pytest.mark.parametrize("clients", [(), (2,)])
def test_it_is_the_product_and_its_gradients(clients):
    x, w = operands(*clients)

    def both(product):
        loss = lambda x, w: jnp.sum(jnp.tanh(product(x, w) / 20))
        one = jax.value_and_grad(loss, (0, 1))
        return jax.jit(jax.vmap(one) if clients else one)(x, w)

    close(both(ours), both(plain))


def test_forward_mode_and_forward_over_reverse():
    x, w = operands()

    def both(product):
        loss = lambda w: jnp.sum(jnp.tanh(product(x, w) / 20))
        return jax.jit(
            lambda w: [jax.jvp(f, (w,), (w,)) for f in (loss, jax.grad(loss))]
        )(w)

    close(both(ours), both(plain))


def test_rows_of_zeros_add_exactly_nothing():
    """Masked rows are zeros: the other rows' gradient is the same bit for bit."""
    x, w = operands()
    gradient = jax.jit(lambda x, g: jax.vjp(lambda w: ours(x, w), w)[1](g)[0])
    padded = [jnp.pad(jnp.asarray(a), ((0, 2), (0, 0))) for a in (x, ours(x, w))]
    np.testing.assert_array_equal(gradient(x, ours(x, w)), gradient(*padded))


# rows, sizes in and out, type; whether its gradient is the sum of outer products
CHOICES = [
    (10, 1600, 512, "float32", True),
    (32, 1600, 512, "float32", False),
    (10, 3072, 10, "float32", False),
    (10, 784, 64, "float32", False),
    (10, 1600, 512, "bfloat16", False),
]


@pytest.mark.parametrize("rows, size, out, dtype, expected", CHOICES)
def test_the_gradient_depends_on_the_shape(rows, size, out, dtype, expected):
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, size), (size, out)))
    for form in convolution.CONVOLUTIONS:

        def loss(w, x, form=form):
            with convolution.convolution(form):
                return jnp.sum(dense.dot_general(x, w, NUMBERS)).astype(jnp.float32)

        whole = ("matmul", *convolution.XLA)
        taken = expected and convolution.form(form) not in whole
        program = str(jax.make_jaxpr(jax.grad(loss))(w, x))
        assert ("eye" in program or "iota" in program) == taken
