"""Networks: sizes, the convolution against XLA's, pooling, initialisation, batch norm,
and the pure functions."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import linen, nnx
from jax import lax

from fedjax_pfl.errors import InputError
from fedjax_pfl.models import MODELS, flops, layers, model, nets, num_parameters
from fedjax_pfl.models.nnx_model import BN_STATS
from fedjax_pfl.models.registry import TEXT


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_rank_promotion("raise"):
        yield


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance),
        a,
        b,
    )


SIZES = [
    ("linear", (28, 28, 1), 10, 7_850),
    ("linear", (60,), 10, 610),
    ("mlp", (28, 28, 1), 10, 50_890),
    ("lenet", (28, 28, 1), 10, 61_706),
    ("lenet_bn", (28, 28, 1), 10, 61_750),
    ("lenet_valid", (28, 28, 1), 10, 44_426),
    ("lenet_valid", (28, 28, 3), 10, 44_726),
    ("lenet_valid", (28, 28, 3), 26, 46_086),
    ("lenet_valid", (28, 28, 3), 47, 47_871),
    ("lenet_valid", (32, 32, 3), 10, 62_006),
    ("lenet_valid", (32, 32, 3), 100, 69_656),
    ("cnn", (28, 28, 1), 10, 582_026),
    ("cnn", (28, 28, 1), 26, 590_234),
    ("cnn", (28, 28, 1), 47, 601_007),
    ("cnn", (28, 28, 1), 62, 608_702),
    ("cnn", (32, 32, 3), 10, 878_538),
    ("cnn", (32, 32, 3), 100, 924_708),
    ("cnn", (64, 64, 3), 200, 5_694_600),
    ("cnn_same", (28, 28, 1), 10, 1_663_370),
    ("cnn_dropout", (28, 28, 1), 62, 1_206_590),
    ("cnn_dropout", (32, 32, 3), 10, 1_626_442),
    ("cnn_same", (28, 28, 1), 62, 1_690_046),
    ("cnn_same", (32, 32, 3), 10, 2_156_490),
    ("cnn_same", (32, 32, 3), 100, 2_202_660),
    ("mobilenet_v2", (32, 32, 3), 10, 2_236_682),  # torchvision's
]


NAMES = [name for name, *_ in SIZES]


# the first of each network; with other images and classes the others count alike
@pytest.mark.parametrize(
    "name, shape, classes, size",
    [toy.slow(*case) if case[0] in NAMES[:i] else case for i, case in enumerate(SIZES)],
)
def test_sizes_are_the_papers(name, shape, classes, size):
    variables = jax.eval_shape(model(name, shape, classes).init, jax.random.key(0))
    assert num_parameters(variables) == size


# like others, and seconds
LONG = (
    "shufflenet",
    "resnet18_50",
    "resnet18_gn",
    "resnet18_imagenet",
    "cnn_dva_small",
    "mobilenet_v2",
)
IMAGE_MODELS = [name for name in MODELS if MODELS[name] not in TEXT]


@pytest.mark.parametrize(
    "name", [toy.slow(name) if name in LONG else name for name in IMAGE_MODELS]
)
def test_every_model_has_a_line_of_help_and_gives_logits(name):
    net = model(name, (28, 28, 1), 10)
    x = jax.ShapeDtypeStruct((3, 28, 28, 1), jnp.float32)
    variables = jax.eval_shape(net.init, jax.random.key(0))
    h, _ = jax.eval_shape(net.features, variables, x)
    logits, stats = jax.eval_shape(
        lambda v, x: net.apply(v, x, jnp.ones(3, bool), train=True), variables, x
    )
    assert "\n\n" not in MODELS[name].__doc__
    assert h.shape == (3, net.num_features) and logits.shape == (3, 10)
    assert jax.tree.structure(net.bn_mask) == jax.tree.structure(variables)
    assert jax.tree.map(jnp.shape, stats) == jax.tree.map(jnp.shape, variables["stats"])
    assert variables["head"]["kernel"].shape == (net.num_features, 10) and variables[
        "head"
    ]["bias"].shape == (10,)


CONVOLUTIONS = [
    ((2, 9, 7, 3), (5, 5, 3, 4), (1, 1), "VALID"),
    ((2, 9, 7, 3), (5, 5, 3, 4), (1, 1), "SAME"),
    ((2, 9, 8, 3), (3, 3, 3, 4), (2, 2), "SAME"),
    ((2, 9, 8, 3), (3, 3, 3, 4), (2, 2), "VALID"),
    ((2, 8, 7, 3), (3, 2, 3, 4), (2, 1), "VALID"),
    ((2, 8, 8, 1), (3, 3, 1, 4), (2, 2), [(1, 1), (0, 2)]),
    ((2, 8, 8, 3), (1, 1, 3, 4), (2, 2), [(0, 0), (0, 0)]),
]
NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize("shape, kernel, strides, padding", CONVOLUTIONS)
def test_matmul_convolution_equals_xla(shape, kernel, strides, padding):
    x, w = normal(0, *shape), normal(1, *kernel)

    def both(form):
        def conv(x, w):
            with layers.convolution(form):
                return layers.conv_general_dilated(
                    x, w, strides, padding, dimension_numbers=NHWC
                )

        y, pullback = jax.vjp(conv, x, w)
        return y, pullback(jnp.sin(y))

    assert "conv_general_dilated" not in str(jax.make_jaxpr(lambda: both("matmul"))())
    close(*jax.jit(lambda: (both("matmul"), both("xla")))(), 1e-4)


def test_matmul_convolution_with_a_kernel_for_each_client_and_forward_over_reverse():
    x, w = normal(0, 4, 2, 8, 8, 3), normal(1, 4, 3, 3, 3, 5)

    def loss(conv, w, x):
        return jnp.sum(jnp.tanh(conv(x, w)) ** 2)

    def hessian_times_w(conv):
        gradient = jax.grad(lambda w, x: loss(conv, w, x))
        return jax.jit(
            jax.vmap(lambda w, x: jax.jvp(lambda w: gradient(w, x), (w,), (w,)))
        )(w, x)

    ours = hessian_times_w(lambda x, w: layers.matmul_conv(x, w, (1, 1), "SAME"))
    xla = hessian_times_w(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=NHWC
        )
    )
    close(ours, xla, 1e-3)


def test_dilated_grouped_and_one_dimensional_convolutions_go_to_xla():
    rngs = nnx.Rngs(0)
    grouped = layers.conv(4, 4, 3, 1, rngs, feature_group_count=2)
    dilated = layers.conv(4, 4, 3, 1, rngs, kernel_dilation=2)
    line = nnx.Conv(
        4, 4, (3,), conv_general_dilated=layers.conv_general_dilated, rngs=rngs
    )
    for layer, shape, expected in (
        (grouped, (6, 6), (6, 6)),
        (dilated, (6, 6), (4, 4)),
        (line, (6,), (6,)),
    ):
        x = jax.ShapeDtypeStruct((2, *shape, 4), jnp.float32)
        assert jax.eval_shape(layer, x).shape == (2, *expected, 4)
        assert "conv_general_dilated" in str(jax.make_jaxpr(layer)(x))
    with pytest.raises(InputError, match="matmul"), layers.convolution("matmull"):
        pass


@pytest.mark.parametrize("shape", [(2, 6, 8, 3), (2, 7, 5, 2), (1, 2, 3, 1)])
def test_max_pool_equals_reduce_window(shape):
    def reduce_window(x):
        return lax.reduce_window(
            x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )

    def both(pool, x):
        y, pullback = jax.vjp(pool, x)
        return y, pullback(y)

    close(
        *jax.jit(lambda x: (both(layers.max_pool, x), both(reduce_window, x)))(
            normal(0, *shape)
        )
    )


def test_where_values_tie_the_first_gets_the_gradient():
    """PyTorch does the same. Equal pixels are common in a digit's background."""
    gradient = jax.jit(jax.grad(lambda x: layers.max_pool(x).sum()))(
        np.zeros((1, 4, 4, 1), np.float32)
    )
    np.testing.assert_array_equal(
        np.asarray(gradient)[0, :, :, 0], np.kron(np.ones((2, 2)), [[1, 0], [0, 0]])
    )

    @jax.jit
    def both(y, slope):
        largest, pullback = jax.vjp(layers._largest, y)
        return largest, pullback(slope)[0]

    largest, slope = both(
        np.array([[3.0, 1], [3, 2], [1, 2], [3, 2]], np.float32),
        np.array([5.0, 7], np.float32),
    )
    np.testing.assert_array_equal(largest, [3, 2])
    np.testing.assert_array_equal(slope, [[5, 0], [0, 7], [0, 0], [0, 0]])


