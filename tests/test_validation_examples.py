"""Validation examples choose: no method trains on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import simulate
from fedjax_pfl.types import Subset

FAST = ("ditto",)
F, KEY = toy.federation(), jax.random.key(0)
METHODS = [name if name in FAST else toy.slow(name) for name in toy.METHODS]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_trained_on_validation_examples(method):
    """The test examples stand for them, and no client has any."""
    found = [
        Subset(F.test.index, size) for size in (F.test.size, np.zeros_like(F.test.size))
    ]
    runs = [
        toy.train(method, toy.method_task(method), 2, federation_=F._replace(val=val))
        for val in found
    ]
    toy.assert_same(runs[0].state, runs[1].state)
    toy.assert_same(runs[0].last, runs[1].last)


# clients hold out what is their test elsewhere; the test is their training examples
HELD_OUT = F._replace(val=F.test, test=F.train)
SMALL = toy.task("linear", epochs=1, metrics="perplexity")


def last_scores(program, federation, lr):
    given = {"rounds": 1, "eval_every": 0}
    return simulate.curve(program, KEY, {"lr": lr}, federation, **given)[-1]


def test_a_curve_has_scores_on_validation_examples():
    program = toy.program("fedavg", SMALL)
    found, plain = (last_scores(program, f, 0.1) for f in (HELD_OUT, F))
    assert "val/acc" not in plain and found.keys() >= {"acc", "val/acc"}
    np.testing.assert_allclose(found["val/perplexity"], plain["perplexity"], rtol=1e-5)
    assert not np.allclose(found["perplexity"], plain["perplexity"], rtol=0.01)


@pytest.mark.slow  # the derivative takes long to compile
def test_a_rate_is_tuned_by_the_gradient_of_held_out_scores():
    program = toy.program("fedavg", SMALL._replace(loop="bounded"))

    def held_out(log_lr):
        found = last_scores(program, HELD_OUT, jnp.exp(log_lr))
        return jnp.log(found["val/perplexity"]).mean()

    step = jax.jit(jax.value_and_grad(held_out))
    log_lr, path = jnp.log(0.02), []
    ahead, behind = (step(log_lr + h)[0] for h in (0.01, -0.01))
    np.testing.assert_allclose(step(log_lr)[1], (ahead - behind) / 0.02, rtol=0.02)
    for _ in range(15):
        value, slope = step(log_lr)
        path.append(value)
        log_lr -= slope
    assert min(path) <= min(step(jnp.log(lr))[0] for lr in (0.01, 0.03, 0.1, 0.3, 1.0))
