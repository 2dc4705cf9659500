"""The properties of sheets 2.8, 2.9 and 2.11 to 2.13.a: coefficients, mixtures, and the
cases in which methods meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy
from toy import PUBLIC, SHAPE, SIZES, C, N, assert_close, assert_same

from fedjax_pfl import aggregate, models
from fedjax_pfl.algorithms import ALGORITHMS, public_data
from fedjax_pfl.algorithms.knowledge_transfer import knowledge_transfer as kt, mixtures
from fedjax_pfl.algorithms.knowledge_transfer.mixtures import Predictions
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import nets
from fedjax_pfl.types import Context, RunState, State

MLP = toy.task()
METHODS = ("fedmd", "sim_pfd", "topk_pfd", "mnfl_het")
GOLDEN = np.array([[[0.9, 0.1]], [[0.6, 0.4]]], np.float32)  # [S, D, C]


def asked(outputs, student, row=None, here=None):
    """Returns the question of student number `student`, for predictions [S, D, C]."""
    s = len(outputs)
    here = np.ones(s, bool) if here is None else np.asarray(here)
    given = Predictions(
        jnp.arange(s), jnp.asarray(here), jnp.where(here[:, None, None], outputs, 0)
    )
    row = jnp.full(s, 1 / s) if row is None else jnp.asarray(row)
    return mixtures.Asked(
        row,
        jnp.arange(s) == student,
        jnp.asarray(outputs[student]),
        given,
        jnp.float32(1 / s),
    )


def some(s=6, d=7, seed=0):
    return (
        np.random.default_rng(seed)
        .dirichlet(np.ones(C), size=(s, d))
        .astype(np.float32)
    )


def matrix(rule, outputs, **options):
    return np.stack(
        [rule(asked(outputs, n, **options))[0] for n in range(len(outputs))]
    )


similar, nearest = mixtures.similar, mixtures.nearest


def test_the_gradient_and_a_step_have_the_golden_numbers():
    half = jnp.full(2, 0.5)
    slopes = np.stack([mixtures.slope(half, asked(GOLDEN, n)) for n in range(2)])
    np.testing.assert_allclose(
        slopes, [[0.927540, 1.257123], [1.153829, 0.945885]], atol=1e-6
    )
    step = lambda g: aggregate.descend(half, 0.5 * g, jnp.ones(2, bool), 0.1, 0.7)
    np.testing.assert_allclose(
        [*map(step, slopes)], [[0.507228, 0.492772], [0.495440, 0.504560]], atol=1e-6
    )
    kl = [
        mixtures.divergence(jnp.array([[0.75, 0.25]]), jnp.log(GOLDEN[n]))
        for n in range(2)
    ]
    np.testing.assert_allclose(np.concatenate(kl), [0.09233152, 0.04985676], atol=1e-7)


def test_the_distance_has_the_golden_numbers():
    target, z = jnp.array([[0.75, 0.25]]), jnp.log(GOLDEN[0])
    distance = functools.partial(mixtures.distance, temperature=1.0)
    for reduction, value in (("batchmean", 0.09233152), ("mean", 0.09233152 / 2)):
        found = distance(target, z, reduction=reduction)
        np.testing.assert_allclose(found, [value], atol=1e-7)


def test_similarities_have_the_golden_numbers():
    np.testing.assert_allclose(
        similar(asked(GOLDEN, 0))[0], [0.529600, 0.470400], atol=1e-6
    )


@pytest.mark.slow
def test_the_gradient_is_that_of_the_divergence():
    outputs, row = (
        some(),
        jnp.asarray(np.random.default_rng(1).dirichlet(np.ones(6)).astype(np.float32)),
    )
    ask = asked(outputs, 2)
    kl = lambda row: jnp.mean(
        mixtures.divergence(mixtures.mean(row, ask.given), jnp.log(ask.outputs))
    )
    np.testing.assert_allclose(mixtures.slope(row, ask), jax.grad(kl)(row), rtol=1e-5)


def test_own_coefficients_are_stationary():
    ask = asked(some(), 2)
    np.testing.assert_allclose(
        mixtures.slope(jnp.eye(6)[2], ask), np.ones(6), rtol=1e-5
    )


@pytest.mark.slow
def test_equal_clients_are_weighed_equally():
    same = np.repeat(some(1), 5, axis=0)
    np.testing.assert_array_equal(
        matrix(similar, same), np.full((5, 5), np.float32(1 / 5))
    )
    np.testing.assert_allclose(
        mixtures.slope(jnp.full(5, 0.2), asked(same, 0)), np.ones(5), rtol=1e-5
    )
    # itself, lower ids
    np.testing.assert_array_equal(
        nearest(asked(same, 4), neighbours=3)[0] > 0, [1, 1, 0, 0, 1]
    )


def test_similar_clients_weigh_more():
    outputs = some()
    a = matrix(similar, outputs)
    np.testing.assert_allclose(a.sum(axis=1), 1, rtol=1e-6)
    ratio = a / np.diag(a)[:, None]
    np.testing.assert_allclose(ratio, ratio.T, rtol=1e-5)
    scaled = outputs * np.where(np.arange(6) == 3, 7.0, 1.0)[:, None, None].astype(
        np.float32
    )
    np.testing.assert_allclose(matrix(similar, scaled), a, atol=2e-6)
    assert np.all(a.min(axis=1) > 0)


@pytest.mark.slow
def test_only_the_nearest_weigh():
    a = matrix(functools.partial(nearest, neighbours=3), some())
    assert np.all((a > 0).sum(axis=1) == 3) and np.all(np.diag(a) > 0)
    np.testing.assert_allclose(a[a > 0], 1 / 3, rtol=1e-6)
    np.testing.assert_array_equal(
        matrix(functools.partial(nearest, neighbours=1), np.repeat(some(1), 4, 0)),
        np.eye(4),
    )
    # five clients each
    two = np.repeat(np.eye(C, dtype=np.float32)[:2, None].repeat(7, axis=1), 5, axis=0)
    a = matrix(functools.partial(nearest, neighbours=5), two)
    np.testing.assert_allclose(a, np.kron(np.eye(2), np.full((5, 5), 0.2)), rtol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [similar, functools.partial(nearest, neighbours=4), mixtures.uniform],
)
def test_who_is_absent_weighs_nothing(rule):
    here = np.array([1, 1, 0, 1, 0, 1], bool)
    outputs = np.where(here[:, None, None], some(), np.nan)
    a = matrix(rule, outputs, here=here)[here]
    np.testing.assert_allclose(a.sum(axis=1), 1, rtol=1e-6)
    assert np.all(a[:, ~here] == 0)


def test_a_constant_among_the_logits_shifts_their_mean_only():
    z = np.random.default_rng(0).normal(size=(3, 7, C)).astype(np.float32)
    moved = z + np.array([0, 5, 0], np.float32)[:, None, None]
    mean = lambda z: mixtures.mean(jnp.full(3, 1 / 3), asked(z, 0).given)
    np.testing.assert_allclose(mean(moved), mean(z) + 5 / 3, rtol=1e-5)
    np.testing.assert_allclose(
        jax.nn.softmax(mean(moved)), jax.nn.softmax(mean(z)), rtol=1e-5
    )


def test_public_examples_are_drawn_without_replacement_in_every_round():
    draws = [np.asarray(public_data.draw(jax.random.key(i), MLP, 5)) for i in range(4)]
    assert all(
        len(set(d)) == 5 and d.max() < PUBLIC and np.all(np.diff(d) > 0) for d in draws
    )
    assert len({tuple(d) for d in draws}) > 1
    np.testing.assert_array_equal(
        public_data.draw(jax.random.key(0), MLP, 3000), np.arange(PUBLIC)
    )


@pytest.mark.slow  # a client that hears itself only is local, too: below
@pytest.mark.parametrize(
    "method, order",
    [("mnfl_het", "paper"), ("mnfl_het", "code"), ("topk_pfd", "paper")],
)
def test_no_passes_is_local(method, order):
    got, alone = (
        toy.train(method, MLP, passes=0, order=order, warmup_epochs=0),
        toy.train("local", MLP),
    )
    assert_same(
        (got.state.clients, got.metrics.post), (alone.state.clients, alone.metrics.post)
    )
    assert_same(got.metrics.loss, alone.metrics.loss)


@pytest.mark.slow
@pytest.mark.parametrize("order", [toy.slow("paper"), "code"])
def test_a_client_that_hears_itself_only_is_local(order):
    got = toy.train("topk_pfd", MLP, neighbours=1, warmup_epochs=0, order=order)
    assert_close(got.state.clients, toy.train("local", MLP).state.clients, 1e-5)


@pytest.mark.slow
def test_fedmd_is_mnfl_of_frozen_coefficients_and_topk_of_all():
    got = toy.train("fedmd", MLP)
    others = (
        toy.train("mnfl_het", MLP, coef_lr=0.0),
        toy.train("topk_pfd", MLP, neighbours=N),
    )
    for other in others:
        assert_same(other.state.clients, got.state.clients)
        assert_same(other.metrics.server, got.metrics.server)
    assert np.abs(got.metrics.clients["transfer_loss"]).min() > 1e-4


@functools.cache
def alone():
    """The models [N] after round 0's private training."""
    return jax.device_get(toy.train("local", MLP, rounds=1).state.clients)


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def predicted(i):
    x = toy.federation().public.x
    # [D, C]
    return softmax(
        np.asarray(MLP.model.apply(toy.rows(alone(), i), x, train=False)[0], np.float64)
    )


