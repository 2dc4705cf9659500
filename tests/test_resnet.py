"""ResNet-18: its sizes, a narrow one against NumPy, forward and gradient, and which of
its leaves FedBN keeps."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx

from fedjax_pfl import models, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import MODELS, resnet

KEY = jax.random.key(0)
SIZES = [
    ("resnet18", 10, 11_173_962),
    ("resnet18", 26, 11_182_170),
    ("resnet18", 47, 11_192_943),
    ("resnet18", 100, 11_220_132),
    ("resnet18_gn", 10, 11_173_962),
    ("resnet18_50", 10, 11_168_832 + 512 * 50 + 50 + 50 * 10 + 10),
    ("resnet18_imagenet", 10, 11_181_642),
    ("resnet18_imagenet", 100, 11_227_812),
    ("resnet18_imagenet", 200, 11_279_112),
]


@functools.cache
def body(name):
    """The body's parameters and moments, as shapes."""
    net = nnx.eval_shape(lambda: MODELS[name]((64, 64, 3), 7, nnx.Rngs(0)))
    return [
        nnx.to_pure_dict(nnx.state(net.body, kind))
        for kind in (nnx.Param, nnx.BatchStat)
    ], net.head.in_features


def size(tree):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name, classes, expected", SIZES)
def test_sizes_are_the_papers(name, classes, expected):
    (params, moments), features = body(name)
    assert size(params) + features * classes + classes == expected
    assert size(moments) == (0 if name == "resnet18_gn" else 9_600)
    assert features == (50 if name == "resnet18_50" else 512)


def test_sizes_of_the_stages():
    (params, _), _ = body("resnet18")
    assert size(params["stem"]) + size(params["norm"]) == 1_856
    stages = [
        size(params["blocks"][i]) + size(params["blocks"][i + 1]) for i in (0, 2, 4, 6)
    ]
    assert stages == [147_968, 525_568, 2_099_712, 8_393_728]


def test_torchvisions_initialisation():
    """Normal with variance 2 / fan_out, where PyTorch's default is uniform."""
    kernel = resnet.resnet(
        (8, 8, 3), 2, nnx.Rngs(0), widths=(16,), stem="imagenet"
    ).body.stem.kernel[...]
    assert abs(kernel.std() / math.sqrt(2 / (49 * 16)) - 1) < 0.03
    assert jnp.abs(kernel).max() > 2 * kernel.std()  # sqrt(3) times it, if uniform


# --- against NumPy
# -----------------------------------------------------------------------------------------------


def conv(x, kernel, strides, padding):
    kh, kw, _, out = kernel.shape
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    height, width = (x.shape[1] - kh) // strides + 1, (x.shape[2] - kw) // strides + 1
    y = np.empty((len(x), height, width, out))
    for i in range(height):
        for j in range(width):
            seen = x[:, i * strides : i * strides + kh, j * strides : j * strides + kw]
            y[:, i, j] = np.tensordot(seen, kernel, 3)
    return y


class Reference:
    """A forward pass over valid rows in plain NumPy; `new` collects the running moments
    that training would leave."""

    def __init__(self, variables, mode):
        self.w, self.stats, self.mode, self.new = (
            variables["body"],
            variables["stats"],
            mode,
            {},
        )
        self.head = variables["head"]

    def norm(self, x, *path):
        w, stats, new = self.w, self.stats, self.new
        for key in path:
            w, stats, new = w[key], stats.get(key, {}), new.setdefault(key, {})
        if self.mode == "group":
            return self.group_norm(x, w["norm"])
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        if self.mode == "train":
            n = x.size // x.shape[-1]
            new["mean"] = 0.9 * stats["mean"] + 0.1 * mean
            new["var"] = 0.9 * stats["var"] + 0.1 * var * n / (n - 1)
        if self.mode == "running":
            mean, var = stats["mean"], stats["var"]
        return (x - mean) / np.sqrt(var + 1e-5) * w["scale"] + w["bias"]

    def group_norm(self, x, w):
        groups = np.split(x, math.gcd(32, x.shape[-1]), axis=-1)
        normed = [
            (g - g.mean((1, 2, 3), keepdims=True))
            / np.sqrt(g.var((1, 2, 3), keepdims=True) + 1e-5)
            for g in groups
        ]
        return np.concatenate(normed, axis=-1) * w["scale"] + w["bias"]

    def block(self, x, i, strides):
        w = self.w["blocks"][i]
        h = np.maximum(
            self.norm(conv(x, w["conv1"]["kernel"], strides, 1), "blocks", i, "norm1"),
            0,
        )
        h = self.norm(conv(h, w["conv2"]["kernel"], 1, 1), "blocks", i, "norm2")
        if strides != 1:
            x = self.norm(
                conv(x, w["shortcut"]["kernel"], strides, 0),
                "blocks",
                i,
                "shortcut_norm",
            )
        return np.maximum(h + x, 0)

    def logits(self, x, stem):
        strides, padding = {"cifar": (1, 1), "imagenet": (2, 3)}[stem]
        x = np.maximum(
            self.norm(conv(x, self.w["stem"]["kernel"], strides, padding), "norm"), 0
        )
        if stem == "imagenet":
            # with zeros, which are never above a ReLU's values
            x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            height, width = (x.shape[1] - 1) // 2, (x.shape[2] - 1) // 2
            pooled = [
                [
                    x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((1, 2))
                    for j in range(width)
                ]
                for i in range(height)
            ]
            x = np.moveaxis(np.array(pooled), 2, 0)
        for i, stride in enumerate((1, 1, 2, 1)):
            x = self.block(x, str(i), stride)
        layer = self.w["dense"]["layers"]["0"]
        h = np.maximum(x.mean((1, 2)) @ layer["kernel"] + layer["bias"], 0)
        return h @ self.head["kernel"] + self.head["bias"]


