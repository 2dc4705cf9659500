"""Natural partitions: a client per value of a column."""

import numpy as np
import pytest

from fedjax_pfl.data import datasets, partitioners
from fedjax_pfl.errors import InputError


def grouped(sizes, num_train=None):
    """A data set whose column `user` has values of these sizes."""
    user = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    x, y = np.zeros((len(user), 2), np.float32), np.arange(len(user)) % 2
    data = datasets.from_arrays(x, y)
    return data._replace(num_train=num_train or len(user), columns={"user": user})


def owners(data, p):
    """The values of each client, and how many examples."""
    user = data.columns["user"]
    rows = [
        np.append(p.train[i][:n], p.test[i][:m])
        for i, (n, m) in enumerate(zip(p.train_sizes, p.test_sizes, strict=True))
    ]
    return [(set(user[r].tolist()), len(r)) for r in rows]


def test_each_client_is_one_value_with_the_minimum():
    data = grouped([9, 1, 6, 4])
    p = partitioners.partition(data, "natural:user", num_clients=None, seed=0)
    assert owners(data, p) == [({0}, 9), ({2}, 6), ({3}, 4)]
    p = partitioners.partition(
        data, "natural:user", num_clients=None, seed=0, min_size=5
    )
    assert owners(data, p) == [({0}, 9), ({2}, 6)]
    p = partitioners.partition(data, "natural:user", num_clients=2, seed=1)
    assert len(p.train) == 2


def test_more_clients_than_values_share_them():
    data = grouped([10, 9])
    p = partitioners.partition(data, "natural:user", num_clients=4, seed=0)
    assert owners(data, p) == [({0}, 5), ({1}, 5), ({0}, 5), ({1}, 4)]
    rows = np.concatenate([p.train[i][:n] for i, n in enumerate(p.train_sizes)])
    assert len(set(rows.tolist())) == len(rows)
    with pytest.raises(
        InputError, match="must be at most 2 or the values larger: client 2 has 1"
    ):
        partitioners.partition(data, "natural:user", num_clients=16, seed=0)


def test_the_official_test_set_is_divided_by_the_column_too():
    data = grouped([20, 20, 20], num_train=40)
    p = partitioners.partition(
        data, "natural:user", num_clients=None, seed=0, test_split="official"
    )
    user = data.columns["user"]
    for i in range(3):
        train, test = p.train[i][: p.train_sizes[i]], p.test[i][: p.test_sizes[i]]
        assert (train < 40).all() and (test >= 40).all()
        assert set(user[train]) == set(user[test]) == {i}


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(InputError, match="user"):
        partitioners.partition(grouped([4, 4]), "natural:usr", num_clients=2, seed=0)
    with pytest.raises(InputError, match="value of at least 8 examples"):
        partitioners.partition(
            grouped([4, 4]), "natural:user", num_clients=2, seed=0, min_size=8
        )


@pytest.mark.parametrize("missing", [np.nan, None, ""])
def test_every_example_has_a_value(missing):
    data = grouped([10, 9])
    user = np.array([missing, *"abababababababababab"[:18]], object)
    with pytest.raises(InputError, match="user has no value of some examples"):
        partitioners.partition(
            data._replace(columns={"user": user}), "natural:user", num_clients=2, seed=0
        )