def test_pooling_can_be_differentiated_forwards_and_twice():
    x, v = normal(0, 1, 4, 4, 1), normal(1, 1, 4, 4, 1)
    for pool, inputs in (
        (layers.max_pool, (x, v)),
        (layers._largest, (x.reshape(4, 4), v.reshape(4, 4))),
    ):

        @jax.jit
        def slopes(x, v, pool=pool):
            loss = lambda x: jnp.sum(pool(x) ** 2)
            along = lambda f: jax.jvp(f, (x,), (v,))[1]
            return along(loss), jax.grad(loss)(x), along(jax.grad(loss)), along(pool)

        slope, gradient, curved, moved = slopes(*inputs)
        close(slope, np.vdot(gradient, inputs[1]))
        close(np.vdot(curved, inputs[1]), 2 * np.sum(np.square(moved)))


@pytest.mark.parametrize(
    "layer",
    [layers.linear(100, 64, nnx.Rngs(0)), layers.conv(4, 64, 5, 0, nnx.Rngs(0))],
)
def test_initialisation_is_pytorchs(layer):
    bound = 1 / math.sqrt(100)
    for leaf, least in ((layer.kernel[...], 0.99), (layer.bias[...], 0.9)):
        assert least * bound < np.abs(leaf).max() <= bound
    assert abs(np.std(layer.kernel[...]) / (bound / math.sqrt(3)) - 1) < 0.03


