"""Tests of the operations of a method's local work, counted in its trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx

from fedjax_pfl import local_training, models
from fedjax_pfl.engine import flops
from fedjax_pfl.models import layers, nets, nnx_model

STEP = models.flops(toy.tiny_mlp, toy.SHAPE, toy.C, 4)  # of the model, batches of 4
HIDDEN, HEAD = 2 * 4 * 6 * 8, 2 * 4 * 8 * 4  # of its two products, forward


def counted(method, *, epochs=2, round=1, **hparams):
    """Returns the operations of one step of the settings."""
    task = toy.method_task(method)._replace(epochs=epochs)
    return flops.flops_of_step(
        toy.METHODS[method], task, toy.federation(), hparams, round=round
    )


@pytest.mark.slow
def test_a_step_of_sgd_is_the_models_own():
    assert STEP == 2 * HIDDEN + 3 * HEAD
    for epochs in (1, 2, 5):
        assert counted("fedavg", epochs=epochs) == STEP
    assert counted("scaffold") == counted("fedprox") == STEP


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, flops",
    [
        ("ditto", 2 * STEP),
        ("apfl", 2 * STEP),
        ("per_fedavg", 2 * STEP),
        ("fedbabu", 2 * HIDDEN + 2 * HEAD),  # the head is not trained
        # a second head, whose gradient for the features is stopped
        ("fedrod", STEP + 2 * HEAD),
    ],
)
def test_what_a_method_trains_beside_it_counts(method, flops):
    assert counted(method) == flops


@pytest.mark.slow
def test_inner_steps_and_models_count():
    inner = [counted("pfedme", inner_steps=k) for k in (1, 2, 5)]
    assert inner[1] - inner[0] == STEP and inner[2] - inner[1] == 3 * STEP
    mixture = [counted("fedem", components=m) for m in (1, 2, 4)]
    assert mixture[2] - mixture[1] == 2 * (mixture[1] - mixture[0]) >= 2 * STEP


@pytest.mark.slow
def test_a_methods_own_number_of_steps_is_related_to_the_settings():
    """pFedHN takes steps of its own number, so relative to more epochs they are
    fewer."""
    assert counted("pfedhn", epochs=2) == 2 * counted("pfedhn", epochs=4) > 0


@pytest.mark.slow
def test_what_the_server_trains_is_not_the_clients_work():
    """FedDF's distillation and its teachers' predictions are the server's, who has
    their models."""
    assert counted("feddf") == counted("feddf", passes=3) == STEP


@pytest.mark.slow
def test_what_precedes_the_first_round_counts_once():
    warm = [
        counted("mnfl_het", order="code", warmup_epochs=2, round=index)
        for index in (0, 1)
    ]
    # two epochs of warm-up beside the settings' two
    assert warm[0] == pytest.approx(warm[1] + STEP)


@pytest.mark.parametrize("turns", [0, 1, 7])
def test_turns_of_a_loop(turns):
    run = lambda n, x: jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)
    given = jnp.int32(turns), jnp.ones((2, 2))
    closed = jax.make_jaxpr(run)(*given)
    outs, count = flops._walk(closed.jaxpr, [], given, True)
    assert count == turns * 2 * 2**3
    np.testing.assert_array_equal(outs[0], run(*given))


def test_convolutions_of_another_form_count_about_as_much():
    """XLA's own, by whose gradient for the input the padding is counted, too."""
    x = jax.ShapeDtypeStruct((4, 16, 16, 3), jnp.float32)
    xla, products = (
        nnx_model.step_flops(models.model("lenet", x.shape[1:], 10, conv=form), x)
        for form in ("xla", "matmul")
    )
    assert (
        products == models.flops("lenet", x.shape[1:], 10, 4)
        and 1 <= xla / products < 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("participation", [(1, 1), (0.2, 0.2)])
def test_of_several_architectures_the_mean_over_their_examples_counts(participation):
    nets = toy.tiny_mlp, toy.small_mlp
    task = toy.task(
        models=tuple(models.model(net, toy.SHAPE, toy.C) for net in nets),
        architecture=np.array([0, 1, 0, 1, 1]),
        participation=participation,
    )
    tiny, small = (models.flops(net, toy.SHAPE, toy.C, 4) for net in nets)
    if participation != (1, 1):
        wanted = [tiny, small]
        found = flops.flops_of_step(toy.METHODS["local"], task, toy.federation())
        assert found in wanted
        return
    steps, _ = local_training.planned(task, toy.SIZES)
    wanted = np.average(np.where(task.architecture == 0, tiny, small), weights=steps)
    np.testing.assert_allclose(
        flops.flops_of_step(toy.METHODS["local"], task, toy.federation()), wanted
    )


def test_convolutions_of_ones_own_network_count():
    class Body(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 2, (3, 3), rngs=rngs)

        def __call__(self, x):
            return self.conv(x).reshape(len(x), -1)

    net = lambda shape, classes, rngs: nets.Net(
        Body(rngs), layers.linear(72, classes, rngs)
    )
    task = toy.task(models=(models.model(net, (6, 6, 1), toy.C),), prepare=toy.images)
    x = jax.ShapeDtypeStruct((4, 6, 6, 1), jnp.float32)
    assert (
        flops.flops_of_step(toy.METHODS["local"], task, toy.federation())
        == nnx_model.step_flops(task.model, x)
        > 0
    )
