"""The properties of sheet 26: class branches, weights, masked aggregation and
metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import C, assert_same

from fedjax_pfl import evaluation, losses, simulate, testing
from fedjax_pfl.algorithms import pfedc as factory
from fedjax_pfl.algorithms.pfedc import class_groups, task_maps
from fedjax_pfl.algorithms.pfedc.class_groups import branch_loss, gram, min_norm_weights
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Batch, Client, Context, State

KEY = jax.random.key(0)
TASK_LOSSES = ("class", "batch")
# Weight decay would move every branch; one task, so that its rounds are compiled once.
TASK = toy.task(
    optimizer=lambda lr: optax.chain(optax.add_decayed_weights(0.01), optax.sgd(lr))
)
PAIRS = {"tasks": "consecutive:2", "head_weighting": "data"}
SUPER = TASK._replace(superclass=np.array([5, 2, 5, 9]))
MIXED = task_maps.branches(SUPER, "superclass")  # {1}, {0, 2}, {3}
BATCH = Batch(
    np.random.default_rng(0).normal(size=(6, *toy.SHAPE)).astype(np.float32),
    np.array([0, 2, 1, 3, 2, 0], np.int32),
    np.array([True, True, True, True, True, False]),
    np.arange(6, dtype=np.int32),
)
MAPS = {
    "class": task_maps.branches(TASK, "class"),
    "pairs": task_maps.branches(TASK, "consecutive:2"),
    "mixed": MIXED,
}
SPECS = {
    "class": (TASK, "class"),
    "pairs": (TASK, "consecutive:2"),
    "mixed": (SUPER, "superclass"),
}
HEADED = {
    (name, head): task_maps.branches(*SPECS[name], head)
    for name in SPECS
    for head in task_maps.HEADS
}
W = TASK.model.init(KEY)
ALL = np.ones(C, bool)
WEIGHTINGS = ["mgda_ub", "uniform"]
DEFAULTS = simulate.hyperparameters(factory)
WEIGHTS = jax.jit(min_norm_weights, static_argnums=3)


@functools.cache
def features():
    return jax.jit(lambda: TASK.model.features(W, BATCH.x, mask=BATCH.mask)[0])()


def logits(head):
    return np.asarray(features(), np.float64) @ np.asarray(head["kernel"]) + np.asarray(
        head["bias"]
    )


def task_losses(b, z, y=BATCH.y, task_loss="class"):
    value = functools.partial(class_groups.task_losses, b, task_loss=task_loss)
    return jax.jit(value)(np.asarray(z, np.float32), y, BATCH.mask)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_maps():
    np.testing.assert_array_equal(MAPS["pairs"].of, [0, 0, 1, 1])
    np.testing.assert_array_equal(MIXED.of, [1, 0, 1, 2])
    np.testing.assert_array_equal(MIXED.binary, [True, False, True])
    assert not task_maps.branches(TASK, "single").binary.any()


@pytest.mark.parametrize("spec", ["consecutive", "consecutive:9", "superclass", "clas"])
def test_bad_maps(spec):
    with pytest.raises(InputError, match="tasks"):
        task_maps.branches(TASK, spec)


def test_one_task_is_cross_entropy():
    z = np.asarray(logits(W["head"]), np.float32)
    value, usable = task_losses(task_maps.branches(TASK, "single"), z)
    expected = jax.jit(losses.cross_entropy)(z, BATCH.y, BATCH.mask)
    np.testing.assert_allclose(value[0], expected, rtol=1e-6)
    assert usable.all()


@pytest.mark.slow
@pytest.mark.parametrize("head", task_maps.HEADS)
def test_a_balanced_loss_is_the_mean_inside_plus_the_mean_outside(head):
    """Both means are those of all samples, over batches of one side."""
    b = HEADED["mixed", head]
    z, y = logits(start(b)).astype(np.float32), BATCH.y
    values, usable = task_losses(b, z, task_loss="balanced")
    for t in np.flatnonzero(usable):
        inside = np.isin(y, np.flatnonzero(b.member[t]))
        sides = [inside, ~inside] if b.open[t] else [inside]
        means = []
        for rows in sides:
            value = class_groups.task_losses(b, z, y, BATCH.mask & rows, "batch")[0]
            means.append(value[t])
        np.testing.assert_allclose(values[t], sum(means), rtol=1e-5)
    _, usable = task_losses(b, z, np.zeros(6, np.int32), task_loss="balanced")
    np.testing.assert_array_equal(usable, [False, True, False])


@pytest.mark.parametrize("task_loss", TASK_LOSSES)
def test_losses_by_hand(task_loss):
    z = logits(W["head"])
    y, n = BATCH.y[:5], 5
    value, usable = task_losses(MIXED, z, task_loss=task_loss)
    for t, c in ((0, 1), (2, 3)):
        p, of = (
            1 / (1 + np.exp(-z[:n, c])),
            np.sum(y == c) if task_loss == "class" else n,
        )
        assert np.isclose(
            value[t],
            -np.sum(np.where(y == c, np.log(p), np.log(1 - p))) / of,
            rtol=1e-5,
        )
    rows = [b for b in range(n) if y[b] in (0, 2)]
    inside = [
        np.log(np.exp(z[b, y[b]]) / (np.exp(z[b, 0]) + np.exp(z[b, 2]))) for b in rows
    ]
    assert np.isclose(value[1], -np.mean(inside), rtol=1e-5)
    assert usable.all()


def test_a_group_without_samples_is_not_usable():
    _, usable = task_losses(MAPS["pairs"], logits(W["head"]), np.zeros(6, np.int32))
    np.testing.assert_array_equal(usable, [True, False])


def test_logits_of_the_other_heads():
    assert [len(HEADED[name, "group_reject"].column) for name in SPECS] == [
        4,
        4 + 2,
        4 + 1,
    ]
    assert [len(HEADED[name, "group_binary"].column) for name in SPECS] == [4, 2, 3]
    z = np.arange(5, dtype=np.float32)[None] ** 2  # classes 0 to 3, and none of {0, 2}
    np.testing.assert_array_equal(
        class_groups.class_logits(HEADED["mixed", "group_reject"], z),
        [[-16, 1, -12, 9]],
    )
    np.testing.assert_array_equal(
        class_groups.class_logits(HEADED["mixed", "group_binary"], z[:, :3]),
        [[1, 0, 1, 4]],
    )


@pytest.mark.parametrize("task_loss", TASK_LOSSES)
@pytest.mark.parametrize("head", ["group_reject", "group_binary"])
def test_losses_of_the_other_heads_by_hand(head, task_loss):
    b = HEADED["mixed", head]
    z = logits(start(b))
    y, expected = BATCH.y[:5], np.zeros(3)
    for k in range(5):
        for t, group in enumerate(([1], [0, 2], [3])):
            inside = y[k] in group
            if head == "group_reject" and len(group) > 1:
                answers = {**{c: z[k, c] for c in group}, "none": z[k, 4]}
                chosen = answers[y[k] if inside else "none"]
                expected[t] -= chosen - np.log(sum(np.exp(a) for a in answers.values()))
            else:
                p = 1 / (1 + np.exp(-z[k, group[0] if head == "group_reject" else t]))
                expected[t] -= np.log(p if inside else 1 - p)
    value, usable = task_losses(b, z, task_loss=task_loss)
    np.testing.assert_allclose(
        value, expected / ([1, 3, 1] if task_loss == "class" else 5), rtol=1e-5
    )
    assert usable.all()
    value, usable = task_losses(b, z, np.zeros(6, np.int32), task_loss)
    np.testing.assert_array_equal(
        usable, [False, True, False] if task_loss == "class" else [True] * 3
    )
    np.testing.assert_array_equal(value == 0, ~usable)


def test_a_reject_logit_that_is_never_chosen_leaves_the_softmax():
    y = np.array([0, 1, 1, 0, 1, 0], np.int32)  # all in the first pair
    z = normal(1, 6, 6)
    z[:, 4] = -1e9
    value, _ = task_losses(HEADED["pairs", "group_reject"], z, y)
    expected, _ = task_losses(MAPS["pairs"], z[:, :C], y)
    np.testing.assert_allclose(value[0], expected[0], rtol=1e-6)


def test_group_binary_is_binary_on_coarse_labels():
    b, coarse = (
        HEADED["mixed", "group_binary"],
        task_maps.branches(TASK._replace(num_classes=3), "class"),
    )
    z = normal(1, 6, 3)
    assert_same(task_losses(b, z), task_losses(coarse, z, b.of[BATCH.y]))


def start(b):
    """A head of the map's logits, other than the model's."""
    width = len(b.column)
    return {"kernel": normal(3, 8, width), "bias": normal(4, width)}


@pytest.mark.parametrize("task_loss", [TASK_LOSSES[0], *map(toy.slow, TASK_LOSSES[1:])])
@pytest.mark.parametrize("head", task_maps.HEADS)
@pytest.mark.parametrize("name", MAPS)
def test_gram_in_closed_form_is_autodiffs(name, head, task_loss):
    b = HEADED[name, head]

    @jax.jit
    def both(w, h):
        value = lambda z: class_groups.task_losses(
            b, z, BATCH.y, BATCH.mask, task_loss
        )[0]
        d = jax.jacrev(lambda h: value(class_groups.columns(w, h)))(h).reshape(
            len(b.member), -1
        )
        return gram(
            b,
            jax.grad(lambda z: jnp.sum(value(z)))(class_groups.columns(w, h)),
            w["kernel"],
        ), d

    m, d = (np.asarray(x) for x in both(start(b), features()))
    np.testing.assert_allclose(m, d @ d.T, rtol=1e-5, atol=1e-6)
    # MGDA-UB is inverse squared norm weighting where samples are disjoint, and only
    # there
    if name == "pairs":
        assert (abs(m[0, 1]) < 1e-9) == (head == "group_softmax")


@pytest.mark.parametrize("normalise", ["none", "loss+"])
def test_weights_are_on_the_simplex_of_active_tasks(normalise):
    d = np.random.default_rng(0).normal(size=(5, 8))
    d[3] = 0  # solved: must not drag the others to zero
    active = np.array([True, False, True, True, True])
    alpha = np.asarray(
        WEIGHTS(
            (d @ d.T).astype(np.float32),
            np.arange(1, 6, dtype=np.float32),
            active,
            normalise,
        )
    )
    assert (
        alpha[1] == alpha[3] == 0 and np.all(alpha >= 0) and np.isclose(alpha.sum(), 1)
    )


def test_weights_are_uniform_when_all_is_solved():
    active = np.array([True, False, True])
    nothing = np.zeros((3, 3), np.float32)
    alpha = WEIGHTS(nothing, np.ones(3, np.float32), active, "none")
    np.testing.assert_array_equal(alpha, [0.5, 0, 0.5])


@functools.cache
def slope(weighting, scale, head_grad, head="group_softmax", task_loss="class"):
    def loss(w, batch, active):
        how = (active, weighting, scale, "none", head_grad, task_loss)
        return branch_loss(TASK, HEADED["class", head], *how)(w, batch, KEY)[0]

    return jax.jit(jax.grad(loss))


def gradient(
    weighting="uniform",
    head_grad="scaled",
    active=ALL,
    w=W,
    batch=BATCH,
    task_loss="class",
    scale="mean_one",
):
    """Returns the gradient for tasks of one class each."""
    return slope(weighting, scale, head_grad, task_loss=task_loss)(w, batch, active)


@pytest.mark.parametrize("task_loss", TASK_LOSSES)
def test_uniform_weights_of_mean_one_add_the_binary_losses(task_loss):
    hit = jax.nn.one_hot(BATCH.y[:5], C)
    of = hit.sum(0) if task_loss == "class" else 5

    def total(w):
        z = TASK.model.apply(w, BATCH.x)[0][:5]
        return jnp.sum(
            jnp.sum(optax.losses.sigmoid_binary_cross_entropy(z, hit), axis=0) / of
        )

    toy.assert_close(gradient(task_loss=task_loss), jax.jit(jax.grad(total))(W), 1e-5)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weights_of_mean_one(weighting):
    """A weight is the gradient by a branch's bias, divided by that of the plain sum."""
    active = np.array([True, False, True, True])
    bias = lambda *how, scale: gradient(*how, active=active, scale=scale)["head"][
        "bias"
    ]
    plain = bias("uniform", scale="mean_one")
    weights = bias(weighting, scale="mean_one")[active] / plain[active]
    np.testing.assert_allclose(np.mean(weights), 1, rtol=1e-5)
    shares = bias(weighting, scale="simplex")[active] / plain[active]
    np.testing.assert_allclose(shares, weights / 3, rtol=1e-5)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_scale_does_not_matter_to_one_active_task(weighting):
    active = np.arange(C) == 2
    scaled = (
        gradient(weighting, active=active, scale=x) for x in ("simplex", "mean_one")
    )
    assert_same(*scaled)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("task_loss", TASK_LOSSES)