def test_a_round_of_mnfl_is_the_plain_loops():
    """In float64 from the models before the exchange; one batch holds all public
    examples, so the loss of training on them is that of the mixture."""
    numbers = {"coef_lr": 3.0, "rho": 0.05, "lam": 2.0}
    got = toy.train("mnfl_het", MLP, rounds=1, **numbers)
    s = [predicted(i) for i in range(N)]
    t = sum(s) / N
    np.testing.assert_allclose(
        got.metrics.clients["transfer_loss"][0],
        [np.mean(np.sum(t * np.log(t / s[n]), axis=1)) for n in range(N)],
        rtol=1e-4,
    )
    a = np.full((N, N), 1 / N)
    for n in range(N):
        g = np.array(
            [np.mean(np.sum(s[m] * (np.log(t / s[n]) + 1), axis=1)) for m in range(N)]
        )
        v = (a[n] - 3.0 * 2.0 * SIZES[n] / SIZES.sum() * g + 2 * 3.0 * 0.05 / N) / (
            1 + 2 * 3.0 * 0.05
        )
        u = np.sort(v)[::-1]
        excess = (np.cumsum(u) - 1) / np.arange(1, N + 1)
        a[n] = np.maximum(v - excess[np.flatnonzero(u > excess)[-1]], 0)
    np.testing.assert_allclose(got.metrics.server["coefficients"][0], a, atol=1e-5)
    assert np.abs(a - 1 / N).max() > 0.05
    assert_same(got.state.server["coefficients"], got.metrics.server["coefficients"][0])


