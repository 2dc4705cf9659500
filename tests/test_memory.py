"""What memory a run is predicted to take, against XLA's own account, and what is done about it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import autotune, liveness, memory
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import nets

KEY, N, KIB = jax.random.key(0), 256, 1024  # an array [N] of floats is one KiB
X, A = jnp.zeros(N), jnp.zeros((N, N))


def beside(function, *args, donated=False, eager=False):
    """KiB that a function takes beside its arguments."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    on = [donated] * len(jaxpr.invars)
    return (liveness.peak(jaxpr, on, [False] * len(on), eager=eager) - sum(x.nbytes for x in args)) / KIB


def wide(x):
    """Two arrays [16, N] on the way to one [N]."""
    return (jnp.sin(jnp.outer(jnp.ones(16), x)) @ A).sum(0)


def loop(x, limit):
    return jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


@pytest.mark.parametrize(
    ("function", "args", "donated", "kib"),
    [
        (lambda x: jnp.exp(jnp.sin(x) + 1), (X,), False, 1),  # fused: only the result
        (lambda x: jnp.exp(jnp.sin(x) + 1), (X,), True, 0),  # over its argument
        (lambda x: jnp.sin(x) @ A, (X,), False, 2),  # a product reads an array
        (lambda x: jax.nn.relu(x @ A) @ A @ A, (X,), False, 2),  # the first is gone when the last is made
        (lambda x: jnp.sum(jnp.outer(x, x) ** 2), (X,), False, 4 / KIB),
        (lambda x: x.at[jnp.array([1, 2])].set(0.0), (X,), False, 1),
        (lambda x: x.at[1].set(0.0), (X,), True, 0),  # in place
        (lambda x: loop(x, 3), (X,), False, 1),
        (lambda x: jax.vmap(loop)(x[None] * 1, jnp.ones(1, jnp.int32)), (X,), False, 1),
    ],
)
def test_what_is_an_array_and_for_how_long(function, args, donated, kib):
    assert beside(function, *args, donated=donated) == pytest.approx(kib, abs=0.1)


@pytest.mark.parametrize(
    ("function", "ordered", "eager"),
    [
        (lambda x: (x @ A) @ A @ A + x @ A, 2, 3),  # the last product needs the argument alone: it is made first
        (lambda x: jax.lax.scan(lambda c, _: (c @ A,) * 2, wide(x), None, 8)[1], 32, 40),  # its zeros are there before
        (lambda x: jax.lax.scan(lambda c, _: (c @ A,) * 2, x, None, 1)[1], 1, 1),  # a single turn is no loop
    ],
)
def test_on_a_cpu_what_can_run_does(function, ordered, eager):
    assert beside(function, X) == pytest.approx(ordered, abs=0.1)
    assert beside(function, X, eager=True) == pytest.approx(eager, abs=0.1)


def test_a_loop_copies_what_may_be_overwritten_before_it_is_read():
    """Nothing says that x @ A is read before x is halved; that it is, where the next x needs it."""
    loop = lambda step: lambda x: jax.lax.while_loop(lambda c: c[0] < 3, step, (0, x, x))[1:]

    def step(c, needs=0):
        y = c[1] @ A
        return c[0] + 1, c[1] / 2 + (y if needs else 1), y

    bound = functools.partial(step, needs=1)
    assert beside(loop(step), X) - beside(loop(bound), X) == pytest.approx(1, abs=0.1)


def test_a_loop_over_clients_keeps_what_those_who_are_done_have():
    """The carry beside what the body makes of it, which is chosen between at its end."""
    step = lambda c: (c[0] + 1, c[1] @ A)
    one = lambda x, n: jax.lax.while_loop(lambda c: c[0] < n, step, (0, x))[1]
    twice = lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(one(x, n)), x)
    n = jnp.ones(1, jnp.int32)
    alone, together = beside(lambda x: twice(x, 2), X), beside(lambda x: jax.vmap(twice)(x[None], n), X)
    assert together - alone == pytest.approx(1, abs=0.1)


MODEL = models.model(lambda shape, classes, rngs: nets.mlp(shape, classes, rngs, hidden=1024), toy.SHAPE, toy.C)


def program_of(method, width, devices=1, participation=1.0):
    """With a network that is large beside the rest."""
    task = toy.task(model=MODEL, participation=(participation, participation))
    return simulate.program(ALGORITHMS[method], task, width=width, devices=devices)


def account(program) -> int:
    """XLA's, of a compiled round on one device."""
    state, f = jax.jit(program.init)(KEY, program.numbers), toy.federation()
    if program.mesh is not None:
        f = jax.device_put(f, jax.NamedSharding(program.mesh, jax.P()))
    args = (KEY, program.numbers, f, state, jnp.int32(0), jnp.bool(False))
    m = jax.jit(program.round, donate_argnums=3).lower(*args).compile().memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


