"""The properties of sheet 19: how the blending weights are learned, for how long, and
what starts from them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import SIZES, C, N, assert_close, assert_same

from fedjax_pfl import keys, losses
from fedjax_pfl.algorithms import fedala as factory
from fedjax_pfl.algorithms.fedala import Patience, blend, learn, subset
from fedjax_pfl.types import Batch, Data, State

KEY = jax.random.key(0)
TASK = toy.task()
LR, EPOCHS = 0.3, 3
# full batches: no shuffling to imitate
FULL = toy.task("linear", lr=LR, batch_size=32, epochs=EPOCHS)


F = toy.federation()
X, Y = np.asarray(F.examples.x, np.float64), np.asarray(F.examples.y)
WIDTHS = {width: toy.federation(width).train for width in (19, 24)}


def data(i, width=19):
    return Data(F.examples, *map(jnp.asarray, toy.rows(WIDTHS[width], i)), TASK.prepare)


@jax.jit
def cut(key, index, size, percent):
    return subset(key, Data(F.examples, index, size, TASK.prepare), percent)[1:3]


def stretch(i, percent, key=KEY, width=19):
    index, size = cut(key, *toy.rows(WIDTHS[width], i), percent)
    return np.asarray(index)[: int(size)]


def examples(i):
    rows = np.asarray(F.train.index[i])[: SIZES[i]]
    return X[rows], Y[rows]


@pytest.mark.parametrize(
    "percent, sizes", [(80.0, [5, 15, 1, 9, 3]), (0.0, [1] * 5), (100.0, list(SIZES))]
)
def test_the_stretch_is_contiguous_and_of_the_right_length(percent, sizes):
    for i in range(N):
        got, mine = stretch(i, percent), np.asarray(data(i).index)[: SIZES[i]]
        assert len(got) == sizes[i]
        assert list(got) == list(range(got[0], got[0] + len(got))) and set(got) <= set(
            mine
        )
        assert_same(stretch(i, percent, width=24), got)


def test_the_stretch_reaches_every_place():
    firsts = {
        stretch(1, 80.0, jax.random.key(k))[0] - int(data(1).index[0])
        for k in range(60)
    }
    assert firsts == {0, 1, 2, 3, 4}  # 19 examples, 15 of them
    _, size = cut(KEY, data(1).index, np.int32(0), 80.0)
    assert size == 0


@pytest.mark.slow
def test_the_gradient_of_the_weights_follows_the_chain_rule():
    """dL/dW = g(w^) * (w^t - w_i), also by finite differences."""
    rng, init = np.random.default_rng(0), TASK.model.init
    own, received = (
        jax.tree.map(np.float64, init(jax.random.key(i))) for i in range(2)
    )
    with jax.enable_x64(True):
        batch = Batch(
            rng.normal(size=(6, *toy.SHAPE)),
            np.arange(6) % C,
            np.arange(6) < 5,
            np.arange(6),
        )
        loss = lambda w: losses.classification(TASK.model)(w, batch, KEY)[0]
        a = jax.tree.map(lambda x: rng.uniform(size=x.shape), own)
        both = jax.jit(jax.value_and_grad(lambda a: loss(blend(own, received, a))))
        by_a = both(a)[1]
        by_w = jax.jit(jax.grad(loss))(jax.jit(blend)(own, received, a))
        assert_close(
            by_a,
            jax.tree.map(lambda g, w, r: np.asarray(g) * (r - w), by_w, own, received),
        )
        value = lambda e: both(jax.tree.map(lambda x: x + e, a))[0]
        slope = sum(np.sum(x) for x in jax.tree.leaves(by_a))
        np.testing.assert_allclose(
            slope, (value(1e-6) - value(-1e-6)) / 2e-6, rtol=1e-6
        )


@jax.jit
def learned(first, size, threshold):
    """Weights of ones, by a loss whose gradient in every step is 2 a."""
    rows = data(0)._replace(size=size)
    loss = lambda a, batch, key: jnp.sum(a**2) + jnp.sum(batch.y * batch.mask)
    return learn(
        KEY, rows, loss, jnp.ones(3), first, TASK, 0.1, Patience(10, threshold, 30)
    )


@pytest.mark.parametrize(
    "first, size, threshold, epochs",
    [
        (True, 7, 1e9, 11),
        (True, 7, 0.0, 30),
        (False, 7, 0.0, 1),
        (True, 0, 1e9, 0),
        (False, 0, 1e9, 0),
    ],
)
def test_how_long_the_weights_are_learned(first, size, threshold, epochs):
    weights, got = learned(first, np.int32(size), threshold)
    assert got == epochs
    steps = epochs * -(-size // TASK.batch_size)
    np.testing.assert_allclose(weights, np.full(3, 0.8**steps), rtol=1e-5, atol=1e-6)


def test_learning_stops_when_the_last_losses_are_steady():
    """A loss a^2 that shrinks by a constant factor; the epoch at which its deviation is
    small is found by a loop."""
    rows = data(2)  # one example: one step an epoch
    values, a = [], 1.0
    while not (len(values) > 4 and np.std(values[-4:]) < 0.02):
        values.append(a**2)
        a -= 0.05 * 2 * a
    loss, patience = lambda a, batch, key: a**2, Patience(4, 0.02, 100)
    run = jax.jit(
        lambda a: learn(KEY, rows, loss, a, jnp.bool(True), TASK, 0.05, patience)
    )
    _, epochs = run(np.float32(1))
    assert epochs == len(values) and epochs > 6


# --- whole rounds


TASKS = {"mlp": TASK, "linear": FULL}


def differing(blended="head"):
    """A start in which the clients' heads are their own."""
    begin = jax.device_get(factory(TASK, blended=blended).init(KEY))
    rng = np.random.default_rng(5)
    noisy = jax.tree.map(
        lambda x: x + 0.5 * rng.normal(size=x.shape).astype(np.float32),
        begin.clients["w"],
    )
    return State(begin.server, {**begin.clients, "w": noisy})