@pytest.mark.slow
def test_public_examples_on_the_server_travel():
    at = {
        where: toy.train("fedmd", MLP, rounds=1, public_at=where).metrics.traffic
        for where in ("clients", "server")
    }
    assert at["clients"].public_data is None
    np.testing.assert_array_equal(at["server"].public_data[0], PUBLIC * SHAPE[0])
    assert_same(at["server"]._replace(public_data=None), at["clients"])


@pytest.mark.parametrize("still", [{"rho": 1e12}, {"lam": 0.0}])
def test_mnfl_keeps_uniform_coefficients(still):
    a = toy.train("mnfl_het", MLP, coef_lr=1.0, **still).state.server["coefficients"]
    np.testing.assert_allclose(a, 1 / N, atol=1e-6)


@functools.cache
def two_groups():
    """Returns models [N] without training: clients 0, 2 and 4 have one, the others
    another, both with confident predictions."""
    both = jax.vmap(MLP.model.init)(jax.random.split(jax.random.key(7), 2))
    both["head"] = jax.tree.map(lambda x: 4 * x, both["head"])
    return jax.device_get(jax.tree.map(lambda x: x[np.arange(N) % 2], both))


@pytest.mark.parametrize("lam, least, most", [(None, 0.85, 1.0), (1.0, 0.5, 0.7)])
def test_by_default_the_coefficients_find_the_clients_with_similar_predictions(
    lam, least, most
):
    begin = State(
        {"coefficients": jnp.full((N, N), 1 / N)},
        jax.tree.map(jnp.asarray, two_groups()),
    )
    still = toy.task(lr=1e-12)
    given = {} if lam is None else {"lam": lam}
    got = toy.train("mnfl_het", still, 30, begin=begin, passes=0, **given)
    a = got.state.server["coefficients"]
    own = np.arange(N)[:, None] % 2 == np.arange(N) % 2
    assert least < np.where(own, a, 0).sum(axis=1).mean() < most


