"""Clients that do not train: who they are, what they score, and that training does not
know of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import models, testing, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import marks
from fedjax_pfl.engine import validate
from fedjax_pfl.engine.unseen import among, obstacle, scorer
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment.build import build, draw_unseen
from fedjax_pfl.experiment.config import resolve
from fedjax_pfl.types import Context, State


def test_marks_are_of_everybody():
    words = {
        "algo": "local",
        "model": "linear",
        "clients": 6,
        "data_fraction": 0.2,
        "unseen": 0.3,
        "marks": True,
    }
    found = build(resolve(words))
    assert found.marks == tuple(marks.MARKS[k % 4] for k in range(6))


def test_of_each_architecture_some_do_not_train_and_some_do():
    of = np.arange(11) % 3
    ids, apart = draw_unseen(0.25, of, 0)
    assert np.array_equal(np.sort(np.append(ids, apart)), np.arange(11))
    assert np.array_equal(np.bincount(of[apart]), [1, 1, 1])
    with pytest.raises(InputError, match="leaves no client"):
        draw_unseen(0.25, np.array([0, 0, 1]), 0)


def test_each_seed_draws_others_and_they_are_as_recorded():
    found = [draw_unseen(0.2, np.zeros(20, int), seed)[1].tolist() for seed in (0, 1)]
    assert found == RECORDED


RECORDED = [[0, 10, 13, 15], [6, 7, 16, 19]]


@pytest.mark.slow
def test_the_draw_is_not_that_of_the_partition():
    """By shards of one class each; with the partition's stream they would be the first
    classes."""
    found = []
    for seed in range(5):
        config = resolve(
            {
                "algo": "fedavg",
                "dataset": "synthetic",
                "clients": 20,
                "partition": "shards",
                "hparams": {},
            }
            | {"classes_per_client": 1, "unseen": 0.2, "seed": seed}
        )
        found.append(build(config).unseen.federation.class_counts.sum(axis=0))
    assert np.asarray(found)[:, 2:].any(axis=1).all()


def personalised(factory, given, server, t, rounds=1, **options):
    """The scores of the toy's clients as if they had not trained."""
    run = jax.jit(scorer(factory, given, given, rounds=rounds, width=2, **options))
    return run(jax.random.key(5), toy.federation(), server, jnp.int32(t))


def test_a_server_of_the_size_of_a_cohort_is_an_obstacle():
    """FedCross has as many models as the largest cohort has clients."""
    for share in (0.4, 1.0):  # one client more makes no larger cohort of 0.4
        given = toy.method_task("fedcross")._replace(participation=(share, share))
        assert obstacle(toy.METHODS["fedcross"], given)
    assert not obstacle(toy.METHODS["fedper"], given)


def keeping(task):
    """FedAvg whose clients keep the mean of the round and predict with it."""
    base = toy.written_out(ALGORITHMS["fedavg"](task), task)

    def init(key):
        server, own = base.init(key)
        return State(
            server, {"own": own, "kept": trees.replicate(server, task.num_clients)}
        )

    def round(key, state, cohort):
        (server, own), metrics = base.round(
            key, State(state.server, state.clients["own"]), cohort
        )
        return State(
            server, {"own": own, "kept": trees.replicate(server, len(cohort.ids))}
        ), metrics

    return base._replace(
        init=init,
        round=round,
        predict=lambda _, row, c: base.predict(row["kept"], row["own"], c),
    )


@pytest.mark.slow
def test_the_server_stays_and_a_round_is_what_it_is_for_a_client_that_trains():
    given = toy.method_task("fedavg")
    two, once = (toy.train("fedavg", given, rounds=rounds) for rounds in (2, 1))
    found = personalised(keeping, given, once.state.server, 1)
    toy.assert_close(found["unseen"], once.last)
    toy.assert_close(
        found["unseen_post"], {name: x[1] for name, x in two.metrics.post.items()}
    )


