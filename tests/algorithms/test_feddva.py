"""FedDVA's rounds against a plain loop, its degenerate cases, and what travels and what
stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import N, assert_close, assert_same

from fedjax_pfl import keys, local_training, trees
from fedjax_pfl.algorithms import feddva as factory
from fedjax_pfl.algorithms.feddva import phases as dva_phases
from fedjax_pfl.algorithms.feddva.feddva import networks
from fedjax_pfl.data.datasets import prepare_images
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Data, State

KEY, IDS = jax.random.key(0), np.array([1, 3], np.int32)
SIZE: dict = {"hidden": 8, "latent": 2, "personal": 2, "exchange": "encoders"}
TASK = toy.task(epochs=1, **toy.TASKS["feddva"])
F = toy.federation()


@functools.cache
def compiled(**fixed):
    """One round of the clients 1 and 3 from the initial state: (active, numbers) ->
    State[2], Metrics, Traffic."""

    @jax.jit
    def run(active, numbers):
        algorithm = factory(TASK, **SIZE, **fixed, **numbers)
        cohort = toy.cohort(TASK, IDS, active, F, KEY)
        state = algorithm.init(KEY)
        return toy.round_of(algorithm, TASK)(
            KEY, State(state.server, trees.gather(state.clients, IDS)), cohort
        )

    return run


def one_round(active=(True, True), numbers=None, **fixed):
    numbers = {"alpha": 1.0, "beta": 0.75, "xi": 8.0, "cls": 1.0} | (numbers or {})
    return compiled(**fixed)(np.array(active), numbers)


# 40 s; test_dva.py has the losses, and the contract the losses of twelve rounds
@pytest.mark.slow
def test_one_client_is_a_plain_loop_over_the_phases():
    """The average of one upload is the upload; the first phase has the client's key,
    each further one its own."""
    state, metrics = one_round((True, False), variant="paper")
    nets, _ = networks(TASK, 2, 2, 8)

    @jax.jit
    def alone():
        key = jax.random.fold_in(jax.random.fold_in(KEY, 0), 1)
        streams = key, keys.fold(key, keys.Client.SECOND_PHASE)
        data, w, losses = (
            Data(F.examples, F.train.index[1], F.train.size[1], TASK.prepare),
            dva_phases.init(nets, KEY),
            [],
        )
        for phase, stream in zip(
            dva_phases.phases(nets, xi=16.0), streams, strict=True
        ):
            w, loss = local_training.sgd(
                stream, data, phase.loss, w, TASK, train=phase.parts
            )
            losses.append(loss)
        return w, losses

    w, losses = alone()
    for part in ("z", "c"):
        assert_close(state.server[part], w[part], 1e-5)
    for part in ("decoder", "stats"):
        assert_close(toy.rows(state.clients[part], 0), w[part], 1e-5)
    np.testing.assert_allclose(metrics.loss[0], losses[-1], rtol=1e-5)
    np.testing.assert_allclose(metrics.clients["loss_decoder"][0], losses[0], rtol=1e-5)


@pytest.mark.slow  # 20 s; test_dva.py has the regulariser alone
def test_without_slack_the_regulariser_is_the_divergence():
    """xi below any bound: R_c = KL(q(c|x, z) || N(0, I)) whatever xi; with slack it is
    not."""
    low, lower, high = (
        one_round(numbers={"xi": xi}, variant="paper")[0].server
        for xi in (-1e4, -1e6, 8.0)
    )
    assert_same(low, lower)
    assert trees.sq_dist(low["c"], high["c"]) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("head", ["personal", "shared"])
def test_a_classifier_without_weight_changes_nothing_else(head):
    plain, beside = one_round()[0], one_round(numbers={"cls": 0.0}, head=head)[0]
    for part in ("z", "c"):
        assert_close(beside.server[part], plain.server[part], 1e-5)
    assert_close(beside.clients["decoder"], plain.clients["decoder"], 1e-5)
    where = beside.server if head == "shared" else beside.clients
    assert jax.tree.leaves(where["head"])


@functools.cache
def shapes(**options):
    uint8 = jax.ShapeDtypeStruct((28, 28, 1), jnp.uint8)
    algorithm = factory(TASK._replace(input=uint8, prepare=prepare_images), **options)
    return algorithm, jax.eval_shape(algorithm.init, KEY)


def test_the_encoders_travel_and_the_rest_stays():
    """6,047,202 scalars for 28x28 pixels and d = 4; the decoder's 2,888,769 and all
    running statistics stay."""
    algorithm, state = shapes(exchange="encoders")
    assert trees.size(state.server) == 6_047_202 and algorithm.traffic is None
    row = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.clients
    )
    assert trees.size(row["decoder"]) == 2_888_769
    assert set(row["stats"]) == {"z", "c", "decoder"} and trees.size(
        row["stats"]
    ) == 2 * (2 * 960 + 448)
    assert all(x.shape[0] == N for x in jax.tree.leaves(state.clients))
    assert (
        trees.size(shapes(head="shared", exchange="encoders")[1].server)
        == 6_047_202 + 8 * 4 + 4 + 4 * 4 + 4
    )


def test_the_encoder_of_c_stays():
    state = shapes()[1]
    assert trees.size(state.server) == 2_756_416 + 264_712
    row = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.clients
    )
    assert trees.size(row["c"]) == 3_920 + 2 + 2_757_440 + 264_712


@pytest.mark.parametrize(
    "head, headline", [("none", ("elbo", "max")), ("personal", ("acc", "max"))]
)
def test_the_headline(head, headline):
    assert shapes(head=head)[0].headline == headline


@pytest.mark.parametrize(
    "options, words",
    [
        ({"alpha": -1.0}, "`alpha` must be in"),
        ({"head": "own"}, "Unknown head"),
        ({"exchange": "c"}, "Unknown exchange"),
        ({"latent": 0}, "`latent` must be in"),
        (
            {"hidden": 8},
            "`hidden` must be in .16, inf., got 8: each of 4 convolutions has half the "
            "channels of the next",
        ),
        ({"hidden": 1}, "`hidden` must be in"),
    ],
)
def test_a_wrong_value_is_said(options, words):
    with pytest.raises(InputError, match=words):
        shapes(**options)


def test_inputs_that_are_no_images_are_said():
    with pytest.raises(InputError, match="square images"):
        factory(toy.task())


@pytest.mark.parametrize(
    "given, xi, floor",
    [
        ({}, 1.0, 0.01),
        ({"variant": "paper"}, 16.0, 0.0),
        ({"variant": "paper", "floor": 0.1, "xi": 3.0}, 6.0, 0.1),
        ({"xi": 8.0}, 16.0, 0.01),
    ],
)
def test_slack_and_floor_are_those_of_the_variant(monkeypatch, given, xi, floor):
    seen, made = [], dva_phases.phases
    monkeypatch.setattr(
        dva_phases,
        "phases",
        lambda *given, **named: seen.append(named) or made(*given, **named),
    )
    factory(TASK, latent=3, personal=2, hidden=8, **given)
    # the slack is for each of the two dimensions of c
    assert (seen[0]["xi"], seen[0]["floor"]) == (xi, floor)
    assert seen[0]["variant"] == given.get("variant", "code")
