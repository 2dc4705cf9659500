"""The properties of sheet 27: Privacy-pFedC is pFedC, and the server keeps and reads
nothing of a branch."""

import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import assert_close, assert_same

from fedjax_pfl import simulate
from fedjax_pfl.algorithms import privacy_pfedc as factory
from fedjax_pfl.algorithms.pfedc import encryption
from fedjax_pfl.errors import InputError

TASK = toy.task()
BODY, HEAD, T = 6 * 8 + 8, 8 * toy.C + toy.C, toy.C


@pytest.fixture
def tenseal():
    return pytest.importorskip(
        "tenseal",
        reason="TenSEAL is not there: pip install -e '.[privacy]'",
        exc_type=ImportError,
    )


@pytest.fixture
def wire(tenseal, monkeypatch):
    """The two parties and all that passes between them; `alter` changes a sum once the
    clients have decrypted it."""
    clients, server = encryption.parties()
    log = SimpleNamespace(
        vectors=[],
        uploads=[],
        answers=[],
        received=[],
        totals=[],
        alter=lambda total: total,
    )

    def encrypt(vector):
        log.vectors.append(np.array(vector))
        return clients.encrypt(vector)

    def add(uploads):
        log.uploads.append(list(uploads))
        log.answers.append(server.add(log.uploads[-1]))
        return log.answers[-1]

    def decrypt(ciphertexts):
        log.received.append(ciphertexts)
        log.totals.append(clients.decrypt(ciphertexts))
        return log.alter(log.totals[-1])

    pair = SimpleNamespace(encrypt=encrypt, decrypt=decrypt), SimpleNamespace(add=add)
    monkeypatch.setattr(encryption, "parties", lambda: pair)
    return log


def unpacked(vector):
    """The kernel [8, C], the bias [C] and the presence indicators, or holder counts,
    [T] of a packed vector."""
    bias, kernel, presence = np.split(vector, [toy.C, HEAD])
    return kernel.reshape(8, toy.C), bias, presence


@functools.cache
def train(method, **hparams):
    return toy.train(method, TASK, 5, **hparams)


@pytest.mark.slow
def test_plain_is_pfedc():
    got, expected = train("privacy_pfedc", backend="plain"), train("pfedc")
    others = {"traffic": None, "clients": {"tasks": expected.metrics.clients["tasks"]}}
    assert_close(
        got.metrics._replace(**others), expected.metrics._replace(**others), 1e-5
    )
    assert_close(got.last, expected.last)
    assert_close(got.state.server["body"], expected.state.server["body"])
    # holders have the bank's branches, and the others are as they started
    for i, own in enumerate(toy.OWN):
        column = lambda part, c, i=i: got.state.clients["head"][part][i, ..., c]
        for c in range(toy.C):
            bank = expected.state.server["head" if c in own else "start"]
            for part in ("kernel", "bias"):
                np.testing.assert_allclose(
                    column(part, c), bank[part][..., c], rtol=1e-5, atol=1e-6
                )


def test_plain_counts_the_packed_vector():
    sent = train("privacy_pfedc", backend="plain").metrics.traffic
    np.testing.assert_array_equal(sent.down, BODY + HEAD + T)
    assert (
        sent.encrypted is None
        and np.all(sent.up == sent.down)
        and np.all(sent.messages == 2)
    )


def test_encrypted_is_plain_after_five_rounds(tenseal):
    got, expected = (
        train("privacy_pfedc", backend=backend) for backend in ("ckks", "plain")
    )
    assert_close(got.state, expected.state, 1e-5)
    assert_close(
        (got.metrics.loss, got.metrics.post),
        (expected.metrics.loss, expected.metrics.post),
        1e-5,
    )


def test_encrypted_runs_are_alike_bit_for_bit(tenseal):
    again = toy.train("privacy_pfedc", TASK, 5, backend="ckks")
    assert_same(again.state, train("privacy_pfedc", backend="ckks").state)


def test_bytes_on_the_wire_are_counted_and_say_nothing_of_the_holders(tenseal):
    metrics = train("privacy_pfedc", backend="ckks").metrics
    sent = metrics.traffic
    one = len(encryption.parties()[0].encrypt(np.zeros(HEAD + T))[0])
    for each in (
        metrics.clients["encrypted_up"],
        metrics.clients["encrypted_down"],
    ):  # clients hold 1, 2 or 4 of the classes
        np.testing.assert_allclose(each, one, rtol=1e-2)
    np.testing.assert_array_equal(
        sent.encrypted,
        metrics.clients["encrypted_up"] + metrics.clients["encrypted_down"],
    )
    np.testing.assert_array_equal((sent.down, sent.up), BODY)
    first = jax.tree.map(lambda x: x[0], metrics)
    row = simulate.record(simulate.Result(0, None, first, None), np.ones(toy.N))
    assert row["traffic/encrypted"] == first.traffic.encrypted.sum()
    assert row["encrypted_up"] == pytest.approx(one, rel=1e-2)


def test_what_the_server_keeps_has_no_branches_and_no_holders(tenseal):
    state = train("privacy_pfedc", backend="ckks").state
    assert set(state.server) == {"body", "stats"}
    assert sum(x.size for x in jax.tree.leaves(state.server)) == BODY


