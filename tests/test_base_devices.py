"""A frozen base that several devices share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import models, simulate, testing
from fedjax_pfl.data.datasets import prepare_integers
from fedjax_pfl.engine import distributed, frozen, rounds
from fedjax_pfl.engine.placement import BASE
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import families
from fedjax_pfl.models.checkpoints import Config
from fedjax_pfl.testing import synthetic

KEY = jax.random.key(3)
LENGTH, WORDS = 5, synthetic.C  # labels are the next tokens
LLAMA = {
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
TEXT = jax.ShapeDtypeStruct((LENGTH,), jnp.int32)
MESHES = [(1, 1), (1, 4), (2, 2), (4, 2), (8, 1)]  # groups of clients x devices each


@functools.cache
def network():
    family = families.TYPES["llama"](Config(LLAMA), None)
    return models.adapted(
        family.factory,
        models.lora(2),
        TEXT.shape,
        WORDS,
        positions=LENGTH,
        vocabulary=WORDS,
        input_dtype=jnp.int32,
    )


@functools.cache
def task(net=None):
    model = network() if net is None else net
    given = {"input": TEXT, "label": TEXT, "epochs": 1}
    given |= {"prepare": prepare_integers}
    return testing.task(models=(model,), **given)


@functools.cache
def federation():
    drawn = synthetic.federation(input=TEXT, label=TEXT)
    return drawn._replace(examples=drawn.examples._replace(x=drawn.examples.x % WORDS))


def program(method, groups, base, **options):
    devices = {"devices": groups * base, "base_devices": base}
    return simulate.program(method, task(), width=2, **devices, **options)


@functools.cache
def states(method, groups, base, **options):
    """The state after two rounds, rows by client id, and the scores."""
    made = program(method, groups, base, **options)
    *_, last = simulate.rounds(made, KEY, federation(), rounds=2)
    return distributed.fetch(made.unplace(last.state)), last.pre


CASES = [("fedavg", (2, 2))]  # others are slow
CASES += [
    toy.slow(method, mesh)
    for method in ("fedavg", "ditto", "fedsa_lora", "flora")
    for mesh in MESHES[1:]
    if (method, mesh) not in CASES
]


@pytest.mark.parametrize(("method", "mesh"), CASES)
def test_results_are_those_of_one_device(method, mesh):
    (state, scores), (wanted, score) = states(method, *mesh), states(method, 1, 1)
    toy.assert_close(state, wanted, 1e-5)
    np.testing.assert_allclose(scores["acc"], score["acc"], atol=1e-6)


def test_a_device_has_its_share_of_the_base():
    made = program("fedavg", 2, 2)
    held = frozen.values(made.task)
    run = simulate.compiled(made, KEY, federation())
    context = rounds.arguments(made, KEY, federation(), run)
    parts = [x.addressable_shards[0].data.size for x in context.federation.frozen]
    # all but norms
    wanted = [x.size // 2 if x.ndim == 2 else x.size for x in held]
    assert parts == wanted
    text = jax.jit(made.round).lower(context, *_rest(made, context)).compile().as_text()
    assert "all-reduce" in text and BASE in made.mesh.axis_names


def _rest(made, context):
    state = made.init(KEY, context.traced, context.federation.placement)
    return state, jnp.bool(False)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_in_one_layout():
    made = program("ditto", 2, 2)
    middle, *_ = (
        jax.device_get(x.state)
        for x in simulate.rounds(made, KEY, federation(), rounds=1)
        if x.state is not None
    )
    *_, last = simulate.rounds(
        made, KEY, federation(), rounds=2, start=1, state=jax.device_put(middle)
    )
    whole, _ = states("ditto", 2, 2)
    again = distributed.fetch(made.unplace(last.state))
    jax.tree.map(np.testing.assert_array_equal, again, whole)


@pytest.mark.slow
def test_rows_may_be_in_host_memory():
    few = task()._replace(participation=0.4)
    found = []
    for options in ({}, {"storage": "host", "devices": 4, "base_devices": 2}):
        made = simulate.program("ditto", few, **options)
        *_, last = simulate.rounds(made, KEY, federation(), rounds=2)
        found.append(distributed.fetch(made.unplace(last.state)))
    toy.assert_close(found[1], found[0], 1e-5)


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(InputError, match="multiple of base_devices=4, got 6"):
        simulate.program("fedavg", task(), devices=6, base_devices=4)
    with pytest.raises(InputError, match="frozen variables"):
        simulate.program("fedavg", toy.task(), devices=2, base_devices=2)


def test_the_least_devices_that_hold_a_base():
    held = frozen.values(task())
    whole, parts = (sum(x.nbytes for x in held if x.ndim == n) for n in (1, 2))
    trained = (
        4
        * 2
        * sum(x.size * 4 for x in jax.tree.leaves(jax.eval_shape(network().init, KEY)))
    )
    rooms = {n: 2 * (whole + parts // n + trained) for n in (1, 2, 4)}
    for n, room in rooms.items():
        assert frozen.least_devices(task(), 2, 8, room) == n
    assert frozen.least_devices(task(), 2, 8, rooms[4] // 4) == 8
    assert frozen.least_devices(task(), 2, 8, None) == 1