@jax.jit
def _normed(x, mask=None):
    norm = layers.BatchNorm(3, rngs=nnx.Rngs(0))
    return norm(x, mask, True), norm.mean[...], norm.var[...]


def test_masked_batch_norm_is_that_of_the_valid_rows():
    x = 3 + 2 * normal(0, 5, 4, 4, 3)
    padded = np.concatenate([x, np.full((2, 4, 4, 3), np.nan, np.float32)])
    y, mean, var = jax.device_get(_normed(padded, np.arange(7) < 5))
    axes = (0, 1, 2)
    flat = x
    close(y[:5], (flat - flat.mean(axes)) / np.sqrt(flat.var(axes) + 1e-5), 1e-4)
    close(mean, 0.1 * flat.mean(axes), 1e-4)
    close(var, 0.9 + 0.1 * flat.var(axes, ddof=1), 1e-4)
    close((y[:5], mean, var), _normed(x))


def test_masked_batch_norm_gradient_ignores_padding_even_nan():
    x, target = normal(0, 5, 4, 4, 3), normal(1, 5, 4, 4, 3)

    @jax.jit
    @jax.grad
    def slope(x, mask=None):
        y = _normed(x, mask)[0][:5]
        return jnp.sum(y * target)

    padded = np.concatenate([x, np.full((2, 4, 4, 3), np.nan, np.float32)])
    gradient = np.asarray(slope(padded, np.arange(7) < 5))
    close(gradient[:5], slope(x), 1e-4)
    assert not gradient[5:].any()


def test_batch_norm_is_the_textbooks_to_the_second_derivative():
    """Gradient, and the gradient's derivative, of x and of the scale and bias."""
    target, axes = normal(0, 5, 4, 4, 3), (0, 1, 2)
    at, along = [
        (1 + normal(i, 3), normal(i + 1, 3), 3 + normal(i + 2, 5, 4, 4, 3))
        for i in (1, 4)
    ]

    def ours(scale, bias, x):
        norm = layers.BatchNorm(3, rngs=nnx.Rngs(0))
        norm.scale[...], norm.bias[...] = scale, bias
        return norm(x, None, True)

    def textbooks(scale, bias, x):
        mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        return (x - mean) / jnp.sqrt(var + 1e-5) * scale.reshape(
            1, 1, 1, 3
        ) + bias.reshape(1, 1, 1, 3)

    @functools.partial(jax.jit, static_argnums=0)
    def slopes(norm):
        return jax.jvp(
            jax.grad(lambda *args: jnp.sum(jnp.tanh(norm(*args)) * target), (0, 1, 2)),
            at,
            along,
        )

    close(slopes(ours), slopes(textbooks), 1e-4)


