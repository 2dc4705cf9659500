"""The properties of sheet 9: what the attention weighs, what is mixed, and whom a
client is pulled towards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import SIZES, C, N, assert_close, assert_same, each_bn_stats

from fedjax_pfl.algorithms import fedamp as factory
from fedjax_pfl.algorithms.fedamp import square_distances, weights
from fedjax_pfl.trees import mixtures
from fedjax_pfl.types import Context, RunState, State

KEY = jax.random.key(0)
EVERY = np.arange(N)
OWN = np.eye(N, dtype=bool)
# full batches: no shuffling to imitate
FULL = toy.task("linear", lr=0.3, batch_size=32, epochs=3)
# numbers with which the toy federation's models see each other
NEAR = {"alpha": 2.0, "sigma": 8.0, "lam": 1.0}


def models(seed=0, scale=1.0, offset=0.0):
    rng = np.random.default_rng(seed)
    made = {
        "a": offset + scale * rng.normal(size=(N, 3, 2)),
        "b": offset + scale * rng.normal(size=(N, 4)),
    }
    return jax.tree.map(np.float32, made)


def flat(w):
    return np.concatenate(
        [np.asarray(x, np.float64).reshape(len(x), -1) for x in jax.tree.leaves(w)],
        axis=1,
    )


@jax.jit
def amp(w, alpha, sigma, others):
    return weights(square_distances(w, EVERY), others, alpha, sigma)


def weigh(w, alpha=0.05, sigma=4.0, others=~OWN):
    return map(np.asarray, amp(w, alpha, sigma, others))


mixed = jax.jit(lambda xi, w: mixtures(xi, w, EVERY))
distances = jax.jit(square_distances)


def test_wide_attention_is_the_plain_mean():
    sigma = 1e6
    xi, rescaled = weigh(models(), alpha=sigma / N, sigma=sigma)
    np.testing.assert_allclose(np.asarray(xi)[~OWN], 1 / N, rtol=1e-4)
    assert not rescaled.any()
    mean = jax.tree.map(
        lambda x: np.broadcast_to(np.mean(x, axis=0), x.shape), models()
    )
    assert_close(mixed(xi, models()), mean, 1e-4)


@pytest.mark.parametrize("hparams", [{}, {"alpha": 1e3}, {"sigma": 1e-3}])
@pytest.mark.parametrize("absent", [[], [1, 3], [0, 1, 2, 3, 4]])
def test_weights_lie_inside_and_leave_the_rest_to_the_own_model(hparams, absent):
    others = ~OWN & ~np.isin(EVERY, absent)[None]
    xi, rescaled = weigh(models(), others=others, **hparams)
    total = np.asarray(xi, np.float64).sum(axis=1)
    assert np.all(xi >= 0) and np.all(total <= 1 + 1e-6)
    assert not np.any(np.asarray(xi)[~others])
    assert_same(rescaled, np.full(N, hparams.get("alpha") == 1e3 and len(absent) < N))
    if rescaled.any():
        np.testing.assert_allclose(total, 1, rtol=1e-6)
    if hparams.get("sigma") == 1e-3:
        assert_same(xi, np.zeros((N, N)))
    whole = np.asarray(xi, np.float64) + np.diag(1 - total)  # its rows sum to 1
    np.testing.assert_allclose(whole.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(
        flat(mixed(xi, models())), whole @ flat(models()), atol=1e-6
    )


def test_the_mixture_of_equal_models_or_without_others_is_the_own_to_the_last_bit():
    w, (xi, _) = models(), weigh(models())
    assert_same(mixed(0 * xi, w), w)
    equal = jax.tree.map(lambda x: np.broadcast_to(x[2], x.shape), w)
    assert_same(mixed(xi, equal), equal)


def test_shrinking_keeps_the_ratios_of_the_others():
    xi, shrunk = (next(weigh(models(), alpha=alpha))[0] for alpha in (0.05, 500.0))
    np.testing.assert_allclose(shrunk / shrunk.sum(), xi / xi.sum(), rtol=1e-5)


def test_the_mixture_is_a_gradient_step_of_the_attention():
    """u_i = w_i - alpha/2 grad_i sum_{a<b} A(||w_a - w_b||^2), by finite
    differences."""
    w, alpha, sigma = models(), 0.5, 8.0
    u = flat(mixed(next(weigh(w, alpha, sigma)), w))
    v, h = flat(w), 1e-5

    def total(v):
        d2 = ((v[:, None] - v[None]) ** 2).sum(-1)
        return np.triu(1 - np.exp(-d2 / sigma), 1).sum()

    for i in range(N):
        for k in range(v.shape[1]):
            step = h * (np.arange(N) == i)[:, None] * (np.arange(v.shape[1]) == k)
            slope = (total(v + step) - total(v - step)) / (2 * h)
            np.testing.assert_allclose(u[i, k], v[i, k] - alpha / 2 * slope, atol=1e-5)


def test_pairs_far_apart_do_not_mix():
    w = toy.rows(models(scale=10.0), [0, 0, 1, 1, 2])
    xi, _ = weigh(w, alpha=0.05, sigma=0.1)
    expected = np.zeros((N, N))
    expected[[0, 1, 2, 3], [1, 0, 3, 2]] = 0.5  # alpha / sigma
    np.testing.assert_allclose(xi, expected, atol=1e-4)


def test_distances_survive_a_large_common_part():
    w = models(scale=0.01, offset=100.0)
    v = flat(w)
    expected = ((v[:, None] - v[None]) ** 2).sum(-1)
    np.testing.assert_allclose(distances(w, EVERY), expected, atol=2e-6)
    assert expected.max() > 1e-3
    assert_same(distances(w, np.array([3, 1])), toy.rows(distances(w, EVERY), [3, 1]))


# --- whole rounds


F = toy.federation()
TASKS = {"linear": FULL, "mlp": toy.task("mlp"), "norm": toy.task("norm")}


@functools.cache
def begin(net):
    return jax.device_get(factory(TASKS[net], **NEAR).init(KEY))


@functools.cache
def compiled(net, width):
    task = TASKS[net]
    algorithm = factory(task, **NEAR)

    @jax.jit
    def run(state, federation, ids, active):
        more = {"evaluated": jnp.bool(True), "width": width}
        here = toy.cohort(task, ids, active, federation, KEY, **more)
        return toy.one_round(algorithm, KEY, state, here)

    return run


def rounds(cohorts, net="mlp", start=None, federation=F, width=1):
    """The states before, between and after rounds of the given (ids, active), and their
    metrics."""
    run = compiled(net, width)
    states, metrics = [begin(net) if start is None else start], []
    for ids, active in cohorts:
        state, row = jax.device_get(
            run(states[-1], federation, ids.astype(np.int32), active)
        )
        states.append(state)
        metrics.append(row)
    return states, metrics


def gradient(w, i):
    """Returns the gradient of client i's mean cross entropy in float64; w is (kernel, bias)."""
    rows = np.asarray(F.train.index[i])[: SIZES[i]]
    x, y = np.asarray(F.examples.x, np.float64)[rows], np.asarray(F.examples.y)[rows]
    z = x @ w[0] + w[1]
    p = np.exp(z - z.max(axis=1, keepdims=True))
    r = (p / p.sum(axis=1, keepdims=True) - np.eye(C)[y]) / len(y)
    return x.T @ r, r.sum(axis=0)