@pytest.mark.parametrize(
    ("method", "width", "devices", "participation"),
    [
        ("fedavg", 1, 1, 1.0),
        ("fedavg", 4, 1, 1.0),
        ("ditto", 4, 1, 0.6),
        ("ditto", 1, 2, 1.0),
        ("pfedc", 4, 1, 0.6),
        ("fedcp", 1, 1, 1.0),
        ("fedamp", 1, 1, 0.6),
        ("fedamp", 1, 2, 1.0),
    ],
)
def test_the_prediction_is_xlas_account_within_a_factor(method, width, devices, participation):
    program = program_of(method, width, devices, participation)
    found = memory.predict(program, KEY, toy.federation())
    assert 0.8 < found.peak / devices / account(program) < 1.5
    assert found.free is not None and found.total is not None and 0 < found.free < found.total


def test_few_of_many_clients_cost_their_own_rows_only():
    """The rows of 200 clients are overwritten in place, where two of them took part."""
    f, many = toy.federation(), np.arange(200) % toy.N
    f = f._replace(**{name: toy.rows(getattr(f, name), many) for name in ("train", "val", "test", "class_counts")})
    sizes, counts = np.asarray(f.train.size), np.asarray(f.class_counts)
    task = toy.task(model=MODEL, participation=(0.01, 0.01), sizes=sizes, class_counts=counts)
    program = simulate.program(ALGORITHMS["ditto"], task)
    state = jax.jit(program.init)(KEY, program.numbers)
    rows = sum(x.nbytes for x in jax.tree.leaves(state.clients))
    args = (KEY, program.numbers, f, state, np.int32(0), np.bool_(False))
    found = jax.jit(program.round, donate_argnums=3).lower(*args).compile().memory_analysis()
    assert found.alias_size_in_bytes >= rows and found.temp_size_in_bytes < rows / 10


def test_a_wider_round_takes_more():
    peaks = [memory.predict(program_of("fedavg", width), KEY, toy.federation()).peak for width in (1, 2, 4)]
    assert peaks[0] < peaks[1] < peaks[2]
    assert peaks[2] / peaks[1] == pytest.approx(2, rel=0.3)  # the models, not the data


@pytest.mark.parametrize("state_every", [1, 2])  # with 2, rounds can go to the devices together
@pytest.mark.parametrize("devices", [1, 2])
def test_what_was_traced_to_predict_is_not_traced_to_run(devices, state_every):
    """A trace calls the method's factory."""
    calls = []

    @functools.wraps(ALGORITHMS["fedavg"])
    def factory(task):
        calls.append(task)
        return ALGORITHMS["fedavg"](task)

    program, f = simulate.program(factory, toy.task(), devices=devices), toy.federation()
    memory.predict(program, KEY, f)
    traced = len(calls)
    assert len(list(simulate.rounds(program, KEY, f, rounds=1, eval_every=0, state_every=state_every))) == 2
    assert len(calls) <= traced + 1  # that of `init`, whose shapes alone were wanted


def test_the_width_is_bounded_by_the_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "_candidates", lambda clients: (1, 2, 4))
    times = {1: 3.0, 2: 2.0, 4: 1.0}
    monkeypatch.setattr(autotune, "_times", lambda widths, *_: {width: times.pop(width) for width in widths})
    choose = lambda most: autotune.choose_width(toy.task(), toy.federation(), 5, fits=lambda width: width <= most)
    assert choose(0) == choose(1) == 1 and len(times) == 3  # nothing to try
    assert choose(3) == 2 and times.keys() == {4}  # the widest is not even tried
    times |= {1: 3.0, 2: 2.0}
    assert choose(4) == 4 and not times
    assert (choose(4), choose(3), choose(1)) == (4, 2, 1)  # remembered


def test_too_little_memory_is_a_warning_and_far_too_little_an_error(caplog):
    gib = 2**30
    memory.check(memory.Memory(10 * gib, 11 * gib, 12 * gib), "x")
    memory.check(memory.Memory(10 * gib, None, None), "x")
    assert not caplog.records
    memory.check(memory.Memory(20 * gib, 8 * gib, 12 * gib), "take less")
    assert caplog.messages == ["The run will take about 20 GiB, but 8 GiB are free: take less."]
    with pytest.raises(InputError, match=r"The run would take about 25 GiB, and there are 12 GiB: take less.$"):
        memory.check(memory.Memory(25 * gib, 11 * gib, 12 * gib), "take less")
    assert memory.say(memory.Memory(int(1.21 * gib), 23 * gib, 24 * gib)) == "memory: about 1.2 GiB of 23 GiB"
    assert memory.say(memory.Memory(2**20, None, None)) == "memory: about 1 MiB"