def test_batch_norm_without_a_valid_row_changes_nothing():
    y, mean, var = jax.device_get(
        _normed(np.zeros((4, 2, 2, 3), np.float32), np.zeros(4, bool))
    )
    assert np.isfinite(y).all() and (mean == 0).all() and (var == 1).all()


@functools.cache
def start(make, *options):
    """(net, its variables, its jitted function) of six inputs and three classes."""
    net = model(make, (6,), 3, *options)
    return net, net.init(jax.random.key(0)), jax.jit(net.apply, static_argnums=3)


class Normed(nnx.Module):
    """Only a batch norm of the inputs, and a head."""

    class Body(nnx.Module):
        def __init__(self, size, rngs):
            self.norm = layers.BatchNorm(size, rngs=rngs)

        def __call__(self, x, mask=None, train=False):
            return self.norm(x, mask, train)

    def __init__(self, input_shape, num_classes, rngs):
        self.body, self.head = (
            self.Body(*input_shape, rngs),
            layers.linear(*input_shape, num_classes, rngs),
        )


class Custom(nnx.Module):
    """A user's net whose normalisation has an unhelpful name, with dropout, and with
    more than nine layers."""

    class Body(nnx.Module):
        def __init__(self, size, rngs):
            self.first = layers.linear(size, 8, rngs)
            self.middle = nnx.List(
                [nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(11)]
            )
            self.squash = layers.BatchNorm(8, rngs=rngs)
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x, mask=None, train=False, rngs=None):
            x = self.first(x)
            for layer in self.middle:
                x = x + layer(x)
            return self.drop(
                self.squash(x, mask, train), deterministic=not train, rngs=rngs
            )

    def __init__(self, input_shape, num_classes, rngs):
        self.body, self.head = (
            self.Body(*input_shape, rngs),
            layers.linear(8, num_classes, rngs),
        )


def test_own_factory_may_take_its_arguments_by_keyword():
    own = model(
        lambda shape, *, num_classes, rngs: Custom(shape, num_classes, rngs), (6,), 3
    )
    plain = model(Custom, (6,), 3)
    toy.assert_same(own.init(jax.random.key(0)), plain.init(jax.random.key(0)))


def test_own_module_gets_only_the_arguments_it_accepts():
    net, variables, apply = start(Custom)
    x, mask = normal(0, 4, 6), np.ones(4, bool)
    first, second, other = (
        np.asarray(apply(variables, x, mask, True, jax.random.key(i))[0])
        for i in (1, 1, 2)
    )
    assert (first == second).all() and (first != other).any()
    np.testing.assert_array_equal(
        apply(variables, x)[0], apply(variables, x, key=jax.random.key(1))[0]
    )
    assert net.num_features == 8


def test_dropout_draws_in_training_only():
    net, x = model("cnn_dropout", (8, 8, 1), 3), normal(0, 4, 8, 8, 1)
    variables = net.init(jax.random.key(0))
    features = jax.jit(
        lambda train, i: net.features(variables, x, None, train, jax.random.key(i))[0],
        static_argnums=0,
    )
    first, again, other, last = (np.asarray(features(True, i)) for i in (1, 1, 2, 3))
    assert (first == again).all()
    # half of those that are not 0 anyway
    assert 0.4 < np.mean((first == 0)[other + last > 0]) < 0.8
    np.testing.assert_array_equal(features(False, 1), features(False, 2))


@pytest.mark.slow
def test_traces_draw_a_network_once_and_as_it_is_drawn_without():
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return Custom(*arguments)

    net, key = model(counted, (6,), 3), jax.random.key(4)
    made = len(calls)
    drawn, twice = (
        jax.jit(net.init)(key),
        jax.jit(lambda key: jax.vmap(net.init)(jax.random.split(key)))(key),
    )
    jax.eval_shape(lambda key: (net.init(key), net.init(jax.random.split(key)[0])), key)
    assert len(calls) == made + 1
    toy.assert_same(drawn, net.init(key))
    toy.assert_same(toy.rows(twice, 1), net.init(jax.random.split(key)[1]))


