"""Compressed updates."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import assert_close, assert_same

from fedjax_pfl import simulate, trees, uploads
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Context
from fedjax_pfl.uploads import compression

KEY = jax.random.key(0)
UPDATE = {"a": jnp.float32([[3, -1], [0.5, 2]]), "b": jnp.float32([-4, 0.1])}


def sent(option, update, key=KEY):
    """Returns what one client sends first, and its state after it."""
    made = option.made()
    server, row = made.init(jax.tree.map(jnp.zeros_like, update))

    class Alone(SimpleNamespace):
        def _replace(self, **changes):
            return Alone(**(vars(self) | changes))

    found, row, _ = made.client(Alone(key=key), update, server, row)
    return found, row


def test_the_largest_numbers_travel():
    option = uploads.top_k(0.5)
    found, lost = sent(option, UPDATE)
    wanted = {"a": jnp.float32([[3, 0], [0, 2]]), "b": jnp.float32([-4, 0])}
    assert_same(found, wanted)
    assert_close(trees.add(found, lost), UPDATE)
    assert option.made().size(UPDATE) == (3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 10, 100])
def test_the_largest_are_those_of_jax(k):
    """Equal numbers, zeros and subnormal numbers included."""
    x = np.random.default_rng(0).normal(size=100).astype(np.float32)
    for values in (x, np.round(x), 0 * x, 1e-40 * x):
        _, at = jax.lax.top_k(jnp.abs(values), k)
        found = compression.largest(jnp.asarray(values), jnp.int32(k))
        assert set(np.flatnonzero(found)) == set(np.asarray(at))


def test_quantisation_has_no_bias_and_few_levels():
    option = uploads.qsgd(4)
    keys = jax.random.split(KEY, 4000)
    draws = jax.vmap(lambda key: sent(option, UPDATE, key)[0])(keys)
    assert_close(jax.tree.map(lambda x: jnp.mean(x, axis=0), draws), UPDATE, 0.06)
    level = 4 * draws["a"] / jnp.linalg.norm(UPDATE["a"])
    assert jnp.allclose(level, jnp.round(level), atol=1e-4)
    # 6 numbers of 4 bits are one scalar, and two norms
    assert option.made().size(UPDATE) == (3, 0)
    zeros = jax.tree.map(jnp.zeros_like, UPDATE)
    assert_same(sent(option, zeros)[0]["b"], jnp.zeros(2))


def test_a_matrix_of_low_rank_is_exact_and_keeps_its_factor():
    left, right = (jax.random.normal(k, (2, 9)) for k in jax.random.split(KEY))
    update = {"w": left.T @ right, "b": jnp.arange(3.0)}
    option = uploads.low_rank(2)
    found, row = sent(option, update)
    assert_close(found, update, 1e-4)
    assert [np.shape(q) for q in row["q"]] == [(0,), (9, 2)]
    assert option.made().size(update) == (2 * 18 + 3, 0)


@pytest.mark.parametrize("method", ["fedavg", toy.slow("ditto")])
def test_whole_updates_are_the_plain_run(method):
    options = {"uploads": uploads.chain(uploads.top_k(1.0))}
    plain = toy.train(method, toy.task(), rounds=2)
    found = toy.train(method, toy.task(), rounds=2, options=options)
    assert_close(found.state.method, plain.state.method, 1e-5)
    assert_same(found.metrics.traffic.up, plain.metrics.traffic.up)


def test_what_was_lost_is_sent_later():
    """Sent updates and held errors sum to the updates."""
    options = {"uploads": uploads.chain(uploads.top_k(0.1))}
    found = toy.train("fedavg", toy.task(), rounds=1, options=options)
    plain = toy.train("fedavg", toy.task(), rounds=1)
    share = toy.SIZES / np.sum(toy.SIZES)
    (lost,) = jax.device_get(found.state.uploads.clients)
    held = jax.tree.map(lambda x: np.einsum("s...,s->...", x, share), lost)
    assert_close(trees.add(found.state.server, held), plain.state.server, 1e-5)
    count = -(-trees.size(plain.state.server) // 10)
    assert set(found.metrics.traffic.up.ravel()) == {count}
    assert set(found.metrics.traffic.ints.ravel()) == {count}


def test_rounds_and_seeds_draw_their_own_numbers():
    """Rounds the same update in another way."""
    options = {"uploads": uploads.chain(uploads.qsgd(1))}
    program = toy.program("fedavg", toy.task(), **options)
    start = program.init(KEY, program.traced)
    step = jax.jit(program.round)

    def moved(key, t):
        given = (
            Context(key, program.traced, toy.federation(), np.int32(t)),
            start,
            False,
        )
        return step(*given)[0].server["head"]["kernel"]

    draws = [moved(jax.random.key(seed), t) for seed in (0, 1) for t in (0, 1)]
    for i in range(4):
        assert not any(np.array_equal(draws[i], x) for x in draws[:i])


def test_the_fraction_is_traced():
    options = {"uploads": uploads.chain(uploads.top_k(0.1))}
    program = simulate.program("fedavg", toy.task(), **options)
    assert program.traced["compress.fraction"] == 0.1
    run = functools.partial(simulate.curve, program, KEY, rounds=1)
    up = jax.vmap(
        lambda x: run({"compress.fraction": x}, toy.federation())[1].traffic.ints
    )(jnp.float32([0.1, 0.5]))
    assert np.all(up[1] > up[0])


@pytest.mark.parametrize(
    "options",
    [{"compress": uploads.qsgd(1)}, {"compress": uploads.top_k(0.01)}],
    ids=lambda x: x["compress"].factory.__name__,
)
def test_running_statistics_pass_unchanged(options):
    task = toy.task("norm")
    plain = toy.train("fedavg", task, rounds=1)
    option = {"uploads": uploads.chain(options["compress"])}
    found = toy.train("fedavg", task, rounds=1, options=option)
    assert_close(found.state.server["stats"], plain.state.server["stats"], 1e-6)


def test_methods_without_one_mean_and_values_out_of_range_are_refused():
    options = uploads.chain(uploads.qsgd(4))
    for method in ("fedamp", "fedma"):
        with pytest.raises(InputError, match=f"{method} takes no options on uploads"):
            simulate.program(method, toy.method_task(method), uploads=options)
    with pytest.raises(InputError, match=r"local takes no option.*send nothing"):
        simulate.program("local", toy.task(), uploads=options)
    with pytest.raises(InputError, match="fraction"):
        uploads.top_k(0.0)
