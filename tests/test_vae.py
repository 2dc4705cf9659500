"""The networks of FedDVA: published sizes, shapes, and the transposed convolution
against XLA's and PyTorch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx

from fedjax_pfl import trees
from fedjax_pfl.algorithms.feddva import phases as dva_phases
from fedjax_pfl.errors import InputError
from fedjax_pfl.kernels import transposed
from fedjax_pfl.models import layers, model, num_parameters, vae

WIDE = (32, 64, 128, 256, 512)
# images, d_z = d_c, hidden widths; both encoders, decoder, classifier of 10
PUBLISHED = [
    ((28, 28, 1), 4, vae.HIDDEN, 6_047_202, 2_888_769, 86),
    ((28, 28, 1), 8, vae.HIDDEN, 6_054_450, 2_890_817, 226),
    ((32, 32, 3), 8, vae.HIDDEN, 6_060_716, 2_892_867, 226),
    ((64, 64, 3), 4, WIDE, 6_130_012, 2_922_147, 86),
]


def variables_of(nets):
    return jax.eval_shape(lambda key: dva_phases.init(nets, key), jax.random.key(0))


@pytest.mark.parametrize(
    "shape, latent, hidden, encoders, decoder, head",
    [PUBLISHED[0], *(toy.slow(*x) for x in PUBLISHED[1:])],
)
def test_sizes_are_the_papers(shape, latent, hidden, encoders, decoder, head):
    v = variables_of(vae.dual_vae(shape, latent, latent, hidden, 10))
    assert trees.size([v["z"], v["c"]]) == encoders
    assert (trees.size(v["decoder"]), trees.size(v["head"])) == (decoder, head)


@pytest.mark.parametrize(
    "shape, size", [((28, 28, 1), 2_890_314), ((32, 32, 3), 2_892_362)]
)
def test_the_cnn_of_the_comparison(shape, size):
    net = model("cnn_dva", shape, 10)
    assert num_parameters(jax.eval_shape(net.init, jax.random.key(0))) == size


@pytest.mark.parametrize(
    "shape, hidden",
    [
        ((28, 28, 1), vae.SMALL),
        toy.slow((8, 8, 3), (4, 8)),
        toy.slow((14, 14, 1), (4, 4, 8)),
    ],
)
def test_shapes_of_what_the_networks_give(shape, hidden):
    nets = vae.dual_vae(shape, 3, 2, hidden, 5)
    x = jax.ShapeDtypeStruct((6, *shape), jnp.float32)
    out = jax.eval_shape(
        lambda v, x: dva_phases.forward(nets, v, x, jnp.ones(6, bool), train=True),
        variables_of(nets),
        x,
    )
    assert out.z.mean.shape == out.z.log_var.shape == (6, 3) and out.c.mean.shape == (
        6,
        2,
    )
    assert out.latents.shape == (6, 5) and out.mean.shape == x.shape
    assert jax.tree.map(jnp.shape, out.stats) == jax.tree.map(
        jnp.shape, variables_of(nets)["stats"]
    )


@pytest.mark.slow  # many small compilations
def test_z_reaches_the_personal_encoder_and_log_variances_are_bounded():
    nets = vae.dual_vae((8, 8, 1), 2, 2, (4, 8))
    v = nets.c.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, 8, 8, 1))
    one, two = (nets.c.apply(v, (x, jnp.full((3, 2), z)))[0] for z in (0.0, 1.0))
    assert not np.allclose(one.mean, two.mean)
    large = jax.tree.map(lambda p: 1e3 * p, v["params"])
    assert (
        np.abs(
            nets.c.apply({**v, "params": large}, (x, jnp.ones((3, 2))))[0].log_var
        ).max()
        == 8
    )


BAD = {
    "not square": (
        {"input_shape": (28, 32, 1)},
        "need square images of 28, 30 or 32 pixels",
    ),
    "no image": ({"input_shape": (60,)}, "need square images"),
    "too small for four layers": ({"input_shape": (8, 8, 1)}, "got input shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_said(case):
    arguments, sentence = BAD[case]
    with pytest.raises(InputError, match=sentence):
        vae.dual_vae(**arguments)


# --- the transposed convolution
# ---------------------------------------------------------------------------------------

SHAPES = [  # images, kernel, stride, padding
    ((2, 3, 4, 5), (4, 4, 5, 3), 2, 1),
    ((2, 4, 4, 3), (4, 4, 3, 1), 2, 3),
    ((3, 1, 1, 5), (4, 4, 5, 2), 1, 0),
    ((2, 2, 3, 4), (4, 4, 4, 2), 1, 0),
    ((2, 3, 2, 2), (6, 6, 2, 2), 2, 0),
    ((2, 3, 3, 2), (3, 3, 2, 2), 3, 1),
]


def drawn(shape, kernel):
    rng = np.random.default_rng(0)
    return [rng.normal(size=s).astype(np.float32) for s in (shape, kernel)]


@pytest.mark.parametrize("shape, kernel, stride, padding", SHAPES)
def test_values_and_gradients_are_xlas(shape, kernel, stride, padding):
    x, w = drawn(shape, kernel)

    def run(form):
        with layers.convolution(form):
            y, pullback = jax.vjp(
                lambda x, w: transposed.conv_transpose(x, w, stride, padding), x, w
            )
            return y, *pullback(
                jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            )

    for ours, exact in zip(
        *jax.jit(lambda: (run("matmul"), run("xla")))(), strict=True
    ):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["matmul", "xla"])
def test_values_are_lax_conv_transposes(form):
    """There the kernel is flipped, and the padding is that of the dilated
    convolution: side - 1 - ours."""
    x, w = drawn((2, 3, 4, 5), (4, 4, 5, 3))
    with layers.convolution(form):
        ours = transposed.conv_transpose(x, w, 2, 1)
    np.testing.assert_allclose(
        ours,
        jax.lax.conv_transpose(x, w[::-1, ::-1], (2, 2), [(2, 2)] * 2),
        rtol=1e-5,
        atol=1e-5,
    )


def test_on_a_cpu_no_convolution_of_xla_is_left():
    x, w = drawn((2, 3, 4, 5), (4, 4, 5, 3))
    lowered = (
        jax.jit(jax.grad(lambda x: transposed.conv_transpose(x, w, 2, 1).sum()))
        .lower(x)
        .as_text()
    )
    assert ("convolution" in lowered) == (layers.form("auto") == "xla")


def test_the_layer_is_pytorchs():
    torch = pytest.importorskip(
        "torch", reason="PyTorch is not installed: it is the reference here"
    )
    layer = layers.ConvTranspose(8, 3, 4, 1, nnx.Rngs(0), stride=2)
    reference = torch.nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)
    bound = 1 / np.sqrt(3 * 4**2)
    for ours, theirs in (
        (layer.kernel[...], reference.weight),
        (layer.bias[...], reference.bias),
    ):
        assert np.abs(ours).max() <= bound and theirs.abs().max() <= bound
    assert np.abs(layer.kernel[...]).max() > 0.95 * bound
    reference.weight.data = torch.tensor(
        np.array(layer.kernel[...].transpose(2, 3, 0, 1))
    )
    reference.bias.data = torch.tensor(np.array(layer.bias[...]))
    x = drawn((2, 5, 5, 8), (1,))[0]
    theirs = (
        reference(torch.tensor(x.transpose(0, 3, 1, 2)))
        .detach()
        .numpy()
        .transpose(0, 2, 3, 1)
    )
    np.testing.assert_allclose(layer(x), theirs, rtol=1e-5, atol=1e-5)
