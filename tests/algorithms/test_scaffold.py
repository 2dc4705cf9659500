"""The properties of sheet 5: what the control variates are, and how they add up."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import SIZES, N, assert_close, assert_same

from fedjax_pfl import losses, simulate, trees
from fedjax_pfl.algorithms import scaffold as factory
from fedjax_pfl.checks import BadInput
from fedjax_pfl.clients import Cohort
from fedjax_pfl.types import Batch, State

KEY = jax.random.key(0)
ONE_STEP = toy.task("linear", batch_size=19, epochs=1)  # one full batch
FULL = toy.task("linear", batch_size=19, epochs=5)


def gradient(f, i, w):
    """Of client i's mean loss over all its examples, at w."""
    row = f.train.index[i][: SIZES[i]]
    batch = Batch(f.examples.x[row], f.examples.y[row], jnp.ones(SIZES[i], bool), row)
    return jax.grad(lambda w: losses.classification(ONE_STEP.model)(w, batch, KEY)[0])(w)


def round_of(task, state, ids=range(N), **hparams):
    f, ids = toy.federation(), jnp.asarray(ids, jnp.int32)
    rows = State(state.server, trees.gather(state.clients, ids))
    cohort = Cohort(f, task.prepare, ids, ids >= 0, key=KEY, round=jnp.int32(0), evaluated=jnp.bool(False), width=1)
    return jax.jit(lambda rows: factory(task, **hparams).round(KEY, rows, cohort))(rows)[0]


def parts(tree):
    return {part: tree[part] for part in ("body", "head")}


@pytest.mark.parametrize("hparams", [{}, {"option": 1}, {"server_lr": 0.1, "weights": "data"}])
def test_the_servers_variate_is_the_mean_of_the_clients(hparams):
    program = simulate.program(factory, toy.task(), hparams)
    f = toy.federation()
    state, _, _ = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, f, rounds=3))()
    assert_close(jax.tree.map(lambda x: jnp.mean(x, axis=0), state.clients["c"]), state.server["c"], 1e-5)
    assert trees.sq_dist(state.server["c"], trees.scale(0, state.server["c"])) > 1e-4


@pytest.mark.parametrize("weights", ["uniform", "data"])
def test_two_rounds_by_hand(weights):
    """Client 3 holds nothing and counts for nothing; clients 0 and 2 miss the second round."""
    task, lr, server_lr = toy.task(), 0.1, 0.7
    keys, states, _ = oracle.run(factory, task, server_lr=server_lr, weights=weights)
    w, f = oracle.variables(states[0].server["w"]), oracle.federation()
    c, own = [0 * x for x in w], [[0 * x for x in w] for _ in range(N)]
    for t, here in enumerate(oracle.ROUNDS):
        models, changes, here = [], [], [i for i in here if i != 3]
        for i in here:
            y, steps = w, oracle.batches(f, i, keys[t], task)
            for ((x, label),) in steps:
                g = oracle.gradient(y, x, label)
                y = [a - lr * (b - mine + all_) for a, b, mine, all_ in zip(y, g, own[i], c, strict=True)]
            new = [a - b + (p - q) / (len(steps) * lr) for a, b, p, q in zip(own[i], c, w, y, strict=True)]
            changes.append([a - b for a, b in zip(new, own[i], strict=True)])
            own[i] = new
            models.append(y)
        target = oracle.mean(models, [1 if weights == "uniform" else SIZES[i] for i in here])
        w = [a + server_lr * (b - a) for a, b in zip(w, target, strict=True)]
        c = [a + sum(change[k] for change in changes) / N for k, a in enumerate(c)]
        oracle.close(states[t + 1].server["w"], w)
        oracle.close(states[t + 1].server["c"], c)
        for i in range(N):
            oracle.close(trees.gather(states[t + 1].clients["c"], i), own[i])


@pytest.mark.parametrize("option", [1, 2])
def test_one_full_batch_makes_the_variate_the_gradient(option):
    before = factory(ONE_STEP).init(KEY)
    after = round_of(ONE_STEP, before, option=option)
    for i in range(N):
        assert_close(
            trees.gather(after.clients["c"], i), parts(gradient(toy.federation(), i, before.server["w"])), 1e-5
        )


def test_absent_clients_count_in_the_servers_variate():
    before = factory(ONE_STEP).init(KEY)
    after = round_of(ONE_STEP, before, ids=[1, 4])
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0), after.clients["c"])
    assert_close(after.server["c"], trees.scale(1 / N, total))


def test_a_common_stationary_point_holds():
    """With c_i = grad f_i(w) and c = 0 every step is 0."""
    f, state = toy.federation(), factory(FULL).init(KEY)
    w = state.server["w"]
    own = [parts(gradient(f, i, w)) for i in range(N)]
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *own)
    state = State(state.server, {**state.clients, "c": stacked})
    for i in range(N):
        after = round_of(FULL, state, ids=[i])
        assert_close(after.server["w"], w, 1e-6)


def test_a_server_step_of_zero_keeps_the_model():
    before = factory(ONE_STEP).init(KEY)
    assert_same(round_of(ONE_STEP, before, server_lr=0.0).server["w"], before.server["w"])


@pytest.mark.parametrize("drop_last, task", [(True, {}), (False, {"epochs": 0})])
def test_without_a_step_a_variate_stays(drop_last, task):
    task = toy.task("linear", batch_size=10, drop_last=drop_last, **task)
    before = factory(task).init(KEY)
    noisy = State(before.server, jax.tree.map(lambda x: x + 0.5, before.clients))
    after = round_of(task, noisy)
    idle = SIZES < 10 if drop_last else SIZES > 0
    assert_same(trees.gather(after.clients["c"], idle), trees.gather(noisy.clients["c"], idle))


@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
def test_batch_norm(bn_stats):
    program = simulate.program(factory, toy.task("norm", bn_stats=bn_stats), {})
    f = toy.federation()
    state, metrics, last = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, f, rounds=2))()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last)))
    assert bool(jax.tree.leaves(state.clients["own"])) == (bn_stats == "local")


@pytest.mark.parametrize("wrong", [{"server_lr": -1.0}, {"option": 3}, {"weights": "size"}])
def test_bad_input(wrong):
    with pytest.raises(BadInput):
        factory(toy.task(), **wrong)
