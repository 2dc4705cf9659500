"""Cached features of a frozen body: the numbers of training on the examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import models, simulate
from fedjax_pfl.data import datasets, federate, partitioners
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import features

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3
    x = rng.normal(size=(120, *toy.SHAPE)) + y[:, None]
    return datasets.from_arrays(x.astype(np.float32), y)


def task_of(data, partition, model, **options):
    given = {"lr": 0.1, "batch_size": 8, "bn_stats": "aggregate"} | options
    return simulate.task(data, partition, model, **given)


def scores(task, data, partition, method):
    program = simulate.program(method, task, width=2, checked=False)
    f = federate.federate(data, partition)
    return [
        (r.pre, None if r.metrics is None else r.metrics.loss)
        for r in simulate.rounds(program, KEY, f, rounds=2)
    ]


@pytest.mark.parametrize("method", ["fedper", toy.slow("fedavg"), toy.slow("ditto")])
def test_cached_features_give_the_same_numbers(data, method):
    partition = partitioners.partition(data, "iid", num_clients=4, seed=0)
    net = models.adapted(toy.norm_net, models.head(), toy.SHAPE, 3)
    task = task_of(data, partition, net)
    other, small, _ = features.cached(task, data, batch=16)
    assert small.x.shape == (120, 8) and other.model.frozen is None
    assert (
        simulate.with_frozen(federate.federate(small, partition), other).frozen is None
    )
    pairs = zip(
        scores(task, data, partition, method),
        scores(other, small, partition, method),
        strict=True,
    )
    for wanted, found in pairs:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            found,
            wanted,
        )


def test_bfloat16_features_take_half_the_memory(data):
    partition = partitioners.partition(data, "iid", num_clients=4, seed=0)
    net = models.adapted(toy.tiny_mlp, models.head(), toy.SHAPE, 3)
    task = task_of(data, partition, net)
    made = [features.cached(task, data, dtype=d)[1].x for d in ("float32", "bfloat16")]
    assert made[0].nbytes == 2 * made[1].nbytes
    assert np.allclose(made[0], made[1].astype(np.float32), rtol=1e-2, atol=1e-2)


def test_what_excludes_cached_features(data):
    partition = partitioners.partition(data, "iid", num_clients=4, seed=0)
    make = lambda net, how: models.adapted(net, how, toy.SHAPE, 3)
    head = make(toy.tiny_mlp, models.head())
    cases = {
        "head alone": {"model": make(toy.tiny_mlp, models.bias())},
        "augmentation": {"model": head, "augment": lambda key, x: x},
        "dropout": {"model": make(toy.drop_net, models.head())},
    }
    for words, options in cases.items():
        task = task_of(data, partition, **options)
        with pytest.raises(InputError, match=words):
            features.cached(task, data)


def test_labels_per_position_keep_their_axis():
    net = models.adapted(
        "transformer",
        models.head(),
        (5,),
        4,
        input_dtype=jnp.int32,
        vocabulary=9,
        positions=5,
    )
    x = np.random.default_rng(0).integers(1, 9, (3, 5)).astype(np.int32)
    h = features.extractor(net, lambda x: x, 2)(x)
    assert h.shape == (3, 5, 64)
    v = net.init(KEY)
    alone = features.head_only(net, positions=True)
    np.testing.assert_allclose(
        alone.apply(v, jnp.asarray(h))[0], net.apply(v, x)[0], rtol=1e-4, atol=1e-5
    )