def test_a_task_without_a_positive_in_the_batch_is_left_out(weighting, task_loss):
    """The one sample of class 0 that counts is relabelled; another stands in a row that
    is masked."""
    batch = BATCH._replace(y=np.array([2, 2, 1, 3, 2, 0], np.int32))
    kernel = np.asarray(
        gradient(weighting, batch=batch, task_loss=task_loss)["head"]["kernel"]
    )
    assert kernel[:, 0].any() == (task_loss == "batch") and kernel[:, 1:].any()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_branches_that_are_not_held_get_no_gradient(weighting):
    kernel = np.asarray(
        gradient(weighting, active=np.array([True, False, True, False]))["head"][
            "kernel"
        ]
    )
    assert not kernel[:, [1, 3]].any() and kernel[:, [0, 2]].any()


def test_the_gradients_of_the_tasks_count_no_padding():
    normed = testing.task(models=toy.task("norm").models)
    solved = functools.partial(factory, weighting="mgda_ub")
    testing.check("mask", testing.subject(solved, normed))


def test_unscaled_heads_take_the_whole_gradient_of_their_task():
    scaled, unscaled = (
        gradient(head_grad=head_grad, scale="simplex")
        for head_grad in ("scaled", "unscaled")
    )
    toy.assert_close(unscaled["body"], scaled["body"])
    toy.assert_close(unscaled["head"], gradient()["head"])