@functools.cache
def compiled(net, blended, window):
    task, static = TASKS[net], {"blended": blended, "window": window}

    @jax.jit
    def run(state, federation, ids, numbers):
        algorithm = factory(
            task._replace(lr=numbers["lr"]),
            **static,
            **{k: numbers[k] for k in numbers if k != "lr"},
        )
        here = toy.cohort(task, ids, True, federation, KEY, evaluated=jnp.bool(True))
        return toy.one_round(algorithm, KEY, state, here)

    return factory(task, **static).init, run


def rounds(
    cohorts, net="mlp", start=None, federation=F, blended="head", window=10, **numbers
):
    """The states before, between and after rounds of the clients `cohorts`, a list of
    ids, and the metrics."""
    init, run = compiled(net, blended, window)
    defaults = {
        "lr": TASKS[net].lr,
        "percent": 80.0,
        "lr_weights": 1.0,
        "threshold": 0.1,
    }
    states, metrics = [jax.device_get(init(KEY)) if start is None else start], []
    for ids in cohorts:
        state, row = jax.device_get(
            run(states[-1], federation, np.asarray(ids, np.int32), defaults | numbers)
        )
        states.append(state)
        metrics.append(row)
    return states, metrics


def by_hand(w, x, y):
    """Loss and gradient of softmax regression w = (kernel, bias), in float64."""
    z = x @ w[0] + w[1]
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    r = (np.exp(log_p) - np.eye(C)[y]) / len(y)
    return -np.mean(log_p[np.arange(len(y)), y]), (x.T @ r, r.sum(axis=0))


def learned_by_hand(w, received, a, first, x, y, threshold):
    losses, values = [], a
    while True:
        now = tuple(
            p + (g - p) * b for p, g, b in zip(w, received, values, strict=True)
        )
        loss, slope = by_hand(now, x, y)
        values = tuple(
            np.clip(b - s * (g - p), 0, 1)
            for b, s, g, p in zip(values, slope, received, w, strict=True)
        )
        losses.append(loss)
        if not first or (len(losses) > 3 and np.std(losses[-3:]) < threshold):
            return values, len(losses)


