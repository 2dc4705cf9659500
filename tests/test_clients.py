"""Clients one after another: order, absence, and what is handed back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import assert_same

KEY = jax.random.key(3)
IDS = np.array([3, 0, 4, 1, 2], np.int32)


def cohort_of(ids, active, key=KEY, width=1):
    return toy.cohort(toy.method_task("fedavg"), ids, active, key=key, width=width)


@functools.partial(jax.jit, static_argnames=("width", "phase"))
def compiled(ids, active, rows, key, width, phase):
    def client(c, carry, row):
        visited, count = carry
        result = {
            "place": count,
            "size": c.train.size,
            "row": row,
            "key": jax.random.bits(c.key),
        }
        return (visited.at[count].set(c.id), count + 1), result

    return cohort_of(ids, active, key, width).scan(
        client, (jnp.full(8, -1), 0), rows, phase=phase
    )


def scan(ids=IDS, active=None, key=KEY, width=1, phase=0):
    """The carry holds who was visited, in order; a client reports its place, its size
    and its row."""
    active, rows = (
        np.ones(len(ids), bool) if active is None else active,
        10 * ids.astype(np.float32),
    )
    return jax.device_get(compiled(ids, active, rows, key, width, phase))


def test_every_client_is_visited_once_with_its_own_row():
    (visited, count), results = scan()
    assert (
        count == 5
        and sorted(visited[:5]) == list(range(5))
        and np.all(visited[5:] == -1)
    )
    np.testing.assert_array_equal(visited[results["place"]], IDS)
    np.testing.assert_array_equal(results["size"], toy.SIZES[IDS])
    np.testing.assert_array_equal(results["row"], 10 * IDS)


@pytest.mark.parametrize("order", [[2, 0, 3, 1, 4], [4, 3, 2, 1, 0]])
def test_the_order_is_not_the_cohorts(order):
    carry, results = scan()
    carry_2, results_2 = scan(IDS[order])
    assert_same(carry_2, carry)
    assert_same(results_2, {name: x[order] for name, x in results.items()})
    assert_same(scan(width=3), (carry, results))


def test_the_order_is_random():
    orders = {tuple(scan(key=jax.random.key(i))[0][0][:5]) for i in range(6)}
    assert len(orders) > 3
    assert tuple(scan(phase=1)[0][0]) != tuple(scan()[0][0])


def test_absent_clients_are_passed_over():
    (visited, _), results = scan()
    active = IDS != 4
    (fewer, count), some = scan(active=active)
    assert count == 4
    # the others keep their order
    np.testing.assert_array_equal(fewer[:4], visited[:5][visited[:5] != 4])
    assert_same(some["key"][active], results["key"][active])
    assert all(x[~active] == 0 for x in some.values())
    padded = scan(np.append(IDS, 77).astype(np.int32), np.append(active, False))
    assert_same(padded[0], (fewer, count))
    assert_same({name: x[:5] for name, x in padded[1].items()}, some)


def test_nobody_changes_nothing():
    (visited, count), results = scan(active=np.zeros(5, bool))
    assert count == 0 and np.all(visited == -1)
    assert all(not np.any(x) for x in results.values())


def test_a_clients_key_is_the_one_of_a_map():
    mapped = jax.jit(
        lambda ids: cohort_of(ids, jnp.ones(5, bool)).map(
            lambda c: jax.random.bits(c.key)
        )
    )
    assert_same(scan()[1]["key"], np.asarray(mapped(IDS)))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 9])
def test_the_steps_computed_for_each_that_is_wanted(width):
    """Counted: a step of a chunk is one for each of its places."""
    count = []

    def client(c):
        def step(i, x):
            jax.debug.callback(lambda _: count.append(1), x)
            return x + 1

        return jax.lax.fori_loop(0, c.train.size, step, 0.0)

    jax.jit(lambda ids, active: cohort_of(ids, active, width=width).map(client))(
        IDS, np.ones(5, bool)
    )
    jax.effects_barrier()
    longest = -np.sort(-np.asarray(toy.SIZES))[::width]  # of each batch
    assert len(count) == min(width, 5) * longest.sum()
