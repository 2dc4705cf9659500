"""The properties of sheet 2.10: what the fused models become, and the cases in which
FedDF is FedAvg."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import SHAPE, SIZES, C, N, assert_close, assert_same

from fedjax_pfl import models, trees
from fedjax_pfl.algorithms import feddf
from fedjax_pfl.models import nets
from fedjax_pfl.types import Context

MLP = toy.task()


def net(hidden):
    return models.model(
        lambda shape, classes, rngs: nets.mlp(shape, classes, rngs, hidden=hidden),
        SHAPE,
        C,
    )


MIXED = toy.task(
    models=(net(3), net(8)), architecture=np.array([0, 1, 0, 1, 1], np.int32)
)


@pytest.mark.slow
@pytest.mark.parametrize("net", [toy.slow("mlp"), "norm"])
def test_without_distillation_it_is_fedavg(net):
    task = MLP if net == "mlp" else toy.task(net)
    got, plain = toy.train("feddf", task, passes=0), toy.train("fedavg", task)
    assert_same(got.state, plain.state)
    assert_same(got.metrics.post, plain.metrics.post)


@pytest.mark.slow
def test_a_student_that_agrees_with_its_teachers_stays():
    """No private training, so all models are the fused one."""
    task = toy.task(epochs=0)
    got = toy.train("feddf", task, student_optimizer="sgd", student_lr=1.0)
    assert_close(got.state.server, got.begin.server)
    assert np.abs(got.metrics.server["distillation_loss"]).max() < 1e-6


def test_a_step_is_that_of_the_divergence_from_the_mean_logits():
    """All public examples are one batch, and the first step of a cosine has the whole
    learning rate."""
    x = toy.federation().public.x
    logits = lambda w: MLP.model.apply(w, x, train=False)[0]
    alone = toy.train("local", MLP, rounds=1).state.clients
    teacher = jax.nn.softmax(
        sum(logits(toy.rows(alone, i)) for i in range(N)) / N / 2.0
    )
    fused = jax.tree.map(
        lambda w: np.tensordot(SIZES / SIZES.sum(), w, 1).astype(np.float32), alone
    )

    def kl(w):
        return jnp.mean(
            jnp.sum(
                teacher * (jnp.log(teacher) - jax.nn.log_softmax(logits(w) / 2.0)),
                axis=1,
            )
        )

    value, slope = jax.value_and_grad(kl)(fused)
    length = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(slope)))
    run = functools.partial(
        toy.train,
        "feddf",
        MLP,
        rounds=1,
        student_optimizer="sgd",
        student_lr=0.5,
        temperature=2.0,
    )
    for clip in (5.0, length / 4):
        step = 0.5 * min(1, clip / length)
        expected = jax.tree.map(lambda w, g, step=step: w - step * g, fused, slope)
        got = run(clip=clip)
        assert_close(got.state.server, expected, 1e-5)
        np.testing.assert_allclose(
            got.metrics.server["distillation_loss"], value, rtol=1e-4
        )
    assert value > 1e-3


@pytest.mark.slow
def test_each_architecture_has_a_student():
    """Within an architecture models are averaged; teachers are all clients."""
    got = toy.train("feddf", MIXED, rounds=6, passes=20)
    of = np.asarray(MIXED.architecture)
    sizes = np.array(
        [
            trees.size(jax.eval_shape(model.init, jax.random.key(0)))
            for model in MIXED.models
        ]
    )
    np.testing.assert_array_equal(
        got.metrics.traffic.up[0], sizes[of[got.metrics.ids[0]]]
    )
    first = toy.train("local", MIXED, rounds=1).state.clients.trees
    begin = toy.train("feddf", MIXED, rounds=1, passes=0).state.server.trees
    for group in range(2):
        weight = SIZES[of == group] / SIZES[of == group].sum()
        alone = {part: first[group][part] for part in begin[group]}
        assert_close(
            begin[group],
            jax.tree.map(lambda w, p=weight: np.tensordot(p, w, 1), alone),
            1e-6,
        )
    assert np.mean(got.metrics.post["acc_present"][-1]) > 0.75


def trees_differ(a, b):
    return any(
        np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


@pytest.mark.slow  # that all clients teach each student is above
def test_an_absent_architecture_learns_from_the_others():
    task = MIXED._replace(participation=(0.2, 0.2))  # a single client
    program = toy.program(feddf, task, {"student_lr": 0.1})
    key, f = jax.random.key(2), toy.federation()
    state = program.init(key, program.traced)
    new, metrics = jax.jit(program.round)(
        Context(key, program.traced, f, jnp.int32(0)), state, jnp.bool(False)
    )
    (present,) = np.asarray(MIXED.architecture)[metrics.ids[metrics.active]]
    assert trees_differ(new.server.trees[1 - present], state.server.trees[1 - present])


@pytest.mark.slow
def test_the_rate_decays_over_the_steps_that_are_taken(monkeypatch):
    seen, schedule = [], optax.cosine_decay_schedule

    def noted(*given):
        fall = schedule(*given)
        return lambda t: jax.debug.callback(seen.append, t) or fall(t)

    monkeypatch.setattr(optax, "cosine_decay_schedule", noted)
    options = {"passes": 4, "public_batch": 1}
    toy.train(functools.partial(feddf), MLP, rounds=1, **options)
    steps = 4 * toy.PUBLIC
    assert np.isclose(max(seen), (steps - 1) / steps)


@pytest.mark.slow  # that of one architecture is above
def test_the_reported_divergence_is_the_mean_over_the_architectures():
    """A rate of 0 leaves the fused models, of which it then is."""
    x, two = (
        toy.federation().public.x,
        toy.task(models=MLP.models * 2, architecture=MIXED.architecture),
    )
    logits = lambda w: MLP.model.apply({**w, "stats": {}}, x, train=False)[0]
    alone = toy.train("local", MLP, rounds=1).state.clients
    teacher = jax.nn.softmax(sum(logits(toy.rows(alone, i)) for i in range(N)) / N)
    got = toy.train("feddf", two, rounds=1, student_lr=0.0)
    gaps = [
        optax.losses.kl_divergence(jax.nn.log_softmax(logits(w)), teacher)
        for w in got.state.server.trees
    ]
    np.testing.assert_allclose(
        got.metrics.server["distillation_loss"][0], np.mean(gaps), rtol=1e-4
    )


@pytest.mark.slow  # three runs; clients do so in test_knowledge_transfer.py
def test_students_take_all_public_examples_as_they_are():
    """Neither augmentation nor the dropped short batches are theirs."""
    plain, odd = (
        toy.task(lr=1e-12, **more)
        for more in ({}, {"drop_last": True, "augment": lambda key, x: -x})
    )
    run = lambda task: (
        toy.train(
            "feddf", task, rounds=1, begin=begin, public_batch=4, student_lr=0.1
        ).state.server
    )
    begin = toy.train("feddf", plain, rounds=1).begin
    assert_close(run(odd), run(plain))


@pytest.mark.slow
def test_where_nobody_has_examples_the_models_stay():
    f = toy.federation()
    nobody = f._replace(
        train=f.train._replace(size=0 * f.train.size), class_counts=0 * f.class_counts
    )
    got = toy.train("feddf", MLP, rounds=1, federation_=nobody)
    assert_same(got.state.server, got.begin.server)
