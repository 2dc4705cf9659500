"""Scores of a client's whole test set, against scikit-learn."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from sklearn import metrics as sklearn

from fedjax_pfl import evaluation
from fedjax_pfl.engine import validate
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Client, Data, Examples

RNG = np.random.default_rng(0)
P = RNG.dirichlet(np.ones(4), 40).round(2).astype(np.float32)  # with ties
Y, MASK = RNG.integers(0, 3, 40), np.arange(40) < 33  # nobody has class 3


def one_against_the_rest(score):
    rows = [(Y[MASK] == c, P[MASK, c]) for c in range(3)]
    return np.mean([score(*row) for row in rows])


def calibration():
    sure, right = P[MASK].max(1), P[MASK].argmax(1) == Y[MASK]
    edges, total = np.linspace(0, 1, 16), 0.0
    for low, high in itertools.pairwise(edges):
        here = (sure > np.float32(low)) & (sure <= np.float32(high))
        total += abs(np.sum(right[here] - sure[here]))
    return total / MASK.sum()


EXPECTED = {
    "auc": lambda: one_against_the_rest(sklearn.roc_auc_score),
    "ap": lambda: one_against_the_rest(sklearn.average_precision_score),
    "balanced_accuracy": lambda: sklearn.recall_score(
        Y[MASK], P[MASK].argmax(1), labels=np.unique(Y[MASK]), average="macro"
    ),
    "f1": lambda: sklearn.f1_score(Y[MASK], P[MASK].argmax(1), average="macro"),
    "ece": calibration,
}


@pytest.mark.parametrize("name", evaluation.METRICS)
def test_against_scikit_learn(name):
    found = jax.jit(evaluation.METRICS[name])(P, jnp.asarray(Y), MASK)
    np.testing.assert_allclose(found, EXPECTED[name](), rtol=1e-5)


@pytest.mark.parametrize("name", evaluation.METRICS)
def test_without_examples_there_is_no_score(name):
    assert np.isnan(evaluation.METRICS[name](P, jnp.asarray(Y), MASK & False))


def test_a_run_has_them_before_and_after_local_training():
    run = toy.train("fedavg", toy.task(metrics=("auc", "f1")), 1)
    for scores in (run.last, run.metrics.post):
        assert np.isfinite(scores["auc"]).any() and np.isfinite(scores["f1"]).any()


def test_the_perplexity_of_equal_logits_is_the_number_of_classes():
    y = jnp.asarray(RNG.integers(0, 7, 20), jnp.int32)
    rows = jnp.arange(12)
    data = Data(Examples(y[:, None], y), rows, jnp.int32(9), lambda x: x)
    given = dict.fromkeys(Client._fields) | {"test": data, "class_counts": jnp.ones(7)}
    c, names = Client(**given), ("perplexity",)
    score = lambda logits: evaluation.client(
        c, lambda x, _: logits(x[:, 0]), metrics=names
    )["perplexity"]
    same = score(lambda y: jnp.zeros((len(y), 7)))
    np.testing.assert_allclose(same, 7, rtol=1e-6)
    sure = score(lambda y: 50.0 * jax.nn.one_hot(y, 7))
    np.testing.assert_allclose(sure, 1, rtol=1e-6)
    with pytest.raises(InputError, match="labels that are classes"):
        real = jax.ShapeDtypeStruct((2,), np.float32)
        validate.task(toy.task()._replace(label=real, metrics=names))
