"""Clients of several architectures: each trains as it would among its own, wherever its
row lies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import N, assert_close, assert_same

from fedjax_pfl import architectures, models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import placement
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import nets
from fedjax_pfl.types import Context

KEY = jax.random.key(3)
WIDE = lambda shape, classes, rngs: nets.mlp(shape, classes, rngs, hidden=12)
SMALL, LARGE = (models.model(net, toy.SHAPE, toy.C) for net in (toy.tiny_mlp, WIDE))
OF = np.array([0, 1, 0, 0, 1])


@functools.cache
def task(participation=(1.0, 1.0), mixed=True):
    of = OF if mixed else np.zeros(N, np.int32)
    return toy.task(
        models=(SMALL, LARGE) if mixed else (SMALL,),
        architecture=of,
        participation=participation,
        drop_last=False,
    )


def run(program, rounds=4, **options):
    """The states after each round by id, on the host, and the results."""
    found = []
    for result in simulate.rounds(
        program, KEY, toy.federation(), rounds=rounds, **options
    ):
        state = jax.tree.map(np.array, jax.device_get(program.unplace(result.state)))
        found.append(result._replace(state=state))
    return found


@functools.cache
def mixed(method="local", participation=(1.0, 1.0), devices=1):
    return run(toy.program(ALGORITHMS[method], task(participation), devices=devices))


@pytest.mark.slow
def test_a_client_alone_trains_as_among_clients_of_its_own_architecture():
    """Local: rows and scores of architecture 0 are those of a run in which everybody
    has it, bit for bit."""
    same = run(toy.program(ALGORITHMS["local"], task(mixed=False)))
    for a, b in zip(mixed(), same, strict=True):
        assert_same(
            architectures.select(a.state.clients, 0),
            toy.rows(b.state.clients, architectures.members(task(), 0)),
        )
        for name in a.pre:
            np.testing.assert_array_equal(a.pre[name][OF == 0], b.pre[name][OF == 0])
        if a.metrics is not None:
            np.testing.assert_array_equal(
                a.metrics.loss[OF == 0], b.metrics.loss[OF == 0]
            )
    assert a.state.clients.trees[1]["head"]["kernel"].shape == (2, 12, toy.C)


@pytest.mark.slow
@pytest.mark.parametrize(
    "participation, devices",
    [
        toy.slow((1.0, 1.0), 2),
        toy.slow((1.0, 1.0), 8),
        toy.slow((0.3, 0.7), 2),
        ((0.3, 0.7), 8),
    ],
)
def test_devices_do_not_matter(participation, devices):
    for a, b in zip(
        mixed("local", participation),
        mixed("local", participation, devices),
        strict=True,
    ):
        assert_close(a.state, b.state, 1e-5)
        assert_close(a.pre, b.pre, 1e-5)
        if a.metrics is not None:
            assert_close(
                a.metrics._replace(traffic=None), b.metrics._replace(traffic=None), 1e-5
            )


# compiles a round of a sample, of one architecture and of two; so does the next
@pytest.mark.slow
def test_a_sample_is_the_one_of_a_single_architecture_and_the_others_stay():
    """Who takes part does not depend on the architectures; absent rows are unchanged,
    bit for bit."""
    program = toy.program(ALGORITHMS["local"], task((0.3, 0.7), mixed=False))
    same, before = run(program), None
    for a, b in zip(mixed("local", (0.3, 0.7)), same, strict=True):
        if a.metrics is None:
            continue
        took_part = [sorted(m.ids[m.active]) for m in (a.metrics, b.metrics)]
        assert took_part[0] == took_part[1]
        absent = np.setdiff1d(np.arange(N), took_part[0])
        for group in range(2):
            slots = architectures.slots(task())[absent[OF[absent] == group]]
            if before is not None:
                assert_same(
                    toy.rows(architectures.select(a.state.clients, group), slots),
                    toy.rows(architectures.select(before.clients, group), slots),
                )
        before = a.state


@pytest.mark.slow
def test_state_on_the_host_and_of_an_earlier_round():
    whole = mixed("local", (0.3, 0.7))
    host = simulate.program(ALGORITHMS["local"], task((0.3, 0.7)), storage="host")
    for a, b in zip(whole, run(host), strict=True):
        assert_same((a.state, a.pre), (b.state, b.pre))
    program = toy.program(ALGORITHMS["local"], task((0.3, 0.7)))
    again = run(program, start=2, state=program.place(whole[1].state))
    assert_same(again[-1].state, whole[-1].state)


@pytest.mark.slow
def test_one_prediction_per_architecture():
    program, f = toy.program(ALGORITHMS["local"], task()), toy.federation()
    state, x = program.init(KEY, program.traced), f.examples.x[:3]
    for id, model in ((0, SMALL), (4, LARGE)):
        row = toy.rows(
            architectures.select(state.clients, int(OF[id])),
            int(architectures.slots(task())[id]),
        )
        expected = model.apply(row, x)[0]
        assert_close(
            program.predict(Context(KEY, program.traced, f, 0), state, id, x), expected
        )


@pytest.mark.slow
def test_what_is_shared_is_averaged_over_all_and_must_have_one_shape():
    # both of 8 features
    same_width = (SMALL, models.model(toy.norm_net, toy.SHAPE, toy.C))
    given = toy.task(models=same_width, architecture=OF)
    results = run(toy.program(ALGORITHMS["lg_fedavg"], given), rounds=1)
    first, begin = results[0], jax.eval_shape(SMALL.init, KEY)
    assert jax.tree.map(np.shape, first.state.server) == {
        "head": jax.tree.map(lambda x: x.shape, begin["head"])
    }
    np.testing.assert_array_equal(first.metrics.traffic.up, 8 * toy.C + toy.C)
    with pytest.raises(
        InputError,
        match=r"head/kernel is \(8, 4\) in the first and \(12, 4\) in number 2",
    ):
        simulate.program(ALGORITHMS["lg_fedavg"], task()).init(
            KEY, {"lr": 0.1, "lr_decay": 1.0}
        )


def test_a_method_of_one_architecture_names_those_of_several():
    for several in ((SMALL, LARGE), (SMALL, SMALL)):
        given = toy.task(models=several, architecture=OF)
        with pytest.raises(
            InputError,
            match=r"^ditto needs clients of one architecture, got 2: .* local, ",
        ):
            simulate.program(ALGORITHMS["ditto"], given)


@pytest.mark.parametrize("of", [np.zeros(N, int), np.arange(N), np.array([0, 1])])
def test_architectures_that_do_not_fit_are_one_sentence(of):
    with pytest.raises(
        InputError, match="`architecture` must give each of the 5 clients"
    ):
        simulate.program(
            ALGORITHMS["local"], toy.task(models=(SMALL, LARGE), architecture=of)
        )


@pytest.mark.slow
def test_the_clients_of_an_architecture_go_where_those_before_left_room():
    """Client 0 keeps the first device busy, so 1 and 2, of the other architecture, go
    to the second."""
    task = toy.task(
        models=toy.task().models * 2, architecture=np.array([0, 1, 1, 1, 0], np.int32)
    )
    where = placement.Placement(
        np.arange(5), np.arange(5), np.array([10.0, 8, 2, 1, 1])
    )
    ids, active = placement.arrange(task, where, jnp.arange(3), jnp.ones(3, bool), 2)
    # a place of each for the first architecture, then two
    devices = np.repeat([0, 1, 0, 1], [1, 1, 2, 2])
    assert {
        int(i): int(d) for i, d, on in zip(ids, devices, active, strict=True) if on
    } == {0: 0, 1: 1, 2: 1}