@pytest.mark.slow
def test_unscaled_heads_learn_where_alpha_is_zero():
    # one task's gradient dominates
    large = np.array([30, 1, 1, 1, 1, 1], np.float32)[:, None]
    wide = BATCH._replace(x=BATCH.x * large)
    kernel = lambda *how: np.asarray(
        gradient(*how, batch=wide, scale="simplex")["head"]["kernel"]
    )
    scaled, unscaled = (
        kernel("mgda_ub", head_grad) for head_grad in ("scaled", "unscaled")
    )
    alone = np.asarray(gradient(batch=wide)["head"]["kernel"])  # sum of the losses
    toy.assert_close(unscaled, alone, 1e-5)
    assert np.any(np.abs(scaled) < 0.1 * np.abs(unscaled).max())


def test_order_of_the_classes_does_not_matter():
    order = np.array([2, 0, 3, 1])
    place = np.argsort(order)  # class c of the permuted problem is class order[c]
    head = jax.tree.map(lambda x: np.asarray(x)[..., order], W["head"])
    plain = gradient("mgda_ub")
    moved = gradient(
        "mgda_ub",
        w={**W, "head": head},
        batch=BATCH._replace(y=place[BATCH.y].astype(np.int32)),
    )
    toy.assert_close(moved["body"], plain["body"], 1e-5)
    toy.assert_close(
        jax.tree.map(lambda x: np.asarray(x)[..., place], moved["head"]),
        plain["head"],
        1e-5,
    )