def narrow(input_shape, num_classes, rngs, **options):
    """Two stages, of which the second has stride 2 and a projection."""
    return resnet.resnet(
        input_shape, num_classes, rngs, widths=(2, 3), feature_dim=4, **options
    )


def random_variables(model):
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(model.init, KEY)
    draw = lambda x: rng.uniform(0.2, 1, x.shape) * rng.choice([-1, 1], x.shape)
    w = jax.tree.map(draw, shapes)
    return {**w, "stats": jax.tree.map(np.abs, w["stats"])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "stem, mode",
    [("cifar", "train"), toy.slow("imagenet", "batch"), toy.slow("cifar", "group")],
)
def test_a_narrow_net_and_its_gradient_are_numpys(stem, mode):
    """Four rows, one of them padding; the reference sees the three. Its gradient is a
    central difference."""
    rng = np.random.default_rng(0)
    shape, valid = ((5, 6, 2) if stem == "cifar" else (9, 8, 2)), np.array([0, 1, 3])
    x, target, mask = (
        rng.normal(size=(4, *shape)),
        rng.normal(size=(3, 3)),
        np.arange(4) != 2,
    )
    x[2] = 0
    net = functools.partial(
        narrow, stem=stem, norm="group" if mode == "group" else "batch"
    )
    with jax.enable_x64(True):
        model = models.model(
            net, shape, 3, bn_stats="batch" if mode == "batch" else "aggregate"
        )
        w = random_variables(model)

        @jax.jit
        def run(params, stats):
            def total(params):
                logits, new = model.apply(
                    {**params, "stats": stats}, x, mask, train=mode == "train"
                )
                return jnp.sum(logits[valid] * target), (logits, new)

            tested = (
                model.apply({**params, "stats": stats}, x, mask)[0]
                if mode == "train"
                else None
            )
            return *jax.value_and_grad(total, has_aux=True)(params), tested

        (_, (logits, new)), gradient, tested = run(
            {"body": w["body"], "head": w["head"]}, w["stats"]
        )

    reference = Reference(w, mode)
    np.testing.assert_allclose(
        np.asarray(logits)[valid],
        reference.logits(x[valid], stem),
        rtol=1e-9,
        atol=1e-9,
    )
    if mode == "train":
        toy.assert_close(new, reference.new, 1e-9)
        running = Reference(w, "running").logits(x[valid], stem)
        np.testing.assert_allclose(
            np.asarray(tested)[valid], running, rtol=1e-9, atol=1e-9
        )
    paths, tree = jax.tree_util.tree_flatten_with_path(
        {"body": w["body"], "head": w["head"]}
    )
    for k, ((path, leaf), slope) in enumerate(
        zip(paths, jax.tree.leaves(gradient), strict=True)
    ):
        direction = rng.normal(size=leaf.shape)
        ends = []
        for h in (1e-6, -1e-6):
            moved = [
                y + h * direction if i == k else y for i, (_, y) in enumerate(paths)
            ]
            moved = {**tree.unflatten(moved), "stats": w["stats"]}
            ends.append(np.sum(Reference(moved, mode).logits(x[valid], stem) * target))
        got, expected = (
            np.sum(np.asarray(slope) * direction),
            (ends[0] - ends[1]) / 2e-6,
        )
        np.testing.assert_allclose(
            got, expected, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path)
        )


# --- in a federation
# ---------------------------------------------------------------------------------------------


@functools.cache
def resnet18():
    return models.model("resnet18", (32, 32, 3), toy.C)


@pytest.mark.parametrize("bn_stats, scalars", [("aggregate", 9_600), ("local", 0)])
def test_fedbn_keeps_all_twenty_norms(bn_stats, scalars):
    """The three of the shortcuts too, which a search for names misses; what FedAvg
    sends of the moments follows."""
    task = toy.task(model=resnet18(), bn_stats=bn_stats)
    state, fedavg = (
        jax.eval_shape(ALGORITHMS[name](task).init, KEY) for name in ("fedbn", "fedavg")
    )
    own = {
        jax.tree_util.keystr(path[1:-1])
        for path, _ in jax.tree_util.tree_leaves_with_path(state.clients)
    }
    assert len(own) == 20 and sum("shortcut" in name for name in own) == 3
    assert len(jax.tree.leaves(state.clients)) == 80
    total = 11_168_832 + 512 * toy.C + toy.C
    assert trees.size(state.server) == total - 9_600
    assert trees.size(fedavg.server) == total + scalars


@pytest.mark.parametrize(
    "shape, options, message",
    [
        (
            (60,),
            {},
            r"needs images .* got input shape \(60,\)",
        ),
        ((8, 8, 1), {"norm": "batc"}, "did you mean 'batch'"),
        ((8, 8, 1), {"stem": "torch"}, "Choose one of cifar, imagenet"),
    ],
)
def test_bad_input(shape, options, message):
    with pytest.raises(InputError, match=message):
        models.model(functools.partial(resnet.resnet, **options), shape, 3)
