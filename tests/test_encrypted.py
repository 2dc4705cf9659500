"""Sums under encryption: what they are, what they cost, and that the server's side
cannot read them."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.algorithms.pfedc import encryption
from fedjax_pfl.engine.placement import AXIS, make_mesh
from fedjax_pfl.errors import InputError

RNG = np.random.default_rng(0)


@pytest.fixture
def tenseal():
    return pytest.importorskip(
        "tenseal",
        reason="TenSEAL is not there: pip install -e '.[privacy]'",
        exc_type=ImportError,
    )


@pytest.fixture
def parties(tenseal):
    return encryption.parties()


def on_grid(x):
    return np.round(x / encryption.GRID) * encryption.GRID


@pytest.mark.parametrize("length", [3, 4096, 5000])
def test_sums_of_numbers_on_the_grid_are_exact(parties, length):
    clients, server = parties
    rows = on_grid(RNG.normal(size=(20, length)) * 10)
    answer = server.add(clients.encrypt(row) for row in rows)
    np.testing.assert_array_equal(clients.decrypt(answer), rows.sum(axis=0))
    assert len(answer) == -(-length // 4096)


def test_the_server_has_no_secret_key(tenseal, parties):
    clients, server = parties
    context = tenseal.context_from(clients.public())
    for held in (
        server._context,
        context,
        tenseal.context_from(server._context.serialize()),
    ):
        assert (
            held.has_public_key()
            and not held.is_private()
            and not held.has_secret_key()
        )
    sent = clients.encrypt(np.ones(5))
    with pytest.raises(ValueError, match="secret_key"):
        tenseal.ckks_vector_from(server._context, sent[0]).decrypt()
    assert all(
        isinstance(part, bytes)
        for part in (clients.public(), *sent, *server.add([sent, sent]))
    )
    assert [
        name for name in vars(server) if "Key" in type(getattr(server, name)).__name__
    ] == []


def test_a_server_that_is_given_the_secret_key_refuses_it(parties):
    clients, _ = parties
    with pytest.raises(ValueError, match="secret key"):
        encryption.Aggregator(clients._context.serialize(save_secret_key=True))


def test_ciphertexts_do_not_tell_what_is_in_them_by_number_or_size(parties):
    """One vector's ciphertexts differ in size, too, by some bytes: they are random, and
    compressed."""
    clients, _ = parties
    vectors = [
        np.zeros(5000),
        np.ones(5000),
        RNG.normal(size=5000) * 1e6,
        np.eye(1, 5000)[0],
    ]
    sent = [clients.encrypt(vector) for vector in vectors for _ in range(3)]
    assert {len(parts) for parts in sent} == {2}
    sizes = np.array([sum(map(len, parts)) for parts in sent])
    assert np.ptp(sizes) < 1e-2 * sizes.mean()
    # no two are alike
    assert len({part for parts in sent for part in parts}) == 2 * len(sent)


ROWS = {
    "a": RNG.normal(size=(4, 3, 2)).astype(np.float32),
    "b": RNG.normal(size=(4,)).astype(np.float32),
}
IDS, ACTIVE = np.array([3, 0, 4, 1], np.int32), np.array([True, True, False, True])
run = jax.jit(encryption.total, static_argnums=3)


@pytest.mark.parametrize("backend", encryption.BACKENDS)
def test_totals_are_those_of_the_active_rows(request, backend):
    if backend == "ckks":
        request.getfixturevalue("tenseal")
    total, up, down = run(
        jax.tree.map(
            lambda x: np.where(ACTIVE.reshape(4, *[1] * (x.ndim - 1)), x, np.nan), ROWS
        ),
        IDS,
        ACTIVE,
        backend,
    )
    for name, rows in ROWS.items():
        np.testing.assert_allclose(
            total[name], rows[ACTIVE].astype(np.float64).sum(axis=0), rtol=1e-6
        )
    for sent in (up, down):
        np.testing.assert_array_equal(sent > 0, ACTIVE & (backend == "ckks"))
    order = np.array([2, 0, 3, 1])
    moved, *_ = run(
        jax.tree.map(lambda x: x[order], ROWS), IDS[order], ACTIVE[order], backend
    )
    jax.tree.map(np.testing.assert_array_equal, moved, total)
    none, up, _ = run(ROWS, IDS, ~np.ones(4, bool), backend)
    assert not any(np.any(x) for x in jax.tree.leaves((none, up)))
    broken, up, _ = run(
        ROWS | {"b": ROWS["b"] + np.array([0, np.inf, 0, 0], np.float32)},
        IDS,
        ACTIVE,
        backend,
    )
    assert np.isnan(broken["b"]) or np.isinf(broken["b"])
    assert not np.any(up)


def test_totals_over_devices_and_under_vmap(tenseal):
    expected = run(ROWS, IDS, ACTIVE, "ckks")[0]
    spread = jax.device_put(ROWS, jax.NamedSharding(make_mesh(2), jax.P(AXIS)))
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.jit(encryption.total, static_argnums=3)(spread, IDS, ACTIVE, "ckks")[0],
        expected,
    )
    twice = jax.jit(
        jax.vmap(
            lambda s: encryption.total({"a": s * ROWS["a"]}, IDS, ACTIVE, "ckks")[0][
                "a"
            ]
        )
    )
    for got, times in zip(twice(jnp.array([1.0, 2.0])), (1, 2), strict=True):
        np.testing.assert_array_equal(got, times * expected["a"])


def test_without_tenseal_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(
        InputError, match=r"TenSEAL.*pip install -e '\.\[privacy\]'.*backend='plain'"
    ):
        encryption.check_backend("ckks")
    encryption.check_backend("plain")
    with pytest.raises(InputError, match="backend"):
        encryption.check_backend("paillier")


def test_a_vector_whose_bytes_cannot_be_counted_is_refused():
    ids, shapes = (
        jnp.arange(2),
        [
            jax.ShapeDtypeStruct((2, encryption.LONGEST + more), jnp.float32)
            for more in (0, 1)
        ],
    )
    total = lambda rows: encryption.total(rows, ids, ids >= 0, "ckks")
    assert jax.eval_shape(total, shapes[0])[0].shape == (encryption.LONGEST,)
    with pytest.raises(InputError, match="16,777,217 numbers, more than 16,777,216"):
        jax.eval_shape(total, shapes[1])


def test_the_bytes_of_the_longest_vector_can_be_counted(parties):
    clients, server = parties
    sent = clients.encrypt(np.zeros(4096))
    both_ways = sum(map(len, sent)) + sum(map(len, server.add([sent])))
    assert encryption.LONGEST // 4096 * both_ways * 1.02 < 2**31
