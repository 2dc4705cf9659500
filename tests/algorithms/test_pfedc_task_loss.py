"""Tests of a task's normalisation: minibatch SGD against a NumPy loop, and the weights
on tasks with a positive and on groups of one class."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import SIZES, C, N

from fedjax_pfl import keys, local_training
from fedjax_pfl.algorithms.pfedc import class_groups, min_norm, task_maps

KEY = jax.random.key(7)
TASK_LOSSES = ("class", "batch")
LINEAR = toy.task("linear", lr=0.3)  # batches of 4: most lack a sample of some class
SOLVED = {"weighting": "mgda_ub", "weight_scale": "simplex"}
# rounds 0, 5 and 11 with whole batches and the weights of SOLVED
BATCH_LOSSES = [0.629285, 0.362609, 0.212951]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pfedc", toy.slow("privacy_pfedc")])
def test_whole_batches_have_the_losses_they_had(method):
    got = toy.train(
        method, toy.method_task(method), 12, KEY, **SOLVED, task_loss="batch"
    )
    loss = got.metrics.loss.mean(axis=1)
    np.testing.assert_allclose(loss[[0, 5, 11]], BATCH_LOSSES, rtol=1e-3, atol=1e-5)


# --- a round against NumPy


def batches(key, i):
    """The minibatches (x [b, F], y [b]) of client i in the order of
    `local_training.sgd`."""
    f, size = toy.federation(), SIZES[i]
    index = np.asarray(f.train.index[i])
    for epoch in range(LINEAR.epochs):
        stream = jax.random.fold_in(keys.fold(key, keys.Client.SHUFFLE), epoch)
        order = index[
            np.asarray(local_training.shuffle(stream, len(index), jnp.int32(size)))[
                :size
            ]
        ]
        for first in range(0, size, LINEAR.batch_size):
            rows = order[first : first + LINEAR.batch_size]
            yield (
                np.asarray(f.examples.x, np.float64)[rows],
                np.asarray(f.examples.y)[rows],
            )


def trained(kernel, bias, key, i, task_loss):
    """Client i's head after local training with alpha 1 on the tasks that have a loss;
    its weight on positives.

    Returns:
      kernel [F, C], bias [C], and the share of alpha on classes in the batch, mean over
      the steps.
    """
    held, shares = np.isin(np.arange(C), toy.OWN[i]), []
    for x, y in batches(key, i):
        positives = np.bincount(y, minlength=C)
        on = held & (positives > 0) if task_loss == "class" else held
        of = np.maximum(positives, 1) if task_loss == "class" else len(y)
        residual = (1 / (1 + np.exp(-(x @ kernel + bias))) - np.eye(C)[y]) / of * on
        kernel, bias = kernel - 0.3 * x.T @ residual, bias - 0.3 * residual.sum(0)
        shares.append((on & (positives > 0)).sum() / on.sum())
    return kernel, bias, np.mean(shares)


# of whole batches the losses are above
@pytest.mark.slow
@pytest.mark.parametrize("task_loss", [TASK_LOSSES[0], toy.slow(TASK_LOSSES[1])])
def test_minibatches_of_uneven_classes(task_loss):
    run = toy.train(
        "pfedc",
        LINEAR,
        1,
        KEY,
        task_loss=task_loss,
        download="stale",
    )
    begin = run.begin.server["head"]
    start = (
        np.asarray(begin["kernel"], np.float64),
        np.asarray(begin["bias"], np.float64),
    )
    # of the first map over clients
    stream = jax.random.fold_in(keys.clients_key(KEY, 0), 0)
    each = [
        trained(*start, jax.random.fold_in(stream, i), i, task_loss) for i in range(N)
    ]
    shares = np.array([share for *_, share in each])[np.asarray(run.metrics.ids[0])]
    np.testing.assert_allclose(
        run.metrics.clients["weight_on_positives"][0], shares, rtol=1e-5
    )
    assert np.all(shares == 1) if task_loss == "class" else np.any(shares < 0.9)
    for c in range(C):
        holders = [each[i] for i in range(N) if c in toy.OWN[i]]
        expected = np.mean([kernel[:, c] for kernel, _, _ in holders], axis=0)
        np.testing.assert_allclose(
            run.state.server["head"]["kernel"][:, c], expected, atol=1e-5
        )
        np.testing.assert_allclose(
            run.state.server["head"]["bias"][c],
            np.mean([bias[c] for _, bias, _ in holders]),
            atol=1e-5,
        )


@pytest.mark.parametrize("download", ["bank", toy.slow("stale")])
def test_absent_branches_learn_to_answer_no(download):
    """By the mean over the batch, while the server stays the same."""
    held, run = (
        toy.train("pfedc", LINEAR, 1, KEY, train=train, download=download)
        for train in ("held", "all")
    )
    toy.assert_close(run.state.server, held.state.server)
    stream = jax.random.fold_in(keys.clients_key(KEY, 0), 0)
    for i in range(N):
        kernel = np.asarray(run.begin.server["head"]["kernel"], np.float64)
        bias = np.asarray(run.begin.server["head"]["bias"], np.float64)
        for x, y in batches(jax.random.fold_in(stream, i), i):
            residual = 1 / (1 + np.exp(-(x @ kernel + bias))) / len(y)
            kernel, bias = kernel - 0.3 * x.T @ residual, bias - 0.3 * residual.sum(0)
        absent = np.setdiff1d(np.arange(C), toy.OWN[i])
        own = toy.rows(run.state.clients["head"], i)
        np.testing.assert_allclose(
            own["kernel"][:, absent], kernel[:, absent], atol=1e-5
        )
        np.testing.assert_allclose(own["bias"][absent], bias[absent], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pfedc", toy.slow("privacy_pfedc")])
def test_absent_branches_do_not_move_the_body(method):
    task, how = toy.task(), {"head": "group_reject", "tasks": "consecutive:2"}
    how |= {} if method == "pfedc" else {"backend": "plain"}
    held, run = (
        toy.train(method, task, 2, KEY, train=train, **how) for train in ("held", "all")
    )
    toy.assert_close(run.state.server, held.state.server)
    assert np.nanmean(run.last["acc"]) > np.nanmean(held.last["acc"])


@pytest.mark.slow  # what lies where is in test_pfedc.py
def test_weight_on_groups_of_which_a_client_holds_one_class():
    how = {"tasks": "consecutive:2", "weight_scale": "simplex"}
    run = toy.train("pfedc", LINEAR, 1, KEY, **how)
    of, stream = (
        np.arange(C) // -(-C // 2),
        jax.random.fold_in(keys.clients_key(KEY, 0), 0),
    )
    expected = []
    for i in np.asarray(run.metrics.ids[0]):
        one = np.bincount(of[list(toy.OWN[i])], minlength=2) == 1
        each = batches(jax.random.fold_in(stream, int(i)), i)
        expected.append(np.mean([one[np.unique(of[y])].mean() for _, y in each]))
    np.testing.assert_allclose(
        run.metrics.clients["weight_on_one_class"][0], expected, rtol=1e-5
    )
    assert 0 < np.mean(expected) < 1
    np.testing.assert_allclose(
        run.metrics.clients["unweighted_loss"], run.metrics.loss, rtol=1e-5
    )
    solved = toy.train("pfedc", LINEAR, 1, KEY, **how | SOLVED).metrics
    # the weights lie on what is learnt
    assert np.all(solved.clients["unweighted_loss"] >= solved.loss * (1 - 1e-6))
    assert np.any(solved.clients["unweighted_loss"] > 1.2 * solved.loss)


# --- the weights


@pytest.mark.parametrize("head", task_maps.HEADS)
def test_weights_are_the_minimum_norm_point_of_the_tasks_in_the_batch(head):
    """Ten of twenty classes, in pairs but for the last; a batch of six: most tasks have
    no sample in it."""
    spec = "map:" + ",".join(str(c // 2 + (c == 19)) for c in range(20))
    b = task_maps.branches(toy.task()._replace(num_classes=20), spec, head)
    rng = np.random.default_rng(3)
    z, kernel = (rng.normal(size=(n, len(b.column))).astype(np.float32) for n in (6, 5))
    y, mask = rng.integers(0, 20, 6).astype(np.int32), np.arange(6) < 5
    held = np.arange(len(b.member)) < 10

    @jax.jit
    def solve(z, y):
        values, usable = class_groups.task_losses(b, z, y, mask)
        m = class_groups.gram(
            b,
            jax.grad(lambda z: jnp.sum(class_groups.task_losses(b, z, y, mask)[0]))(z),
            kernel,
        )
        return (
            m,
            class_groups.min_norm_weights(m, values, held & usable, "none"),
            held & usable,
        )

    m, alpha, on = (np.asarray(x) for x in solve(z, y))
    moving = on & (np.diag(m) > 0)
    assert (
        2 <= moving.sum() <= 5
        and not alpha[~moving].any()
        and np.isclose(alpha.sum(), 1)
        and np.all(alpha >= 0)
    )
    assert set(np.flatnonzero(on)) == set(b.of[y[:5]]) & set(np.flatnonzero(held))
    assert float(min_norm.gap(m, moving, alpha)) <= 1e-3 * (alpha @ m @ alpha)
