"""The properties of sheet 6: the three meta-gradients, small clients, and an evaluation that leaves no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import SIZES, assert_close, assert_same

from fedjax_pfl import losses, simulate, trees
from fedjax_pfl.algorithms import per_fedavg as factory
from fedjax_pfl.algorithms.perfedavg import BOTH, VARIANTS, curvature, meta_gradient
from fedjax_pfl.checks import BadInput
from fedjax_pfl.clients import Cohort
from fedjax_pfl.types import Batch, State

KEY = jax.random.key(0)
TASK = toy.task()
LOSS = losses.classification(TASK.model)
W = TASK.model.init(KEY)


def batch(seed):
    key = jax.random.key(seed)
    x, y = jax.random.normal(key, (6, *toy.SHAPE)), jax.random.randint(key, (6,), 0, toy.C)
    return Batch(x, y, jnp.arange(6) < 5, jnp.arange(6))


def meta(variant, batches, alpha=0.3, delta=1e-3, loss=LOSS, w=W):
    return meta_gradient(loss, w, batches, KEY, variant, alpha, delta)[0]


def parts(tree):
    return {part: tree[part] for part in BOTH}


def test_exact_is_the_gradient_of_the_meta_loss():
    b, alpha = batch(1), 0.3

    def meta_loss(w):
        value = lambda w: LOSS(w, b, KEY)[0]
        return value(jax.tree.map(lambda x, g: x - alpha * g, w, jax.grad(value)(w)))

    assert_close(meta("exact", (b, b, b), alpha), parts(jax.grad(meta_loss)(W)), 1e-5)


def test_first_order_leaves_the_hessian_out():
    b1, b2, b3 = (batch(i) for i in range(3))
    adapted = jax.tree.map(lambda x, g: x - 0.3 * g, W, jax.grad(lambda w: LOSS(w, b1, KEY)[0])(W))
    v = parts(jax.grad(lambda w: LOSS(w, b2, KEY)[0])(adapted))
    assert_close(meta("fo", (b1, b2)), v)
    h = curvature(lambda w: parts(jax.grad(lambda w: LOSS(w, b3, KEY)[0])({**W, **w})), parts(W), v, "exact", 0)
    assert_close(meta("exact", (b1, b2, b3)), jax.tree.map(lambda v, h: v - 0.3 * h, v, h), 1e-5)


@pytest.mark.parametrize("delta", [1.0, 0.01])
def test_the_difference_of_gradients_is_exact_on_a_quadratic(delta):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4))
    a, b, w, v = (jnp.asarray(x, jnp.float32) for x in (root @ root.T, *rng.normal(size=(3, 4))))
    difference, exact = (curvature(lambda w: a @ w - b, w, v, variant, delta) for variant in ("hf", "exact"))
    np.testing.assert_allclose(exact, a @ v, rtol=1e-5)
    np.testing.assert_allclose(difference, exact, rtol=1e-3, atol=1e-3)


def test_the_difference_of_gradients_is_near_the_exact_one():
    batches = tuple(batch(i) for i in range(3))
    exact = meta("exact", batches)
    assert_close(meta("hf", batches, delta=0.01), exact, 1e-3)
    assert trees.sq_dist(exact, meta("fo", batches[:2])) > 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_an_inner_step_all_are_the_gradient_of_the_outer_batch(variant):
    batches = tuple(batch(i) for i in range(3 if variant != "fo" else 2))
    assert_close(meta(variant, batches, alpha=0.0), parts(jax.grad(lambda w: LOSS(w, batches[1], KEY)[0])(W)))


def test_two_rounds_by_hand():
    task, alpha, beta = toy.task(), 0.3, 0.05
    keys, states, _ = oracle.run(factory, task, variant="fo", alpha=alpha, beta=beta)
    w, f = oracle.variables(states[0].server), oracle.federation()
    for t, here in enumerate(oracle.ROUNDS):
        models = []
        for i in here:
            local = w
            for outer, inner in oracle.batches(f, i, keys[t], task, 2):
                adapted = [p - alpha * g for p, g in zip(local, oracle.gradient(local, *inner), strict=True)]
                local = [p - beta * g for p, g in zip(local, oracle.gradient(adapted, *outer), strict=True)]
            models.append(local)
        w = oracle.mean(models, [int(f.train.size[i]) for i in here])
        oracle.close(states[t + 1].server, w)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_client_with_one_example_uses_it_for_every_batch(variant):
    f, ids = toy.federation(), jnp.array([2])
    task = TASK._replace(epochs=1)
    algorithm = factory(task, variant=variant, delta=0.01)
    before = algorithm.init(KEY)
    cohort = Cohort(f, task.prepare, ids, ids >= 0, key=KEY, round=jnp.int32(0), evaluated=jnp.bool(False), width=1)
    rows = State(before.server, trees.gather(before.clients, ids))
    after, metrics = jax.jit(lambda rows: algorithm.round(KEY, rows, cohort))(rows)
    row = f.train.index[2][:1]
    assert SIZES[2] == 1
    only = Batch(f.examples.x[row], f.examples.y[row], jnp.ones(1, bool), row)
    gradient, value, _ = meta_gradient(LOSS, before.server, (only,) * 3, KEY, variant, 0.1, 0.01)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, parts(before.server), gradient)
    assert_close(parts(after.server), expected, 1e-5)
    np.testing.assert_allclose(metrics["loss"], [value], rtol=1e-5)


def test_evaluation_takes_one_step_and_leaves_no_trace():
    f = toy.federation()
    program = simulate.program(factory, toy.task("linear", batch_size=19), {"alpha": 0.5})
    state = program.init(KEY, program.numbers)
    x, rows = f.examples.x[:4], f.train.index[1][: SIZES[1]]
    only = Batch(f.examples.x[rows], f.examples.y[rows], jnp.ones(SIZES[1], bool), rows)
    task = toy.task("linear")
    by = jax.grad(lambda w: losses.classification(task.model)(w, only, KEY)[0])(state.server)
    expected = task.model.apply(jax.tree.map(lambda w, g: w - 0.5 * g, state.server, by), x)[0]
    copy = trees.copied(state)
    got = program.predict(KEY, program.numbers, f, state, jnp.int32(0), 1, x)
    assert_close(got, expected, 1e-5)
    assert_same(state, copy)


def test_outer_step_size():
    f, states = toy.federation(), []
    for beta in (0.0, None):
        program = simulate.program(factory, TASK, {"beta": beta})
        run = lambda p=program: simulate.curve(p, KEY, p.numbers, f, rounds=1)[0]
        states.append((program.init(KEY, program.numbers), jax.jit(run)()))
    assert_close(*(state.server for state in states[0]))
    assert trees.sq_dist(*(state.server for state in states[1])) > 1e-3


@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
def test_batch_norm(bn_stats):
    program = simulate.program(factory, toy.task("norm", bn_stats=bn_stats), {"variant": "exact"})
    f = toy.federation()
    state, metrics, last = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, f, rounds=2))()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last)))
    assert bool(jax.tree.leaves(state.clients)) == (bn_stats == "local")


@pytest.mark.parametrize("wrong", [{"variant": "second"}, {"alpha": -1.0}, {"beta": -1.0}, {"delta": 0.0}])
def test_bad_input(wrong):
    with pytest.raises(BadInput):
        factory(TASK, **wrong)
