"""LG-FedAvg: what of the network is shared, by its layers, and between which
architectures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from toy import C, N, assert_close, assert_same

from fedjax_pfl import models, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers, nets, nnx_model

KEY = jax.random.key(5)
MLP = toy.task()
MIXED = np.array([0, 1, 0, 1, 1])


def train(task=MLP, rounds=3, method="lg_fedavg", **options):
    return toy.train(method, task, rounds, **options)


def images(shape, *names, bn_stats="aggregate"):
    """Clients with these networks in turn, of which nothing is trained."""
    return toy.task(
        models=tuple(
            models.model(name, shape, 10, bn_stats=bn_stats) for name in names
        ),
        architecture=np.arange(N) % len(names),
        input=jax.ShapeDtypeStruct(shape, jnp.float32),
        bn_stats=bn_stats,
    )


def shared_size(task, **hparams):
    return trees.size(
        jax.eval_shape(ALGORITHMS["lg_fedavg"](task, **hparams).init, KEY).server
    )


@pytest.mark.parametrize("net", [toy.slow("mlp"), "norm"])
@pytest.mark.parametrize(
    "count, method", [toy.slow(0, "local"), toy.slow(1, "lg_fedavg"), (99, "fedavg")]
)
def test_upper_layers_reach_from_local_to_fedavg(net, count, method):
    task = toy.task(net)
    got, expected = (
        train(task, shared="upper", upper_layers=count),
        train(task, method=method),
    )
    assert_close(jax.tree.leaves(got.state), jax.tree.leaves(expected.state))
    assert_same(got.metrics.post, expected.metrics.post)


def test_sizes_are_the_sheets():
    five = images((32, 32, 3), *(f"cnn{k}" for k in range(1, 6)))
    assert shared_size(five) == 5_010
    assert shared_size(five, shared="upper", upper_layers=1) == 5_010
    assert shared_size(five, shared="conv1+head") == 1_216 + 5_010
    lenet = images((32, 32, 3), "lenet_valid")
    assert shared_size(lenet, shared="conv") == 2_872
    assert shared_size(lenet, shared="upper") == 62_006 - 2_872
    assert (
        shared_size(images((32, 32, 3), "cnn1", "cnn3", "cnn4", "cnn5"), shared="conv")
        == 1_216 + 12_832
    )


@pytest.mark.parametrize("bn_stats, stats", [("aggregate", 2 * 22), ("local", 0)])
def test_batch_norms_go_with_their_layer(bn_stats, stats):
    task = images((28, 28, 1), "lenet_bn", bn_stats=bn_stats)
    convs, norms = 25 * 6 + 6 + 25 * 6 * 16 + 16, 2 * 22
    assert shared_size(task, shared="conv") == convs + norms + stats
    assert (
        shared_size(task, shared="upper")
        == 400 * 120 + 120 + 120 * 84 + 84 + 84 * 10 + 10
    )


def test_layers_are_in_the_order_of_their_use():
    x = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    found = nnx_model.layer_order(models.model("resnet18", x.shape[1:], 10), x)
    paths = [["/".join(path) for path in layer] for layer in found]
    assert paths[:2] == [
        ["body/stem", "body/norm"],
        ["body/blocks/0/conv1", "body/blocks/0/norm1"],
    ]
    assert paths[-1] == ["head"] and len(paths) == 1 + 8 * 2 + 3 + 1
    assert found[0]["body", "stem"] == ((3, 3, 3, 64),)


def test_layers_that_no_prediction_uses_are_none():
    """An auxiliary head is neither the upper layer nor anything else."""

    class Body(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.auxiliary = (
                layers.linear(toy.SHAPE[0], 8, rngs),
                layers.linear(8, C, rngs),
            )

        def __call__(self, x, train=False):
            h = self.inner(x)
            return h + self.auxiliary(h).sum() if train else h

    model = models.model(
        lambda shape, classes, rngs: nets.Net(Body(rngs), layers.linear(8, C, rngs)),
        toy.SHAPE,
        C,
    )
    found = nnx_model.layer_order(
        model, jax.ShapeDtypeStruct((1, *toy.SHAPE), jnp.float32)
    )
    assert [list(layer) for layer in found] == [[("body", "inner")], [("head",)]]


@pytest.mark.parametrize(
    "name", ["lenet_bn", toy.slow("resnet18"), "cnn_dva", toy.slow("shufflenet")]
)
def test_the_order_of_layers_does_not_depend_on_the_type_of_computation(name):
    """In bfloat16 all parameters are cast first, in the order of their names."""
    shape = (28, 28, 1) if name == "lenet_bn" else (32, 32, 3)
    x = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    made = [
        models.model(name, shape, 10, compute_dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]
    assert nnx_model.layer_order(made[0], x) == nnx_model.layer_order(made[1], x)


@pytest.mark.parametrize("whole", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize(
    "cast", [lambda x: x, jax.jit(lambda x: x.astype(jnp.bfloat16))]
)
def test_layers_within_jit_and_remat_are_in_their_order(whole, cast):
    class Body(nnx.Module):
        def __init__(self, rngs):
            self.zfirst, self.asecond = (
                layers.linear(6, 5, rngs),
                layers.linear(5, 4, rngs),
            )

        def __call__(self, x):
            run = whole(lambda a, b, x: jnp.tanh(jnp.tanh(x @ a) @ b))
            second, first = (
                cast(self.asecond.kernel[...]),
                cast(self.zfirst.kernel[...]),
            )
            return run(first, second, x)

    net = models.model(
        lambda input_shape, c, rngs: nets.Net(Body(rngs), layers.linear(4, c, rngs)),
        (6,),
        C,
    )
    found = nnx_model.layer_order(net, jax.ShapeDtypeStruct((1, 6), jnp.float32))
    assert [next(iter(layer)) for layer in found][:3] == [
        ("body", "zfirst"),
        ("body", "asecond"),
        ("head",),
    ]


@pytest.mark.parametrize(
    "names, hparams, message",
    [
        (
            ("cnn1", "cnn2"),
            {"shared": "conv"},
            r"body/convs/1/bias is \(32,\) in the first and \(16,\) in number 2",
        ),
        (
            ("cnn1", "cnn5"),
            {"shared": "upper"},
            r"body/dense/layers/0/bias is \(2000,\) .* or share less",
        ),
        (
            ("cnn1", "lenet"),
            {},
            r"head/kernel is \(500, 10\) .* and \(84, 10\) .* one feature width",
        ),
        (("mlp",), {"shared": "conv"}, "shared=conv needs networks with convolutions"),
        (("cnn1", "mlp"), {"shared": "conv1+head"}, "needs networks with convolutions"),
        (("mlp",), {"upper_layers": -1}, "`upper_layers` must be in"),
        (("mlp",), {"shared": "body"}, "Unknown shared 'body'"),
    ],
)
def test_what_cannot_be_shared_is_said_in_one_sentence(names, hparams, message):
    with pytest.raises(InputError, match=message):
        shared_size(images((32, 32, 3), *names), **hparams)


@pytest.mark.slow  # which layers those are is above
def test_convolutions_of_a_federation_are_shared():
    """Clients whose networks differ above the convolution; the input is an image of
    products of the features."""

    def net(width):
        def build(input_shape, num_classes, rngs):
            body = nets.Conv("tiny", input_shape, (2,), (0,), (width,), rngs)
            return nets.Net(body, layers.linear(width, num_classes, rngs))

        return models.model(build, (6, 6, 1), C)

    image = lambda x: x[:, :, None, None] * x[:, None, :, None] / 4
    task = toy.task(models=(net(8), net(12)), architecture=MIXED, prepare=image)
    got = train(task, shared="conv")
    assert (
        list(got.state.server) == ["body"]
        and trees.size(got.state.server) == 25 * 2 + 2
    )
    assert trees.sq_dist(got.state.server, got.begin.server) > 1e-4
    assert got.metrics.loss[-1].mean() < got.metrics.loss[0].mean()


@pytest.mark.slow  # the contract: the head alone is sent
def test_nothing_of_another_client_reaches_the_body_within_the_round():
    f = toy.federation()
    other = np.asarray(f.train.index[3][: toy.SIZES[3]])
    changed = f._replace(
        examples=f.examples._replace(x=f.examples.x.at[other].multiply(-3))
    )
    mine = lambda rounds, data: toy.rows(
        train(rounds=rounds, federation_=data).state.clients, 0
    )
    assert_same(mine(1, changed), mine(1, f))
    assert trees.sq_dist(mine(2, changed), mine(2, f)) > 1e-8