def train(rounds, task=TASK, federation=None, **hparams):
    """Defaults are left out, so that they are no other compilation."""
    others = {name: value for name, value in hparams.items() if value != DEFAULTS[name]}
    return toy.train(factory, task, rounds, KEY, federation, **others)


def round_of(ids, **hparams):
    """The server before and after a round in which only these clients hold examples."""
    f, others = toy.federation(), np.setdiff1d(np.arange(toy.N), ids)
    sizes, counts = np.array(f.train.size), np.array(f.class_counts)
    sizes[others] = counts[others] = 0
    here = f._replace(train=f.train._replace(size=sizes), class_counts=counts)
    run = train(1, federation=here, **hparams)
    return run.begin.server, run.state.server


def columns(server, classes):
    return jax.tree.map(lambda x: np.asarray(x)[..., np.array(classes)], server["head"])


@pytest.mark.slow
def test_only_held_branches_move_even_under_weight_decay():
    before, after = round_of([0])  # client 0 holds classes 0 and 1
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
        np.asarray(both["body"]["layers"]["0"]["kernel"])
        != np.asarray(first["body"]["layers"]["0"]["kernel"])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "head, columns_of",
    [("group_reject", [(0, 1, 4), (2, 3, 5)]), toy.slow("group_binary", [(0,), (1,)])],
)
def test_only_held_columns_move_and_never_mix(head, columns_of):
    before, both = round_of([0, 2], head=head, **PAIRS)  # classes 0 and 1; class 3
    _, first = round_of([0], head=head, **PAIRS)
    first_pair, second_pair = columns_of
    assert_same(columns(first, second_pair), columns(before, second_pair))
    assert_same(columns(both, first_pair), columns(first, first_pair))
    moved = np.any(
        columns(both, [*first_pair, *second_pair])["kernel"]
        != np.asarray(before["head"]["kernel"]),
        axis=0,
    )
    assert moved.all()