OTHERS = {
    "tasks": "consecutive:2",
    "head": "group_reject",
    "head_weighting": "data",
    "train": "all",
}


@pytest.mark.slow
def test_with_drop_outs_and_other_heads_it_is_stale_pfedc(tenseal):
    some = toy.task(participation=(0.2, 0.8))
    expected = toy.train("pfedc", some, 4, download="stale", **OTHERS)
    got = toy.train("privacy_pfedc", some, 4, backend="ckks", **OTHERS)
    assert_close(got.state.server["body"], expected.state.server["body"], 1e-5)
    assert_close(got.state.clients, expected.state.clients, 1e-5)
    on = got.metrics.active
    np.testing.assert_array_equal(got.metrics.traffic.encrypted > 0, on)
    assert not on.all() and len(set(on.sum(axis=1))) > 1


def test_the_server_adds_ciphertexts_only_and_the_heads_are_what_the_clients_decrypt(
    wire,
):
    """The altered sum has 1 more in every branch and twice the holders: the heads must
    follow, if they come from it."""
    wire.alter = lambda total: total + np.where(np.arange(len(total)) < HEAD, 1, total)
    heads = toy.train("privacy_pfedc", TASK, 1, backend="ckks").state.clients["head"]
    (uploads,), (total,) = wire.uploads, wire.totals
    assert len(uploads) == toy.N and all(
        type(part) is bytes for sent in uploads for part in sent
    )
    assert wire.received == wire.answers
    holds = np.array([[c in own for c in range(toy.C)] for own in toy.OWN])
    assert np.shape(wire.vectors) == (toy.N, HEAD + T) and total.shape == (HEAD + T,)
    for vector, here in zip(wire.vectors, holds, strict=True):
        kernel, bias, presence = unpacked(vector)
        np.testing.assert_array_equal(presence, here)
        np.testing.assert_array_equal(
            (np.all(kernel != 0, axis=0), bias != 0), (here, here)
        )
    kernel, bias, holders = unpacked(total)
    np.testing.assert_array_equal(holders, holds.sum(axis=0))
    for i, c in zip(*np.nonzero(holds), strict=True):
        for part, summed in (("kernel", kernel), ("bias", bias)):
            expected = (summed[..., c] + 1) / (2 * holders[c])
            np.testing.assert_allclose(
                heads[part][i][..., c], expected, rtol=1e-6, atol=1e-7
            )


def one_holder():
    """The toy federation with client 2 left as the one holder of class 3."""
    f = toy.federation()
    rows = np.asarray(f.train.index[4][: int(f.train.size[4])])
    y = np.array(f.examples.y)
    y[rows[y[rows] == 3]] = 0
    counts = np.array(f.class_counts)
    counts[4] = np.bincount(y[rows], minlength=toy.C)
    return f._replace(
        examples=f.examples._replace(y=jnp.asarray(y)), class_counts=jnp.asarray(counts)
    )


def test_the_branch_of_a_single_holder_comes_back_unchanged(wire):
    for backend in ("ckks", "plain"):
        got = toy.train(
            "privacy_pfedc", TASK, 1, federation_=one_holder(), backend=backend
        )
        head, (kernel, bias, presence) = (
            got.state.clients["head"],
            unpacked(wire.vectors[2]),
        )
        np.testing.assert_array_equal(presence, [0, 0, 0, 1])
        for back, sent in (
            (head["kernel"][2, :, 3], kernel[:, 3]),
            (head["bias"][2, 3], bias[3]),
        ):
            assert np.all(np.abs(sent) > 0)
            # what is below the grid is lost
            np.testing.assert_allclose(back, sent, rtol=0, atol=encryption.GRID / 2)


@pytest.mark.slow
def test_without_division_a_branch_grows_by_its_holders_in_every_round(wire):
    """Algorithm 2 to the letter, by clients that read 1 for every count of holders, and
    as it is built."""
    still = toy.task(epochs=0)
    run = lambda: toy.train(
        "privacy_pfedc", still, 3, federation_=one_holder(), backend="ckks"
    )
    divided = run()
    wire.alter = lambda total: np.where(np.arange(len(total)) < HEAD, total, 1)
    literal = run().state.clients["head"]
    held = np.asarray(one_holder().class_counts) > 0
    growth = np.where(held, held.sum(axis=0) ** 3, 1)  # [N, C]
    assert set(growth[held]) == {1, 27}
    for part, start in divided.begin.clients["head"].items():
        times = growth.reshape(toy.N, *[1] * (start.ndim - 2), toy.C)
        np.testing.assert_allclose(
            divided.state.clients["head"][part], start, rtol=1e-6, atol=encryption.GRID
        )
        np.testing.assert_allclose(
            literal[part], times * start, rtol=1e-6, atol=27 * encryption.GRID
        )


def test_without_tenseal_the_method_is_refused_before_it_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(InputError, match="privacy"):
        factory(TASK)
    with pytest.raises(InputError, match="backend"):
        factory(TASK, backend="aes")
