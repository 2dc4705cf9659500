"""The properties of sheet 26: class branches, weights, masked aggregation and metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import C, assert_same

from fedjax_pfl import evaluate, losses, tasks
from fedjax_pfl.algorithms import pfedc as factory
from fedjax_pfl.algorithms.pfedc import branch_loss, gram, min_norm_weights
from fedjax_pfl.checks import BadInput
from fedjax_pfl.clients import Cohort
from fedjax_pfl.types import Batch, Client, State

KEY = jax.random.key(0)
TASK = toy.task()
MIXED = tasks.branches(TASK._replace(superclass=np.array([5, 2, 5, 9])), "superclass")  # {0, 2}, {1}, {3}
BATCH = Batch(
    jax.random.normal(KEY, (6, *toy.SHAPE)),
    jnp.array([0, 2, 1, 3, 2, 0]),
    jnp.array([True, True, True, True, True, False]),
    jnp.arange(6),
)
MAPS = {"class": tasks.branches(TASK, "class"), "pairs": tasks.branches(TASK, "consecutive:2"), "mixed": MIXED}
W = TASK.model.init(KEY)


def features():
    return TASK.model.features(W, BATCH.x, mask=BATCH.mask)[0]


def logits(h, head=W["head"]):
    return TASK.model.head(head, h)


def test_maps():
    np.testing.assert_array_equal(MAPS["pairs"].of, [0, 0, 1, 1])
    np.testing.assert_array_equal(MIXED.of, [1, 0, 1, 2])
    np.testing.assert_array_equal(MIXED.binary, [True, False, True])
    assert not tasks.branches(TASK, "single").binary.any()


@pytest.mark.parametrize("spec", ["consecutive", "consecutive:9", "superclass", "clas"])
def test_bad_maps(spec):
    with pytest.raises(BadInput, match="tasks"):
        tasks.branches(TASK, spec)


def test_one_task_is_cross_entropy():
    z = logits(features())
    value, usable = tasks.task_losses(tasks.branches(TASK, "single"), z, BATCH.y, BATCH.mask)
    np.testing.assert_allclose(value[0], losses.cross_entropy(z, BATCH.y, BATCH.mask), rtol=1e-6)
    assert usable.all()


def test_losses_by_hand():
    z = np.asarray(logits(features()), np.float64)
    y, n = np.asarray(BATCH.y)[:5], 5
    value, usable = tasks.task_losses(MIXED, jnp.asarray(z, jnp.float32), BATCH.y, BATCH.mask)
    for t, c in ((0, 1), (2, 3)):
        p = 1 / (1 + np.exp(-z[:n, c]))
        assert np.isclose(value[t], -np.mean(np.where(y == c, np.log(p), np.log(1 - p))), rtol=1e-5)
    rows = [b for b in range(n) if y[b] in (0, 2)]
    inside = [np.log(np.exp(z[b, y[b]]) / (np.exp(z[b, 0]) + np.exp(z[b, 2]))) for b in rows]
    assert np.isclose(value[1], -np.mean(inside), rtol=1e-5)
    assert usable.all()


def test_a_group_without_samples_is_not_usable():
    _, usable = tasks.task_losses(MAPS["pairs"], logits(features()), jnp.zeros(6, jnp.int32), BATCH.mask)
    np.testing.assert_array_equal(usable, [True, False])


@pytest.mark.parametrize("name", MAPS)
def test_gram_in_closed_form_is_autodiffs(name):
    b, h = MAPS[name], features()
    by_features = jax.jacrev(lambda h: tasks.task_losses(b, logits(h), BATCH.y, BATCH.mask)[0])(h)
    d = by_features.reshape(len(b.member), -1)
    residual = jax.grad(lambda z: jnp.sum(tasks.task_losses(b, z, BATCH.y, BATCH.mask)[0]))(logits(h))
    m = gram(b, residual, W["head"]["kernel"])
    np.testing.assert_allclose(m, d @ d.T, atol=1e-6)
    if name == "pairs":  # disjoint samples: MGDA-UB is inverse squared norm weighting
        assert abs(m[0, 1]) < 1e-9


@pytest.mark.parametrize("normalise", ["none", "l2", "loss", "loss+"])
@pytest.mark.parametrize("solver", ["fista", "fw"])
def test_weights_are_on_the_simplex_of_active_tasks(solver, normalise):
    d = np.random.default_rng(0).normal(size=(5, 8))
    d[3] = 0  # solved: must not drag the others to zero
    active = jnp.array([True, False, True, True, True])
    alpha = min_norm_weights(jnp.asarray(d @ d.T, jnp.float32), jnp.arange(1.0, 6), active, solver, normalise)
    assert alpha[1] == alpha[3] == 0 and np.all(alpha >= 0) and np.isclose(alpha.sum(), 1)


def test_weights_are_uniform_when_all_is_solved():
    active = jnp.array([True, False, True])
    np.testing.assert_array_equal(
        min_norm_weights(jnp.zeros((3, 3)), jnp.ones(3), active, "fista", "none"), [0.5, 0, 0.5]
    )


def gradient(b, weighting="sum", head_grad="scaled", active=None, solver="fista"):
    active = jnp.ones(len(b.member), bool) if active is None else active
    loss = branch_loss(TASK, b, active, weighting, solver, "none", head_grad)
    return jax.grad(lambda w: loss(w, BATCH, KEY)[0])(W)


def test_sum_weighting_adds_the_binary_losses():
    def total(w):
        z = TASK.model.apply(w, BATCH.x)[0][:5]
        return jnp.sum(jnp.mean(losses.sigmoid_bce(z, jax.nn.one_hot(BATCH.y[:5], C)), axis=0))

    toy.assert_close(gradient(MAPS["class"]), jax.grad(total)(W))


@pytest.mark.parametrize("weighting", ["mgda_ub", "mgda", "uniform", "sum"])
def test_branches_that_are_not_held_get_no_gradient(weighting):
    active = jnp.array([True, False, True, False])
    head = gradient(MAPS["class"], weighting, active=active)["head"]
    assert not np.asarray(head["kernel"])[:, [1, 3]].any() and np.asarray(head["kernel"])[:, [0, 2]].any()


def test_unscaled_heads_take_the_whole_gradient_of_their_task():
    b = MAPS["class"]
    scaled, unscaled = (gradient(b, "uniform", head_grad) for head_grad in ("scaled", "unscaled"))
    toy.assert_close(unscaled["body"], scaled["body"])
    toy.assert_close(unscaled["head"], gradient(b, "sum")["head"])


def test_unscaled_heads_learn_where_alpha_is_zero():
    wide = BATCH._replace(x=BATCH.x * jnp.array([30.0, 1, 1, 1, 1, 1])[:, None])  # one task's gradient dominates
    b, active = MAPS["class"], jnp.ones(C, bool)

    def head(head_grad):
        loss = branch_loss(TASK, b, active, "mgda_ub", "fw", "none", head_grad)
        return jax.grad(lambda w: loss(w, wide, KEY)[0])(W)["head"]["kernel"]

    total = branch_loss(TASK, b, active, "sum", "fw", "none", "scaled")
    toy.assert_close(head("unscaled"), jax.grad(lambda w: total(w, wide, KEY)[0])(W)["head"]["kernel"], 1e-5)
    assert np.any(np.abs(head("scaled")) < 0.1 * np.abs(head("unscaled")).max())


def test_order_of_the_classes_does_not_matter():
    order = np.array([2, 0, 3, 1])
    place = np.argsort(order)  # class c of the permuted problem is class order[c]
    head = jax.tree.map(lambda x: x[..., order], W["head"])
    y = jnp.asarray(place)[BATCH.y]
    loss = branch_loss(TASK, MAPS["class"], jnp.ones(C, bool), "mgda_ub", "fista", "none", "scaled")
    plain = jax.grad(lambda w: loss(w, BATCH, KEY)[0])(W)
    moved = jax.grad(lambda w: loss(w, BATCH._replace(y=y), KEY)[0])({**W, "head": head})
    toy.assert_close(moved["body"], plain["body"], 1e-5)
    toy.assert_close(jax.tree.map(lambda x: x[..., place], moved["head"]), plain["head"], 1e-5)


def test_mgda_descends_every_loss():
    b, active = MAPS["class"], jnp.ones(C, bool)
    loss = branch_loss(TASK, b, active, "mgda", "fista", "none", "scaled")
    step = jax.grad(lambda body: loss({**W, "body": body}, BATCH, KEY)[0])(W["body"])

    def each(body):
        return tasks.task_losses(b, TASK.model.apply({**W, "body": body}, BATCH.x)[0], BATCH.y, BATCH.mask)[0]

    _, slopes = jax.jvp(each, (W["body"],), (step,))
    norm = sum(jnp.sum(x * x) for x in jax.tree.leaves(step))
    assert np.all(slopes >= norm * 0.99)


def round_of(ids, task=TASK, **hparams):
    algorithm = factory(task, **hparams)
    f, ids = toy.federation(), jnp.asarray(ids, jnp.int32)
    state = algorithm.init(KEY)
    rows = State(state.server, jax.tree.map(lambda x: x[ids], state.clients))
    cohort = Cohort(f, task.prepare, ids, ids >= 0, key=KEY, round=jnp.int32(0), evaluated=jnp.bool(False), width=1)
    return state.server, jax.jit(lambda rows: algorithm.round(KEY, rows, cohort))(rows)[0].server


def columns(server, classes):
    return jax.tree.map(lambda x: x[..., np.array(classes)], server["head"])


def test_only_held_branches_move_even_under_weight_decay():
    decay = TASK._replace(optimizer=lambda lr: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(lr)))
    before, after = round_of([0], decay)  # client 0 holds classes 0 and 1
    assert_same(columns(after, [2, 3]), columns(before, [2, 3]))
    assert np.any(columns(after, [0])["kernel"] != columns(before, [0])["kernel"])
    assert_same(after["start"], before["start"])


def test_branches_of_clients_without_a_common_class_never_mix():
    _, both = round_of([0, 2])
    _, first = round_of([0])
    _, second = round_of([2])
    assert_same(columns(both, [0, 1]), columns(first, [0, 1]))
    assert_same(columns(both, [3]), columns(second, [3]))
    assert np.any(
        np.asarray(both["body"]["layers"]["0"]["kernel"]) != np.asarray(first["body"]["layers"]["0"]["kernel"])
    )


def test_task_counts_weigh_the_holders():
    uniform, counted = (round_of([0, 4], head_weighting=by)[1] for by in ("uniform", "task_count"))
    assert_same(columns(uniform, [3]), columns(counted, [3]))  # one holder
    assert np.any(columns(uniform, [0])["kernel"] != columns(counted, [0])["kernel"])


def test_scores_by_hand():
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(40, C)), rng.integers(0, C, 40)
    mask = np.arange(40) < 33
    counts = np.array([3, 0, 7, 5])  # holds the group {0, 2} and class 3, not class 1
    c = Client(None, None, None, None, None, jnp.asarray(counts))
    got = tasks.scores(MIXED, jnp.asarray(z), jnp.asarray(y), jnp.asarray(mask), c)
    got = {name: float(evaluate.ratio(*pair)) for name, pair in got.items()}
    z, y = z[:33], y[:33]
    inside = np.isin(y, [0, 2])
    group = np.mean(np.where(z[inside, 0] > z[inside, 2], 0, 2) == y[inside])
    three, yes = y == 3, z[:, 3] > 0
    present = np.where(counts > 0, z, -np.inf).argmax(1)
    expected = {
        "acc": np.mean(z.argmax(1) == y),
        "acc_present": np.mean(present == y),
        "acc_groups": np.mean(present == y),
        "acc_trivial": np.mean(y == 2),
        "task_acc": (group + np.mean(yes == three)) / 2,
        "task_acc_trivial": (np.mean(y[inside] == 2) + np.mean(~three)) / 2,
        "task_bal": (np.mean(yes[three]) + np.mean(~yes[~three])) / 2,
        "task_bal_trivial": 0.5,
        "recall_macro": np.mean([np.mean(present[y == k] == k) for k in range(C)]),
        "recall_trivial": 1 / C,
    }
    assert got == pytest.approx(expected)


def test_a_head_that_is_not_linear_is_refused():
    model = TASK.model._replace(init=lambda key: {"body": {}, "head": {"w": jnp.zeros(3)}, "stats": {}})
    with pytest.raises(BadInput, match="one linear layer"):
        factory(TASK._replace(model=model)).init(KEY)
