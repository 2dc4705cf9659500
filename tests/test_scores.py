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


def test_average_precision_of_two_classes_is_that_of_the_second():
    y, p = np.minimum(Y, 1), P[:, :2]
    found = evaluation.average_precision(p, jnp.asarray(y), MASK)
    wanted = sklearn.average_precision_score(y[MASK], p[MASK, 1])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", evaluation.METRICS)
def test_without_examples_there_is_no_score(name):
    assert np.isnan(evaluation.METRICS[name](P, jnp.asarray(Y), MASK & False))


@pytest.mark.parametrize("name", evaluation.METRICS)
def test_nan_logits_have_a_score_of_nan(name):
    wrong = P.copy()
    wrong[35] = np.nan  # masked
    score = evaluation.METRICS[name]
    np.testing.assert_allclose(score(wrong, Y, MASK), EXPECTED[name](), rtol=1e-5)
    wrong[3, 1] = np.nan
    assert np.isnan(score(wrong, Y, MASK))


def test_a_nan_logit_of_several_labels_is_wrong():
    y, mask = jnp.array([[False, True], [False, False]]), jnp.ones(2, bool)
    z = jnp.array([[-1.0, 2.0], [-1.0, jnp.nan]])
    found = evaluation.several_labels(z, y, mask, None)
    assert {name: [*map(int, found[name])] for name in ("exact", "hamming")} == {
        "exact": [1, 2],
        "hamming": [3, 4],
    }


def scored(logits, y):
    """Returns the area under the curve, and what stands beside it."""
    rows = jnp.arange(len(y))
    data = Data(Examples(logits, y), rows, jnp.int32(len(y)), lambda x: x)
    found = evaluation.whole(data, lambda x, _: x, logits.shape[1], ("auc",))
    return {name: float(x) for name, x in found.items()}


def test_beside_the_area_stand_the_positives_and_the_rows_of_nan():
    y = jnp.array([0, 0, 1, 0])
    z = jnp.array([[0.0, 1.0], [1.0, 0.0], [1.0, -1.0], [0.0, 0.0]])
    found = scored(z, y)
    assert found["auc"] == 0 and found["positives"] == 1
    assert np.isnan(found["nan_rows"])
    found = scored(z.at[1:3, 0].set(jnp.nan), y)
    assert np.isnan(found["auc"]) and found["nan_rows"] == 2
    assert np.isnan(scored(z, jnp.zeros(4, int))["positives"])


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
