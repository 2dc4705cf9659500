"""CNN-1 to CNN-5, AlexNet, ShuffleNetV2, MobileNetV2 and the vision transformer, the
common feature width, and CNN-k inside CNN-1."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import nnx
from jax import lax

from fedjax_pfl import models
from fedjax_pfl.errors import InputError
from fedjax_pfl.kernels.depthwise import depthwise_conv
from fedjax_pfl.models import (
    MODELS,
    layers,
    mobilenet,
    nets,
    nnx_model,
    shufflenet,
    vit,
)
from fedjax_pfl.models.transformer import Layout

KEY = jax.random.key(0)
CIFAR, MNIST_RGB = (32, 32, 3), (28, 28, 3)
SIZES = [
    *[("cnn1", CIFAR, c, n) for c, n in ((10, 2_621_558), (100, 2_666_648))],
    *[("cnn2", CIFAR, c, n) for c, n in ((10, 1_815_142), (100, 1_860_232))],
    *[("cnn3", CIFAR, c, n) for c, n in ((10, 1_320_558), (100, 1_365_648))],
    *[("cnn4", CIFAR, c, n) for c, n in ((10, 1_060_358), (100, 1_105_448))],
    *[("cnn5", CIFAR, c, n) for c, n in ((10, 670_058), (100, 715_148))],
    *[("alexnet", CIFAR, c, n) for c, n in ((10, 23_272_266), (100, 23_640_996))],
    *[
        ("alexnet", MNIST_RGB, c, n)
        for c, n in ((10, 20_126_538), (26, 20_192_090), (47, 20_278_127))
    ],
    *[
        ("shufflenet", CIFAR, c, n)
        for c, n in (
            (10, 1_263_854),
            (100, 1_356_104),
            (26, 1_280_254),
            (47, 1_301_779),
        )
    ],
]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance),
        a,
        b,
    )


def size(tree):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@functools.cache
def body(name, shape):
    """The body's parameters and running statistics, as shapes, and the number of
    features."""
    net = nnx.eval_shape(lambda: MODELS[name](shape, 7, nnx.Rngs(0)))
    return [
        nnx.to_pure_dict(nnx.state(net.body, kind))
        for kind in (nnx.Param, nnx.BatchStat)
    ], net.head.in_features


@pytest.mark.parametrize("name, shape, classes, expected", SIZES)
def test_sizes_are_the_papers(name, shape, classes, expected):
    (params, _), width = body(name, shape)
    assert size(params) + width * classes + classes == expected


def test_sizes_of_the_parts():
    (params, stats), width = body("shufflenet", CIFAR)
    units = [size(params["units"][i]) for i in range(16)]
    assert [sum(units[:4]), sum(units[4:12]), sum(units[12:])] == [
        30_192,
        244_180,
        501_352,
    ]
    assert (size(params["stem"]), size(params["last"]), size(stats), width) == (
        696,
        477_184,
        16_180,
        1024,
    )
    (params, _), width = body("alexnet", CIFAR)
    assert [size(params["convs"][i]) for i in range(5)] == [
        1_792,
        110_784,
        663_936,
        884_992,
        590_080,
    ]
    (params, _), width = body("cnn5", CIFAR)
    assert size(params) == 665_048  # pFedAFM's shared extractor
    assert {body(f"cnn{k}", CIFAR)[1] for k in range(1, 6)} == {500}


# --- depthwise convolution
# ---------------------------------------------------------------------------------------

DEPTHWISE = [
    ((2, 7, 6, 4), (3, 3), (1, 1), [(1, 1), (1, 1)]),
    ((2, 7, 6, 4), (3, 3), (2, 2), [(1, 1), (1, 1)]),
    ((1, 8, 8, 3), (3, 2), (2, 1), [(0, 0), (0, 2)]),
]


def xla(x, w, strides, pads):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, strides, pads, dimension_numbers=numbers, feature_group_count=x.shape[-1]
    )


@pytest.mark.parametrize("shape, sides, strides, pads", DEPTHWISE)
def test_depthwise_convolution_equals_xla(shape, sides, strides, pads):
    x, w = normal(0, *shape), normal(1, *sides, 1, shape[-1])

    def both(conv):
        y, pullback = jax.vjp(lambda x, w: conv(x, w, strides, pads), x, w)
        return y, pullback(jnp.sin(y))

    close(*jax.jit(lambda: (both(depthwise_conv), both(xla)))(), 1e-5)


def test_depthwise_sums_of_bfloat16_are_of_float32():
    x, w = (
        jnp.asarray(normal(0, 2, 6, 6, 4), jnp.bfloat16),
        jnp.asarray(1 + normal(1, 3, 3, 1, 4), jnp.bfloat16),
    )
    pads = [(1, 1), (1, 1)]
    y = jax.jit(lambda: depthwise_conv(x, w, (1, 1), pads))()
    exact = jax.jit(
        lambda: depthwise_conv(
            x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), pads
        )
    )()
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "form, grouped", [("matmul", False), ("winograd", False), ("xla", True)]
)
def test_the_form_of_a_depthwise_convolution_is_the_models(form, grouped):
    layer = layers.conv(4, 4, 3, 1, nnx.Rngs(0), feature_group_count=4)
    with layers.convolution(form):
        program = str(jax.make_jaxpr(lambda x: layer(x))(jnp.ones((2, 6, 6, 4))))
    assert ("feature_group_count=4" in program) == grouped


# --- ShuffleNetV2
# ------------------------------------------------------------------------------------------------


def test_the_shuffle_alternates_channels():
    left, right = np.arange(3.0).reshape(1, 3), 10 + np.arange(3.0).reshape(1, 3)
    np.testing.assert_array_equal(
        shufflenet.shuffle(left, right), [[0, 10, 1, 11, 2, 12]]
    )


def test_a_plain_unit_passes_its_left_half():
    unit = shufflenet.Unit(8, 8, 1, nnx.Rngs(0))
    x = normal(0, 2, 4, 4, 8)
    y = np.asarray(jax.jit(lambda x: unit(x))(x))
    np.testing.assert_array_equal(y[..., ::2], x[..., :4])
    moved = np.asarray(
        jax.jit(lambda x: unit(x))(
            x + np.r_[np.ones(4), np.zeros(4)].astype(np.float32)
        )
    )
    np.testing.assert_array_equal(moved[..., 1::2], y[..., 1::2])


def small(input_shape, num_classes, rngs):
    """ShuffleNetV2 with one stage of two units, few channels and a ReLU after the
    stem."""
    body = shufflenet.ShuffleNet(
        input_shape[-1], rngs, stages=((16, 2),), last=12, stem_relu=True
    )
    return nets.Net(body, layers.linear(12, num_classes, rngs))


def plain(layer, x, stride=1, groups=1, relu=True):
    """A convolution, a batch norm as in a test, and a ReLU."""
    kernel, norm = layer.conv.kernel[...], layer.norm
    pad = [(n // 2, n // 2) for n in kernel.shape[:2]]
    given = {
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        "feature_group_count": groups,
    }
    x = lax.conv_general_dilated(x, kernel, (stride, stride), pad, **given)
    mean, var, scale, bias = (
        v[...].reshape(1, 1, 1, -1)
        for v in (norm.mean, norm.var, norm.scale, norm.bias)
    )
    x = (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias
    return jnp.maximum(x, 0) if relu else x


@pytest.mark.slow  # its parts are tested above
def test_shufflenet_unit_by_unit():
    """Strides, ReLUs, branches and their order, without what the library makes
    convolutions of."""
    net = shufflenet.ShuffleNet(3, nnx.Rngs(0), stages=((16, 2), (24, 1)), last=12)
    for number, (_, norm) in enumerate(nnx.iter_modules(net)):
        if isinstance(norm, layers.BatchNorm):
            for least, value in (
                (-2, norm.mean),
                (0.5, norm.var),
                (0.5, norm.scale),
                (-1, norm.bias),
            ):
                value[...] = least + np.abs(normal(number, *value[...].shape))
    x = given = normal(0, 2, 16, 16, 3)
    x = plain(net.stem, x, relu=False)
    for unit, down in zip(net.units, (True, False, True), strict=True):
        left, right = (
            (x, x) if down else (x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :])
        )
        if down:
            left = plain(unit.left[0], left, 2, left.shape[-1], relu=False)
            left = plain(unit.left[1], left)
        right = plain(unit.right[0], right)
        right = plain(unit.right[1], right, 1 + down, right.shape[-1], relu=False)
        right = plain(unit.right[2], right)
        x = jnp.stack([left, right], axis=-1).reshape(*left.shape[:-1], -1)
    assert x.shape == (2, 4, 4, 24)
    close(net(given), plain(net.last, x).mean((1, 2)), 1e-4)


def step(net, variables, x, mask=None, key=None):
    """(logits, new statistics, gradients) in training."""

    def loss(variables):
        logits, stats = net.apply(variables, x, mask, True, key)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.arange(len(x)) % 3
        )
        return (losses if mask is None else jnp.where(mask, losses, 0)).sum(), (
            logits,
            stats,
        )

    gradients, (logits, stats) = jax.grad(loss, has_aux=True)(variables)
    return logits, stats, {part: gradients[part] for part in ("body", "head")}


@pytest.mark.slow
def test_forms_of_convolution_agree_in_shufflenet():
    x = normal(0, 3, 9, 8, 3)
    nets_ = [
        models.model(small, x.shape[1:], 3, conv=form)
        for form in ("matmul", "winograd", "xla")
    ]
    run = jax.jit(lambda x: [step(net, nets_[0].init(KEY), x) for net in nets_])
    matmul, winograd, reference = run(x)
    close(matmul, reference, 1e-4)
    close(winograd, reference, 1e-4)
    assert all(
        np.isfinite(a).all() and np.any(np.asarray(a) != 0)
        for a in jax.tree.leaves(matmul[2])
    )


@pytest.mark.slow  # a smaller network with batch norm is in test_models.py
def test_padding_changes_nothing_in_shufflenet():
    net, x = models.model(small, (8, 8, 3), 3), normal(0, 3, 8, 8, 3)
    padded = np.concatenate([x, np.full((2, 8, 8, 3), 7, np.float32)])

    @jax.jit
    def both(x, padded):
        variables = net.init(KEY)
        logits, *others = step(net, variables, padded, jnp.arange(5) < 3)
        return (logits[:3], *others), step(net, variables, x)

    close(*both(x, padded), 1e-4)


# --- MobileNetV2 and the vision transformer
# ------------------------------------------------------------------------------------


def block_size(width):
    """Query, key, value and output, two layers of 4 times the width, two layer norms."""
    return 12 * width**2 + 13 * width


def test_size_of_the_vision_transformer_is_its_formula():
    for shape, patch in (((28, 28, 1), 4), ((64, 64, 3), 8)):
        inputs = patch**2 * shape[2]
        count = shape[0] * shape[1] // patch**2
        ends = (inputs + 1 + count) * 128 + 2 * 128 + 128 * 10 + 10
        net = models.model("vit_small", shape, 10)
        variables = jax.eval_shape(net.init, KEY)
        assert size(variables) == ends + 4 * block_size(128)


def short_mobilenet(input_shape, num_classes, rngs):
    """A stem, a plain block, one of stride 2 and one with a residual."""
    stages = ((1, 4, 1, 1), (2, 6, 2, 2))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("STEM", 4), ("LAST", 8), ("STAGES", stages)):
            patch.setattr(mobilenet, name, value)
        body = mobilenet.MobileNet(input_shape[-1], False, rngs)
    return nets.Net(body, layers.linear(8, num_classes, rngs))


def short_vit(input_shape, num_classes, rngs):
    body = vit.Patches(input_shape, 4, 1, Layout(8, 2, 32), rngs)
    return nets.Net(body, layers.linear(8, num_classes, rngs))


@pytest.mark.parametrize("make", [short_mobilenet, short_vit])
def test_masked_rows_change_nothing_and_a_step_changes_all_parameters(make):
    net, x = models.model(make, (8, 8, 2), 3), normal(0, 5, 8, 8, 2)
    padded = np.where(np.arange(5)[:, None, None, None] < 3, x, 7)

    run = jax.jit(lambda x: step(net, net.init(KEY), x, jnp.arange(5) < 3))
    (logits, *found), (expected, *others) = run(x), run(padded)
    close((logits[:3], *found), (expected[:3], *others), 1e-5)
    for path, gradient in jax.tree.leaves_with_path(found[1]):
        assert np.any(np.asarray(gradient) != 0), path


# --- AlexNet
# -----------------------------------------------------------------------------------------------------


# --- the common feature width
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, width",
    [(4, 3), (84, 512), (1024, 512), (500, 512), (512, 512), (10, 7), (3, 7)],
)
def test_adaptive_pooling_is_the_mean_of_each_bin(size, width):
    h = normal(0, 2, size)
    bins = [
        h[:, i * size // width : math.ceil((i + 1) * size / width)].mean(1)
        for i in range(width)
    ]
    close(
        jax.jit(lambda h: nnx_model.adaptive_average_pool(h, width))(h),
        np.stack(bins, 1),
        1e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, native",
    [("lenet_valid", 84), ("cnn5", 500), toy.slow("alexnet", 4096), (small, 12)],
)
def test_any_network_can_have_512_features(name, native):
    plain, net = (models.model(name, CIFAR, 7, features=k) for k in (None, 512))
    before, after = (jax.eval_shape(net.init, KEY) for net in (plain, net))
    assert plain.num_features == native
    assert net.num_features == 512
    assert jax.tree.map(jnp.shape, after["head"]) == {"kernel": (512, 7), "bias": (7,)}
    assert size(after["body"]) == size(before["body"])
    assert sum(jax.tree.leaves(net.bn_mask)) == sum(jax.tree.leaves(plain.bn_mask))
    assert size(after["stats"]) == size(before["stats"])


@pytest.mark.slow
def test_pooled_features_are_the_networks_own_averaged():
    plain, net = (
        models.model(small, (8, 8, 3), 3, features=width) for width in (None, 5)
    )
    x, mask = normal(0, 4, 8, 8, 3), np.arange(4) < 3

    @jax.jit
    def both(x, mask):
        a, b = plain.init(KEY), net.init(KEY)
        h, stats = plain.features(a, x, mask, True)
        pooled, moved = net.features(b, x, mask, True)
        return nnx_model.adaptive_average_pool(h, 5), pooled, stats, moved["body"]

    h, pooled, stats, moved = both(x, mask)
    close(h, pooled)
    close(stats, moved)


class Bag(nnx.Module):
    """The mean of the embeddings of tokens."""

    def __init__(self, rngs):
        self.table = nnx.Embed(10, 8, rngs=rngs)

    def __call__(self, x, train):
        return self.table(x).mean(axis=1)


def tokens():
    def make(shape, classes, rngs):
        return nets.Net(Bag(rngs), layers.linear(8, classes, rngs))

    return models.model(make, (4,), 3, features=5, input_dtype=jnp.int32)


@pytest.mark.slow
def test_a_network_of_tokens_can_have_other_features():
    net = tokens()
    assert net.apply(net.init(KEY), jnp.ones((2, 4), jnp.int32))[0].shape == (2, 3)


# --- CNN-1 to CNN-5 of pFedAFM
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: models.model("alexnet", (14, 32, 3), 10), "at least 15x15 pixels"),
        (lambda: models.model("shufflenet", (60,), 10), "needs images"),
        (
            lambda: models.model("cnn2", (12, 12, 3), 10),
            "'cnn2' needs images .* of at least 16x16",
        ),
        (lambda: models.model("mlp", (6,), 3, features=0), "`features` must be in"),
    ],
)
def test_what_cannot_work_is_said_at_once(make, message):
    with pytest.raises(InputError, match=message):
        make()
