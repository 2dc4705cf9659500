"""The properties of sheet 22: responsibilities, mixing weights, what EM never worsens,
and two rounds by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import SIZES, N, assert_close, assert_same

from fedjax_pfl import averaging, keys, local_training, trees
from fedjax_pfl.algorithms import fedem as factory
from fedjax_pfl.algorithms.fedem import e_step, mixture, responsibilities
from fedjax_pfl.types import Data, State

KEY = jax.random.key(0)
TASK = toy.task("linear")
TASKS = {"linear": TASK, "norm": toy.task("norm")}
ALL = np.arange(N)
W = list(map(jax.device_get, map(TASK.model.init, map(jax.random.key, range(3)))))
THETA = jax.tree.map(lambda *x: 3 * np.stack(x), *W)  # far apart
# nothing stays at home
OWN = trees.partition(THETA, averaging.split(TASK).personal[0])[0]
PI = np.array([0.5, 0.3, 0.2], np.float32)
F = toy.federation()


def state_of(theta, pi):
    return State(theta, {"pi": np.stack([pi] * N), "own": OWN})


@functools.cache
def compiled(net):
    task = TASKS[net]

    @jax.jit
    def run(state, federation, ids):
        here = toy.cohort(task, ids, ids < N, federation, KEY)
        return toy.one_round(factory(task), KEY, state, here)

    return run


def round_of(state, ids=ALL, federation=F, net="linear"):
    """The state after a round of the clients `ids`, and their metrics."""
    # every cohort is the same compilation
    places = np.append(ids, N + np.arange(N - len(ids))).astype(np.int32)
    return jax.device_get(compiled(net)(state, federation, places))


@jax.jit
def e_step_of(i, theta, pi):
    return e_step(
        TASK,
        theta,
        pi,
        Data(F.examples, F.train.index[i], F.train.size[i], TASK.prepare),
    )


def rows(i):
    row = np.asarray(F.train.index[i])[: SIZES[i]]
    return np.asarray(F.examples.x, np.float64)[row], np.asarray(F.examples.y)[row]


def log_probabilities(head, x):
    z = x @ head[0] + head[1]
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def heads(theta):
    return [
        tuple(np.asarray(theta["head"][k][m], np.float64) for k in ("kernel", "bias"))
        for m in range(3)
    ]


def q_by_hand(heads, pi, i):
    x, y = rows(i)
    p = (
        np.stack(
            [np.exp(log_probabilities(h, x))[np.arange(len(y)), y] for h in heads],
            axis=1,
        )
        * pi
    )
    return p / p.sum(1, keepdims=True)


@jax.jit
def orders(i, size):
    """The library's shuffles of client i's rows, one an epoch."""
    key = keys.fold(
        jax.random.fold_in(jax.random.fold_in(KEY, 0), i), keys.Client.SHUFFLE
    )
    return [
        local_training.shuffle(jax.random.fold_in(key, epoch), 19, size)
        for epoch in range(TASK.epochs)
    ]


def train_by_hand(i, head, q):
    """SGD on a client's weighted rows, in the order of the library's shuffle."""
    (x, y), (kernel, bias), size = rows(i), head, int(SIZES[i])
    for order in orders(i, size):
        order = np.asarray(order)[:size]
        for s in range(0, size, TASK.batch_size):
            b = order[s : s + TASK.batch_size]
            error = (
                np.exp(log_probabilities((kernel, bias), x[b])) - np.eye(toy.C)[y[b]]
            )
            error *= q[b][:, None] / len(b)
            kernel, bias = kernel - 0.1 * x[b].T @ error, bias - 0.1 * error.sum(0)
    return kernel, bias


def test_two_rounds_are_the_plain_loop():
    state, ids = state_of(THETA, PI), [3, 0, 1]
    components, pi = heads(THETA), [np.asarray(PI, np.float64)] * N
    share = {i: SIZES[i] / SIZES[ids].sum() for i in ids}
    for _ in range(2):
        state, _ = round_of(state, ids)
        q = {i: q_by_hand(components, pi[i], i) for i in ids}
        for i in ids:
            pi[i] = q[i].mean(0)
        for m, head in enumerate(components):
            trained = [(share[i], train_by_hand(i, head, q[i][:, m])) for i in ids]
            components[m] = tuple(
                sum(p * new[k] for p, new in trained) for k in range(2)
            )
    for m, head in enumerate(components):
        np.testing.assert_allclose(
            state.server["head"]["kernel"][m], head[0], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            state.server["head"]["bias"][m], head[1], rtol=1e-4, atol=1e-5
        )
    np.testing.assert_allclose(state.clients["pi"], np.stack(pi), rtol=1e-4, atol=1e-5)


def test_identical_components_leave_the_weights_alone():
    same = jax.tree.map(lambda x: np.stack([x] * 3), W[0])
    q, pi = e_step_of(1, same, PI)
    assert_close(np.asarray(q)[: SIZES[1]], np.stack([PI] * SIZES[1]))
    assert_close(pi, PI)
    assert_close(round_of(state_of(same, PI))[0].clients["pi"], np.stack([PI] * N))


@pytest.mark.parametrize("i", range(N))
def test_responsibilities_and_weights_are_on_the_simplex(i):
    q, pi = map(np.asarray, e_step_of(i, THETA, PI))
    assert q.shape == (19, 3) and np.all(q >= 0)
    np.testing.assert_allclose(q[: SIZES[i]].sum(1), 1, rtol=1e-6)
    np.testing.assert_array_equal(q[SIZES[i] :], 0)  # no row of padding has any
    np.testing.assert_allclose(pi, q[: SIZES[i]].mean(0), rtol=1e-5)
    np.testing.assert_allclose(
        q[: SIZES[i]], q_by_hand(heads(THETA), PI, i), rtol=1e-4, atol=1e-6
    )


def test_em_on_fixed_components_never_lowers_the_likelihood():
    x, y = rows(1)
    by_component = np.stack(
        [np.exp(log_probabilities(h, x))[np.arange(len(y)), y] for h in heads(THETA)],
        axis=1,
    )
    pi, values = PI, []
    for _ in range(20):
        values.append(np.log(by_component @ np.asarray(pi, np.float64)).sum())
        pi = e_step_of(1, THETA, pi)[1]
    assert np.all(np.diff(values) > -1e-5) and values[-1] > values[0] + 0.01


def test_a_weight_of_zero_stays_zero():
    q = jax.jit(responsibilities)(
        jnp.array([0.0, 0.6, 0.4]), jnp.array([[0.1, 2.0, 3.0]])
    )
    assert np.isfinite(q).all() and q[0, 0] < 1e-20


@pytest.mark.slow
def test_permuting_the_components_permutes_everything():
    order, task = [2, 0, 1], TASKS["norm"]
    init = task.model.init
    theta = jax.tree.map(
        lambda *x: np.stack(x), *(init(jax.random.key(m)) for m in range(3))
    )
    own = trees.partition(theta, averaging.split(task).personal[0])[0]
    start = State(theta, {"pi": np.stack([PI] * N), "own": own})
    turned = State(
        toy.rows(theta, order), {"pi": start.clients["pi"][:, order], "own": own}
    )
    (a, losses), (b, other) = (round_of(state, net="norm") for state in (start, turned))
    assert_close(toy.rows(a.server, order), b.server)
    assert_close(a.clients["pi"][:, order], b.clients["pi"])
    assert_close(losses.loss, other.loss)


X = np.asarray(F.examples.x[:7])
mixed = jax.jit(lambda pi: mixture(TASK, THETA, pi)(jnp.asarray(X), jnp.ones(7, bool)))


def test_the_prediction_mixes_probabilities():
    p = sum(
        w * np.exp(log_probabilities(h, X))
        for w, h in zip(PI, heads(THETA), strict=True)
    )
    np.testing.assert_allclose(np.exp(mixed(PI)), p, rtol=1e-4, atol=1e-6)
    assert_close(
        mixed(np.array([0, 1, 0], np.float32)),
        log_probabilities(heads(THETA)[1], X),
        1e-4,
    )


def test_components_begin_apart_and_the_first_as_fedavgs_model():
    begin, first = jax.jit(lambda: (factory(TASK).init(KEY), TASK.model.init(KEY)))()
    assert_same(toy.rows(begin.server, 0), first)
    one, two = (toy.rows(begin.server["head"]["kernel"], m) for m in (1, 2))
    assert np.sum((one - two) ** 2) > 1e-2
    np.testing.assert_allclose(begin.clients["pi"], 1 / 3, rtol=1e-6)


def test_a_client_without_examples_keeps_its_weights():
    size = np.array(F.train.size)
    size[0] = 0
    state, _ = round_of(
        state_of(THETA, PI), federation=F._replace(train=F.train._replace(size=size))
    )
    assert_same(state.clients["pi"][0], PI)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_responsibilities_are_of_the_model_as_it_predicts():
    """By its moments, not by the batch's."""
    task = TASKS["norm"]
    shifted = lambda i, tree: jax.tree.map(lambda x: x + 0.3 * (i + 1), tree)
    w = [jax.device_get(task.model.init(jax.random.key(i))) for i in range(2)]
    w = [{**v, "stats": shifted(i, v["stats"])} for i, v in enumerate(w)]
    data = Data(F.examples, F.train.index[1], F.train.size[1], task.prepare)
    pi = np.array([0.7, 0.3], np.float32)

    @jax.jit
    def run(theta):
        x, y = F.examples.x[data.index], F.examples.y[data.index]
        logits = [
            task.model.apply(jax.tree.map(lambda a, m=m: a[m], theta), x, train=False)[
                0
            ]
            for m in range(2)
        ]
        loss = [-jax.nn.log_softmax(z)[jnp.arange(len(y)), y] for z in logits]
        return e_step(task, theta, pi, data), responsibilities(
            pi, jnp.stack(loss, axis=1)
        )

    (q, new), by_hand = run(jax.tree.map(lambda *x: np.stack(x), *w))
    assert_close((q, new), (by_hand, by_hand.mean(axis=0)))