def test_variables_go_in_and_out_in_the_same_places():
    _, variables, apply = start(Custom)
    module = jax.jit(lambda: Custom((6,), 3, nnx.Rngs(jax.random.key(0))))()
    x = normal(0, 4, 6)
    close(apply(variables, x)[0], jax.jit(lambda x: module.head(module.body(x)))(x))
    close(
        variables["body"]["middle"]["10"]["kernel"], module.body.middle[10].kernel[...]
    )


def test_norms_are_found_by_type_not_by_name():
    bn_mask = model(Custom, (6,), 3).bn_mask
    assert bn_mask["body"]["squash"] == {"scale": True, "bias": True}
    assert bn_mask["stats"] == {"squash": {"mean": True, "var": True}}
    assert sum(jax.tree.leaves(bn_mask)) == 4


def test_batch_statistics_at_test_time():
    x = 5 + normal(0, 8, 6)
    (_, variables, apply), (_, others, apply_running) = (
        start(Normed, stats) for stats in ("batch", "local")
    )
    close(variables["body"], others["body"])
    logits, stats = apply(variables, x)
    assert variables["stats"] == stats == {}
    train, _ = apply_running(others, x, None, True)
    close(logits, train, 1e-4)
    assert np.abs(np.asarray(apply_running(others, x)[0]) - train).max() > 1e-2


def test_running_moments_move_only_in_training():
    _, variables, apply = start(Normed, "local")
    x = normal(0, 8, 6)
    close(apply(variables, x)[1], variables["stats"], 0)
    moved = apply(variables, x, None, True)[1]
    assert all(
        np.any(np.asarray(a) != b)
        for a, b in zip(*map(jax.tree.leaves, (moved, variables["stats"])), strict=True)
    )


@pytest.mark.slow
def test_bfloat16_computes_the_body_and_keeps_float32():
    """8 bits are a relative error of 0.4 % an operation."""
    x = normal(0, 6, 12, 12, 1)
    nets = [
        model("lenet_bn", (12, 12, 1), 3, compute_dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]

    def run(net, variables):
        def loss(variables):
            logits, stats = net.apply(variables, x, train=True)
            return jnp.mean(
                optax.softmax_cross_entropy_with_integer_labels(
                    logits, jnp.arange(6) % 3
                )
            ), (logits, stats)

        return jax.grad(loss, has_aux=True)(variables)

    variables = nets[0].init(jax.random.key(0))
    (wide, narrow) = jax.device_get(
        jax.jit(lambda v: [run(net, v) for net in nets])(variables)
    )
    assert {a.dtype for a in jax.tree.leaves(narrow)} == {np.dtype("float32")}
    flat = lambda tree: np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])
    for a, b in zip(wide[1], narrow[1], strict=True):  # logits, moments
        error = np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(a))
        assert 1e-4 < error < 0.02
    assert np.linalg.norm(flat(wide[0]) - flat(narrow[0])) < 0.1 * np.linalg.norm(
        flat(wide[0])
    )
    traced = str(
        jax.make_jaxpr(lambda v: nets[1].features(v, x, train=True)[0])(variables)
    )
    assert "dot_general" in traced and not re.search(r":f32[^\n]*= dot_general", traced)


def test_moments_of_bfloat16_are_summed_in_float32():
    # a bfloat16 sum of 8,192 such stands still at 32,768
    x = jnp.asarray(100 + normal(0, 512, 4, 4, 3), jnp.bfloat16)
    y, mean, var = jax.device_get(_normed(x))
    wide = np.asarray(x, np.float32)
    close(_normed(wide)[1:], (mean, var))
    assert (
        y.dtype == jnp.bfloat16
        and np.abs(np.asarray(_normed(wide)[0]) - y.astype(np.float32)).max() < 0.03
    )


def test_padding_changes_neither_logits_nor_moments_of_a_net():
    net = model("lenet_bn", (12, 12, 1), 10)

    @jax.jit
    def both(x):
        variables = net.init(jax.random.key(0))
        padded = jnp.concatenate([x, jnp.zeros((2, 12, 12, 1))])
        logits, stats = net.apply(variables, padded, jnp.arange(6) < 4, train=True)
        return (logits[:4], stats), net.apply(variables, x, train=True)

    close(*both(normal(0, 4, 12, 12, 1)), 1e-4)


