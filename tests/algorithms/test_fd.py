"""FD: every client learns from the mean predictions of the others, and never from its
own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import OWN, C, N, assert_close, assert_same

from fedjax_pfl import local_training
from fedjax_pfl.algorithms.fd import fd, teacher
from fedjax_pfl.types import Data, Examples

TASK, KEY = toy.task(), jax.random.key(5)
HAS = np.array([[label in own for label in range(C)] for own in OWN])


@functools.cache
def train(rounds=3, **hparams):
    return toy.train("fd", TASK, rounds, **hparams)


def received(tables, holds, took, id, before=None):
    """(G, known) of client `id`, from all clients' tables F [N, C, L] and which of the
    L labels each holds, [N, L]."""
    tables, sends = (
        np.asarray(tables, np.float32),
        np.asarray(holds) & np.asarray(took)[:, None],
    )
    count = sends.sum(axis=0)
    mean = np.einsum("ncl,nl->cl", tables, sends) / np.maximum(count, 1)
    server = {
        "mean": mean.astype(np.float32),
        "count": count.astype(np.int32),
        "took": np.asarray(took),
    }
    mine = (
        {"table": np.zeros_like(tables[0]), "known": np.zeros(tables.shape[2], bool)}
        if before is None
        else before
    )
    return teacher(
        jax.tree.map(jnp.asarray, server),
        {**mine, "own": tables[id]},
        id,
        jnp.asarray(holds[id]) * 3,
    )


def test_leave_one_out_by_hand():
    tables = np.array([[[0.8], [0.2]], [[0.6], [0.4]], [[0.7], [0.3]]])
    holds = np.ones((3, 1), bool)
    for id, expected in enumerate(([0.65, 0.35], [0.75, 0.25], [0.7, 0.3])):
        table, known = received(tables, holds, [True] * 3, id)
        assert_close(table[:, 0], np.float32(expected))
        assert known.all()
    # who was absent has nothing to leave out
    table, _ = received(tables, holds, [False, True, True], 0)
    assert_close(table[:, 0], np.float32([0.65, 0.35]))


@pytest.mark.slow
def test_two_clients_receive_each_others_tables():
    tables = (
        np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 3)).transpose(0, 2, 1)
    )
    for id in (0, 1):
        assert_close(
            received(tables, np.ones((2, 3), bool), [True] * 2, id)[0],
            np.float32(tables[1 - id]),
        )


@pytest.mark.slow
def test_a_class_that_nobody_else_sent_keeps_what_was_known():
    tables = (
        np.random.default_rng(0).dirichlet(np.ones(2), size=(2, 2)).transpose(0, 2, 1)
    )
    holds = np.array([[True, True], [False, True]])
    assert_same(received(tables, holds, [True] * 2, 0)[1], np.array([False, True]))
    before = {
        "table": np.full((2, 2), 0.5, np.float32),
        "known": np.array([True, True]),
    }
    table, known = received(tables, holds, [True, False], 0, before)
    assert_same(table, before["table"])
    assert known.all()


@pytest.mark.slow  # as the rounds by hand
def test_without_the_others_predictions_it_is_local():
    got, expected = train(gamma=0.0), toy.train("local", TASK)
    assert_close(got.state.clients["w"], expected.state.clients)
    assert_same(got.last, expected.last)


@pytest.mark.slow
def test_columns_are_distributions():
    state = train().state
    own, table = (
        np.asarray(state.clients[name]).sum(axis=1) for name in ("own", "table")
    )
    np.testing.assert_allclose(own, HAS, atol=1e-6)
    np.testing.assert_allclose(table, np.asarray(state.clients["known"]), atol=1e-5)
    np.testing.assert_allclose(
        np.asarray(state.server["mean"]).sum(axis=0), 1, atol=1e-6
    )


def test_a_class_of_one_client_is_never_known_to_it():
    f = toy.federation()
    # class 3 is then said to be client 2's alone
    single = f._replace(class_counts=f.class_counts.at[4, 3].set(0))
    known = np.asarray(toy.train("fd", TASK, federation_=single).state.clients["known"])
    assert not known[2, 3] and known[[0, 1, 3, 4], 3].all()


@pytest.mark.slow
def test_tables_follow_a_permutation_of_the_classes():
    order = np.array([2, 0, 3, 1])  # class i becomes class order[i]
    f, w = toy.federation(), TASK.model.init(KEY)
    renamed = {
        **w,
        "head": jax.tree.map(lambda x: x[..., np.argsort(order)], w["head"]),
    }

    def table(w, y):
        data = Data(
            Examples(f.examples.x, y), f.train.index[4], f.train.size[4], TASK.prepare
        )
        soft = lambda batch: jax.nn.softmax(TASK.model.apply(w, batch.x)[0])
        return np.asarray(local_training.class_means(data, soft, C, 3))

    before, after = (
        table(w, f.examples.y),
        table(renamed, jnp.asarray(order)[f.examples.y]),
    )
    assert_close(after[np.ix_(order, order)], before)


def test_only_columns_that_another_client_has_sent_come_down():
    """In round 0 nobody has; afterwards every class is held by another client, too."""
    down = train().metrics.traffic.down
    assert not down[0].any() and (down[1:] == C * C).all()


def test_two_rounds_by_hand():
    """In plain NumPy; in the second round some are absent, and one client never has
    examples."""
    f, (keys, states, _) = oracle.federation(), oracle.run(fd, TASK)
    w = [oracle.variables(toy.rows(states[0].clients["w"], i)) for i in range(N)]
    tables, known = np.zeros((N, C, C)), np.zeros((N, C), bool)  # [N, label, class]
    sent = {}  # of the last round: (client, label) -> its mean prediction
    for t, here in enumerate(oracle.ROUNDS):
        last, sent = sent, {}
        for i in here:
            for label in range(C):
                if others := [
                    p for (j, own), p in last.items() if own == label and j != i
                ]:
                    tables[i, label], known[i, label] = np.mean(others, axis=0), True
            for ((x, y),) in oracle.batches(f, i, keys[t], TASK):
                p = oracle.softmax(oracle.forward(w[i], x)[1])
                dz = (
                    p - np.eye(C)[y] + known[i, y][:, None] * (p - tables[i, y])
                ) / len(y)
                w[i] = [
                    a - 0.1 * g
                    for a, g in zip(w[i], oracle.backward(w[i], x, dz), strict=True)
                ]
            rows = np.asarray(f.train.index[i][: f.train.size[i]])
            p, y = (
                oracle.softmax(oracle.forward(w[i], np.asarray(f.examples.x)[rows])[1]),
                np.asarray(f.examples.y)[rows],
            )
            sent |= {
                (i, label): p[y == label].mean(axis=0) for label in set(y.tolist())
            }
        for i in range(N):
            oracle.close(toy.rows(states[t + 1].clients["w"], i), w[i])
    np.testing.assert_array_equal(
        states[2].server["took"], [False, True, False, False, True]
    )
