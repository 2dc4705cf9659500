"""The properties of sheet 27: Privacy-pFedC is pFedC, and the server keeps and reads nothing of a branch."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import assert_close, assert_same

from experiments import report
from fedjax_pfl import encrypted, simulate
from fedjax_pfl.algorithms import privacy_pfedc as factory
from fedjax_pfl.checks import BadInput

TASK = toy.task()
QUICK = {"weighting": "uniform"}  # compiles in half the time; the contract's golden losses are those of the default
BODY, HEAD, T = 6 * 8 + 8, 8 * toy.C + toy.C, toy.C


@pytest.fixture
def tenseal():
    return pytest.importorskip(
        "tenseal", reason="TenSEAL is not there: pip install -e '.[privacy]'", exc_type=ImportError
    )


@functools.cache
def train(method, **hparams):
    return toy.train(method, TASK, 5, **QUICK, **hparams)


def test_plain_is_pfedc():
    got, expected = train("privacy_pfedc", backend="plain"), train("pfedc", comm="full")
    others = {name: x for name, x in expected.metrics.items() if name != "traffic"}
    assert_close({name: got.metrics[name] for name in others}, others, 1e-5)
    assert_close(got.last, expected.last)
    assert_close(got.state.server["body"], expected.state.server["body"])
    for i, own in enumerate(toy.OWN):  # holders have the bank's branches, and the others are as they started
        column = lambda part, c, i=i: got.state.clients["head"][part][i, ..., c]
        for c in range(toy.C):
            bank = expected.state.server["head" if c in own else "start"]
            for part in ("kernel", "bias"):
                np.testing.assert_allclose(column(part, c), bank[part][..., c], rtol=1e-5, atol=1e-6)


def test_plain_counts_the_packed_vector():
    sent = train("privacy_pfedc", backend="plain").metrics["traffic"]
    np.testing.assert_array_equal(sent.down, BODY + HEAD + T)
    assert sent.encrypted is None and np.all(sent.up == sent.down) and np.all(sent.messages == 2)


def test_encrypted_is_plain_after_five_rounds(tenseal):
    got, expected = (train("privacy_pfedc", backend=backend) for backend in ("ckks", "plain"))
    assert_close(got.state, expected.state, 1e-5)
    assert_close((got.metrics["loss"], got.metrics["post"]), (expected.metrics["loss"], expected.metrics["post"]), 1e-5)


def test_encrypted_runs_are_alike_bit_for_bit(tenseal):
    again = toy.train("privacy_pfedc", TASK, 5, backend="ckks", **QUICK)
    assert_same(again.state, train("privacy_pfedc", backend="ckks").state)


def test_bytes_on_the_wire_are_counted_and_say_nothing_of_the_holders(tenseal):
    metrics = train("privacy_pfedc", backend="ckks").metrics
    sent = metrics["traffic"]
    one = len(encrypted.parties()[0].encrypt(np.zeros(HEAD + T))[0])
    for each in (metrics["encrypted_up"], metrics["encrypted_down"]):  # clients hold 1, 2 or 4 of the classes
        np.testing.assert_allclose(each, one, rtol=1e-2)
    np.testing.assert_array_equal(sent.encrypted, metrics["encrypted_up"] + metrics["encrypted_down"])
    np.testing.assert_array_equal((sent.down, sent.up), BODY)
    first = jax.tree.map(lambda x: x[0], metrics)
    row = simulate.record(simulate.Result(0, None, first, None), np.ones(toy.N))
    assert row["traffic/encrypted"] == first["traffic"].encrypted.sum()
    assert row["encrypted_up"] == pytest.approx(one, rel=1e-2)
    totals = report.traffic([row, row])
    assert totals["bytes"] == 4 * (totals["down"] + totals["up"]) + 2 * row["traffic/encrypted"]


def test_what_the_server_keeps_has_no_branches_and_no_holders(tenseal):
    state = train("privacy_pfedc", backend="ckks").state
    assert set(state.server) == {"body", "stats"}
    assert sum(x.size for x in jax.tree.leaves(state.server)) == BODY


OTHERS = {"tasks": "consecutive:2", "head": "group_reject", "head_weighting": "data"} | QUICK


def test_with_drop_outs_other_heads_and_an_encrypted_body_it_is_stale_pfedc(tenseal):
    some = toy.task(participation=(0.2, 0.8))
    expected = toy.train("pfedc", some, 4, download="stale", **OTHERS)
    got = toy.train("privacy_pfedc", some, 4, backend="ckks", encrypt_phi=True, **OTHERS)
    assert_close(got.state.server["body"], expected.state.server["body"], 1e-5)
    assert_close(got.state.clients, expected.state.clients, 1e-5)
    assert not np.any(got.metrics["traffic"].down) and not np.any(got.metrics["traffic"].up)
    on = got.metrics["active"]
    np.testing.assert_array_equal(got.metrics["traffic"].encrypted > 0, on)
    assert not on.all() and len(set(on.sum(axis=1))) > 1


def test_the_branch_of_a_single_holder_comes_back_unchanged(tenseal):
    f = toy.federation()
    rows = np.asarray(f.train.index[4][: int(f.train.size[4])])
    y = np.array(f.examples.y)
    y[rows[y[rows] == 3]] = 0  # client 2 is left as the one holder of class 3
    counts = np.array(f.class_counts)
    counts[4] = np.bincount(y[rows], minlength=toy.C)
    f = f._replace(examples=f.examples._replace(y=jnp.asarray(y)), class_counts=jnp.asarray(counts))
    heads = [
        toy.train("privacy_pfedc", TASK, 1, federation_=f, backend=backend, **QUICK).state.clients["head"]
        for backend in ("plain", "ckks")
    ]
    for mine, back in zip(*([head["kernel"][2, :, 3], head["bias"][2, 3]] for head in heads), strict=True):
        assert np.all(np.abs(mine) > 0)  # in the clear it is divided by one
        np.testing.assert_allclose(back, mine, rtol=0, atol=encrypted.GRID / 2)  # what is below the grid is lost


def test_without_tenseal_the_method_is_refused_before_it_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(BadInput, match="privacy"):
        factory(TASK)
    with pytest.raises(BadInput, match="backend"):
        factory(TASK, backend="aes")