@pytest.mark.slow  # six compilations; their losses by hand are above
def test_of_tasks_of_one_class_all_heads_are_the_same():
    slopes = [
        slope("mgda_ub", "simplex", "scaled", head)(W, BATCH, ALL)
        for head in task_maps.HEADS
    ]
    servers = [round_of([0, 1, 4], head=head)[1] for head in task_maps.HEADS]
    for expected, *others in (slopes, servers):
        for other in others:
            assert_same(other, expected)


@pytest.mark.parametrize(
    "head, per_task", [("group_softmax", 2), ("group_reject", 3), ("group_binary", 1)]
)
def test_traffic_counts_the_logits_of_held_tasks(head, per_task):
    cohort = toy.cohort(TASK, range(3), [True, True, False])
    algorithm = factory(TASK, tasks="consecutive:2", head=head)
    shapes = jax.eval_shape(algorithm.init, KEY)
    sent = jax.jit(lambda: algorithm.traffic(shapes, cohort, {}))()
    held = np.array([1, 2, 0])
    np.testing.assert_array_equal(sent.down, [56, 56, 0] + held * per_task * 9)
    np.testing.assert_array_equal(sent.up, sent.down)


@pytest.mark.parametrize(
    "head", [h if h == "group_reject" else toy.slow(h) for h in task_maps.HEADS]
)
def test_every_head_learns(head):
    run = train(10, head=head, **PAIRS)
    loss = run.metrics.loss.mean(axis=1)
    assert loss[-1] < 0.7 * loss[0]
    coarse = np.nanmean(run.last["coarse_acc"])
    fine = np.nanmean(run.last["acc_present"])
    assert coarse > 0.75 and (fine > 0.75 or head == "group_binary")
    program, f = toy.program(factory, TASK, {"head": head, **PAIRS}), toy.federation()
    t = jnp.int32(10)
    outputs = jax.eval_shape(
        program.predict, program.context(KEY, f, t), run.state, 1, f.examples.x[:3]
    )
    assert outputs.shape == (3, C)


# --- download


@pytest.mark.slow
def test_with_everybody_a_stale_download_is_the_banks():
    run = functools.partial(train, head="group_reject", **PAIRS)
    bank, stale = (run(3, download=name) for name in ("bank", "stale"))
    toy.assert_close(stale.state.server, bank.state.server)
    toy.assert_close(stale.metrics, bank.metrics)
    for rounds in range(4):
        toy.assert_close(
            run(rounds, download="stale").last, run(rounds, download="bank").last
        )
    counts = np.asarray(toy.federation().class_counts)
    holds = (counts @ MAPS["pairs"].member.T > 0)[
        :, HEADED["pairs", "group_reject"].column
    ]
    server = bank.state.server
    # holders have the bank's branches, and the others are as they started
    for i in range(toy.N):
        expected = jax.tree.map(
            lambda new, old, i=i: np.where(holds[i], new, old),
            server["head"],
            server["start"],
        )
        toy.assert_close(toy.rows(stale.state.clients["head"], i), expected)


STALE = {"download": "stale"}
ANY_NUMBER = toy.program(factory, TASK._replace(participation=(0.2, 1.0)), STALE)
ROUND_OF_ANY_NUMBER = jax.jit(ANY_NUMBER.round)


