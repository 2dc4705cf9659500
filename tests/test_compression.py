"""Compressed uploads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import assert_close, assert_same

from fedjax_pfl import compression, simulate, trees
from fedjax_pfl.errors import InputError

KEY = jax.random.key(0)
UPDATE = {"a": jnp.float32([[3, -1], [0.5, 2]]), "b": jnp.float32([-4, 0.1])}


def test_the_largest_numbers_travel():
    rule = compression.top_k(0.5)
    found = rule.apply(KEY, UPDATE)
    assert_same(found, {"a": jnp.float32([[3, 0], [0, 2]]), "b": jnp.float32([-4, 0])})
    assert rule.size(UPDATE) == (3, 3)


@pytest.mark.slow
def test_quantisation_has_no_bias_and_few_levels():
    rule = compression.qsgd(4)
    draws = jax.vmap(lambda key: rule.apply(key, UPDATE))(jax.random.split(KEY, 4000))
    assert_close(jax.tree.map(lambda x: jnp.mean(x, axis=0), draws), UPDATE, 0.06)
    norm = jnp.linalg.norm(UPDATE["a"])
    level = 4 * draws["a"] / norm
    assert jnp.allclose(level, jnp.round(level), atol=1e-4)
    # 6 numbers of 4 bits are one scalar, and two norms
    assert rule.size(UPDATE) == (3, 0)
    assert_same(
        rule.apply(KEY, jax.tree.map(jnp.zeros_like, UPDATE))["b"], jnp.zeros(2)
    )


def test_a_matrix_of_low_rank_is_exact():
    left, right = (jax.random.normal(k, (2, 9)) for k in jax.random.split(KEY))
    update = {"w": left.T @ right, "b": jnp.arange(3.0)}
    rule = compression.low_rank(2)
    assert_close(rule.apply(KEY, update), update, 1e-4)
    assert rule.size(update) == (2 * 18 + 3, 0)


@pytest.mark.parametrize("method", ["fedavg", toy.slow("ditto")])
def test_whole_uploads_are_the_plain_run(method):
    under = compression.compressed(method, "top_k", 1.0)
    plain = toy.train(method, toy.task(), rounds=2)
    found = toy.train(under, toy.task(), rounds=2)
    assert_close(found.state.server, plain.state.server, 1e-5)
    assert_close(found.state.clients.method, plain.state.clients, 1e-5)
    assert_same(found.metrics.traffic.up, plain.metrics.traffic.up)


def test_what_was_lost_is_sent_later():
    """Sent uploads and held errors sum to the updates."""
    under = compression.compressed("fedavg", "top_k", 0.1)
    found = toy.train(under, toy.task(), rounds=1)
    plain = toy.train("fedavg", toy.task(), rounds=1)
    share = toy.SIZES / np.sum(toy.SIZES)
    held = jax.tree.map(
        lambda x: np.einsum("s...,s->...", x, share),
        jax.device_get(found.state.clients.lost),
    )
    assert_close(trees.add(found.state.server, held), plain.state.server, 1e-5)
    count = -(-trees.size(plain.state.server) // 10)
    assert set(found.metrics.traffic.up.ravel()) == {count}
    assert set(found.metrics.traffic.ints.ravel()) == {count}


def test_methods_without_one_upload_are_refused():
    for method in ("fedamp", "fedma"):
        under = compression.compressed(method, "qsgd", 4)
        with pytest.raises(InputError, match=f"{method} cannot have compression"):
            simulate.program(under, toy.method_task(method))
    with pytest.raises(InputError, match="fraction"):
        compression.compressed("fedavg", "top_k", 0.0)