def test_rounds_by_hand():
    percent, threshold = 80.0, 3e-3
    cohorts = [[0, 1, 2], [0, 1, 3], [3, 1, 4]]
    states, metrics = rounds(
        cohorts, "linear", window=3, percent=percent, threshold=threshold
    )
    head = lambda tree: tuple(
        np.asarray(tree[name], np.float64) for name in ("kernel", "bias")
    )
    received = head(states[0].server["head"])
    w, a = [received] * N, [tuple(np.ones_like(p) for p in received)] * N
    learned, most = np.zeros(N, bool), 0
    for ids, got, row in zip(cohorts, states[1:], metrics, strict=True):
        for slot, i in enumerate(ids):
            key = keys.fold(
                jax.random.fold_in(jax.random.fold_in(KEY, 0), i), keys.Client.SUBSET
            )
            part = stretch(i, percent, key)
            epochs = 0
            if any(np.any(p != g) for p, g in zip(w[i], received, strict=True)):
                a[i], epochs = learned_by_hand(
                    w[i], received, a[i], not learned[i], X[part], Y[part], threshold
                )
                learned[i] = True
            assert row.clients["ala_epochs"][slot] == epochs
            most = max(most, epochs)
            share = sum(p.sum() for p in a[i]) / sum(p.size for p in a[i])
            np.testing.assert_allclose(
                row.clients["global_share"][slot], share, atol=1e-5
            )
            v = tuple(
                p + (g - p) * b for p, g, b in zip(w[i], received, a[i], strict=True)
            )
            for _ in range(EPOCHS):
                v = tuple(
                    p - LR * s
                    for p, s in zip(v, by_hand(v, *examples(i))[1], strict=True)
                )
            w[i] = v
        share = SIZES[ids] / SIZES[ids].sum()
        received = tuple(
            sum(p * w[i][part] for p, i in zip(share, ids, strict=True))
            for part in range(2)
        )
        np.testing.assert_array_equal(got.clients["first"], ~learned)
        for part, name in enumerate(("kernel", "bias")):
            np.testing.assert_allclose(
                got.server["head"][name], received[part], atol=2e-5
            )
            for i in range(N):
                np.testing.assert_allclose(
                    got.clients["w"]["head"][name][i], w[i][part], atol=2e-5
                )
                np.testing.assert_allclose(
                    got.clients["weights"]["head"][name][i], a[i][part], atol=2e-5
                )
    assert most > 4


@pytest.mark.slow
@pytest.mark.parametrize("blended", ["head", toy.slow("all")])
def test_weights_stay_within_bounds_and_reach_them(blended):
    states, metrics = rounds(
        [range(N)] * 2, start=differing(blended), blended=blended, lr_weights=50.0
    )
    flat = np.concatenate(
        [np.ravel(x) for x in jax.tree.leaves(states[-1].clients["weights"])]
    )
    assert np.all((flat >= 0) & (flat <= 1))
    assert np.any(flat == 0) and np.any(flat == 1)
    assert np.all(metrics[0].clients["ala_epochs"] > 10)
    assert_same(metrics[1].clients["ala_epochs"], np.ones(N))


def test_in_the_first_round_nothing_is_learned():
    states, metrics = rounds([range(N)])
    assert_same(states[1].clients["weights"], states[0].clients["weights"])
    assert (
        not metrics[0].clients["ala_epochs"].any() and states[1].clients["first"].all()
    )


def test_a_prediction_is_made_by_the_model_that_training_starts_from():
    start = differing()
    # so that the round scores what it would train from
    (_, state), _ = rounds([range(N)], start=start, lr=0.0)
    cohort = toy.cohort(TASK, range(N), True, F, KEY)
    predict = lambda c, mine: factory(TASK).predict(start.server, mine, c)(
        F.examples.x[:7], jnp.ones(7, bool)
    )
    got = jax.jit(lambda rows: cohort.map(predict, rows))(start.clients)
    for i in range(N):
        begun = {**start.server, "head": toy.rows(state.clients["w"]["head"], i)}
        assert_close(got[i], oracle.forward(oracle.variables(begun), X[:7])[1], 1e-5)


def test_blending_helps_on_the_examples_it_is_learned_on():
    """Against w_i and w^t alone, by the loss of all training examples."""
    start = differing()
    (_, after), _ = rounds([range(N)], start=start, lr=0.0, percent=100.0)

    def loss(i, head):
        x, y = examples(i)
        return oracle.cross_entropy(
            oracle.forward(oracle.variables({**start.server, "head": head}), x)[1], y
        )

    for i in range(N):
        mine, own = (
            toy.rows(state.clients["w"]["head"], i) for state in (after, start)
        )
        assert loss(i, mine) < min(loss(i, own), loss(i, start.server["head"]))


def test_a_round_without_examples_keeps_the_server():
    nothing = F._replace(train=F.train._replace(size=np.zeros(N, np.int32)))
    (before, after), (metrics,) = rounds(
        [range(N)], start=differing(), federation=nothing
    )
    assert_same(after.server, before.server)
    assert_same(after.clients["weights"], before.clients["weights"])
    assert not metrics.clients["ala_epochs"].any() and after.clients["first"].all()
