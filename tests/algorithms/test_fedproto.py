"""FedProto: prototypes are class means, and pull only the examples of known classes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import OWN, C, N, assert_close, assert_same

from fedjax_pfl.algorithms.fedproto import fedproto
from fedjax_pfl.algorithms.prototypes import predictor
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import State

TASK = toy.task()


@functools.cache
def train(rounds=3, **hparams):
    return toy.train("fedproto", TASK, rounds, **hparams)


def class_means(w, id, model=TASK.model):
    """A client's prototypes [K, C], example by example."""
    f, found = toy.federation(), np.zeros((8, C))
    rows = np.asarray(f.train.index[id][: f.train.size[id]])
    h = np.asarray(model.features(w, f.examples.x)[0])
    for label in set(np.asarray(f.examples.y)[rows]):
        found[:, label] = np.mean(
            [h[i] for i in rows if f.examples.y[i] == label], axis=0
        )
    return found


def alone(id):
    """A federation in which only this client has training examples."""
    f, only = toy.federation(), jnp.arange(N) == id
    return f._replace(
        train=f.train._replace(size=f.train.size * only),
        class_counts=f.class_counts * only[:, None],
    )


@pytest.mark.slow  # the pull and the rest are in the rounds by hand
def test_without_pull_it_is_local():
    got, expected = train(lam=0.0), toy.train("local", TASK)
    assert_close(got.state.clients, expected.state.clients)
    assert_same(got.last["acc"], expected.last["acc"])
    assert_close(got.metrics.loss, expected.metrics.loss)


@pytest.mark.parametrize("net", ["mlp", toy.slow("norm")])
def test_prototypes_are_means_over_clients_of_means_over_examples(net):
    """Returns means of features, normalised by running statistics."""
    task, counts = toy.task(net), np.asarray(toy.federation().class_counts)
    state = toy.train("fedproto", task, 1).state
    means = [class_means(toy.rows(state.clients, i), i, task.model) for i in range(N)]
    share = counts > 0
    assert_close(
        np.asarray(state.server["proto"]),
        np.einsum("nkc,nc->kc", means, share / share.sum(axis=0)),
        1e-5,
    )
    assert state.server["known"].all()


def test_prototypes_of_a_single_client_are_its_own_and_the_others_stay():
    before = train().state
    server, clients = toy.train(
        "fedproto", TASK, 1, federation_=alone(0), begin=before
    ).state.method
    held, missing = list(OWN[0]), [label for label in range(C) if label not in OWN[0]]
    w = toy.rows(clients, 0)
    assert_close(np.asarray(server["proto"])[:, held], class_means(w, 0)[:, held], 1e-5)
    assert_same(server["proto"][:, missing], before.server["proto"][:, missing])


def test_only_examples_of_known_classes_are_pulled():
    # nothing is known yet
    assert_same(train(1, lam=100.0).state.clients, train(1, lam=0.0).state.clients)
    start = train(1).state
    half = State({**start.server, "known": jnp.arange(C) < 3}, start.clients)
    free, pulled = (
        toy.train("fedproto", TASK, 1, begin=half, lam=lam).state.clients
        for lam in (0.0, 1.0)
    )
    assert_same(toy.rows(free, 2), toy.rows(pulled, 2))  # client 2 has class 3 only
    assert np.abs(free["head"]["kernel"] - pulled["head"]["kernel"])[0].max() > 1e-3


@pytest.mark.slow
def test_the_nearest_known_prototype_wins():
    rng = np.random.default_rng(0)
    w, x = (
        TASK.model.init(jax.random.key(3)),
        rng.normal(size=(20, *toy.SHAPE)).astype(np.float32),
    )
    proto, known = (
        np.abs(rng.normal(size=(8, C))).astype(np.float32),
        np.array([True, False, True, True]),
    )
    outputs = predictor(
        TASK.model, w, {"proto": jnp.asarray(proto), "known": jnp.asarray(known)}
    )(x, np.ones(20, bool))
    h, logits = np.asarray(TASK.model.features(w, x)[0]), TASK.model.apply(w, x)[0]
    away = np.where(known, np.sum((h[:, :, None] - proto[None]) ** 2, axis=1), np.inf)
    assert_same(np.argmax(outputs[..., 1], axis=1), np.argmin(away, axis=1))
    assert_same(outputs[..., 0], logits)


def test_nothing_comes_down_before_there_are_prototypes():
    sent = train().metrics.traffic
    counts = np.array([len(own) for own in OWN])
    np.testing.assert_array_equal(sent.down, [[0] * N, [8 * C] * N, [8 * C] * N])
    np.testing.assert_array_equal(sent.up[0], 8 * counts)
    np.testing.assert_array_equal(sent.ints[0], counts)
    np.testing.assert_array_equal(sent.messages, [[1] * N, [2] * N, [2] * N])


def test_two_rounds_by_hand():
    """In plain NumPy; in the second round some are absent, and one client never has
    examples."""
    f, (keys, states, _) = oracle.federation(), oracle.run(fedproto, TASK, lam=2.0)
    w = [oracle.variables(toy.rows(states[0].clients, i)) for i in range(N)]
    proto, known = np.zeros((C, 8)), np.zeros(C, bool)
    for t, here in enumerate(oracle.ROUNDS):
        found: dict = {label: [] for label in range(C)}
        for i in here:
            for ((x, y),) in oracle.batches(f, i, keys[t], TASK):
                h, z = oracle.forward(w[i], x)
                step = oracle.backward(w[i], x, oracle.by_logits(z, y))
                dh = 2.0 * 2 * known[y][:, None] * (h - proto[y]) / 8 / len(y) * (h > 0)
                step[0], step[1] = step[0] + x.T @ dh, step[1] + dh.sum(axis=0)
                w[i] = [a - 0.1 * g for a, g in zip(w[i], step, strict=True)]
            rows = np.asarray(f.train.index[i][: f.train.size[i]])
            h, y = (
                oracle.forward(w[i], np.asarray(f.examples.x)[rows])[0],
                np.asarray(f.examples.y)[rows].tolist(),
            )
            pairs = list(zip(h, y, strict=True))
            for label in {label for _, label in pairs}:
                own = [h for h, k in pairs if k == label]
                found[label].append(np.mean(own, axis=0))
        for label, means in found.items():
            if means:
                proto[label], known[label] = np.mean(means, axis=0), True
        assert_close(
            np.asarray(states[t + 1].server["proto"]), np.float32(proto.T), 2e-5
        )
        assert_same(states[t + 1].server["known"], known)
        for i in range(N):
            oracle.close(toy.rows(states[t + 1].clients, i), w[i])


def test_different_widths_are_refused():
    several = toy.task(
        models=(TASK.model, toy.task("linear").model), architecture=np.arange(N) % 2
    )
    with pytest.raises(
        InputError, match=r"one feature width K in all architectures, not \[6, 8\]"
    ):
        fedproto(several)
