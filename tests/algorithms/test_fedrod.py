"""The properties of sheet 13: the balanced softmax, and two heads that do not reach
into each other."""

import jax
import numpy as np
import optax
import oracle
import pytest
import toy
from toy import C, assert_close, assert_same

from fedjax_pfl import losses
from fedjax_pfl.algorithms import fedavg, fedrod as factory
from fedjax_pfl.algorithms.fedrod import personal_loss
from fedjax_pfl.types import Batch

KEY = jax.random.key(0)
TASK = toy.task()
CLIP = toy.task(
    optimizer=lambda lr: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(lr))
)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, *toy.SHAPE)).astype(np.float32)
BATCH = Batch(
    X,
    np.array([0, 2, 0, 3, 2, 0], np.int32),
    np.arange(6) < 5,
    np.arange(6, dtype=np.int32),
)
Z = RNG.normal(size=(6, C)).astype(np.float32)
COUNTS = np.array([5, 0, 9, 1], np.int32)


@jax.jit
@jax.value_and_grad
def balanced(z, counts, gamma):
    return losses.balanced_softmax(z, BATCH.y, BATCH.mask, counts, gamma)


@pytest.mark.parametrize(
    "counts, gamma", [(np.full(C, 7, np.int32), 1.0), (COUNTS, 0.0)]
)
def test_balanced_softmax_without_imbalance_is_cross_entropy(counts, gamma):
    expected = jax.jit(
        jax.value_and_grad(lambda z: losses.cross_entropy(z, BATCH.y, BATCH.mask))
    )(Z)
    assert_close(balanced(Z, counts, gamma), expected)


def test_balanced_softmax_by_hand():
    present = np.array([0, 2, 3])
    p = np.exp(Z)[:5, present] * np.array([5, 9, 1])
    p = p / p.sum(axis=1, keepdims=True)
    y = np.array([0, 1, 0, 2, 1])
    np.testing.assert_allclose(
        balanced(Z, COUNTS, 1.0)[0], -np.mean(np.log(p[np.arange(5), y])), rtol=1e-5
    )


def test_absent_classes_get_no_gradient():
    slope = np.asarray(balanced(Z, COUNTS, 1.0)[1])
    assert not slope[:, 1].any() and slope[:5, [0, 2, 3]].all() and not slope[5].any()


def test_the_personal_loss_moves_the_personal_head_only():
    w = TASK.model.init(KEY)

    def loss(w, own):
        h, _ = TASK.model.features(w, BATCH.x, mask=BATCH.mask)
        return personal_loss(TASK, own, h, TASK.model.head(w["head"], h), BATCH)

    by_w, by_own = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, w["head"])
    assert all(not np.any(g) for g in jax.tree.leaves(by_w)) and all(
        np.any(g) for g in jax.tree.leaves(by_own)
    )


def test_a_personal_head_of_zeros_predicts_as_the_generic_one():
    algorithm = factory(TASK)
    state = algorithm.init(KEY)
    mine = jax.tree.map(np.zeros_like, toy.rows(state.clients, 0))
    outputs = jax.jit(lambda w: algorithm.predict(w, mine, None)(BATCH.x, BATCH.mask))(
        state.server
    )
    outputs, expected = (
        np.asarray(outputs),
        jax.jit(lambda w: TASK.model.apply(w, BATCH.x)[0])(state.server),
    )
    assert_same(outputs[..., 0], outputs[..., 1])
    assert_close(outputs[..., 1], expected)


def test_two_rounds_by_hand():
    task, lr, gamma = TASK, 0.1, 0.8
    keys, states, reports = oracle.run(factory, task, gamma=gamma)
    w, f = oracle.variables(states[0].server), oracle.federation()
    own = [w[2:]] * toy.N
    for t, here in enumerate(oracle.ROUNDS):
        models = []
        for i in here:
            local, mine, counts, values = w, own[i], np.asarray(f.class_counts[i]), []
            held = counts > 0
            for ((x, y),) in oracle.batches(f, i, keys[t], task):
                h, z = oracle.forward(local, x)
                place = np.searchsorted(np.flatnonzero(held), y)
                balanced, both = (
                    z[:, held] + gamma * np.log(counts[held]),
                    z + h @ mine[0] + mine[1],
                )
                dz = np.zeros_like(z)
                dz[:, held] = oracle.by_logits(balanced, place)
                dp = oracle.by_logits(both, y)
                values.append(
                    oracle.cross_entropy(balanced, place)
                    + oracle.cross_entropy(both, y)
                )
                local = [
                    p - lr * g
                    for p, g in zip(local, oracle.backward(local, x, dz), strict=True)
                ]
                mine = [mine[0] - lr * h.T @ dp, mine[1] - lr * dp.sum(axis=0)]
            own[i] = mine
            models.append(local)
            np.testing.assert_allclose(
                reports[t].loss[i], np.mean(values) if values else 0, rtol=1e-4
            )
        w = oracle.mean(models, [int(f.train.size[i]) for i in here])
        oracle.close(states[t + 1].server, w)
        for i in range(toy.N):
            head = toy.rows(states[t + 1].clients["head"], i)
            np.testing.assert_allclose(head["kernel"], own[i][0], rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(head["bias"], own[i][1], rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_the_heads_have_optimizers_of_their_own():
    """Clipping by the global norm would otherwise let the personal gradient shrink the
    generic one's step."""
    own, plain = (
        toy.train(factory, CLIP, 2, KEY, gamma=0.0),
        toy.train(fedavg, CLIP, 2, KEY),
    )
    assert_close(own.state.server, plain.state.server)
