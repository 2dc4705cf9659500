"""`averaging.from_client` makes the round that one would write by hand."""

import functools

import jax
import numpy as np
import optax
import pytest
import toy
from toy import assert_same

from fedjax_pfl import (
    averaging,
    evaluation,
    local_training,
    losses,
    testing,
    traffic,
    trees,
)
from fedjax_pfl.algorithms import ALGORITHMS, template
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Algorithm, Context, Metrics, State


def ditto(task, *, lam=1.0):
    """Ditto without `from_client`."""
    loss, split = losses.classification(task.model), averaging.split(task)
    made = ALGORITHMS["ditto"](task, lam=lam)

    def round(key, state, cohort):
        anchor = trees.proximal(averaging.params(state.server), lam)
        sgd = functools.partial(local_training.sgd, task=task)

        def client(c, mine):
            v, _ = sgd(c.key, c.train, loss, mine["v"], extra=anchor)
            w = split.receive(state.server, mine["own"])
            w, value = sgd(c.key, c.train, loss, w)
            shared, own = split.send(w)
            predictor = averaging.predictor(task.model, v)
            post = evaluation.post(cohort, c, predictor)
            return shared, {"v": v, "own": own}, value, post

        w, (mine, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        return State(w, mine), Metrics(value, post)

    sent = lambda state, cohort, metrics: traffic.both_ways(cohort, state.server)
    return Algorithm(made.init, round, made.predict, made.score, sent)


def small_head(task, *, mu=0.01):
    """The template without `from_client`."""
    plain, split = losses.classification(task.model), averaging.split(task, ("head",))
    made = template.small_head(task, mu=mu)

    def loss(w, batch, key):
        value, stats = plain(w, batch, key)
        return value + mu / 2 * optax.tree.norm(w["head"], squared=True), stats

    def round(key, state, cohort):
        def client(c, own):
            w = split.receive(state.server, own)
            w, value = local_training.sgd(c.key, c.train, loss, w, task)
            body, own = split.send(w)
            predictor = averaging.predictor(task.model, w)
            return body, own, value, evaluation.post(cohort, c, predictor)

        body, (own, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=state.server
        )
        return State(body, own), Metrics(value, post)

    sent = lambda state, cohort, metrics: traffic.both_ways(cohort, state.server)
    return Algorithm(made.init, round, made.predict, made.score, sent)


def after(factory):
    """Returns the state and the results after one round of four clients."""
    subject = testing.subject(factory, testing.task())
    ids, active = np.arange(4, dtype=np.int32), np.ones(4, bool)
    given = jax.random.key(1), subject.traced, subject.federation, np.int32(0)
    return subject.round(Context(*given), subject.start, ids, active, np.bool_(True))


@pytest.mark.parametrize(
    ("made", "by_hand"),
    [(ALGORITHMS["ditto"], ditto), (template.small_head, small_head)],
)
def test_the_round_is_the_one_written_by_hand(made, by_hand):
    assert_same(after(made), after(by_hand))


def test_an_unknown_part_is_named():
    with pytest.raises(InputError, match="part of a model 'layer0'"):
        averaging.split(toy.task("mlp"), ("layer0",))
