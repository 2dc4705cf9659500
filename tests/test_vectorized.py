"""Several runs as one program: the same runs, to rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_devices import on_host, program_of
from test_together import plain
from toy import assert_close

from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import vectorized
from fedjax_pfl.errors import InputError

KEYS = jax.random.split(jax.random.key(3), 2)
RATES = (0.05, 0.2)
OPTIONS = {"rounds": 3, "eval_every": 2}
QUICK = ["ditto"]


_compiled: dict = {}


@functools.cache
def federations():
    """Two over the same examples, of which the second's clients hold theirs in another order."""
    first = toy.federation()
    size = np.asarray(first.train.size)
    index = np.array(first.train.index)
    for row, count in zip(index, size, strict=True):
        row[:count] = row[:count][::-1]
    return first, first._replace(train=first.train._replace(index=jnp.asarray(index)))


@functools.cache
def program(method):
    return program_of(method, 1, (0.6, 0.6))


def runs_of(method):
    one = program(method)
    return [one._replace(traced=one.traced | {"lr": lr}) for lr in RATES]


def at_once(programs, given):
    """The rounds of all, with the states on the host."""
    program, federation = simulate.vectorized(programs, given)
    if programs[0].round not in _compiled:  # other rates need nothing new
        _compiled[programs[0].round] = simulate.compiled(program, KEYS, federation, eval_every=2)
    functions = _compiled[programs[0].round]
    for results in simulate.rounds_at_once(program, KEYS, federation, functions, **OPTIONS):
        whole = next((r.state for r in results if isinstance(r, simulate.Result)), None)
        states = jax.device_get(program.unplace(whole))
        yield [
            r if isinstance(r, Exception) else r._replace(state=vectorized.one(states, i))
            for i, r in enumerate(results)
        ]


@pytest.mark.parametrize("method", [*QUICK, *(toy.slow(name) for name in sorted({*ALGORITHMS} - {*QUICK}))])
def test_runs_at_once_are_the_runs_one_by_one(method):
    programs, given = runs_of(method), federations()
    found = list(at_once(programs, given))
    for i, (program, federation) in enumerate(zip(programs, given, strict=True)):
        each = simulate.rounds(program, KEYS[i], federation, **OPTIONS)
        alone = [result._replace(state=on_host(program, result.state)) for result in each]
        for got, wanted in zip((results[i] for results in found), alone, strict=True):
            assert got.round == wanted.round
            assert_close((plain(got.metrics), got.pre), (plain(wanted.metrics), wanted.pre), 1e-4)
            assert_close(got.state, wanted.state, 1e-3)  # FedDVA's running variances take most of it
    assert not np.allclose(*(result.metrics.loss for result in found[0]))


def test_a_run_that_diverges_leaves_the_others_as_they_are():
    programs, given = runs_of("ditto"), federations()
    wild = [programs[0], programs[1]._replace(traced=programs[1].traced | {"lr": 1e38})]
    for calm, results in zip(at_once(programs, given), at_once(wild, given), strict=True):
        toy.assert_same(results[0].state, calm[0].state)
        assert isinstance(results[1], simulate.DivergenceError) and "not finite in round 0:" in str(results[1])


def test_what_cannot_be_one_program_is_refused():
    first, second = federations()
    programs = runs_of("ditto")
    with pytest.raises(InputError, match="arrays of the same shapes"):
        simulate.vectorized(programs, [first, toy.federation(width=20)])
    with pytest.raises(InputError, match="need one device"):
        simulate.vectorized([program_of("ditto", 3, (1, 1))] * 2, [first, second])
    fewer = second._replace(train=second.train._replace(size=second.train.size - 1))
    with pytest.raises(InputError, match="hold other training examples than the task's"):
        simulate.vectorized(programs, [first, fewer])
    task = toy.task("linear")
    larger = task._replace(sizes=2 * task.sizes, class_counts=2 * task.class_counts)  # more dual variables per client
    others = [toy.program(ALGORITHMS["mocha"], each) for each in (task, larger)]
    with pytest.raises(InputError, match="states of the same shapes"):
        simulate.vectorized([p._replace(task=None) for p in others], [first, second])
    for options, why in (({"rounds": -1}, "rounds=-1"), ({"rounds": 3, "start": 1}, "start=1 needs the state")):
        with pytest.raises(InputError, match=why):
            next(
                simulate.rounds_at_once(
                    programs[0], KEYS, simulate.vectorized(programs, [first, second])[1], None, **options
                )
            )


def test_examples_that_are_shared_are_there_once():
    given = federations()
    _, whole = simulate.vectorized(runs_of("ditto"), given)
    assert whole.examples is given[0].examples and whole.train.index.shape[0] == 2
