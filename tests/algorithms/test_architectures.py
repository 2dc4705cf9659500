"""Methods whose clients may be of several architectures: grouping does not matter, and
mixed federations learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import N, assert_close, assert_same

from fedjax_pfl import models, trees

METHODS = ("fedproto", "fd", "fml", "fedkd", "fedapen")
OF = np.array([0, 1, 0, 1, 0])


def by_id(metrics):
    """What is known of the clients, by id: places of several architectures are grouped
    and padded."""
    order = [np.argsort(ids)[:N] for ids in metrics.ids]
    take = lambda x: np.stack([row[i] for row, i in zip(x, order, strict=True)])
    return jax.tree.map(
        take, (metrics.loss, metrics.post, metrics.clients, metrics.traffic)
    )


@pytest.mark.slow  # the contract has a round of each
@pytest.mark.parametrize("method", METHODS)
def test_grouping_does_not_matter(method):
    one = toy.task()
    two = toy.task(models=one.models * 2, architecture=OF)
    got, expected = (toy.train(method, task, 2) for task in (two, one))
    assert_close(got.state.server, expected.state.server, 1e-5)
    assert_close(by_id(got.metrics), by_id(expected.metrics), 1e-5)
    assert_same(got.last, expected.last)


# one feature width and two; FedProto refuses two, see its own tests
MIXED = [
    *((method, "norm") for method in METHODS),
    *((method, "linear") for method in METHODS if method != "fedproto"),
]


@pytest.mark.slow  # eight rounds; the contract has two architectures
@pytest.mark.parametrize("method, other", MIXED)
def test_architectures_mix(method, other):
    task = toy.task(models=(toy.task().model, toy.task(other).model), architecture=OF)
    got = toy.train(method, task, 8)
    loss = got.metrics.loss.mean(axis=1)
    # from the second round on, when there is something to learn from the others
    assert loss[-1] < loss[1]
    assert got.metrics.finite.all() and np.mean(got.last["acc_present"]) > 0.75


@pytest.mark.slow  # test_zoo.py trains a padded network beside its own
def test_padded_clients_of_one_architecture_train_as_grouped_ones():
    """FedProto of CNN-2 and CNN-5 in two groups, and of one group of CNN-1 that holds
    both, padded."""
    shape, of = (16, 16, 1), np.array([0, 1, 1, 0, 1])
    # No two pixels alike: where a max pool sees a tie, rounding decides where its
    # gradient goes.
    pixels = (
        np.random.default_rng(0).normal(size=(*toy.SHAPE, 16 * 16)).astype(np.float32)
    )
    small = {"prepare": lambda x: jnp.tanh(x @ pixels).reshape(-1, *shape), "epochs": 1}

    def task(make, *names, architecture=of):
        return toy.task(
            models=tuple(make(name, shape, toy.C) for name in names),
            architecture=architecture,
            **small,
        )

    grouped = toy.train("fedproto", task(models.model, "cnn2", "cnn5"), 2)
    padded = jax.device_get(
        toy.train("fedproto", task(models.pad_to_superset, "cnn2", "cnn5"), 0).begin
    )
    rows = jax.tree.map(
        lambda a, b: np.where(
            trees.expand(of == 0, a.ndim), a[[0, 0, 0, 1, 1]], b[[0, 0, 1, 1, 2]]
        ),
        *padded.clients.trees,
    )
    one = task(models.model, "cnn1", architecture=np.zeros(N, int))
    whole = toy.train(
        "fedproto",
        one,
        2,
        begin=jax.tree.map(jnp.asarray, padded._replace(clients=rows)),
    )
    assert_close(whole.state.server, grouped.state.server, 1e-5)
    assert_close(by_id(whole.metrics), by_id(grouped.metrics), 1e-5)
    assert_same(whole.last, grouped.last)
    # it is the padded network
    assert trees.size(whole.state.clients) > 1.3 * trees.size(grouped.state.clients)
