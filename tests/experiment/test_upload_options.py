"""Flags of what is done to uploads."""

import inspect
import re

import jax
import jax.numpy as jnp
import pytest
import toy

from fedjax_pfl import simulate
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import config
from fedjax_pfl.experiment.build import method


def resolved(**given):
    return config.resolve({"algo": "fedavg", **given})


def test_without_options_the_method_is_the_registered_one():
    """Its program is then the plain one."""
    factory, hparams = method(resolved())
    assert factory is find("fedavg") and not hparams


def round_of(config):
    """The jaxpr of a round of a toy task, as text."""
    factory, hparams = method(config)
    program = simulate.program(factory, toy.task(), hparams)
    key, t, known = jax.random.key(0), jnp.int32(1), jnp.bool(True)
    state = jax.eval_shape(program.init, key, program.traced)
    given = (key, program.traced, toy.federation(), state, t, known)
    return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(program.round)(*given)))


OPTIONS = [
    {"malicious": "0.4:sign_flip"},
    {"aggregate": "krum"},
    {"compress": "top_k:0.1"},
    {"dp": "client", "dp_noise": 1.0},
]


def test_the_plain_round_has_nothing_of_the_options():
    """Its jaxpr is the same after others were traced, which are all larger."""
    plain = round_of(resolved())
    longer = [round_of(resolved(**given)) for given in OPTIONS]
    assert all(len(text) > len(plain) for text in longer)
    assert round_of(resolved()) == plain


def test_options_are_applied_in_their_order():
    given = resolved(
        malicious="0.2:scale:3", compress="top_k:0.1", aggregate="krum", seed=4
    )
    factory, hparams = method(given)
    assert hparams == {"attack_scale": 3.0, "malicious_share": 0.2}
    assert set(inspect.signature(factory).parameters) >= set(hparams)
    # the same function, so that runs may be one program
    assert method(given)[0] is factory
    private = resolved(dp="adaptive", dp_noise=2.0, dp_clip=0.5)
    assert method(private)[1] == {"dp_noise": 2.0, "dp_clip": 0.5}


def test_a_target_sets_the_noise():
    pytest.importorskip("dp_accounting")
    given = {"dp": "client", "clients": 100, "participation": "0.1", "rounds": 10}
    noises = [resolved(dp_epsilon=x, **given).dp_noise for x in (2, 8)]
    assert noises[0] > noises[1] > 0


@pytest.mark.parametrize(
    "given, message",
    [
        ({"malicious": "0.2:flip"}, "attack"),
        ({"malicious": "2:sign_flip"}, "`malicious` must be in"),
        ({"compress": "top_k"}, "compress"),
        ({"compress": "zip:1"}, "compression"),
        ({"dp": "client"}, "needs --dp_noise"),
        ({"dp_noise": 1.0}, "--dp_noise needs --dp"),
        ({"dp": "example", "dp_epsilon": 1.0}, "--dp=example needs --dp_noise"),
    ],
)
def test_values_are_checked(given, message):
    with pytest.raises(InputError, match=message):
        resolved(**given)