@pytest.mark.slow
def test_a_stale_download_is_equation_7():
    """Clients that do not train: every branch is the mean of its holders' in the round,
    and nobody else's moves."""
    f, numbers = toy.federation(), ANY_NUMBER.traced | {"lr": 0.0}
    begin = train(0, **STALE).begin
    noise = lambda x: np.asarray(x) + normal(x.ndim, *x.shape)
    moved = begin.clients | {"head": jax.tree.map(noise, begin.clients["head"])}
    state = ANY_NUMBER.init(KEY, numbers)
    state = state._replace(method=State(begin.server, moved))
    expected, participants = moved["head"]["kernel"].copy(), set()
    for t in range(4):
        old = np.asarray(state.method.clients["head"]["kernel"])
        state, metrics = ROUND_OF_ANY_NUMBER(
            Context(KEY, numbers, f, jnp.int32(t)), state, jnp.bool(False)
        )
        here = np.asarray(metrics.ids)[np.asarray(metrics.active)]
        before = expected.copy()
        for i in here:
            for c in toy.OWN[i]:
                expected[i, :, c] = np.mean(
                    [before[n, :, c] for n in here if c in toy.OWN[n]], axis=0
                )
        kernel = np.asarray(state.method.clients["head"]["kernel"])
        np.testing.assert_allclose(kernel, expected, rtol=1e-5)
        absent = np.setdiff1d(np.arange(toy.N), here)
        assert_same(kernel[absent], old[absent])
        participants.add(len(here))
    assert len(participants) > 1 and min(participants) < toy.N


@pytest.mark.slow
def test_a_newcomer_begins_with_the_banks_branches_or_with_its_own():
    """Client 4, of all classes, held nothing when 0 and 1 trained."""
    f, outputs = toy.federation(), {}
    x, c = f.examples.x[:5], Client(*[None] * 6, f.class_counts[4], None, None)
    for download in ("bank", "stale"):
        algorithm = factory(TASK, download=download)
        begin = train(0, download=download).begin
        after = round_of([0, 1], download=download)[1]
        used = after["head"] if download == "bank" else begin.server["head"]

        @jax.jit
        def both(after, mine, used, algorithm=algorithm):
            h = TASK.model.features(
                {"body": after["body"], "head": used, "stats": {}}, x
            )[0]
            return algorithm.predict(after, mine, c)(
                x, jnp.ones(5, bool)
            ), class_groups.columns(used, h)

        outputs[download], expected = both(after, toy.rows(begin.clients, 4), used)
        toy.assert_close(outputs[download], expected)
    assert (
        np.abs(np.asarray(outputs["bank"]) - np.asarray(outputs["stale"])).max() > 1e-3
    )


@pytest.mark.slow
def test_a_round_that_happens_to_draw_everybody_is_one_of_full_participation():
    everybody = train(1, **STALE)
    args = (
        Context(KEY, ANY_NUMBER.traced, toy.federation(), jnp.int32(0)),
        everybody.begin,
        jnp.bool(True),
    )
    state, metrics = ROUND_OF_ANY_NUMBER(*args)
    assert np.all(metrics.active)
    assert_same(state, everybody.state)


# --- scores


def scores(b, z, y, mask, counts):
    """Returns the scores {name: mean} of a client with these class counts."""
    c = Client(*[None] * 6, counts, None, None)

    @jax.jit
    def run(z, y, mask, c):
        return {
            name: evaluation.ratio(*pair)
            for name, pair in class_groups.scores(b, z, y, mask, c).items()
        }

    return {name: float(x) for name, x in run(z, y, mask, c).items()}


@pytest.mark.parametrize("held, z, right", [(1, np.nan, 0), (0, 1.0, 0), (1, 1.0, 1)])
def test_no_argmax_of_nan_and_none_of_no_class_is_right(held, z, right):
    """All labels are 0, which argmax would name."""
    got = scores(
        MIXED,
        np.full((6, C), z),
        np.zeros(6, int),
        np.ones(6, bool),
        np.array([held, 0, 0, 0]),
    )
    assert got["acc_present"] == right
    assert got["recall_macro"] == got["acc_groups"] == got["coarse_acc"] == right
    if held:
        assert got["acc"] == right


