"""The properties of sheet 26: class branches, weights, masked aggregation and metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import C, assert_same

from fedjax_pfl import evaluate, losses, simulate, tasks, trees
from fedjax_pfl.algorithms import pfedc as factory
from fedjax_pfl.checks import BadInput
from fedjax_pfl.clients import Cohort
from fedjax_pfl.tasks import branch_loss, gram, min_norm_weights
from fedjax_pfl.types import Batch, Client, State

KEY = jax.random.key(0)
TASK = toy.task()
SUPER = TASK._replace(superclass=np.array([5, 2, 5, 9]))
MIXED = tasks.branches(SUPER, "superclass")  # {1}, {0, 2}, {3}
BATCH = Batch(
    jax.random.normal(KEY, (6, *toy.SHAPE)),
    jnp.array([0, 2, 1, 3, 2, 0]),
    jnp.array([True, True, True, True, True, False]),
    jnp.arange(6),
)
MAPS = {"class": tasks.branches(TASK, "class"), "pairs": tasks.branches(TASK, "consecutive:2"), "mixed": MIXED}
SPECS = {"class": (TASK, "class"), "pairs": (TASK, "consecutive:2"), "mixed": (SUPER, "superclass")}
HEADED = {(name, head): tasks.branches(*SPECS[name], head) for name in SPECS for head in tasks.HEADS}
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


def test_logits_of_the_other_heads():
    assert [len(HEADED[name, "group_reject"].column) for name in SPECS] == [4, 4 + 2, 4 + 1]
    assert [len(HEADED[name, "group_binary"].column) for name in SPECS] == [4, 2, 3]
    z = jnp.arange(5.0)[None] ** 2  # classes 0 to 3, and none of {0, 2}
    np.testing.assert_array_equal(tasks.class_logits(HEADED["mixed", "group_reject"], z), [[-16, 1, -12, 9]])
    np.testing.assert_array_equal(tasks.class_logits(HEADED["mixed", "group_binary"], z[:, :3]), [[1, 0, 1, 4]])


@pytest.mark.parametrize("head", ["group_reject", "group_binary"])
def test_losses_of_the_other_heads_by_hand(head):
    b = HEADED["mixed", head]
    z = np.asarray(tasks.columns(start(b), features()), np.float64)
    y, expected = np.asarray(BATCH.y)[:5], np.zeros(3)
    for k in range(5):
        for t, group in enumerate(([1], [0, 2], [3])):
            inside = y[k] in group
            if head == "group_reject" and len(group) > 1:
                answers = {**{c: z[k, c] for c in group}, "none": z[k, 4]}
                chosen = answers[y[k] if inside else "none"]
                expected[t] -= (chosen - np.log(sum(np.exp(a) for a in answers.values()))) / 5
            else:
                p = 1 / (1 + np.exp(-z[k, group[0] if head == "group_reject" else t]))
                expected[t] -= np.log(p if inside else 1 - p) / 5
    value, usable = tasks.task_losses(b, jnp.asarray(z, jnp.float32), BATCH.y, BATCH.mask)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert usable.all()
    _, usable = tasks.task_losses(b, jnp.asarray(z, jnp.float32), jnp.zeros(6, jnp.int32), BATCH.mask)
    assert usable.all()  # they learn from the others' samples


def test_a_reject_logit_that_is_never_chosen_leaves_the_softmax():
    y = jnp.array([0, 1, 1, 0, 1, 0])  # all in the first pair
    z = jax.random.normal(KEY, (6, 6)).at[:, 4].set(-1e9)
    value, _ = tasks.task_losses(HEADED["pairs", "group_reject"], z, y, BATCH.mask)
    expected, _ = tasks.task_losses(MAPS["pairs"], z[:, :C], y, BATCH.mask)
    np.testing.assert_allclose(value[0], expected[0], rtol=1e-6)


def test_group_binary_is_binary_on_coarse_labels():
    b, coarse = HEADED["mixed", "group_binary"], tasks.branches(TASK._replace(num_classes=3), "class")
    z = jax.random.normal(KEY, (6, 3))
    got = tasks.task_losses(b, z, BATCH.y, BATCH.mask)
    assert_same(got, tasks.task_losses(coarse, z, jnp.asarray(b.of)[BATCH.y], BATCH.mask))


def start(b):
    """A head of the map's logits, other than the model's."""
    width = len(b.column)
    return {
        "kernel": jax.random.normal(jax.random.key(3), (8, width)),
        "bias": jax.random.normal(jax.random.key(4), (width,)),
    }


@pytest.mark.parametrize("head", tasks.HEADS)
@pytest.mark.parametrize("name", MAPS)
def test_gram_in_closed_form_is_autodiffs(name, head):
    b, h = HEADED[name, head], features()
    w = start(b)
    value = lambda z: tasks.task_losses(b, z, BATCH.y, BATCH.mask)[0]
    d = jax.jacrev(lambda h: value(tasks.columns(w, h)))(h).reshape(len(b.member), -1)
    m = gram(b, jax.grad(lambda z: jnp.sum(value(z)))(tasks.columns(w, h)), w["kernel"])
    np.testing.assert_allclose(m, d @ d.T, rtol=1e-5, atol=1e-6)
    if name == "pairs":  # MGDA-UB is inverse squared norm weighting where samples are disjoint, and only there
        assert (abs(m[0, 1]) < 1e-9) == (head == "group_softmax")


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


@pytest.mark.parametrize("head, columns_of", [("group_reject", [(0, 1, 4), (2, 3, 5)]), ("group_binary", [(0,), (1,)])])
def test_only_held_columns_move_and_never_mix(head, columns_of):
    decay = TASK._replace(optimizer=lambda lr: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(lr)))
    before, both = round_of([0, 2], decay, tasks="consecutive:2", head=head)  # classes 0 and 1; class 3
    _, first = round_of([0], decay, tasks="consecutive:2", head=head)
    first_pair, second_pair = columns_of
    assert_same(columns(first, second_pair), columns(before, second_pair))
    assert_same(columns(both, first_pair), columns(first, first_pair))
    moved = np.any(columns(both, [*first_pair, *second_pair])["kernel"] != before["head"]["kernel"], axis=0)
    assert moved.all()


def test_of_tasks_of_one_class_all_heads_are_the_same():
    expected, *others = (round_of([0, 1, 4], head=head)[1] for head in tasks.HEADS)
    for other in others:
        assert_same(other, expected)


@pytest.mark.parametrize("head, per_task", [("group_softmax", 2), ("group_reject", 3), ("group_binary", 1)])
def test_traffic_counts_the_logits_of_held_tasks(head, per_task):
    given = {"round": jnp.int32(0), "evaluated": jnp.bool(False), "key": KEY, "width": 1}
    cohort = Cohort(toy.federation(), TASK.prepare, jnp.array([0, 1, 2]), jnp.array([True, True, False]), **given)
    for comm, held in (("sparse", np.array([1, 2, 0])), ("full", np.array([2, 2, 0]))):
        algorithm = factory(TASK, tasks="consecutive:2", head=head, comm=comm)
        sent = algorithm.traffic(jax.eval_shape(algorithm.init, KEY), cohort, {})
        np.testing.assert_array_equal(sent.down, [56, 56, 0] + held * per_task * 9)
        np.testing.assert_array_equal(sent.up, sent.down)


@pytest.mark.parametrize("head", tasks.HEADS)
def test_every_head_learns(head):
    program = simulate.program(factory, TASK, {"tasks": "consecutive:2", "head": head})
    f = toy.federation()
    state, metrics, last = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, f, rounds=10, eval_every=0))()
    assert metrics["loss"][-1].mean() < 0.7 * metrics["loss"][0].mean()
    coarse = np.nanmean(last["coarse_acc"])
    fine = np.nanmean(last["acc_present"])
    assert coarse > 0.75 and (fine > 0.75 or head == "group_binary")
    outputs = jax.jit(program.predict)(KEY, program.numbers, f, state, jnp.int32(10), 1, f.examples.x[:3])
    assert outputs.shape == (3, C)


# --- download


def states_after(download, task=TASK, rounds=3, **hparams):
    program, f = simulate.program(factory, task, {"download": download, **hparams}), toy.federation()
    return jax.jit(lambda: simulate.curve(program, KEY, program.numbers, f, rounds=rounds))()


def test_with_everybody_a_stale_download_is_the_banks():
    options = {"tasks": "consecutive:2", "head": "group_reject", "head_weighting": "task_count"}
    (bank, metrics, last), (stale, *others) = (states_after(name, **options) for name in ("bank", "stale"))
    toy.assert_close(stale.server, bank.server)
    toy.assert_close(others, [metrics, last])
    holds = (toy.federation().class_counts @ MAPS["pairs"].member.T > 0)[:, HEADED["pairs", "group_reject"].column]
    for i in range(toy.N):  # holders have the bank's branches, and the others are as they started
        mine = jax.tree.map(lambda x, i=i: x[i], stale.clients["head"])
        toy.assert_close(mine, trees.choose(holds[i], bank.server["head"], bank.server["start"]))


def test_a_stale_download_is_equation_7():
    """Clients that do not train: every branch is the mean of its holders' in the round, and nobody else's moves."""
    task = TASK._replace(optimizer=lambda lr: optax.set_to_zero(), participation=(0.2, 0.8))
    program, f = simulate.program(factory, task, {"download": "stale"}), toy.federation()
    begin = program.init(KEY, program.numbers)
    noise = lambda x: x + jax.random.normal(jax.random.key(x.ndim), x.shape)
    state = State(begin.server, begin.clients | {"head": jax.tree.map(noise, begin.clients["head"])})
    step, expected = jax.jit(program.round), np.asarray(state.clients["head"]["kernel"]).copy()
    for t in range(4):
        old = state.clients["head"]["kernel"]
        state, metrics = step(KEY, program.numbers, f, state, jnp.int32(t), jnp.bool(False))
        here = [int(i) for i, on in zip(metrics["ids"], metrics["active"], strict=True) if on]
        before = expected.copy()
        for i in here:
            for c in toy.OWN[i]:
                expected[i, :, c] = np.mean([before[n, :, c] for n in here if c in toy.OWN[n]], axis=0)
        kernel = state.clients["head"]["kernel"]
        np.testing.assert_allclose(kernel, expected, rtol=1e-5)
        absent = np.setdiff1d(np.arange(toy.N), here)
        assert_same(kernel[absent], old[absent])


def test_a_newcomer_begins_with_the_banks_branches_or_with_its_own():
    ids = jnp.array([1, 4], jnp.int32)  # client 4, of all classes, was absent when 0 and 1 trained
    heads = {}
    for download in ("bank", "stale"):
        algorithm = factory(TASK, download=download)
        begin = algorithm.init(KEY)
        after = round_of([0, 1], download=download)[1]
        rows = State(after, jax.tree.map(lambda x: x[ids], begin.clients))
        c = Client(None, None, None, None, None, toy.federation().class_counts[4])
        mine = jax.tree.map(lambda x: x[1], rows.clients)
        x = toy.federation().examples.x[:5]
        heads[download] = algorithm.predict(after, mine, c)(x, jnp.ones(5, bool))
        used = after["head"] if download == "bank" else begin.server["head"]
        h = TASK.model.features({"body": after["body"], "head": used, "stats": {}}, x)[0]
        toy.assert_close(heads[download], tasks.columns(used, h))
    assert np.abs(heads["bank"] - heads["stale"]).max() > 1e-3


def test_a_round_that_happens_to_draw_everybody_is_one_of_full_participation():
    f, servers = toy.federation(), []
    for participation in ((0.2, 1.0), (1.0, 1.0)):
        program = simulate.program(factory, TASK._replace(participation=participation), {"download": "stale"})
        begin, key = program.init(KEY, program.numbers), jax.random.key(7)
        state, metrics = jax.jit(program.round)(key, program.numbers, f, begin, jnp.int32(5), jnp.bool(False))
        assert metrics["active"].all()
        servers.append(state)
    assert_same(*servers)


def test_stale_heads_with_moments_of_their_own():
    state, metrics, last = states_after("stale", toy.task("norm", bn_stats="local", epochs=1), rounds=2)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last["acc"])))
    assert jax.tree.leaves(state.clients["stats"]) and not jax.tree.leaves(state.server["stats"])


# --- scores


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
        "coarse_acc": np.mean(MIXED.of[present] == MIXED.of[y]),
        "acc_trivial": np.mean(y == 2),
        "task_acc": (group + np.mean(yes == three)) / 2,
        "task_acc_trivial": (np.mean(y[inside] == 2) + np.mean(~three)) / 2,
        "task_bal": (np.mean(yes[three]) + np.mean(~yes[~three])) / 2,
        "task_bal_trivial": 0.5,
        "recall_macro": np.mean([np.mean(present[y == k] == k) for k in range(C)]),
        "recall_trivial": 1 / C,
    }
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("head", ["group_reject", "group_binary"])
def test_scores_of_the_other_heads_by_hand(head):
    """The client holds the group {0, 2}, of which mostly 2, and class 3, not class 1."""
    b, rng = HEADED["mixed", head], np.random.default_rng(1)
    columns, y = rng.normal(size=(40, len(b.column))), rng.integers(0, C, 40)
    z = np.asarray(tasks.class_logits(b, jnp.asarray(columns)))
    mask, counts = np.arange(40) < 33, np.array([3, 0, 7, 5])
    c = Client(None, None, None, None, None, jnp.asarray(counts))
    got = tasks.scores(b, jnp.asarray(z), jnp.asarray(y), jnp.asarray(mask), c)
    got = {name: float(evaluate.ratio(*pair)) for name, pair in got.items()}
    right, fine, present = {1: [], 2: []}, [], []  # (answer right, label in the group) of each task
    for row, label in zip(columns[:33], y[:33], strict=True):
        if head == "group_reject":  # answers of the group {0, 2}, the last of them none
            answer = (0, 2, None)[np.argmax(row[[0, 2, 4]])]
            logit = {0: row[0] - row[4], 1: row[1], 2: row[2] - row[4], 3: row[3]}
            right[1].append((answer == (label if label in (0, 2) else None), label in (0, 2)))
        else:
            logit = {1: row[0], 2: row[1], 3: row[2]}  # the group's prediction is class 2
            right[1].append(((row[1] > 0) == (label in (0, 2)), label in (0, 2)))
        right[2].append(((logit[3] > 0) == (label == 3), label == 3))
        fine.append(max(logit, key=logit.get) == label)
        present.append(max(set(logit) - {1}, key=logit.get))
    rate = lambda pairs, *which: np.mean([ok for ok, inside in pairs if inside in which])
    present, y = np.array(present), y[:33]
    expected = {
        "acc": np.mean(fine),
        "acc_present": np.mean(present == y),
        "acc_groups": np.mean(present == y),
        "coarse_acc": np.mean(b.of[present] == b.of[y]),
        "acc_trivial": np.mean(y == 2),
        "task_acc": np.mean([rate(pairs, True, False) for pairs in right.values()]),
        "task_acc_trivial": (np.mean(~np.isin(y, [0, 2])) + np.mean(y != 3)) / 2,
        "task_bal": np.mean([(rate(pairs, True) + rate(pairs, False)) / 2 for pairs in right.values()]),
        "task_bal_trivial": 0.5,
        "recall_macro": np.mean([np.mean(present[y == k] == k) for k in range(C)]),
        "recall_trivial": 1 / C,
    }
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "wrong", [{"head": "softmax"}, {"download": "fresh"}, {"tasks": "single", "head": "group_binary"}]
)
def test_bad_input(wrong):
    with pytest.raises(BadInput, match=next(iter(wrong)) if len(wrong) == 1 else "group_binary"):
        factory(TASK, **wrong)


def test_a_head_that_is_not_linear_is_refused():
    model = TASK.model._replace(init=lambda key: {"body": {}, "head": {"w": jnp.zeros(3)}, "stats": {}})
    with pytest.raises(BadInput, match="one linear layer"):
        factory(TASK._replace(model=model)).init(KEY)