def mixture_by_hand(w, i, pool, alpha, sigma):
    """u_i of models w, a list of (kernel, bias), with those of `pool`."""
    vector = [np.concatenate([part.ravel() for part in m]) for m in w]
    xi = np.zeros(N)
    for j in pool:
        if j != i:
            xi[j] = (
                alpha / sigma * np.exp(-(((vector[i] - vector[j]) ** 2).sum()) / sigma)
            )
    event = xi.sum() > 1
    xi = xi / max(xi.sum(), 1)
    xi[i] = 1 - xi.sum()
    return (
        tuple(sum(xi[j] * w[j][part] for j in range(N)) for part in range(2)),
        xi[i],
        event,
    )


COHORTS = [
    (np.array([3, 0, 4, 1, 2, 9]), np.array([True] * 5 + [False])),  # 9 is padding
    # 0 drops out, 2 is absent
    (np.array([3, 0, 1, 7, 4, 5]), np.array([True, False, True, False, True, False])),
    (np.array([0, 1, 2, 3, 4, 5]), np.array([True, True, True, False, False, False])),
]


def test_rounds_by_hand():
    alpha, sigma, lam = NEAR["alpha"], NEAR["sigma"], NEAR["lam"]
    states, metrics = rounds(COHORTS, "linear")
    head = jax.tree.map(
        lambda x: np.asarray(x, np.float64), states[0].server["w"]["head"]
    )
    w, pool = [(head["kernel"][i], head["bias"][i]) for i in range(N)], range(N)
    for (ids, active), got, row in zip(COHORTS, states[1:], metrics, strict=True):
        here, before = [int(i) for i in ids[active]], list(w)
        for i in here:
            u, own, event = mixture_by_hand(before, i, pool, alpha, sigma)
            slot = list(ids).index(i)
            np.testing.assert_allclose(row.clients["self_weight"][slot], own, atol=1e-5)
            assert row.clients["rescaled"][slot] == event
            for _ in range(FULL.epochs):
                d = [a - b for a, b in zip(w[i], u, strict=True)]
                steps = [lam / alpha * x for x in d]
                w[i] = tuple(
                    a - 0.3 * (g + s)
                    for a, g, s in zip(w[i], gradient(w[i], i), steps, strict=True)
                )
        pool = here
        np.testing.assert_array_equal(got.server["uploaded"], np.isin(range(N), here))
        for i in range(N):
            np.testing.assert_allclose(
                got.server["w"]["head"]["kernel"][i], w[i][0], atol=2e-5
            )
            np.testing.assert_allclose(
                got.server["w"]["head"]["bias"][i], w[i][1], atol=2e-5
            )


