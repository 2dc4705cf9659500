"""Rounds against slow NumPy loops in float64, on softmax regression with full batches
(no shuffling to imitate)."""

import jax
import numpy as np
import pytest
import toy
from toy import C, N

from fedjax_pfl import evaluation

LR, EPOCHS, ROUNDS = 0.3, 3, 3
TASK = toy.task("linear", lr=LR, batch_size=32, epochs=EPOCHS)


def client_arrays(f, i):
    rows = np.asarray(f.train.index[i][: int(f.train.size[i])])
    return np.asarray(f.examples.x, np.float64)[rows], np.asarray(f.examples.y)[rows]


def residual_softmax(z, y):
    p = np.exp(z - z.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True) - np.eye(C)[y]) / len(y)


def descend(w, x, y, residual, extra=lambda w: (0, 0)):
    for _ in range(EPOCHS):
        r = residual(x @ w[0] + w[1], y)
        pull = extra(w)
        w = (w[0] - LR * (x.T @ r + pull[0]), w[1] - LR * (r.sum(0) + pull[1]))
    return w


def average(models, weights):
    return tuple(
        np.tensordot(weights, np.stack(parts), 1) for parts in zip(*models, strict=True)
    )


def run(method, **hparams):
    """The method's own start and its state after ROUNDS rounds."""
    result = toy.train(method, TASK, ROUNDS, key=jax.random.key(3), **hparams)
    return result.begin, result.state


def head(tree):
    return np.asarray(tree["head"]["kernel"], np.float64), np.asarray(
        tree["head"]["bias"], np.float64
    )


def check(tree, expected):
    np.testing.assert_allclose(head(tree)[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(head(tree)[1], expected[1], atol=1e-5)


def test_fedavg():
    f, (begin, state) = toy.federation(), run("fedavg")
    w, p = head(begin.server), toy.SIZES / toy.SIZES.sum()
    for _ in range(ROUNDS):
        w = average(
            [descend(w, *client_arrays(f, i), residual_softmax) for i in range(N)], p
        )
    check(state.server, w)


def proximal(w, strength):
    """The gradient of strength/2 ||u - w||^2 at u."""
    return lambda u: tuple(strength * (a - b) for a, b in zip(u, w, strict=True))


def test_fedprox():
    f, (begin, state) = toy.federation(), run("fedprox", mu=0.7)
    w, p = head(begin.server), toy.SIZES / toy.SIZES.sum()
    for _ in range(ROUNDS):
        w = average(
            [
                descend(w, *client_arrays(f, i), residual_softmax, proximal(w, 0.7))
                for i in range(N)
            ],
            p,
        )
    check(state.server, w)


def test_ditto():
    lam = 0.7
    f, (begin, state) = toy.federation(), run("ditto", lam=lam)
    w, p = head(begin.server), toy.SIZES / toy.SIZES.sum()
    v = [w] * N
    for _ in range(ROUNDS):
        pull = proximal(w, lam)
        v = [
            descend(v[i], *client_arrays(f, i), residual_softmax, pull)
            for i in range(N)
        ]
        w = average(
            [descend(w, *client_arrays(f, i), residual_softmax) for i in range(N)], p
        )
    check(state.server, w)
    for i in range(N):
        check(toy.rows(state.clients["v"], i), v[i])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_weighting", "task_loss"),
    [
        toy.slow("uniform", "class"),
        ("data", "class"),
        toy.slow("uniform", "batch"),
    ],
)
def test_pfedc_aggregation(head_weighting, task_loss):
    f = toy.federation()
    begin, state = run("pfedc", head_weighting=head_weighting, task_loss=task_loss)
    holds = np.asarray(f.class_counts) > 0
    start, bank = head(begin.server), list(head(begin.server))
    by = holds * (toy.SIZES[:, None] if head_weighting == "data" else 1.0)
    for _ in range(ROUNDS):
        trained = []
        for i in range(N):

            def residual(z, y, i=i):
                of = (
                    np.maximum(np.bincount(y, minlength=C), 1)
                    if task_loss == "class"
                    else len(y)
                )
                return (1 / (1 + np.exp(-z)) - np.eye(C)[y]) / of * holds[i]

            own = tuple(
                np.where(holds[i], new, old)
                for new, old in zip(bank, start, strict=True)
            )
            trained.append(descend(own, *client_arrays(f, i), residual))
        for part in range(2):
            stacked = np.stack([t[part] for t in trained])  # [N, K, C] or [N, C]
            for c in range(C):
                bank[part][..., c] = np.average(
                    stacked[..., c], axis=0, weights=by[:, c]
                )
    check(state.server, bank)


def test_accuracy_is_counted_by_hand():
    result = toy.train("fedavg", TASK, ROUNDS, key=jax.random.key(3))
    f, w, got = toy.federation(), head(result.state.server), jax.device_get(result.last)
    for i in range(N):
        rows = np.asarray(f.test.index[i][: int(f.test.size[i])])
        z = np.asarray(f.examples.x)[rows] @ w[0] + w[1]
        y = np.asarray(f.examples.y)[rows]
        assert np.isclose(got["acc"][i], np.mean(z.argmax(1) == y))
        z[:, np.asarray(f.class_counts[i]) == 0] = -np.inf
        assert np.isclose(got["acc_present"][i], np.mean(z.argmax(1) == y))


def test_a_prediction_that_is_no_number_is_wrong():
    """The logits of a diverged model are NaN, and argmax would return class 0."""
    z = np.array([[np.nan, np.nan, np.nan], [1, 0, 0], [0, 1, np.nan]], np.float32)
    counts = jax.numpy.array([1, 1, 0])
    client = type("Client", (), {"class_counts": counts})()
    found = evaluation.classification(
        jax.numpy.asarray(z), np.array([0, 0, 1]), np.ones(3, bool), client
    )
    assert {name: (int(hits), int(rows)) for name, (hits, rows) in found.items()} == {
        "acc": (1, 3),
        # the NaN of a class that the client does not hold is not looked at
        "acc_present": (2, 3),
        "acc_majority": (2, 3),  # of as many examples the first class
    }


def test_of_a_client_without_training_examples_no_class_is_present_and_no_answer_right():
    client = type("Client", (), {"class_counts": np.zeros(3, int)})()
    found = evaluation.accuracies(
        jax.numpy.eye(3), np.arange(3), np.ones(3, bool), client
    )
    assert found["acc_present"] == (0, 3) and found["acc"] == (3, 3)
