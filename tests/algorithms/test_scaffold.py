"""The properties of sheet 5: what the control variates are, and how they add up."""

import jax
import numpy as np
import oracle
import pytest
import toy
from toy import SIZES, N, assert_close, assert_same

from fedjax_pfl.algorithms import scaffold as factory
from fedjax_pfl.types import State

KEY = jax.random.key(0)
TASK = toy.task()
ONE_STEP = toy.task("linear", batch_size=19, epochs=1)  # one full batch
FULL = toy.task("linear", batch_size=19, epochs=5)
# some clients have not a single batch
LONG = toy.task("linear", batch_size=10, drop_last=True)


def gradient(i, w):
    """Returns the gradient of a linear model's mean loss over client i's examples."""
    f = toy.federation()
    x, y = (
        np.asarray(a, np.float64)
        for a in toy.rows(f.examples, f.train.index[i][: SIZES[i]])
    )
    (kernel, bias), y = (
        (np.asarray(w["head"][name], np.float64) for name in ("kernel", "bias")),
        y.astype(int),
    )
    dz = oracle.by_logits(x @ kernel + bias, y)
    return {"body": {}, "head": {"kernel": x.T @ dz, "bias": dz.sum(axis=0)}}


def round_of(task, state=None, ids=range(N), **hparams):
    """The states before and after a round of these clients; the others have no
    examples."""
    f = toy.federation()
    size = np.where(np.isin(np.arange(N), list(ids)), f.train.size, 0)
    here = f._replace(train=f.train._replace(size=size))
    run = toy.train(factory, task, 1, KEY, here, state, **hparams)
    return run.begin, run.state


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, hparams",
    [(LONG, {}), toy.slow(LONG, {"server_lr": 0.1})],
)
def test_the_servers_variate_is_the_mean_of_the_clients(task, hparams):
    state = toy.train(factory, task, 3, KEY, **hparams).state
    mean = jax.tree.map(lambda x: np.mean(x, axis=0), state.clients["c"])
    assert_close(mean, state.server["c"], 1e-5)
    assert sum(np.sum(np.square(x)) for x in jax.tree.leaves(state.server["c"])) > 1e-4


def test_two_rounds_by_hand():
    """Client 3 holds nothing and counts for nothing; clients 0 and 2 miss the second
    round."""
    task, lr, server_lr = TASK, 0.1, 0.7
    keys, states, _ = oracle.run(factory, task, server_lr=server_lr)
    w, f = oracle.variables(states[0].server["w"]), oracle.federation()
    c, own = [0 * x for x in w], [[0 * x for x in w] for _ in range(N)]
    for t, here in enumerate(oracle.ROUNDS):
        models, changes, here = [], [], [i for i in here if i != 3]
        for i in here:
            y, steps = w, oracle.batches(f, i, keys[t], task)
            for ((x, label),) in steps:
                g = oracle.gradient(y, x, label)
                y = [
                    a - lr * (b - mine + all_)
                    for a, b, mine, all_ in zip(y, g, own[i], c, strict=True)
                ]
            new = [
                a - b + (p - q) / (len(steps) * lr)
                for a, b, p, q in zip(own[i], c, w, y, strict=True)
            ]
            changes.append([a - b for a, b in zip(new, own[i], strict=True)])
            own[i] = new
            models.append(y)
        target = oracle.mean(models, [1] * len(here))
        w = [a + server_lr * (b - a) for a, b in zip(w, target, strict=True)]
        c = [a + sum(x[k] for x in changes) / N for k, a in enumerate(c)]
        oracle.close(states[t + 1].server["w"], w)
        oracle.close(states[t + 1].server["c"], c)
        for i in range(N):
            oracle.close(toy.rows(states[t + 1].clients["c"], i), own[i])


@pytest.mark.slow
def test_one_full_batch_makes_the_variate_the_gradient():
    before, after = round_of(ONE_STEP)
    for i in range(N):
        assert_close(
            toy.rows(after.clients["c"], i), gradient(i, before.server["w"]), 1e-5
        )


def test_absent_clients_count_in_the_servers_variate():
    _, after = round_of(ONE_STEP, ids=[1, 4])
    assert_close(
        after.server["c"],
        jax.tree.map(lambda x: np.sum(x, axis=0) / N, after.clients["c"]),
    )


@pytest.mark.slow  # the steps are in the rounds by hand
def test_a_common_stationary_point_holds():
    """With c_i = grad f_i(w) and c = 0 every step is 0."""
    state = toy.train(factory, FULL, 0, KEY).begin
    w = state.server["w"]
    stacked = jax.tree.map(
        lambda *g: np.stack(g).astype(np.float32), *(gradient(i, w) for i in range(N))
    )
    state = State(state.server, {**state.clients, "c": stacked})
    for i in range(N):
        _, after = round_of(FULL, state, ids=[i])
        assert_close(after.server["w"], w, 1e-6)


def test_a_server_step_of_zero_keeps_the_model():
    before, after = round_of(ONE_STEP, server_lr=0.0)
    assert_same(after.server["w"], before.server["w"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "drop_last, task",
    [(True, LONG), (False, toy.task("linear", batch_size=10, epochs=0))],
)
def test_without_a_step_a_variate_stays(drop_last, task):
    before = toy.train(factory, task, 0, KEY).begin
    noisy = State(
        before.server,
        jax.tree.map(lambda x: np.asarray(x) + np.float32(0.5), before.clients),
    )
    _, after = round_of(task, noisy)
    idle = SIZES < 10 if drop_last else SIZES > 0
    assert_same(toy.rows(after.clients["c"], idle), toy.rows(noisy.clients["c"], idle))
