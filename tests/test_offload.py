"""Clients' state in the host's memory: the same experiment."""

import functools

import jax
import numpy as np
import pytest
import toy
from toy import N, assert_same

from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import distributed, memory, storage
from fedjax_pfl.errors import InputError

KEY = jax.random.key(3)


@functools.cache
def programs(devices):
    """State on the devices, and on the host."""
    # cohorts of three, some of them dropped out
    task = toy.method_task("ditto")._replace(participation=(0.3, 0.7))
    program = toy.program(ALGORITHMS["ditto"], task, devices=devices)
    return program, simulate.program(
        ALGORITHMS["ditto"], task, devices=devices, storage="host"
    )


def run(program, rounds=4, **options):
    """Each round's result, with a state that stays what it was."""
    keep = lambda result: result._replace(
        state=jax.device_get(program.unplace(result.state))
    )
    copied = lambda result: result._replace(state=jax.tree.map(np.array, result.state))
    return [
        copied(keep(r))
        for r in simulate.rounds(
            program, KEY, toy.federation(), rounds=rounds, **options
        )
    ]


@functools.cache
def both(devices):
    return [run(program) for program in programs(devices)]


@pytest.mark.parametrize("devices", [toy.slow(1), 2])
def test_a_run_is_bit_for_bit_that_of_state_on_the_devices(devices):
    there, here = both(devices)
    assert len(there) == len(here) == 5
    for a, b in zip(there, here, strict=True):
        assert_same(tuple(a), tuple(b))


@pytest.mark.slow  # the run is that of state on the devices, where they do
def test_rows_of_absent_clients_stay():
    before, after = both(1)[1][1:3]
    absent = np.setdiff1d(np.arange(N), after.metrics.ids[after.metrics.active])
    assert len(absent)
    assert_same(
        toy.rows(before.state.clients, absent), toy.rows(after.state.clients, absent)
    )


@pytest.mark.slow
def test_the_rows_are_the_hosts_and_are_overwritten_in_place():
    _, program = programs(1)
    places = set()
    for result in simulate.rounds(
        program, KEY, toy.federation(), rounds=2, eval_every=0
    ):
        leaves = jax.tree.leaves(result.state.clients)
        assert all(type(x) is np.ndarray and x.shape[0] == N for x in leaves)
        places.add(tuple(x.ctypes.data for x in leaves))
    assert len(places) == 1


@pytest.mark.slow
def test_a_run_goes_on_from_its_state_wherever_it_was():
    """A resume with another --client_memory does the same."""
    for program, from_other in zip(programs(2), reversed(both(2)), strict=True):
        again = run(program, start=2, state=program.place(from_other[1].state))
        assert_same(again[-1].state, both(2)[0][-1].state)
        assert_same(again[-1].pre, both(2)[0][-1].pre)


def test_the_rows_begin_on_one_cpu_wherever_the_key_is(monkeypatch):
    """All N of them, which the devices of the mesh may have no room for."""
    _, program = programs(2)
    key, numbers = distributed.replicate(
        (KEY, {name: np.float32(x) for name, x in program.traced.items()}), program.mesh
    )
    places, get = [], jax.device_get
    monkeypatch.setattr(
        jax,
        "device_get",
        lambda tree: places.extend(jax.tree.leaves(tree)) or get(tree),
    )
    program.init(key, numbers)
    assert places and all(
        x.devices() == {jax.local_devices(backend="cpu")[0]} for x in places
    )


def test_state_beyond_the_hosts_memory_is_an_error(monkeypatch):
    task = toy.method_task("ditto")._replace(participation=(0.3, 0.7))
    monkeypatch.setattr(memory, "host_total", lambda: 1000)
    with pytest.raises(InputError, match=r"needs about .* GiB of .* GiB"):
        simulate.program(ALGORITHMS["ditto"], task, storage="host")


def test_the_first_state_is_drawn_in_blocks(monkeypatch):
    """Row after row, it is that of one block, and that of state on the devices."""
    program, host = programs(1)
    at_once = host.init(KEY, host.traced)
    monkeypatch.setattr(storage, "BLOCK", 1)
    assert_same(host.init(KEY, host.traced), at_once)
    assert_same(program.init(KEY, program.traced), at_once)