POOLED = [
    ((9, 8, 1), 2, 6, 5),
    ((10, 11, 3), 0, 6, 5),
    ((9, 8, 1), 2, 16, 5),
    ((10, 11, 3), 0, 16, (5, 3)),
]


@pytest.mark.parametrize(
    "shape, padding, out, kernel", [*POOLED, ((10, 9, 2), 0, 16, (4, 3))]
)
def test_fused_pooling_is_convolution_and_pooling(shape, padding, out, kernel):
    graph, state = nnx.split(layers.conv(shape[-1], out, kernel, padding, nnx.Rngs(0)))
    x = normal(1, 3, *shape)

    def run(form, state, x):
        def total(state, x):
            with layers.convolution(form):
                y = layers.conv_pool(nnx.merge(graph, state), x)
            return jnp.sum(jnp.sin(y)), y

        return jax.value_and_grad(total, (0, 1), has_aux=True)(state, x)

    close(
        *jax.jit(lambda state, x: (run("fused", state, x), run("xla", state, x)))(
            state, x
        ),
        1e-4,
    )


@pytest.mark.parametrize("form", ["matmul", "xla"])
def test_the_form_of_the_convolution_is_chosen_when_the_model_is_made(form):
    net = model("cnn", (16, 16, 1), 4, conv=form)
    variables = jax.eval_shape(net.init, jax.random.key(0))
    program = str(jax.make_jaxpr(net.apply)(variables, jnp.ones((2, 16, 16, 1))))
    assert ("conv_general_dilated" in program) == (form == "xla")


def test_flops_of_cnn_by_hand():
    step = 2 * 28 * 28 * 75 * 32 + 3 * (10 * 10 * 800 * 64 + 1600 * 512 + 512 * 10)
    assert flops("cnn", (32, 32, 3), 10, batch=10) == 2 * 10 * step
    assert flops("linear", (60,), 10, batch=3) == 2 * 2 * 3 * 600
    # large enough for `dense`'s own gradient
    assert flops("linear", (4096,), 64, batch=3) == 2 * 2 * 3 * 2**18


class Headless(nnx.Module):
    def __init__(self, input_shape, num_classes, rngs):
        self.body = layers.linear(*input_shape, num_classes, rngs)


class Stray(Custom):
    def __init__(self, input_shape, num_classes, rngs):
        super().__init__(input_shape, num_classes, rngs)
        self.temperature = nnx.Param(jnp.ones(()))


class Foreign(Custom):
    def __init__(self, input_shape, num_classes, rngs):
        super().__init__(input_shape, num_classes, rngs)
        self.body.squash = nnx.BatchNorm(8, rngs=rngs)


class Deaf(Custom):
    def __init__(self, input_shape, num_classes, rngs):
        super().__init__(input_shape, num_classes, rngs)
        self.body = nnx.Sequential(
            layers.BatchNorm(*input_shape, rngs=rngs),
            layers.linear(*input_shape, 8, rngs),
        )


class Pair(nnx.Module):
    def __call__(self, x):
        return x, x


@pytest.mark.parametrize(
    "args, message",
    [
        (
            (lambda *_: linen.Dense(3), (6,), 3),
            "Dense must be a Flax NNX module with a body, .* it has no `body`",
        ),
        (
            (lambda *_: nnx.Linear(6, 3, rngs=nnx.Rngs(0)), (6,), 3),
            "Linear must be .* it has no `body`",
        ),
        (
            (Pair(), (6,), 3),
            r"must take the arguments \(input_shape, num_classes, rngs\)",
        ),
        (
            (lambda shape, classes: None, (6,), 3),
            r"must take the arguments \(input_shape, num_classes, rngs\).*\(too many",
        ),
        (
            (lambda shape, classes, *, seed: None, (6,), 3),
            r"must take the arguments .*\(too many positional",
        ),
        ((lambda *_: None, (6,), 3), "NoneType must be .* it has no `body`"),
        (("cnnn", (28, 28, 1), 10), "did you mean 'cnn'"),
        (("cnn", (12, 12, 3), 10), "at least 16x16 pixels, got input shape"),
        (("lenet", (60,), 10), "needs images"),
        (("mlp", (6,), 3, "bach"), "did you mean 'batch'"),
        (("mlp", (6,), 3, "batch", "fft"), "Choose one of auto, .*xla"),
        ((Headless, (6,), 3), "Headless must be .* it has no `head`"),
        ((Stray, (6,), 3), "Stray.temperature must be .* of body or head, got Param"),
        (
            (Deaf, (6,), 3),
            "Sequential.__call__ must take `mask` and `train`: it has batch norm",
        ),
        *(
            (
                (Foreign, (6,), 3, bn_stats),
                "Foreign.body.squash must be a fedjax_pfl.models.layers.BatchNorm",
            )
            for bn_stats in BN_STATS
        ),
    ],
)
def test_what_cannot_work_is_said_at_once(args, message):
    with pytest.raises(InputError, match=message):
        model(*args)


