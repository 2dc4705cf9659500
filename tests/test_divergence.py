"""A round that is not finite names what was so first, its clients and the cause."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import losses, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import divergence

KEY = jax.random.key(1)
RATE = "learning rate (--lr)"


def message(task, method="fedavg", **options):
    """The error of a run of a task, and the rounds before it."""
    return message_of(simulate.program(method, task, checked=False), **options)


def message_of(program, f=None, rounds=3, **options):
    done = []
    with pytest.raises(simulate.DivergenceError) as error:
        for result in simulate.rounds(
            program, KEY, f or toy.federation(), rounds=rounds, eval_every=0, **options
        ):
            done.append(result)
    return str(error.value), len(done)


@functools.cache
def compiled():
    """A run whose preparation of -1e9 is NaN, and its functions."""
    task = toy.task()._replace(prepare=lambda x: jnp.where(x < -1e8, jnp.nan, x))
    program = simulate.program("fedavg", task, checked=False)
    return program, simulate.compiled(program, KEY, toy.federation(), eval_every=0)


def test_the_input_of_one_client_is_named():
    f, (program, functions) = toy.federation(), compiled()
    x = f.examples.x.at[int(f.train.index[3, 4]), 0].set(-1e9)
    f = f._replace(examples=f.examples._replace(x=x))
    text, done = message_of(program, f, functions=functions)
    assert text == (
        "The input of client 3 is not finite in round 0: `prepare` returns NaN or "
        "infinity for 1 of 12 rows."
    )
    assert not done


# alone, and several rounds together
@pytest.mark.parametrize("state_every", [1, toy.slow(10)])
def test_a_large_learning_rate_is_to_be_lowered(state_every):
    program, functions = compiled()
    text, _ = message_of(
        program._replace(traced=program.traced | {"lr": 1e30}),
        functions=functions if state_every == 1 else None,
        state_every=state_every,
    )
    assert text == (
        "The loss of 5 clients ([0 1 2 3 4]) is not finite in round 0: lower the "
        "learning rate (--lr) or clip gradients (--clip)."
    )


@pytest.mark.slow
def test_a_schedule_that_overflows_is_named():
    task = toy.task()._replace(schedule=lambda t: jnp.where(t == 1, jnp.inf, 1.0))
    text, done = message(task)
    assert "The learning rate (inf) of 5 clients" in text and done == 1
    assert "in round 1: check --lr and its schedule" in text


def root(logits, y, mask):
    """sqrt(1 - p), whose gradient is NaN at p = 1."""
    own = jnp.exp(losses.cross_entropy_of_rows(logits, y) * -1)
    return losses.masked_mean(jnp.sqrt(1 - own), mask)


@pytest.mark.slow
def test_a_loss_without_a_gradient_is_named():
    f = toy.federation()
    x = f.examples.x * 0 + f.examples.y[:, None] * 10 + 1  # soon certain
    task = toy.task(loss=root, lr=0.5)
    f = f._replace(examples=f.examples._replace(x=x))
    text, _ = message(task, f=f, rounds=99)
    assert "The gradient of the loss of" in text and RATE not in text
    assert "it has none where a label has probability 1" in text


@pytest.mark.parametrize("loss", [losses.focal(0.5), losses.label_smoothing(0.1)])
def test_losses_of_the_library_have_gradients(loss):
    assert divergence.without_gradient(toy.task(loss=loss)) is None


def test_a_regression_without_a_gradient_at_its_targets():
    label = jax.ShapeDtypeStruct((toy.C,), jnp.float32)
    distance = lambda outputs, y, mask: jnp.sqrt(losses.squared_error(outputs, y, mask))
    task = toy.task(loss=distance)._replace(label=label)
    assert divergence.without_gradient(task) == "outputs are targets"
    task = task._replace(loss=losses.squared_error)
    assert divergence.without_gradient(task) is None


@pytest.mark.slow
def test_a_state_of_one_client_is_named():
    def poisoned(task):
        made = ALGORITHMS["ditto"](task)

        def client(c, server, row):
            found = made.client(c, server, row)
            bad = jnp.where((c.id == 2) & (c.round == 1), jnp.nan, 0)
            return found._replace(row=jax.tree.map(lambda x: x + bad, found.row))

        return made._replace(client=client)

    text, done = message(toy.task(), poisoned)
    assert text == (
        "The state (or the server's) of client 2 is not finite in round 1: nor is it "
        "with a learning rate of 1e-06 from the initial state."
    )
    assert done == 1


@pytest.mark.slow
def test_several_runs_at_once_do_not_blame_the_rate():
    programs = [simulate.program("fedavg", toy.task())] * 2
    programs[1] = programs[1]._replace(traced=programs[1].traced | {"lr": 1e30})
    f, keys = toy.federation(), jax.random.split(KEY, 2)
    program, both = simulate.vectorized(programs, [f, f])
    functions = simulate.compiled(program, keys, both, eval_every=0)
    first, *_ = simulate.rounds_at_once(
        program, keys, both, functions, rounds=1, eval_every=0
    )
    assert np.isfinite(first[0].metrics.loss).all()
    assert "a run alone names the cause" in str(first[1])
