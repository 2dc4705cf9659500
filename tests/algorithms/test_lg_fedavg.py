"""LG-FedAvg: the head is shared, between which architectures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import N, assert_same

from fedjax_pfl import models, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError

KEY = jax.random.key(5)
MLP = toy.task()


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
