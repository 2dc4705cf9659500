"""The options with which rounds are compiled."""

import re

import jax
import jax.numpy as jnp
import pytest
import toy

from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import xla
from fedjax_pfl.models import nets


@pytest.mark.slow
def test_no_local_step_copies_the_weights():
    """XLA would, by itself: the gradient of the first layer reads the weights of the
    second, which the step overwrites."""
    net = models.model(
        lambda shape, classes, rngs: nets.mlp(shape, classes, rngs, hidden=97),
        toy.SHAPE,
        toy.C,
    )
    program = toy.program(ALGORITHMS["local"], toy.task(model=net), width=1)
    context = program.context(jax.random.key(0), toy.federation())
    state = jax.eval_shape(program.init, context.key, context.traced)
    args = context, state, jnp.bool(False)

    def copies(**options):
        """Counts copies of the second layer's weights, inside loops and outside."""
        text = (
            jax.jit(program.round, donate_argnums=1, **options)
            .lower(*args)
            .compile()
            .as_text()
        )
        return len(re.findall(rf"= f32\[97,{toy.C}\]\S* copy\(", text))

    assert copies(compiler_options=simulate.compiler_options()) == 0 < copies()


def test_an_option_that_xla_does_not_know_is_not_given(monkeypatch):
    monkeypatch.setitem(xla.OPTIONS, "cpu", {"xla_cpu_no_such_option": True})
    assert xla.compiler_options.__wrapped__() == {}


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_options_are_those_of_the_platform(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(xla, "_known", lambda options: options)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert xla.compiler_options.__wrapped__() == xla.OPTIONS.get(backend, {})
    assert xla.init_options.__wrapped__() == {}


@pytest.mark.slow
def test_a_state_drawn_with_less_optimisation_is_the_same_bit_for_bit(monkeypatch):
    assert xla.init_options.__wrapped__() == {}  # the level of these tests stays
    monkeypatch.delenv("XLA_FLAGS")
    options = xla.init_options.__wrapped__()
    assert options
    init = jax.jit(models.model("linear", (60,), 10).init).lower(jax.random.key(0))
    usual = {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }
    quickly, usually = (
        init.compile(compiler_options=each)(jax.random.key(0))
        for each in (options, usual)
    )
    toy.assert_same(quickly, usually)