def test_lam_is_the_number_of_clients_by_default():
    run = lambda **given: toy.train("mnfl_het", MLP, rounds=1, coef_lr=3.0, **given)
    assert_close(run().state, run(lam=float(N)).state)


@pytest.mark.slow
def test_only_the_block_of_the_cohort_moves():
    """The step is large: some coefficients end at 0, and rows keep what they weigh in
    the block."""
    before = np.random.default_rng(0).dirichlet(np.ones(N), size=N).astype(np.float32)
    ids, active = np.array([3, 1, 4, 0], np.int32), np.array([True, True, True, False])
    here, clients = ids[:3], jax.tree.map(jnp.asarray, toy.rows(alone(), ids))

    @jax.jit
    def run(a):
        cohort = toy.cohort(MLP, ids, active, key=jax.random.key(1))
        method = kt.mnfl_het(MLP, coef_lr=100.0, rho=0.0)
        start = State({"coefficients": a}, clients)
        return method.round(jax.random.key(2), start, cohort)[0].server["coefficients"]

    a = np.asarray(run(before))
    block = np.isin(np.arange(N), here)[:, None] & np.isin(np.arange(N), here)[None]
    np.testing.assert_array_equal(a[~block], before[~block])
    assert np.all(a >= 0) and np.any(a[block] == 0) and np.all((a != before)[block])
    np.testing.assert_allclose(a.sum(axis=1), 1, rtol=1e-5)


