"""The properties of sheet 13: the balanced softmax, and two heads that do not reach into each other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import toy
from toy import C, assert_close, assert_same

from fedjax_pfl import losses, simulate, trees
from fedjax_pfl.algorithms import fedavg
from fedjax_pfl.algorithms import fedrod as factory
from fedjax_pfl.algorithms.fedrod import personal_loss
from fedjax_pfl.checks import BadInput
from fedjax_pfl.types import Batch

KEY = jax.random.key(0)
TASK = toy.task()
BATCH = Batch(jax.random.normal(KEY, (6, *toy.SHAPE)), jnp.array([0, 2, 0, 3, 2, 0]), jnp.arange(6) < 5, jnp.arange(6))
Z = jax.random.normal(KEY, (6, C))
COUNTS = jnp.array([5, 0, 9, 1])


def balanced(z, counts, gamma):
    return losses.balanced_softmax(z, BATCH.y, BATCH.mask, counts, gamma)


@pytest.mark.parametrize("counts, gamma", [(jnp.full(C, 7), 1.0), (COUNTS, 0.0)])
def test_balanced_softmax_without_imbalance_is_cross_entropy(counts, gamma):
    value, slope = jax.value_and_grad(lambda z: balanced(z, counts, gamma))(Z)
    expected, by = jax.value_and_grad(lambda z: losses.cross_entropy(z, BATCH.y, BATCH.mask))(Z)
    assert_close((value, slope), (expected, by))


def test_balanced_softmax_by_hand():
    present = np.array([0, 2, 3])
    p = np.exp(np.asarray(Z))[:5, present] * np.array([5, 9, 1])
    p = p / p.sum(axis=1, keepdims=True)
    y = np.array([0, 1, 0, 2, 1])
    np.testing.assert_allclose(balanced(Z, COUNTS, 1.0), -np.mean(np.log(p[np.arange(5), y])), rtol=1e-5)


def test_absent_classes_get_no_gradient():
    slope = np.asarray(jax.grad(lambda z: balanced(z, COUNTS, 1.0))(Z))
    assert not slope[:, 1].any() and slope[:5, [0, 2, 3]].all() and not slope[5].any()


def test_the_personal_loss_moves_the_personal_head_only():
    w = TASK.model.init(KEY)

    def loss(w, own):
        h, _ = TASK.model.features(w, BATCH.x, mask=BATCH.mask)
        return personal_loss(TASK, own, h, TASK.model.head(w["head"], h), BATCH)

    by_w, by_own = jax.grad(loss, argnums=(0, 1))(w, w["head"])
    assert all(not np.any(g) for g in jax.tree.leaves(by_w)) and all(np.any(g) for g in jax.tree.leaves(by_own))


def test_a_personal_head_of_zeros_predicts_as_the_generic_one():
    algorithm = factory(TASK)
    state = algorithm.init(KEY)
    mine = jax.tree.map(lambda x: 0 * x[0], state.clients)
    outputs = algorithm.predict(state.server, mine, None)(BATCH.x, BATCH.mask)
    assert_same(outputs[..., 0], outputs[..., 1])
    assert_close(outputs[..., 1], TASK.model.apply(state.server, BATCH.x)[0])


def curve(task, **hparams):
    program = simulate.program(factory, task, hparams)
    f = toy.federation()
    run = jax.jit(lambda numbers: simulate.curve(program, KEY, numbers, f, rounds=2))
    return program.init(KEY, program.numbers), *run(program.numbers)


def test_two_rounds_by_hand():
    task, lr, gamma = toy.task(), 0.1, 0.8
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
                balanced, both = z[:, held] + gamma * np.log(counts[held]), z + h @ mine[0] + mine[1]
                dz = np.zeros_like(z)
                dz[:, held] = oracle.by_logits(balanced, place)
                dp = oracle.by_logits(both, y)
                values.append(oracle.cross_entropy(balanced, place) + oracle.cross_entropy(both, y))
                local = [p - lr * g for p, g in zip(local, oracle.backward(local, x, dz), strict=True)]
                mine = [mine[0] - lr * h.T @ dp, mine[1] - lr * dp.sum(axis=0)]
            own[i] = mine
            models.append(local)
            np.testing.assert_allclose(reports[t]["loss"][i], np.mean(values) if values else 0, rtol=1e-4)
        w = oracle.mean(models, [int(f.train.size[i]) for i in here])
        oracle.close(states[t + 1].server, w)
        for i in range(toy.N):
            head = trees.gather(states[t + 1].clients["head"], i)
            np.testing.assert_allclose(head["kernel"], own[i][0], rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(head["bias"], own[i][1], rtol=2e-5, atol=2e-5)


def test_the_personal_head_starts_as_the_generic_one():
    state, after, _, last = curve(TASK)
    assert_same(state.clients["head"], trees.replicate(state.server["head"], toy.N))
    assert trees.sq_dist(after.clients["head"], state.clients["head"]) > 1e-3
    assert last.keys() == {"acc", "acc_present", "global_acc", "global_acc_present"}


def test_the_heads_have_optimizers_of_their_own():
    """Clipping by the global norm would otherwise let the personal gradient shrink the generic one's step."""
    clip = TASK._replace(optimizer=lambda lr: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(lr)))
    program = simulate.program(fedavg, clip)
    plain = jax.jit(lambda: simulate.curve(program, KEY, program.numbers, toy.federation(), rounds=2))()[0]
    assert_close(curve(clip, gamma=0.0)[1].server, plain.server)


@pytest.mark.parametrize("bn_stats", ["aggregate", "local", "batch"])
def test_batch_norm(bn_stats):
    _, state, metrics, last = curve(toy.task("norm", bn_stats=bn_stats))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics["loss"], last)))
    assert bool(jax.tree.leaves(state.clients["rest"])) == (bn_stats == "local")


def test_bad_input():
    with pytest.raises(BadInput, match="gamma"):
        factory(TASK, gamma=-1.0)
