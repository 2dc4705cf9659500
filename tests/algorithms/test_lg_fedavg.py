"""LG-FedAvg: the head is shared, between which architectures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import C, N, assert_close, assert_same

from fedjax_pfl import architectures, models, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError

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


def shared_size(task):
    return trees.size(jax.eval_shape(ALGORITHMS["lg_fedavg"](task).init, KEY).server)


def test_the_size_of_the_head():
    five = images((32, 32, 3), *(f"cnn{k}" for k in range(1, 6)))
    assert shared_size(five) == 5_010


def test_heads_of_different_shapes_are_refused():
    message = r"head/kernel is \(500, 10\) .* and \(84, 10\) .* one feature width"
    with pytest.raises(InputError, match=message):
        shared_size(images((32, 32, 3), "cnn1", "lenet"))


@pytest.mark.slow  # as the reductions
def test_the_head_of_identical_clients_is_each_ones():
    f = toy.federation()
    same = lambda rows: type(rows)(*(trees.replicate(x[1], N) for x in rows))
    equal = f._replace(
        train=same(f.train), class_counts=trees.replicate(f.class_counts[1], N)
    )
    task = toy.task(batch_size=19)
    got, alone = (
        train(task, method=method, federation_=equal).state
        for method in ("lg_fedavg", "local")
    )
    assert_close(got.server["head"], trees.gather(alone.clients["head"], 0))
    assert_close(got.clients["body"], alone.clients["body"])


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


@pytest.mark.slow  # as the contract's rule `grouping`
def test_grouping_does_not_matter():
    model = MLP.models[0]
    two = toy.task(models=(model, model), architecture=MIXED)
    one, apart = train(), train(two)
    assert_close(apart.state.server["head"], one.state.server["head"])
    for group in (0, 1):
        members = architectures.members(two, group)
        mine = architectures.select(apart.state.clients, group)
        assert_close(mine, toy.rows(one.state.clients, members))


@pytest.mark.slow  # six rounds; the contract has two architectures
def test_bodies_of_different_structure_learn_under_one_head():
    task = toy.task(
        models=tuple(models.model(toy.NETS[n], toy.SHAPE, C) for n in ("mlp", "norm")),
        architecture=MIXED,
    )
    got = train(task, 6)
    assert got.metrics.loss[-1].mean() < got.metrics.loss[0].mean() - 0.2
    assert trees.size(got.state.server) == 8 * C + C