def trees_differ(a, b):
    return any(
        np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def net(hidden):
    return models.model(
        lambda shape, classes, rngs: nets.mlp(shape, classes, rngs, hidden=hidden),
        SHAPE,
        C,
    )


@pytest.mark.slow  # eight rounds
def test_different_architectures_learn_from_each_other():
    task = toy.task(
        models=(net(3), net(17)), architecture=np.array([0, 1, 1, 1, 0], np.int32)
    )
    got = toy.train("fedmd", task, rounds=8, public_size=7)
    assert got.metrics.loss[-1].mean() < 0.5 * got.metrics.loss[0].mean()
    gap = got.metrics.clients["transfer_loss"]
    assert np.all(np.isfinite(gap)) and np.all(gap > 0)
    assert np.mean(got.metrics.post["acc_present"][-1]) > 0.75
    np.testing.assert_array_equal(got.metrics.traffic.ints[0], 7)
    np.testing.assert_array_equal(got.metrics.traffic.up[0], 7 * C)


def test_without_public_examples_it_is_one_sentence():
    for method in METHODS:
        with pytest.raises(InputError, match="needs public examples: give --public"):
            toy.METHODS[method](MLP._replace(public=None))


@pytest.mark.slow
def test_public_examples_are_all_taken_as_they_are():
    """Neither augmentation nor the dropped short batches are theirs."""
    plain, odd = (
        toy.task(lr=1e-12, **more)
        for more in ({}, {"drop_last": True, "augment": lambda key, x: -x})
    )
    run = lambda task: (
        toy.train(
            "fedmd", task, 1, begin=begin, public_batch=4, public_lr=0.1
        ).state.clients
    )
    begin = State({}, jax.tree.map(jnp.asarray, alone()))
    assert_close(run(odd), run(plain))


@pytest.mark.slow  # as what is learned from public labels does: above
def test_the_warm_up_comes_before_round_0_only():
    def after(epochs, t):
        program = toy.program(
            ALGORITHMS["fedmd"],
            MLP,
            {"passes": 0, "order": "code", "warmup_epochs": epochs},
        )
        begin = RunState(State({}, jax.tree.map(jnp.asarray, alone())))
        given = jax.random.key(5), program.traced, toy.federation()
        run = jax.jit(
            lambda t: program.round(Context(*given, t), begin, jnp.bool(False))[0]
        )
        return [run(jnp.int32(t)).clients for t in (0, 1)]

    (first, second), (plain, other) = after(2, 0), after(0, 0)
    assert trees_differ(first, plain)
    assert_same(second, other)


def test_the_temperature_is_the_teachers_and_the_students():
    x = toy.federation().public.x
    s = [
        softmax(
            np.asarray(
                MLP.model.apply(toy.rows(alone(), i), x, train=False)[0], np.float64
            )
            / 2
        )
        for i in range(N)
    ]
    t = sum(s) / N
    got = toy.train("fedmd", MLP, rounds=1, temperature=2.0).metrics.clients[
        "transfer_loss"
    ][0]
    np.testing.assert_allclose(
        got, [np.mean(np.sum(t * np.log(t / own), axis=1)) for own in s], rtol=1e-4
    )


@pytest.mark.slow  # four runs; the steps themselves are above
def test_a_mixture_has_the_coefficients_before_or_after_their_step():
    def gap(order, lr):
        got = toy.train("mnfl_het", MLP, rounds=1, order=order, coef_lr=lr)
        return got.metrics.clients["transfer_loss"]

    assert_same(gap("paper", 3.0), gap("paper", 0.0))  # their step comes last
    assert np.abs(gap("code", 3.0) - gap("code", 0.0)).max() > 1e-4


@pytest.mark.slow
def test_a_step_of_some_clients_is_that_of_the_normalised_block():
    before = np.random.default_rng(0).dirichlet(np.ones(N), size=N).astype(np.float32)
    ids, task = np.array([1, 3, 4], np.int32), toy.task(lr=1e-12)
    clients = jax.tree.map(jnp.asarray, toy.rows(alone(), ids))

    @jax.jit
    def run(a):
        cohort = toy.cohort(task, ids, key=jax.random.key(1))
        start = State({"coefficients": a}, clients)
        method = kt.mnfl_het(task, coef_lr=2.0, rho=0.1, lam=1.0)
        return method.round(jax.random.key(2), start, cohort)[0].server["coefficients"]

    a, s = run(before), np.array([predicted(i) for i in ids], np.float32)
    for n, i in enumerate(ids):
        row = before[i, ids]
        slope = (
            SIZES[i]
            / SIZES.sum()
            * mixtures.slope(row / row.sum(), asked(s, n))
            / row.sum()
        )
        expected = aggregate.descend(row, slope, np.ones(3, bool), 2.0, 0.1, 1 / N)
        np.testing.assert_allclose(a[i, ids], expected, atol=1e-5)
    assert np.abs(a - before).max() > 0.05


def test_a_client_without_examples_neither_teaches_nor_learns():
    # client 3 has none
    got = toy.train(
        "mnfl_het", MLP, rounds=1, coef_lr=3.0, federation_=oracle.federation()
    )
    a, others = got.metrics.server["coefficients"][0], np.arange(N) != 3
    np.testing.assert_array_equal([a[3], a[:, 3]], np.float32(1 / N))
    assert np.abs(a[others][:, others] - 1 / N).max() > 0.01


# the rules themselves are above
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedmd", "sim_pfd", "topk_pfd"])
def test_coefficients_of_clients_out_of_the_round_are_not_known(method):
    a = toy.train(
        method, MLP._replace(participation=(0.6, 0.6)), rounds=1
    ).metrics.server["coefficients"][0]
    here = np.isfinite(a).any(axis=1)
    assert here.sum() == 3 and np.isnan(a[~here]).all() and np.isnan(a[:, ~here]).all()
    np.testing.assert_allclose(a[here][:, here].sum(axis=1), 1, atol=1e-5)


@pytest.mark.slow
def test_clients_without_examples_exchange_nothing():
    f = oracle.federation()  # client 3 has none
    sent = toy.train(
        "fedmd", MLP, rounds=1, federation_=f, public_at="server"
    ).metrics.traffic
    for counts in (
        sent.down[0],
        sent.up[0],
        sent.ints[0],
        sent.messages[0],
        sent.public_data[0],
    ):
        np.testing.assert_array_equal(counts > 0, np.arange(N) != 3)