def far_apart():
    server, clients = begin("mlp")
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), server["w"]
    )
    return RunState(State({**server, "w": noisy}, clients))


@pytest.mark.slow  # the contract's rules where they hardly mix
def test_order_and_width_do_not_matter_where_models_mix():
    ids, active, order = *COHORTS[1], np.array([4, 2, 0, 5, 1, 3])
    start = far_apart()
    (_, state), (metrics,) = rounds([(ids, active)], start=start)
    # so there is something to mix up
    assert np.all(metrics.clients["self_weight"][active] < 0.99)
    (_, permuted), (metrics_2,) = rounds([(ids[order], active[order])], start=start)
    assert_same(permuted, state)
    of = lambda m, places: jax.tree.map(lambda x: x[places], (m.loss, m.clients))
    assert_same(of(metrics_2, active[order]), of(metrics, order[active[order]]))
    assert_close(rounds([(ids, active)], width=3, start=start)[0][1], state, 2e-6)
    (_, shorter), _ = rounds([(ids[active], active[active])], start=start)
    assert_close(shorter, state)


@pytest.mark.slow
def test_a_round_without_examples_keeps_the_server():
    nothing = F._replace(train=F.train._replace(size=np.zeros(N, np.int32)))
    start = far_apart()
    start = State(
        {**start.server, "uploaded": np.array([True, False, True, True, False])},
        start.clients,
    )
    (_, after), _ = rounds(COHORTS[:1], start=start, federation=nothing)
    assert_same(after.server, start.server)


def test_each_client_predicts_with_its_own_model():
    state, task, x = far_apart(), TASKS["mlp"], F.examples.x[:7]
    program = toy.program(factory, task, NEAR)
    predict = jax.jit(
        lambda state, i: program.predict(
            Context(KEY, program.traced, F, 0), state, i, x
        )
    )
    outputs = jax.jit(lambda w: task.model.apply(w, x)[0])
    for i in (0, 3):
        assert_close(
            predict(state, i), outputs({**toy.rows(state.server["w"], i), "stats": {}})
        )


@each_bn_stats
def test_batch_norm(bn_stats):
    task = toy.task("norm", bn_stats=bn_stats)
    one, two = (toy.train(factory, task, rounds, key=KEY, **NEAR) for rounds in (1, 2))
    toy.assert_finite((two.state, two.metrics.loss))
    assert_same(
        two.metrics.post,
        jax.tree.map(lambda a, b: np.stack([a, b]), one.last, two.last),
    )
    assert "stats" not in two.state.server["w"]