def test_scores_by_hand():
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(40, C)), rng.integers(0, C, 40)
    mask = np.arange(40) < 33
    counts = np.array([3, 0, 7, 5])  # holds the group {0, 2} and class 3, not class 1
    got = scores(MIXED, z, y, mask, counts)
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
        "acc_majority": np.mean(y == 2),
        "task_acc": (group + np.mean(yes == three)) / 2,
        "task_acc_majority": (np.mean(y[inside] == 2) + np.mean(~three)) / 2,
        "task_bal": (np.mean(yes[three]) + np.mean(~yes[~three])) / 2,
        "task_bal_majority": 0.5,
        "recall_macro": np.mean([np.mean(present[y == k] == k) for k in range(C)]),
        "recall_majority": 1 / C,
    }
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("head", ["group_reject", "group_binary"])
def test_scores_of_the_other_heads_by_hand(head):
    """The client holds the group {0, 2}, of which mostly 2, and class 3, not class
    1."""
    b, rng = HEADED["mixed", head], np.random.default_rng(1)
    columns, y = rng.normal(size=(40, len(b.column))), rng.integers(0, C, 40)
    z = np.asarray(jax.jit(functools.partial(class_groups.class_logits, b))(columns))
    mask, counts = np.arange(40) < 33, np.array([3, 0, 7, 5])
    got = scores(b, z, y, mask, counts)
    # (answer right, label in the group) of each task
    right, fine, present = {1: [], 2: []}, [], []
    for row, label in zip(columns[:33], y[:33], strict=True):
        if head == "group_reject":  # answers of the group {0, 2}, the last of them none
            answer = (0, 2, None)[np.argmax(row[[0, 2, 4]])]
            logit = {0: row[0] - row[4], 1: row[1], 2: row[2] - row[4], 3: row[3]}
            right[1].append(
                (answer == (label if label in (0, 2) else None), label in (0, 2))
            )
        else:
            # the group's prediction is class 2
            logit = {1: row[0], 2: row[1], 3: row[2]}
            right[1].append(((row[1] > 0) == (label in (0, 2)), label in (0, 2)))
        right[2].append(((logit[3] > 0) == (label == 3), label == 3))
        fine.append(max(logit, key=logit.get) == label)
        present.append(max(set(logit) - {1}, key=logit.get))
    rate = lambda pairs, *which: np.mean(
        [ok for ok, inside in pairs if inside in which]
    )
    present, y = np.array(present), y[:33]
    expected = {
        "acc": np.mean(fine),
        "acc_present": np.mean(present == y),
        "acc_groups": np.mean(present == y),
        "coarse_acc": np.mean(b.of[present] == b.of[y]),
        "acc_majority": np.mean(y == 2),
        "task_acc": np.mean([rate(pairs, True, False) for pairs in right.values()]),
        "task_acc_majority": (np.mean(~np.isin(y, [0, 2])) + np.mean(y != 3)) / 2,
        "task_bal": np.mean(
            [(rate(pairs, True) + rate(pairs, False)) / 2 for pairs in right.values()]
        ),
        "task_bal_majority": 0.5,
        "recall_macro": np.mean([np.mean(present[y == k] == k) for k in range(C)]),
        "recall_majority": 1 / C,
    }
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"head": "softmax"},
        {"task_loss": "mean"},
        {"download": "fresh"},
        {"tasks": "single", "head": "group_binary"},
    ],
)
def test_bad_input(wrong):
    with pytest.raises(
        InputError, match=next(iter(wrong)) if len(wrong) == 1 else "group_binary"
    ):
        factory(TASK, **wrong)


def test_a_head_that_is_not_linear_is_refused():
    model = TASK.model._replace(
        init=lambda key: {"body": {}, "head": {"w": jnp.zeros(3)}, "stats": {}}
    )
    with pytest.raises(InputError, match="one linear layer"):
        factory(TASK._replace(models=(model,))).init(KEY)


@pytest.mark.slow
def test_holders_may_weigh_by_all_their_examples():
    """Whoever holds no example of a class does not count for it."""
    both, first, second = (
        round_of(ids, head_weighting="data")[1] for ids in ([0, 4], [0], [4])
    )
    n, m = toy.SIZES[[0, 4]]
    mean = jax.tree.map(
        lambda x, y: (n * x + m * y) / (n + m),
        *(columns(x, [0, 1]) for x in (first, second)),
    )
    toy.assert_close(columns(both, [0, 1]), mean)
    toy.assert_close(columns(both, [2, 3]), columns(second, [2, 3]))


