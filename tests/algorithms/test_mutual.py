"""FML, FedKD and FedAPEN: what the two models teach each other, and what becomes of the
small one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import toy
from toy import C, N, assert_close, assert_same

from fedjax_pfl import trees
from fedjax_pfl.algorithms import ALGORITHMS, fml, mutual
from fedjax_pfl.algorithms.shared_model import Outputs, divergence
from fedjax_pfl.errors import InputError
from fedjax_pfl.optimizers import clipped
from fedjax_pfl.types import Batch, State

TASK = toy.task()
RNG = np.random.default_rng(0)
ONE = Batch(np.zeros((1, 1)), np.array([0]), np.array([True]), np.array([0]))
OWN, SMALL = (
    Outputs(np.zeros((1, 1)), jnp.array([z])) for z in ([2.0, 0.0], [0.0, 1.0])
)
EYE = {"map": jnp.eye(1)}
X = RNG.normal(size=(6, *toy.SHAPE)).astype(np.float32)
BATCH = Batch(
    X,
    np.array([0, 2, 0, 3, 2, 0], np.int32),
    np.arange(6) < 5,
    np.arange(6, dtype=np.int32),
)
Z = [RNG.normal(size=(6, C)).astype(np.float32) for _ in range(2)]
H = [RNG.normal(size=(6, k)).astype(np.float32) for k in (3, 2)]
OUT = [Outputs(*pair) for pair in zip(H, Z, strict=True)]


@functools.cache
def train(method, **hparams):
    return toy.train(method, TASK, **hparams)


@pytest.mark.parametrize("method", ["fml", "fedkd", "fedapen"])
def test_a_missing_or_unfit_shared_model_is_one_sentence(method):
    other, more = (
        toy.models.model(toy.small_mlp, (7,), C),
        toy.models.model(toy.small_mlp, toy.SHAPE, C + 1),
    )
    for shared, said in (
        (None, "give the task one"),
        (other, r"inputs of shape \[6\]"),
        (more, "5 classes instead of 4"),
    ):
        with pytest.raises(InputError, match=said):
            ALGORITHMS[method](toy.task(shared=shared))


# ------------------------------------------------------------------------------------------------
# FML


def test_fml_golden_numbers():
    total, private = mutual.fml_objective(0.5, 0.5)({}, OWN, SMALL, ONE)
    np.testing.assert_allclose(
        [private, total - private], [0.56688504, 1.07099330], rtol=1e-6
    )


@pytest.mark.slow
def test_divergence_pulls_each_model_by_the_difference_of_probabilities():
    slope = jax.grad(lambda z: divergence(Z[1], z, BATCH.mask))(Z[0])
    expected = (jax.nn.softmax(Z[0]) - jax.nn.softmax(Z[1])) * BATCH.mask[:, None] / 5
    assert_close(slope, expected)


def test_fml_by_hand():
    """Two rounds in plain NumPy; in the second some are absent, and one client never
    has examples."""
    f, (keys, states, _) = (
        oracle.federation(),
        oracle.run(fml, TASK, alpha=0.3, beta=0.6),
    )
    w = [oracle.variables(toy.rows(states[0].clients["w"], i)) for i in range(N)]
    theta = oracle.variables(states[0].server)
    for t, here in enumerate(oracle.ROUNDS):
        sent = []
        for i in here:
            small, steps = theta, oracle.batches(f, i, keys[t], TASK)
            for ((x, y),) in steps:
                p, q = (oracle.softmax(oracle.forward(m, x)[1]) for m in (w[i], small))
                by_own = (0.3 * (p - np.eye(C)[y]) + 0.7 * (p - q)) / len(y)
                by_small = (0.6 * (q - np.eye(C)[y]) + 0.4 * (q - p)) / len(y)
                own = oracle.backward(w[i], x, by_own)
                small = [
                    a - 0.1 * g
                    for a, g in zip(
                        small, oracle.backward(small, x, by_small), strict=True
                    )
                ]
                w[i] = [a - 0.1 * g for a, g in zip(w[i], own, strict=True)]
            sent += [small] if steps else []
        theta = oracle.mean(sent, [1] * len(sent))
        oracle.close(states[t + 1].server, theta)
        for i in range(N):
            oracle.close(toy.rows(states[t + 1].clients["w"], i), w[i])


@pytest.mark.slow
@pytest.mark.parametrize("bn_stats, kept", [("aggregate", 0), toy.slow("local", 16)])
def test_running_statistics_of_the_small_model_travel_or_stay(bn_stats, kept):
    task = toy.task("norm", bn_stats=bn_stats)
    got = toy.train("fml", task._replace(shared=task.model), 1)
    # body, head, statistics
    assert (got.metrics.traffic.up == 72 + 36 + 16 - kept).all()
    assert sum(x[0].size for x in jax.tree.leaves(got.state.clients["kept"])) == kept
    # all began alike
    assert all((x[0] != x[1]).any() for x in jax.tree.leaves(got.state.clients["kept"]))
    assert (
        kept or trees.sq_dist(got.state.server["stats"], got.begin.server["stats"]) > 0
    )
    toy.assert_finite((got.state, got.outputs()))


@pytest.mark.slow
@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_clipping_is_optaxs(largest):
    tree = {"a": Z[0], "b": H[0]}
    ours, theirs = clipped(largest), optax.clip_by_global_norm(largest)
    assert_close(
        ours.update(tree, ours.init(tree))[0], theirs.update(tree, theirs.init(tree))[0]
    )
    zero = jax.tree.map(jnp.zeros_like, tree)
    assert_same(ours.update(zero, ours.init(zero))[0], zero)


# ------------------------------------------------------------------------------------------------
# FedKD


def test_fedkd_golden_numbers():
    total, teacher = mutual.fedkd_objective(EYE, OWN, SMALL, ONE)
    np.testing.assert_allclose(teacher - 0.12692801, 0.69910378, rtol=1e-5)
    np.testing.assert_allclose(total - teacher - 1.31326169, 0.57542761, rtol=1e-5)


def test_fedkd_by_hand():
    w = RNG.normal(size=(3, 2)).astype(np.float32)
    on = np.arange(5)
    p, q = (oracle.softmax(z.astype(float))[on] for z in Z)
    fit = [oracle.cross_entropy(z[on].astype(float), BATCH.y[on]) for z in Z]
    gap = np.mean((H[0] - H[1] @ w.T)[on] ** 2)
    kl = [np.mean(np.sum(a * np.log(a / b), axis=1)) for a, b in ((q, p), (p, q))]
    expected = sum(fit) + (sum(kl) + 2 * gap) / sum(fit)
    total, _ = mutual.fedkd_objective({"map": w}, *OUT, BATCH)
    np.testing.assert_allclose(total, expected, rtol=1e-5)


@pytest.mark.slow
def test_fedkd_twins_start_as_the_labels_alone():
    same = [OUT[0], Outputs(H[0], Z[0])]
    grads = jax.grad(
        lambda own, small: mutual.fedkd_objective(
            {"map": jnp.eye(3)}, own, small, BATCH
        )[0],
        argnums=(0, 1),
    )(*same)
    expected = jax.grad(lambda z: mutual.losses.cross_entropy(z, BATCH.y, BATCH.mask))(
        Z[0]
    )
    for by_h, by_z in grads:
        assert_close(by_z, expected)
        np.testing.assert_allclose(by_h, 0, atol=1e-7)


# ----------------------------------------------------------------------------------------------
# FedAPEN


def ensemble(lam):
    return mutual.losses.cross_entropy(mutual.mixed(lam, *Z), BATCH.y, BATCH.mask)


def test_fedapen_golden_numbers():
    loss = lambda lam: mutual.losses.cross_entropy(
        mutual.mixed(lam, OWN.z, SMALL.z), ONE.y, ONE.mask
    )
    np.testing.assert_allclose(
        jax.value_and_grad(loss)(0.25), [0.82593942, -1.68652950], rtol=1e-6
    )


def test_slope_of_the_weight_by_hand_and_by_differences():
    lam = 0.3
    p = jax.nn.softmax(mutual.mixed(lam, *Z))
    expected = np.mean(np.sum((p - np.eye(C)[BATCH.y]) * (Z[0] - Z[1]), axis=1)[:5])
    np.testing.assert_allclose(jax.grad(ensemble)(lam), expected, rtol=1e-5)
    np.testing.assert_allclose(
        (ensemble(lam + 0.01) - ensemble(lam - 0.01)) / 0.02, expected, rtol=1e-2
    )


def test_an_ensemble_of_the_own_model_alone():
    def terms(own, small, lam):
        total, private = mutual.fedapen_objective(lam)(
            {}, OUT[0]._replace(z=own), OUT[1]._replace(z=small), BATCH
        )
        return private, total - private

    fit, pulled = mutual.losses.cross_entropy, divergence
    own, _ = terms(*Z, 1.0)
    np.testing.assert_allclose(
        own,
        2 * fit(Z[0], BATCH.y, BATCH.mask) + pulled(Z[1], Z[0], BATCH.mask),
        rtol=1e-5,
    )
    slope = jax.grad(lambda small: terms(Z[0], small, 1.0)[1])(Z[1])
    expected = jax.grad(
        lambda z: fit(z, BATCH.y, BATCH.mask) + pulled(Z[0], z, BATCH.mask)
    )(Z[1])
    assert_close(slope, expected)


@pytest.mark.slow
def test_the_weight_stays_between_0_and_1_and_is_learned():
    lam = np.asarray(train("fedapen", lam_lr=1.0).metrics.clients["lam"])
    assert (lam >= 0).all() and (lam <= 1).all() and len(set(lam[-1].tolist())) > 2
    assert lam[-1, 2] == 0.5  # a single example is not held out


def test_equal_logits_do_not_move_the_weight():
    loss = lambda lam: mutual.losses.cross_entropy(
        mutual.mixed(lam, Z[0], Z[0]), BATCH.y, BATCH.mask
    )
    assert jax.grad(loss)(0.3) == 0


@pytest.mark.slow
def test_fedapen_of_a_frozen_weight_is_feden():
    frozen, without = train("fedapen", lam_lr=0.0), train("fedapen", lam_epochs=0)
    assert_same(frozen.state, without.state)
    assert_same(without.last["acc"], without.last["equal_acc"])


@pytest.mark.slow
def test_fedapen_trains_on_what_it_does_not_hold_out_and_adapts_with_the_new_small_model():
    f = toy.federation()
    held = np.asarray(f.train.index[1][f.train.size[1] - 1])  # one of 19
    poisoned = f._replace(
        examples=f.examples._replace(x=f.examples.x.at[held].multiply(9))
    )
    got, expected = (
        toy.train("fedapen", TASK, 1, federation_=g, lam_lr=1.0).state
        for g in (poisoned, f)
    )
    assert_same(got.server, expected.server)
    assert_same(got.clients["w"], expected.clients["w"])
    assert got.clients["lam"][1] != expected.clients["lam"][1]
    w, row = toy.rows(expected.clients["w"], 1), held[None]
    z = [
        m.apply(v, f.examples.x[row])[0]
        for m, v in ((TASK.model, w), (TASK.shared, expected.server))
    ]
    lam = 0.5
    for _ in range(10):
        slope = jax.grad(
            lambda lam: (
                -jax.nn.log_softmax(mutual.mixed(lam, *z))[0, f.examples.y[held]]
            )
        )(lam)
        lam = jnp.clip(lam - slope, 0, 1)
    np.testing.assert_allclose(expected.clients["lam"][1], lam, rtol=1e-4)


def test_fedapen_learns_the_weight_of_exactly_what_it_holds_out():
    """The weight is learned on the last half of the examples, here one batch."""
    f = jax.device_get(toy.federation())
    run = lambda f: (
        toy.train("fedapen", TASK, 1, federation_=f, held_out=0.5, lam_lr=0.05).state
    )
    got, rows = (
        run(toy.federation()),
        {i: f.train.index[i][: toy.SIZES[i]][-held:] for i, held in ((0, 4), (4, 2))},
    )
    poisoned = f.examples.x.copy()
    poisoned[np.concatenate([*rows.values()])] *= 9
    other = run(f._replace(examples=f.examples._replace(x=poisoned)))
    assert_same((other.server, other.clients["w"]), (got.server, got.clients["w"]))
    for i, row in rows.items():
        x, labels, lam = (
            f.examples.x[row].astype(float),
            np.eye(C)[f.examples.y[row]],
            0.5,
        )
        z = [
            oracle.forward(oracle.variables(w), x)[1]
            for w in (toy.rows(got.clients["w"], i), got.server)
        ]
        for _ in range(10):
            p = oracle.softmax(lam * z[0] + (1 - lam) * z[1])
            lam = np.clip(
                lam - 0.05 * np.mean(np.sum((p - labels) * (z[0] - z[1]), axis=1)), 0, 1
            )
        np.testing.assert_allclose(got.clients["lam"][i], lam, rtol=1e-4)
        assert 1e-3 < abs(lam - 0.5) < 0.5


@pytest.mark.slow
def test_scores_of_an_ensemble_and_its_parts():
    got = train("fedapen")
    for name, lam in (
        ("own_acc", 1.0),
        ("shared_acc", 0.0),
        ("equal_acc", 0.5),
        ("acc", None),
    ):
        clients = (
            got.state.clients
            if lam is None
            else {**got.state.clients, "lam": jnp.full(N, lam)}
        )
        again = toy.train(
            "fedapen", TASK, 0, begin=State(got.state.server, clients)
        ).last
        assert_same(again["acc"], got.last[name])


def test_fedapen_says_that_no_batch_is_left_beside_the_examples_held_out():
    """The largest of the toy's clients has 19 examples, of which one is held out."""
    task = toy.task(batch_size=19, drop_last=True)
    with pytest.raises(
        InputError, match="the examples held out the largest client has 18"
    ):
        toy.program("fedapen", task)
    toy.program("fedapen", task._replace(batch_size=18))


@pytest.mark.slow
def test_twins_draw_dropout_of_their_own():
    """Twins with dropout differ after a round."""

    task = toy.task("dropout")
    state = toy.train("fml", task._replace(shared=task.model), 1).state
    mean = jax.tree.map(lambda x: np.mean(x, axis=0), state.clients["w"])
    assert trees.sq_dist(mean, state.server) > 1e-4
