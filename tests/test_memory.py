"""Memory of a run by XLA's account, and the refusal of one that is too large."""

import functools
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import memory
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import nets
from fedjax_pfl.types import Context

KEY, GIB = jax.random.key(0), 2**30
MODEL = models.model(
    lambda shape, classes, rngs: nets.mlp(shape, classes, rngs, hidden=1024),
    toy.SHAPE,
    toy.C,
)
ONE = 4 * (6 * 1024 + 1024 + 1024 * toy.C + toy.C)  # bytes of the model


@functools.cache
def peak_of(method, width=1, devices=1):
    """Returns the peak of a run whose network is larger than all other arrays."""
    program = toy.program(
        ALGORITHMS[method], toy.task(model=MODEL), width=width, devices=devices
    )
    return simulate.compiled(program, KEY, toy.federation()).memory.peak


def test_an_account_counts_what_is_overwritten_once():
    x = jnp.zeros((16, 256))
    sin = lambda **options: memory.account(
        jax.jit(jnp.sin, **options).lower(x).compile()
    )
    assert sin() == 2 * x.nbytes and sin(donate_argnums=0) == x.nbytes
    product = memory.account(
        jax.jit(lambda x: jnp.sum(jnp.sin(x @ x.T) @ x)).lower(x).compile()
    )
    # the argument, and what is between it and the sum
    assert product >= x.nbytes + 4 * 16 * 16
    assert memory.account(SimpleNamespace(memory_analysis=lambda: None)) == 0


def test_a_run_takes_what_its_largest_function_does(monkeypatch):
    def function(size):
        if size is None:
            return SimpleNamespace(memory_analysis=lambda: None)
        names = ("argument", "output", "temp", "alias")
        return SimpleNamespace(
            memory_analysis=lambda: SimpleNamespace(
                **{f"{name}_size_in_bytes": size for name in names}
            )
        )

    monkeypatch.setattr(memory, "host_total", lambda: 5)
    sizes = [function(10), function(None), function(20)]
    assert memory.of(sizes, devices=3) == (2 * 20 * 3, 5)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 11})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory.of([function(10)], devices=3) == (20, 11)  # per device
    device.memory_stats = lambda: None
    assert memory.of([function(10)]) == (20, None)


@pytest.mark.slow
def test_a_run_holds_its_models():
    """FedAvg the server's and those in training, Ditto besides a personal one of every
    client."""
    fedavg, ditto = peak_of("fedavg"), peak_of("ditto")
    assert fedavg > 2 * ONE and ditto - fedavg > toy.N * ONE


@pytest.mark.slow  # that the account sees models is tested above
def test_a_wider_round_takes_more():
    peaks = [peak_of("fedavg", width) for width in (1, 2, 4)]
    assert peaks[1] - peaks[0] > ONE and peaks[2] - peaks[1] > 2 * ONE


@pytest.mark.slow  # that the devices are added is tested above
def test_devices_of_one_machine_share_its_memory():
    assert peak_of("ditto", devices=2) > peak_of("ditto") + ONE


@pytest.mark.slow
def test_few_of_many_clients_cost_their_own_rows_only():
    """The rows of 200 clients are overwritten in place, where two of them took part."""
    f, many = toy.federation(), np.arange(200) % toy.N
    f = f._replace(
        **{
            name: toy.rows(getattr(f, name), many)
            for name in ("train", "val", "test", "class_counts")
        }
    )
    sizes, counts = np.asarray(f.train.size), np.asarray(f.class_counts)
    task = toy.task(
        model=MODEL, participation=(0.01, 0.01), sizes=sizes, class_counts=counts
    )
    program = toy.program(ALGORITHMS["ditto"], task)
    state = program.init(KEY, program.traced)
    rows = sum(x.nbytes for x in jax.tree.leaves(state.clients))
    args = (Context(KEY, program.traced, f, np.int32(0)), state, np.bool_(False))
    found = (
        jax.jit(program.round, donate_argnums=1)
        .lower(*args)
        .compile()
        .memory_analysis()
    )
    assert found.alias_size_in_bytes >= rows and found.temp_size_in_bytes < rows / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, state_every", [(1, 2), toy.slow(2, 1), toy.slow(1, 1), toy.slow(2, 2)]
)
def test_what_was_compiled_to_account_for_it_is_what_runs(devices, state_every):
    """A trace calls the method's factory. With the state of every second round only,
    rounds can go to the devices together."""
    calls = []

    @functools.wraps(ALGORITHMS["fedavg"])
    def factory(task):
        calls.append(task)
        return ALGORITHMS["fedavg"](task)

    program, f = toy.program(factory, toy.task(), devices=devices), toy.federation()
    options = {"eval_every": 0, "state_every": state_every}
    functions = simulate.compiled(program, KEY, f, **options)
    traced = len(calls)
    assert (
        len(
            list(
                simulate.rounds(
                    program, KEY, f, rounds=1, functions=functions, **options
                )
            )
        )
        == 2
    )
    assert len(calls) == traced


def test_the_hosts_memory_is_the_machines_or_the_control_groups(tmp_path, monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "LIMITS", (str(limit), str(tmp_path / "none")))
    assert memory.host_total() == machine
    for text, total in (("max\n", machine), ("4096\n", 4096), ("9" * 19, machine)):
        limit.write_text(text)
        assert memory.host_total() == total


def test_more_than_there_is_is_an_error():
    memory.check(memory.Memory(10 * GIB, 12 * GIB), "x")
    memory.check(memory.Memory(10 * GIB, None), "x")
    memory.check(memory.Memory(None, 12 * GIB), "x")
    with pytest.raises(
        InputError, match=r"The run needs about 25.0 GiB of 12.0 GiB: take less.$"
    ):
        memory.check(memory.Memory(25 * GIB, 12 * GIB), "take less")