@pytest.mark.slow
def test_right_after_training_the_branches_of_others_are_as_they_were(monkeypatch):
    """Weight decay would move them."""
    task, x = toy.task("linear", optimizer=lambda lr: TASK.optimizer(10 * lr)), BATCH.x
    begin = class_groups.columns(
        toy.train(factory, task, 0, KEY).begin.server["head"], x
    )

    def moved(cohort, c, predictor, score):
        gap = jnp.abs(predictor(x, BATCH.mask) - begin).max(axis=0)
        return {"acc": gap[0]} | {str(k): gap[k] for k in range(C)}

    monkeypatch.setattr(evaluation, "post", moved)
    metrics = toy.train(functools.partial(factory), task, 1, KEY).metrics
    for place, i in enumerate(metrics.ids[0]):
        np.testing.assert_array_equal(
            [metrics.post[str(k)][0, place] > 0 for k in range(C)],
            np.isin(range(C), toy.OWN[i]),
        )


def test_orthogonal_gradients_weigh_by_their_norms_and_losses():
    n, value = (
        np.array([1.0, 2.0, 3.0], np.float32),
        np.array([2.0, 1.0, 3.0], np.float32),
    )
    for normalise, share in {
        "none": n**-2,
        "loss+": value**2,
    }.items():
        alpha = WEIGHTS(np.diag(n**2), value, np.ones(3, bool), normalise)
        np.testing.assert_allclose(alpha, share / share.sum(), atol=1e-3)


def test_scores_of_a_client_that_holds_a_part_of_a_group():
    """The client has class 0 of {0, 2}, and more of class 3."""
    rng, counts = np.random.default_rng(1), np.array([3, 0, 0, 5])
    z, y = rng.normal(size=(40, C)), rng.integers(0, C, 40)
    got = scores(MIXED, z, y, np.ones(40, bool), counts)
    own, grouped = (
        np.where(known, z, -np.inf).argmax(axis=1)
        for known in (counts > 0, MIXED.of != 0)
    )
    expected = {
        "acc_present": np.mean(own == y),
        "acc_groups": np.mean(grouped == y),
        "coarse_acc": np.mean(MIXED.of[grouped] == MIXED.of[y]),
        "recall_macro": np.mean([np.mean(own[y == k] == k) for k in range(C)]),
        "task_acc_majority": (np.mean(y[np.isin(y, [0, 2])] == 0) + np.mean(y != 3))
        / 2,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)


def test_a_task_is_not_answered_by_nan():
    got = scores(
        MIXED,
        np.full((6, C), np.nan),
        np.zeros(6, int),
        np.ones(6, bool),
        np.array([1, 0, 0, 0]),
    )
    assert got["task_acc"] == 0  # argmax would name class 0


def test_weights_lie_where_a_sample_counts():
    """The weights are shares, whatever they sum to."""
    y, mask = np.array([0, 1, 2]), np.array([True, True, False])
    for alpha in (np.array([0.1, 0.2, 0.3, 0.4]), np.ones(C)):
        got = class_groups.weight_shares(
            MAPS["class"], alpha, y, mask, np.array([False, True, False, True])
        )
        np.testing.assert_allclose(
            got["weight_on_positives"], alpha[:2].sum() / alpha.sum(), rtol=1e-6
        )
        np.testing.assert_allclose(
            got["weight_on_one_class"], alpha[[1, 3]].sum() / alpha.sum(), rtol=1e-6
        )


@pytest.mark.slow
def test_running_statistics_weigh_by_examples():
    norm = toy.task("norm")
    both, first, second = (
        round_of(ids, task=norm)[1]["stats"] for ids in ([0, 4], [0], [4])
    )
    n, m = toy.SIZES[[0, 4]]
    toy.assert_close(
        both, jax.tree.map(lambda x, y: (n * x + m * y) / (n + m), first, second), 1e-5
    )


@pytest.mark.slow
def test_branches_that_a_client_does_not_hold_are_not_seen_by_its_optimizer():
    """Their decay is in no norm by which what the client trains is clipped."""
    rule = lambda lr: optax.chain(
        optax.add_decayed_weights(0.1), optax.clip_by_global_norm(0.1), optax.sgd(lr)
    )
    task = toy.task(optimizer=rule)
    plain = toy.train("pfedc", task, rounds=0).begin
    large = jax.tree.map(lambda x: 50 * x, plain.server["start"])
    begins = (plain, State({**plain.server, "start": large}, plain.clients))
    found = [
        toy.train("pfedc", task, rounds=1, begin=begin).state.server["body"]
        for begin in begins
    ]
    toy.assert_close(*found)