def test_a_mask_that_a_body_does_not_hand_to_its_batch_norm_is_missed():
    class Body(nnx.Module):
        def __init__(self, rngs):
            self.norm = layers.BatchNorm(6, rngs=rngs)

        def __call__(self, x, mask, train):
            return self.norm(x, None, train)

    net = model(
        lambda shape, classes, rngs: nets.Net(
            Body(rngs), layers.linear(6, classes, rngs)
        ),
        (6,),
        3,
    )
    variables, x, mask = (
        net.init(jax.random.key(0)),
        jnp.ones((4, 6)),
        jnp.arange(4) < 3,
    )
    # nothing is counted, or nothing is padding
    for options in ({"mask": mask}, {"train": True}, {}):
        net.apply(variables, x, **options)
    with pytest.raises(
        InputError,
        match="must get the `mask` of its network's __call__",
    ):
        net.apply(variables, x, mask=mask, train=True)


class Guided(nnx.Module):
    """A layer of Flax, built and called as Flax's guides do."""

    def __init__(self, make, rngs):
        self.layer = make(rngs)

    def __call__(self, x):
        return self.layer(x).reshape(len(x), -1)


# layers that hold more than parameters, of inputs [B, 5, 3]; do they draw in training?
STATEFUL = {
    "lstm": (lambda r: nnx.RNN(nnx.LSTMCell(3, 4, rngs=r)), False),
    "gru": (lambda r: nnx.RNN(nnx.GRUCell(3, 4, rngs=r), rngs=r), False),
    "both ways": (
        lambda r: nnx.Bidirectional(
            *(nnx.RNN(nnx.SimpleCell(3, 4, rngs=r)) for _ in range(2))
        ),
        False,
    ),
    "dropout": (
        lambda r: nnx.Sequential(nnx.Linear(3, 4, rngs=r), nnx.Dropout(0.5, rngs=r)),
        True,
    ),
    "attention": (
        lambda r: nnx.MultiHeadAttention(
            2, 3, 4, dropout_rate=0.5, decode=False, rngs=r
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_layers_of_flax_work_as_in_its_guides(name):
    layer, draws = STATEFUL[name]
    x = normal(1, 2, 5, 3)

    def net(input_shape, num_classes, rngs):
        width = 8 if name == "both ways" else 3 if name == "attention" else 4
        head = nnx.Linear(5 * width, num_classes, rngs=rngs)
        return nets.Net(Guided(layer, rngs), head)

    made = model(net, (5, 3), 2)
    variables = made.init(jax.random.key(0))
    assert not variables["stats"]
    trained = jax.jit(lambda key: made.apply(variables, x, train=True, key=key)[0])
    one, same, other = (trained(jax.random.key(seed)) for seed in (1, 1, 2))
    toy.assert_same(one, same)
    assert np.array_equal(one, other) != draws
    toy.assert_same(made.apply(variables, x)[0], made.apply(variables, x)[0])


class Counting(Custom):
    def __init__(self, input_shape, num_classes, rngs):
        super().__init__(input_shape, num_classes, rngs)
        self.body.calls = nnx.Intermediate(jnp.zeros(()))


def test_other_state_is_named_with_its_remedy():
    with pytest.raises(
        InputError, match=r"body\.calls must be a .*got Intermediate\. M"
    ):
        model(Counting, (6,), 3)
