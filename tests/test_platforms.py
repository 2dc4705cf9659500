"""Rounds in the forms of accelerators, run on the CPU, against those of a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_decoding as language
import toy

from fedjax_pfl import local_training, models
from fedjax_pfl.engine import rounds
from fedjax_pfl.kernels.platform import on
from fedjax_pfl.types import Batch, Context

WIDTH = 3  # clients of one to five batches share a loop
momentum = functools.partial(optax.sgd, momentum=0.9)


def one_round(method, width, evaluated=True, **options):
    task = toy.fitted(method, toy.net_of(method), **options)
    program = toy.program(toy.METHODS[method], task, width=width)
    key = jax.random.key(5)
    state = program.init(key, program.traced)
    arguments = (Context(key, program.traced, toy.federation(), np.int32(0)), state)
    state, found = jax.jit(program.round)(*arguments, np.bool_(evaluated))
    return state, found.loss, found.post, jax.jit(program.evaluate)(*arguments)


@pytest.mark.parametrize("platform", ["gpu", toy.slow("tpu")])
@pytest.mark.parametrize(
    "method, options",
    [
        ("fedavg", {"optimizer": momentum}),
        toy.slow("fedavg", {"epochs": None, "steps": 7}),
        toy.slow("fedavg", {"drop_last": True}),
        toy.slow("fedbn", {}),
        toy.slow("apfl", {}),
        toy.slow("fedala", {}),
        toy.slow("per_fedavg", {}),
    ],
)
def test_round_does_not_depend_on_the_platform(platform, method, options):
    expected = one_round(method, 1, **options)
    with on(platform):
        found = one_round(method, WIDTH, **options)
    toy.assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_round_that_is_not_evaluated_has_no_scores_after_training(platform):
    with on(platform):
        _, _, post, _ = one_round("fedavg", WIDTH, evaluated=False)
    assert post and all(np.isnan(x).all() for x in post.values())


def test_clients_share_the_largest_trip_count():
    with on("gpu"):
        count = jax.vmap(lambda n: local_training.trips(n), out_axes=None)(
            jnp.array([2, 5, 3])
        )
    assert count == 5
    assert local_training.trips(4) == 4


def test_step_after_a_clients_last_changes_nothing():
    def step(key, carry, batch: Batch, active=True):
        seen = jnp.where(active, 1, 0)
        assert batch.mask.shape == (4,)
        return carry + seen, jnp.float32(1)

    def run(size):
        data = local_training.Data(
            toy.federation().examples, jnp.arange(12), size, lambda x: x, None
        )
        options = {"batch_size": 4, "epochs": 2, "keeps": True}
        return local_training.steps(jax.random.key(0), data, step, 0, **options)

    with on("gpu"):
        carry, mean, total = jax.vmap(run)(jnp.array([3, 12, 0]))
    np.testing.assert_array_equal(carry, [2, 6, 0])
    np.testing.assert_array_equal(total, [2, 6, 0])
    np.testing.assert_array_equal(mean, [1, 1, 0])


def test_static_loops_give_the_same_results():
    with on("gpu"):
        expected = one_round("fedavg", WIDTH, epochs=2)
        found = one_round("fedavg", WIDTH, epochs=2, loop="static")
    toy.assert_close(found, expected, 1e-6)


def test_static_loops_have_no_condition_on_data():
    count = {}
    for kind in local_training.LOOPS:
        program = toy.program("fedavg", toy.task(epochs=2, loop=kind), width=WIDTH)
        state = program.init(jax.random.key(5), program.traced)
        context = program.context(jax.random.key(0), toy.federation())
        with on("gpu"):
            traced = jax.make_jaxpr(program.round)(context, state, np.bool_(True))
        count[kind] = str(traced).count("while[")
    assert count["static"] < count["dynamic"]
    assert count["bounded"] == 0


def test_compiler_chooses_the_layout_of_examples(monkeypatch):
    task = toy.task()
    program = toy.program("fedavg", task)
    run = functools.partial(
        rounds.rounds, program, jax.random.key(0), toy.federation(), rounds=2
    )
    expected = jax.tree.map(np.array, [result.state for result in run()][-1])
    monkeypatch.setattr(rounds, "platform", lambda: "gpu")
    assert rounds.free_layouts(program, toy.federation()) is not None
    toy.assert_same([result.state for result in run()][-1], expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["transformer", "gpt2", "llama", "qwen2", "qwen3"])
def test_attention_does_not_depend_on_the_platform(kind, packed, monkeypatch):
    """Rows with padding and, packed, with two texts; grouped queries and windows."""
    options = language.GIVEN | {"packed": packed}
    size, words = language.LENGTH, language.TOKENS
    model = models.model(language.network(kind), (size,), words, **options)
    w, x = language.drawn(model, 2.0), language.prompts(3, size, 7)
    x[1, 5] = -1 - x[1, 5] if packed else x[1, 5]
    weight = (jnp.asarray(x) != 0).reshape(-1, 1)
    calls, own = [], jax.nn.dot_product_attention

    def spy(*args, **options):
        calls.append(options)
        return own(*args, **options)

    def gradients():
        def loss(w):
            return jnp.sum(jnp.sin(model.apply(w, x)[0]) * weight)

        return jax.jit(jax.value_and_grad(loss))(w)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    wanted = gradients()
    assert not calls
    with on("gpu"):
        found = gradients()
    assert len(calls) == 2
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1, abs(b).max()))
