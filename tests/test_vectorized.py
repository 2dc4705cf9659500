"""Several runs as one program: the same runs, to rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_devices import on_host, program_of
from test_fuzz import MEAN
from test_together import plain
from toy import assert_close

from fedjax_pfl import models, simulate, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import rounds
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Context

KEYS = jax.random.split(jax.random.key(3), 2)
RATES = (0.05, 0.2)
OPTIONS = {"rounds": 3, "eval_every": 2}
QUICK = ["ditto"]


_compiled: dict = {}


@functools.cache
def federations():
    """Two over the same examples, of which the second's clients hold theirs in another
    order."""
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
        _compiled[programs[0].round] = simulate.compiled(
            program, KEYS, federation, eval_every=2
        )
    functions = _compiled[programs[0].round]
    for results in simulate.rounds_at_once(
        program, KEYS, federation, functions, **OPTIONS
    ):
        whole = next((r.state for r in results if isinstance(r, simulate.Result)), None)
        states = jax.device_get(program.unplace(whole))
        yield [
            r if isinstance(r, Exception) else r._replace(state=trees.gather(states, i))
            for i, r in enumerate(results)
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    # a method whose round is one mean differs in what one client does alone
    "method",
    [*QUICK, *sorted({*ALGORITHMS} - {*QUICK} - MEAN)],
)
def test_runs_at_once_are_the_runs_one_by_one(method):
    programs, given = runs_of(method), federations()
    # the divergence of FedDVA's c is a difference of larger numbers
    off = 5e-4 if method == "feddva" else 1e-4
    found = list(at_once(programs, given))
    # for the others, too
    functions = simulate.compiled(programs[0], KEYS[0], given[0], eval_every=2)
    for i, (program, federation) in enumerate(zip(programs, given, strict=True)):
        each = simulate.rounds(
            program, KEYS[i], federation, functions=functions, **OPTIONS
        )
        alone = [
            result._replace(state=on_host(program, result.state)) for result in each
        ]
        for got, wanted in zip((results[i] for results in found), alone, strict=True):
            assert got.round == wanted.round
            assert_close(
                (plain(got.metrics), got.pre), (plain(wanted.metrics), wanted.pre), off
            )
            # FedDVA's running variances take most of it
            assert_close(got.state, wanted.state, 1e-3)
    # in the first round FedPCL has no prototypes, and no loss
    assert not np.allclose(*(result.metrics.loss for result in found[1]))


@pytest.mark.slow
def test_a_run_that_diverges_leaves_the_others_as_they_are():
    programs, given = runs_of("ditto"), federations()
    wild = [programs[0], programs[1]._replace(traced=programs[1].traced | {"lr": 1e38})]
    for calm, results in zip(
        at_once(programs, given), at_once(wild, given), strict=True
    ):
        toy.assert_same(results[0].state, calm[0].state)
        assert isinstance(
            results[1], simulate.DivergenceError
        ) and "not finite in round 0:" in str(results[1])


@pytest.mark.slow
@pytest.mark.parametrize("intervals", [(1, 3), (3, 1)])
def test_functions_compiled_for_other_intervals_serve(intervals, monkeypatch):
    monkeypatch.setattr(rounds, "SECONDS", 1e9)  # as many rounds at once as may be
    program, f = runs_of("ditto")[0], federations()[0]
    first, now = ({"eval_every": every, "state_every": every} for every in intervals)
    functions = simulate.compiled(program, KEYS[0], f, **first)
    found = list(
        simulate.rounds(program, KEYS[0], f, rounds=6, functions=functions, **now)
    )
    assert [result.round for result in found] == list(range(7)) and np.isfinite(
        found[-1].pre["acc"]
    ).all()


def test_what_cannot_be_one_program_is_refused():
    first, second = federations()
    programs = runs_of("ditto")
    several, both = simulate.vectorized(programs, [first, second], checked=False)
    for keys in (KEYS[0], KEYS[:1]):
        with pytest.raises(InputError, match=r"have the shape \[2\]"):
            next(simulate.rounds_at_once(several, keys, both, None, rounds=1))
    with pytest.raises(InputError, match="arrays of the same shapes"):
        simulate.vectorized(programs, [first, toy.federation(width=20)])
    with pytest.raises(InputError, match="need one device"):
        simulate.vectorized([program_of("ditto", 3, (1, 1))] * 2, [first, second])
    fewer = second._replace(train=second.train._replace(size=second.train.size - 1))
    with pytest.raises(InputError, match="class counts must be those of the task"):
        simulate.vectorized(programs, [first, fewer])
    whole, federation = simulate.vectorized(programs, [first, second])
    for options, why in (
        ({"rounds": -1}, "`rounds` must be in"),
        ({"rounds": 3, "start": 1}, "start=1 needs the `state`"),
    ):
        with pytest.raises(InputError, match=why):
            next(simulate.rounds_at_once(whole, KEYS, federation, None, **options))
    with pytest.raises(InputError, match="of several runs: use `rounds_at_once`"):
        next(simulate.rounds(whole, KEYS, federation, rounds=1))
    with pytest.raises(InputError, match="of one run: use `rounds`"):
        next(simulate.rounds_at_once(programs[0], KEYS[:1], first, None, rounds=1))


def centred(mean):
    """Inputs less a constant within a jitted function."""
    mean = jnp.full((1, *toy.SHAPE), mean)
    return toy.task(prepare=jax.jit(lambda x: x - mean))


@pytest.mark.slow
@pytest.mark.parametrize("make", [centred])
def test_programs_that_differ_in_what_their_parts_do_not_show_are_refused(make):
    """Programs are compared as a whole, too."""
    f = toy.federation()
    same, other = (toy.program("fedavg", make(x)) for x in (0.1, 0.5))
    again = toy.program("fedavg", make(0.1))
    assert simulate.vectorized([same, again], [f, f])
    assert simulate.vectorized([same, other], [f, f], checked=False)
    with pytest.raises(InputError, match="the program of run 1 differs from the first"):
        simulate.vectorized([same, other], [f, f])


@pytest.mark.slow  # compiles rounds of two networks twice
def test_seeds_of_one_program_of_several_architectures():
    """They have one placement, which needs no axis."""
    given = [
        models.model(net, toy.SHAPE, toy.C) for net in (toy.tiny_mlp, toy.norm_net)
    ]
    task = toy.task(models=tuple(given), architecture=np.arange(toy.N) % 2)
    program, f = toy.program("fedproto", task), toy.federation()
    whole, federation = simulate.vectorized([program, program], [f, f])
    functions = simulate.compiled(whole, KEYS, federation)
    *_, results = simulate.rounds_at_once(whole, KEYS, federation, functions, rounds=1)
    for i, key in enumerate(KEYS):
        *_, alone = simulate.rounds(program, key, f, rounds=1)
        assert_close(
            (plain(results[i].metrics), results[i].pre),
            (plain(alone.metrics), alone.pre),
            1e-4,
        )


def test_the_learning_rate_shrinks_by_its_factor_in_each_round():
    """In round t it is lr * lr_decay ** t."""
    program, f, key = (
        toy.program("fedavg", toy.task()),
        toy.federation(),
        jax.random.key(5),
    )
    begin, step = program.init(key, program.traced), jax.jit(program.round)
    rates = [
        {"lr": 0.8, "lr_decay": 0.5},
        {"lr": 0.1, "lr_decay": 1.0},
        {"lr": 0.05, "lr_decay": 1.0},
    ]
    after = [
        step(
            Context(key, program.traced | rate, f, jnp.int32(3)), begin, jnp.bool(False)
        )[0].server
        for rate in rates
    ]
    assert_close(after[0], after[1])
    assert not np.allclose(
        *(state["head"]["kernel"] for state in (after[0], after[2])), rtol=1e-2
    )


def test_examples_that_are_shared_are_there_once():
    given = federations()
    _, whole = simulate.vectorized(runs_of("ditto"), given)
    assert whole.examples is given[0].examples and whole.train.index.shape[0] == 2