def test_fedma_matches_no_neurons_of_clients_that_keep_their_statistics():
    """The server of unseen clients does not change, so their statistics must not change
    places."""
    method = functools.partial(ALGORITHMS["fedma"])
    for bn_stats, refused in (("aggregate", False), ("local", True)):
        given = testing.task(
            models=(models.model("lenet_bn", (28, 28, 1), toy.C, bn_stats=bn_stats),),
            bn_stats=bn_stats,
        )
        assert bool(obstacle(method, given)) == refused
        assert not obstacle(functools.partial(method, matching="identity"), given)


@pytest.mark.slow
def test_rounds_of_personalisation_go_on_from_their_rows():
    given = toy.method_task("local")
    wanted = toy.train("local", given, rounds=3)
    toy.assert_close(
        personalised(ALGORITHMS["local"], given, wanted.state.server, 0, rounds=3)[
            "unseen"
        ],
        wanted.last,
    )


def of_the_round(task):
    """FedAvg whose `post` score is the number of the round, and whose predictions are
    random."""
    base = toy.written_out(ALGORITHMS["fedavg"](task), task)

    def round(key, state, cohort):
        state, metrics = base.round(key, state, cohort)
        return state, metrics._replace(
            post={**metrics.post, "acc": jnp.full(len(cohort.ids), cohort.round, float)}
        )

    return base._replace(
        round=round,
        predict=lambda server, own, c: (
            lambda x, mask: jax.random.normal(c.key, (len(x), toy.C))
        ),
    )


@pytest.mark.slow  # their learning rate goes by these numbers, below
def test_rounds_of_personalisation_have_the_numbers_that_follow():
    given, key = toy.method_task("fedavg"), jax.random.key(5)
    program, begin = (
        toy.program(of_the_round, given),
        toy.train(of_the_round, given, 0).state,
    )
    found = personalised(of_the_round, given, begin.server, 4, rounds=3)
    np.testing.assert_array_equal(found["unseen_post"]["acc"], 6)
    then = program.evaluate(
        Context(key, program.traced, toy.federation(), jnp.int32(6)), begin
    )
    np.testing.assert_array_equal(found["unseen"]["acc"], then["acc"])


def of_the_rate(task):
    """FedAvg whose `post` score is the learning rate."""
    base = toy.written_out(ALGORITHMS["fedavg"](task), task)

    def round(key, state, cohort):
        state, metrics = base.round(key, state, cohort)
        return state, metrics._replace(
            post={**metrics.post, "acc": jnp.full(len(cohort.ids), task.lr)}
        )

    return base._replace(round=round)


@pytest.mark.slow
def test_their_learning_rate_is_that_of_the_round():
    """Half as large in each, so an eighth in round 3."""
    given = toy.method_task("fedavg")._replace(lr=0.8)
    server = toy.train("fedavg", given, 0).state.server
    found = personalised(of_the_rate, given, server, 2, rounds=2, lr_decay=0.5)
    np.testing.assert_allclose(found["unseen_post"]["acc"], 0.1, rtol=1e-6)


@pytest.mark.slow  # four programs
def test_they_are_scored_by_id_whatever_their_architectures():
    model = toy.method_task("local").models[0]
    one = toy.task(models=(model,))
    two = toy.task(
        models=(model, model), architecture=np.array([1, 0, 1, 0, 0], np.int32)
    )
    found = [
        personalised(ALGORITHMS["local"], x, toy.train("local", x, 0).state.server, 0)
        for x in (one, two)
    ]
    toy.assert_close(*found)
    assert len(set(np.asarray(found[0]["unseen_post"]["acc"]).tolist())) > 1


@pytest.mark.parametrize("clients, some, most", [(50, 40, 10), (10, 8, 2)])
def test_those_who_train_are_drawn_by_the_share_that_was_asked_for(clients, some, most):
    """Not by the share that it comes to of all clients, unseen ones among them."""
    task = toy.task()
    whole = task._replace(
        sizes=np.full(clients, 3),
        class_counts=np.tile([3, 0, 0, 0], (clients, 1)),
        architecture=np.zeros(clients, int),
        participation=0.25,
    )
    assert max(among(validate.task(whole), np.arange(some)).cohort_sizes) == most
