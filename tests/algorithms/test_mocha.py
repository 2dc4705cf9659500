"""The properties of sheet 21: duality, the identity of the models, the relations, and
two rounds in plain NumPy."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import keys, local_training, models, trees
from fedjax_pfl.algorithms import mocha as factory
from fedjax_pfl.algorithms.mocha import relations, visits
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Context, State

KEY = jax.random.key(0)
# some clients have other than two classes: one-vs-rest
REST = toy.task("linear", rounds=20)
FEDERATION = toy.federation()
# the clients with two classes: 0 and 1, 1 and 2, 2 and 0
PAIR_IDS = np.array([0, 1, 3])


def only(federation, ids):
    some = lambda rows: jax.tree.map(jnp.asarray, toy.rows(rows, ids))
    parts = {name: some(getattr(federation, name)) for name in ("train", "val", "test")}
    return federation._replace(class_counts=some(federation.class_counts), **parts)


def task_of(federation, **options):
    sizes, counts = (
        np.asarray(federation.train.size),
        np.asarray(federation.class_counts),
    )
    return toy.task(
        "linear", sizes=sizes, class_counts=counts, **{"rounds": 20} | options
    )


PAIRS_FEDERATION = only(FEDERATION, PAIR_IDS)
PAIRS = task_of(PAIRS_FEDERATION)
TWINS_FEDERATION = only(FEDERATION, [1, 1, 1, 1])
TWINS = task_of(TWINS_FEDERATION)
CASES = {
    "rest": (REST, FEDERATION),
    "pairs": (PAIRS, PAIRS_FEDERATION),
    "twins": (TWINS, TWINS_FEDERATION),
}
cases = pytest.mark.parametrize("case", ["rest", "pairs"])
# the plain loops have both
rest = pytest.mark.parametrize("case", ["rest", toy.slow("pairs")])


def examples(task, f, i):
    """x [n, d] with the constant and labels [n, H] in float64, of the case's
    columns."""
    row = np.asarray(f.train.index[i])[: int(f.train.size[i])]
    x, y = np.asarray(f.examples.x, np.float64)[row], np.asarray(f.examples.y)[row]
    x = np.hstack([x, np.ones((len(x), 1))])
    if len(task.sizes) == 3:
        return x, np.where(y == min(set(y)), -1.0, 1.0)[:, None]
    return x, np.where(y[:, None] == np.arange(toy.C)[None], 1.0, -1.0)


@functools.cache
def compiled(case, relate_every):
    task, f = CASES[case]
    program = toy.program(factory, task, {"relate_every": relate_every})
    step = lambda numbers, state, t: program.round(
        Context(KEY, numbers, f, t), state, jnp.bool(False)
    )
    return (
        jax.device_get(program.init(KEY, program.traced)),
        program.traced,
        jax.jit(step),
    )


def states(case, rounds, relate_every=2, **numbers):
    state, defaults, step = compiled(case, relate_every)
    for t in range(rounds):
        state = jax.device_get(step(defaults | numbers, state, np.int32(t))[0])
        yield state


def objectives(task, f, state, lam):
    """Primal and dual of the multi-task SVMs, summed over the columns."""
    sigma = np.asarray(state.server["sigma"], np.float64)
    n = len(sigma)
    data, alpha = (
        [examples(task, f, i) for i in range(n)],
        np.asarray(state.clients["alpha"], np.float64),
    )
    duals = [alpha[i, : len(x)] for i, (x, _) in enumerate(data)]
    b = np.stack([x.T @ a / len(x) for (x, _), a in zip(data, duals, strict=True)])
    w = np.einsum("nm,mdh->ndh", sigma, b) / lam
    penalty = lam / 2 * np.einsum("ndh,nm,mdh->", w, np.linalg.inv(sigma), w)
    hinge = sum(
        np.maximum(1 - y * (x @ w[i]), 0).sum() / len(x)
        for i, (x, y) in enumerate(data)
    )
    dual = (
        sum((y * a).sum() / len(x) for (x, y), a in zip(data, duals, strict=True))
        - penalty
    )
    return (
        hinge + penalty,
        dual,
        w,
        b,
        [y * a for (_, y), a in zip(data, duals, strict=True)],
    )


@pytest.mark.slow
@rest
def test_duality_and_the_identity_of_the_models(case):
    task, f = CASES[case]
    for lam in (0.1, 1.0):
        gaps = []
        for state in states(case, 20, lam=lam):  # Sigma changes every second round
            primal, dual, w, b, scaled = objectives(task, f, state, lam)
            assert primal >= dual - 1e-5 * abs(primal)
            np.testing.assert_allclose(state.server["w"], w, atol=2e-5)
            np.testing.assert_allclose(state.server["b"], b, atol=2e-5)
            assert all(np.all((a >= 0) & (a <= 1)) for a in scaled)
            sigma = np.asarray(state.server["sigma"], np.float64)
            np.testing.assert_allclose(np.trace(sigma), 1, rtol=1e-5)
            assert np.linalg.eigvalsh(sigma).min() > 0
            gaps.append(primal - dual)
        assert gaps[-1] < gaps[0]


@pytest.mark.slow
@rest
def test_the_gap_closes(case):
    task, f = CASES[case]
    *_, state = states(case, 400, relate_every=390, lam=0.3, frac=4.0)
    assert not np.allclose(
        state.server["sigma"], np.eye(len(task.sizes)) / len(task.sizes), atol=1e-2
    )
    primal, dual, *_ = objectives(task, f, state, 0.3)
    begin = sum(task.sizes > 0) * state.server["w"].shape[-1]  # the primal at w = 0
    assert -1e-4 * begin < primal - dual < 0.02 * begin
    # before they change
    *_, state = states(case, 60, relate_every=390, lam=0.3, frac=4.0)
    primal, dual, *_ = objectives(task, f, state, 0.3)
    assert abs(primal - dual) < 1e-3 * begin


@rest
def test_fixed_relations_are_independent_machines(case):
    """Sigma = I/m: each client's own SVM with m lambda; its own duality gap closes
    whatever the others hold."""
    task, f = CASES[case]
    m, lam = len(task.sizes), 0.3
    # they do not change in as few
    *_, state = states(case, 60, relate_every=390, lam=lam, frac=4.0)
    np.testing.assert_allclose(state.server["sigma"], np.eye(m) / m, atol=1e-7)
    for i in range(m):
        x, y = examples(task, f, i)
        a = np.asarray(state.clients["alpha"][i], np.float64)[: len(x)]
        w = x.T @ a / (len(x) * lam * m)
        np.testing.assert_allclose(state.server["w"][i], w, atol=1e-5)
        penalty = lam * m / 2 * (w**2).sum()
        primal = np.maximum(1 - y * (x @ w), 0).sum() / len(x) + penalty
        dual = (y * a).sum() / len(x) - penalty
        assert -1e-5 < primal - dual < 2e-3 * y.shape[1]


@pytest.mark.slow
def test_identical_tasks_are_found_to_be_one():
    *_, state = states("twins", 40, frac=4.0)
    np.testing.assert_allclose(state.server["sigma"], np.full((4, 4), 0.25), atol=0.02)


@pytest.mark.slow
def test_relations_are_learned_in_every_tenth_of_the_rounds():
    """A tenth of 20 rounds is every second round."""
    first, second, third, fourth = (
        state.server["sigma"] for state in states("rest", 4, relate_every=None)
    )
    np.testing.assert_array_equal(first, np.float32(np.eye(toy.N) / toy.N))
    assert np.abs(second - first).max() > 1e-2 < np.abs(fourth - third).max()
    np.testing.assert_array_equal(third, second)


def test_relations_are_the_root_of_the_gram_matrix():
    w = np.random.default_rng(0).normal(size=(4, 7, 3))
    of = jax.jit(relations)
    sigma = np.asarray(of(w.astype(np.float32)), np.float64)
    gram = np.einsum("ndh,mdh->nm", w, w)
    np.testing.assert_allclose(
        sigma @ sigma, gram / np.trace(root(gram)) ** 2, atol=1e-5
    )
    np.testing.assert_allclose(
        of(np.zeros((4, 7, 3), np.float32)), np.eye(4) / 4, atol=1e-6
    )


def root(gram):
    values, vectors = np.linalg.eigh(gram)
    return vectors @ np.diag(np.sqrt(np.maximum(values, 1e-7))) @ vectors.T


@jax.jit
def orders(key, i, size):
    """The library's shuffles of client i's rows in as many epochs as are begun at
    most."""
    key = keys.fold(
        jax.random.fold_in(jax.random.fold_in(key, 0), i), keys.Client.SHUFFLE
    )
    return [
        local_training.shuffle(jax.random.fold_in(key, epoch), 19, size)
        for epoch in range(2)
    ]


def sdca(task, f, state, key, ids, lam, frac, renew):
    """One round of the sheet in loops; `state` holds alpha [N] lists, b, w, sigma, rho
    in float64."""
    alpha, b, w, sigma, rho = state
    new = b.copy()
    for i in ids:
        x, y = examples(task, f, i)
        n, dw, done = len(x), np.zeros_like(w[i]), 0
        for order in orders(key, i, n):
            for k in np.asarray(order)[:n]:
                if done >= frac * n:
                    break
                done += 1
                for h in range(w.shape[2]):
                    u = y[k, h] * x[k] @ (w[i, :, h] + rho * dw[:, h])
                    q = (
                        lam * n * (1 - u) / (sigma[i, i] * rho * x[k] @ x[k])
                        + alpha[i][k, h] * y[k, h]
                    )
                    after = y[k, h] * min(max(q, 0), 1)
                    dw[:, h] += (
                        sigma[i, i] * (after - alpha[i][k, h]) * x[k] / (lam * n)
                    )
                    new[i, :, h] += (after - alpha[i][k, h]) * x[k] / n
                    alpha[i][k, h] = after
    w = np.einsum("nm,mdh->ndh", sigma, new) / lam
    if renew:
        r = root(np.einsum("ndh,mdh->nm", w, w))
        sigma = r / np.trace(r)
        w = np.einsum("nm,mdh->ndh", sigma, new) / lam
        rho = max(np.abs(sigma[t]).sum() / sigma[t, t] for t in range(len(sigma)))
    return alpha, new, w, sigma, rho


@cases
def test_rounds_are_the_plain_loops(case):
    task, f = CASES[case]
    n, lam, frac = len(task.sizes), 0.2, 1.4
    algorithm = factory(task, lam=lam, frac=frac, relate_every=2)

    @jax.jit
    def step(key, state, ids, t):
        rows = State(state.server, trees.gather(state.clients, ids))
        cohort = toy.cohort(task, ids, ids < n, f, key, t)
        new, _ = algorithm.round(KEY, rows, cohort)
        return State(
            new.server, trees.scatter(state.clients, ids, new.clients, ids < n)
        )

    state = jax.device_get(algorithm.init(KEY))
    expected = ([np.zeros((s, state.server["w"].shape[2])) for s in task.sizes],)
    expected += (
        np.zeros(state.server["w"].shape),
        np.zeros(state.server["w"].shape),
        np.eye(n) / n,
        1.0,
    )
    # Sigma after the second; then client 1 is absent
    for t, ids in enumerate([range(n), range(n), [2, 0]]):
        key, places = (
            jax.random.key(100 + t),
            np.append(list(ids), n + np.arange(n - len(ids))),
        )
        state = jax.device_get(step(key, state, places.astype(np.int32), np.int32(t)))
        expected = sdca(task, f, expected, key, list(ids), lam, frac, t == 1)
        alpha, b, w, sigma, rho = expected
        for name, value in (("b", b), ("w", w), ("sigma", sigma), ("rho", rho)):
            np.testing.assert_allclose(
                state.server[name], value, atol=5e-4, err_msg=f"{name} of round {t}"
            )
        for i, a in enumerate(alpha):
            np.testing.assert_allclose(
                state.clients["alpha"][i, : len(a)], a, atol=5e-4
            )
            assert not np.any(state.clients["alpha"][i, len(a) :])


@pytest.mark.slow
def test_two_classes_are_predicted_by_a_sign():
    program, f = toy.program(factory, PAIRS, {"lam": 0.1}), PAIRS_FEDERATION
    state, _, last = jax.device_get(
        tuple(toy.train(factory, PAIRS, 6, key=KEY, federation_=f, lam=0.1))
    )
    assert state.server["w"].shape == (3, 7, 1)
    np.testing.assert_array_equal(last["acc"], last["acc_present"])
    assert np.mean(last["acc"]) > 0.9
    x = np.asarray(FEDERATION.examples.x[:5])
    predict = jax.jit(
        lambda state, i: program.predict(
            Context(KEY, program.traced, f, 0), state, i, jnp.asarray(x)
        )
    )
    for i, (low, high) in enumerate([(0, 1), (1, 2), (0, 2)]):
        z = np.asarray(predict(state, i))
        score = x @ state.server["w"][i, :-1, 0] + state.server["w"][i, -1, 0]
        np.testing.assert_allclose(z[:, low], -score, atol=1e-5)
        np.testing.assert_allclose(z[:, high], score, atol=1e-5)
        assert np.isneginf(np.delete(z, [low, high], axis=1)).all()


def test_two_class_clients_send_one_column():
    cohort = toy.cohort(PAIRS, range(3), [True, True, False], PAIRS_FEDERATION)
    sent = factory(PAIRS).traffic(None, cohort, {})
    np.testing.assert_array_equal([sent.down, sent.up], [[9, 9, 0], [7, 7, 0]])


@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_other_models_are_refused(net):
    with pytest.raises(InputError, match="linear"):
        factory(toy.task(net))


def test_inputs_may_be_prepared_to_another_length():
    task = REST._replace(prepare=lambda x: REST.prepare(x)[..., :1])
    width = np.prod(task.prepared.shape)
    assert 1 <= width < np.prod(REST.prepared.shape)
    model = models.model("linear", task.prepared.shape[1:], task.num_classes)
    made = factory(task._replace(models=(model,)))
    assert jax.eval_shape(made.init, KEY).server["w"].shape == (
        task.num_clients,
        width + 1,
        task.num_classes,
    )


@pytest.mark.parametrize("frac", ["0.1", "0.3", "0.5", "0.6", "1.2"])
def test_a_share_that_is_no_binary_fraction_is_not_rounded_up_twice(frac):
    sizes = np.arange(2001)
    exact = [math.ceil(Fraction(frac) * int(size)) for size in sizes]
    np.testing.assert_array_equal(visits(jnp.float32(frac), jnp.asarray(sizes)), exact)
    assert visits(1.0, jnp.int32(2_000_000)) == 2_000_000
