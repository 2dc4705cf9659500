"""Flags of what is done to uploads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import toy

from fedjax_pfl import simulate
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import config, results
from fedjax_pfl.experiment.upload_options import malicious, options
from fedjax_pfl.types import Context
from fedjax_pfl.uploads.privacy import guarantee


def resolved(**given):
    return config.resolve({"algo": "fedavg", **given})


def made(given, task=None):
    task = toy.task() if task is None else task
    task = task._replace(malicious=malicious(given.uploads, task.num_clients))
    return options(given.uploads, given.server, task), task


def round_of(given):
    """The jaxpr of a round of a toy task, as text."""
    more, task = made(given)
    program = simulate.program(given.algo, task, given.hparams, **more)
    key, t, known = jax.random.key(0), jnp.int32(1), jnp.bool(True)
    state = jax.eval_shape(program.init, key, program.traced)
    arguments = (Context(key, program.traced, toy.federation(), t), state, known)
    return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(program.round)(*arguments)))


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
    found, task = made(given)
    assert list(found["uploads"].named) == ["attack", "compress", "aggregate"]
    program = simulate.program("fedavg", task, **found)
    assert program.traced["attack.scale"] == 3
    assert program.traced["aggregate.malicious_share"] == 0.2
    private = resolved(dp="adaptive", dp_noise=2.0, dp_clip=0.5, compress="qsgd:2")
    found, _ = made(private)
    assert list(found["uploads"].named) == ["compress", "private"]
    numbers = found["uploads"].named["private"].traced
    assert (numbers["noise"], numbers["clip"]) == (2.0, 0.5)


def test_a_target_sets_the_noise_of_the_clients_that_train():
    pytest.importorskip("dp_accounting")
    task = toy.task()
    noises = [
        made(resolved(dp="client", dp_epsilon=x, rounds=10))[0]["uploads"]
        .named["private"]
        .traced["noise"]
        for x in (2.0, 8.0)
    ]
    assert noises[0] > noises[1] > 0
    found, _ = made(resolved(dp="client", dp_epsilon=8.0, rounds=10))
    program = simulate.program("fedavg", task, **found)

    assert 7.9 < guarantee(program, 10).epsilon <= 8


@pytest.mark.parametrize(
    "given, message",
    [
        ({"malicious": "0.2:flip"}, "malicious"),
        ({"malicious": "2:sign_flip"}, "`malicious` must be in"),
        ({"compress": "top_k"}, "compress"),
        ({"compress": "zip:1"}, "compress"),
        ({"compress": "qsgd:1.5"}, "`levels` must be an integer"),
        ({"dp": "client"}, "one of --dp_noise and --dp_epsilon"),
        ({"dp": "client", "dp_noise": 1.0, "dp_epsilon": 2.0}, "one of --dp_noise"),
        ({"dp_noise": 1.0}, "needs --dp"),
        ({"dp": "example", "dp_epsilon": 1.0}, "--dp=example needs --dp_noise"),
    ],
)
def test_values_are_checked(given, message):
    with pytest.raises(InputError, match=message):
        resolved(**given)


@pytest.mark.parametrize(
    ("dp", "epsilon", "wanted"),
    [
        ("client", 4.0, "epsilon 4 of clients, delta 0.1, fixed sampling"),
        ("example", np.nan, "epsilon inf of examples, delta 0.1, poisson sampling"),
    ],
)
def test_a_guarantee_has_unit_delta_and_sampling(dp, epsilon, wanted):
    rows = pd.DataFrame({"epsilon": [epsilon, np.nan], "delta": [0.1, np.nan]})
    private = results.guarantee({"dp": dp}, rows)
    assert str(private) == wanted
