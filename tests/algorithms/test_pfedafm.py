"""pFedAFM: the mixture and its gradient, the phases, and what it is without one of its
parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from toy import C, N, assert_close, assert_same

from fedjax_pfl import (
    averaging,
    local_training,
    losses,
    models,
    simulate,
    trees,
)
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.pfedafm import mixture, objective
from fedjax_pfl.averaging import Phase, partial_averaging, split
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Batch, State

KEY = jax.random.key(5)


def task_of(net="mlp", **options):
    """The toy task whose shared model is the clients' own."""
    given = toy.task(net, **options)
    return given if "shared" in options else given._replace(shared=given.models[0])


MLP = task_of()
# one step on all of a client's examples
FULL = task_of(epochs=None, steps=1, batch_size=19)
FROZEN = {"lr_alpha": 0.0}


def train(task=MLP, rounds=3, method="pfedafm", begin=None, federation=None, **hparams):
    return toy.train(
        method, task, rounds, begin=begin, federation_=federation, **hparams
    )


def start(task=MLP, **hparams):
    program = simulate.program(ALGORITHMS["pfedafm"], task, hparams, checked=False)
    return program.init(KEY, program.traced)


def with_rows(state, **parts):
    """The state with parts of the clients' rows replaced, the same for all."""
    return State(state.server, {**state.clients, **trees.replicate(parts, N)})


def local_rows(rows):
    return {**rows["w"], "stats": rows["stats"]["w"]}


@pytest.mark.slow
def test_golden_mixture():
    g, G, a = jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 0.0]]), jnp.array([0.25, 0.5])
    # the head is the identity
    ce = lambda a: losses.cross_entropy(
        mixture(a, g, G), jnp.array([0]), jnp.array([True])
    )
    assert_close(mixture(a, g, G), jnp.array([[2.5, 1.0]]))
    np.testing.assert_allclose(ce(a), 0.20141328, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(ce)(a), [0.364851, 0.364851], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("iterative", [True, False])
def test_the_step_of_alpha_is_the_formula(iterative):
    """da = mean over the batch of (g - G) * (p - y) h^T, and of plain SGD at the first
    step."""
    begin = start(FULL, alpha=0.5)
    got = train(
        FULL, 1, begin=begin, iterative=iterative, alpha=0.5, lr_alpha=0.1, wd_alpha=0.0
    )
    f, model = toy.federation(), FULL.models[0]
    for i, n in enumerate(toy.SIZES):
        x, y = (part[f.train.index[i][:n]] for part in f.examples)
        w = local_rows(toy.rows(begin.clients, i))
        theta = {"body": begin.server["theta"]["body"], "stats": {}}
        g, G = (np.asarray(model.features(v, x)[0], np.float64) for v in (w, theta))
        kernel, bias = (
            np.asarray(w["head"][part], np.float64) for part in ("kernel", "bias")
        )

        def ce(a, g=g, G=G, kernel=kernel, bias=bias, y=y):
            z = (a * g + (1 - a) * G) @ kernel + bias
            return np.mean(np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y]), z

        a = np.full(8, 0.5)
        p = np.exp(ce(a)[1])
        p /= p.sum(axis=1, keepdims=True)
        da = np.mean((g - G) * ((p - np.eye(C)[np.asarray(y)]) @ kernel.T), axis=0)
        numeric = [
            (ce(a + 1e-5 * e)[0] - ce(a - 1e-5 * e)[0]) / 2e-5 for e in np.eye(8)
        ]
        np.testing.assert_allclose(da, numeric, atol=1e-8)
        np.testing.assert_allclose(
            got.state.clients["alpha"][i], np.clip(a - 0.1 * da, 0, 1), atol=1e-6
        )


@pytest.mark.slow
# end to end, and with batch norm, it is FedPer: below
@pytest.mark.parametrize(
    "net, iterative",
    [
        ("mlp", True),
        toy.slow("mlp", False),
        toy.slow("norm", True),
        toy.slow("norm", False),
    ],
)
def test_own_features_alone_are_local(net, iterative):
    """Whatever the extractor is; end to end it then learns nothing."""
    task = task_of(net)
    begin = start(task)
    other = State(optax.tree.scale(3.0, begin.server), begin.clients)
    alone = train(task, method="local")
    for first in (begin, other):
        got = train(task, begin=first, iterative=iterative, **FROZEN)
        assert_close(local_rows(got.state.clients), alone.state.clients)
        assert_close(got.metrics.loss, alone.metrics.loss)
        for name, score in alone.last.items():
            assert_same(got.last[name], score)
        for name in ("acc", "acc_present"):
            assert_same(got.last[f"large_{name}"], alone.last[name])
        assert_same(got.state.clients["alpha"], jnp.ones((N, 8)))
        if not iterative:
            assert_close(got.state.server["theta"], first.server["theta"])
        else:
            assert (
                trees.sq_dist(got.state.server["theta"], first.server["theta"]) > 1e-3
            )


@pytest.mark.slow
def test_shared_features_alone_train_the_head_on_them():
    cut = split(MLP, ("body", "head"))

    def head_only(task):
        return partial_averaging(task, cut, phases=(Phase(("head",)),))

    begin = start(alpha=0.0)
    on_shared = State(
        cut.init(KEY)[0],
        {**local_rows(begin.clients), **trees.replicate(begin.server["theta"], N)},
    )
    got = train(rounds=1, begin=begin, alpha=0.0, **FROZEN)
    expected = train(rounds=1, method=head_only, begin=on_shared)
    assert_close(got.state.clients["w"]["head"], expected.state.clients["head"])
    assert_same(got.state.clients["w"]["body"], begin.clients["w"]["body"])
    assert_close(got.metrics.loss, expected.metrics.loss)
    assert_same(got.metrics.post["small_acc"], expected.metrics.post["acc"])
    assert_same(got.metrics.post["small_acc"], got.metrics.post["acc"])


@pytest.mark.slow
@pytest.mark.parametrize("net", [toy.slow("mlp"), "norm"])
def test_shared_features_alone_end_to_end_are_fedper(net):
    task = task_of(net)
    begin, fedper = start(task, alpha=0.0), toy.program(ALGORITHMS["fedper"], task)
    other = fedper.init(KEY, fedper.traced)
    # the same first extractor
    server = {**begin.server, "theta": {"body": other.server["body"]}}
    got = train(
        task,
        begin=State(server, begin.clients),
        alpha=0.0,
        iterative=False,
        **FROZEN,
    )
    expected = train(task, method="fedper")
    assert_close(got.state.server["theta"]["body"], expected.state.server["body"])
    assert_close(got.state.server["stats"]["theta"], expected.state.server["stats"])
    assert_close(got.state.clients["w"]["head"], expected.state.clients["head"])
    assert_same(got.last["acc"], expected.last["acc"])


@pytest.mark.slow  # three runs; each phase alone is above
def test_the_first_phase_moves_the_client_and_the_second_the_extractor():
    """A shared model without a gradient in training mode moves neither in the second
    phase nor end to end, which then is the first phase alone."""

    def still(variables, x, mask=None, train=False, key=None):
        h, stats = MLP.models[0].features(variables, x, mask=mask, train=train, key=key)
        return (jax.lax.stop_gradient(h) if train else h), stats

    task = MLP._replace(shared=MLP.models[0]._replace(features=still))
    begin = start(alpha=0.5)
    run = lambda task, iterative=True: train(
        task, 1, begin=begin, iterative=iterative, alpha=0.5, lr_alpha=0.1
    )
    one, two, first_phase = run(task), run(MLP), run(task, False)
    for still_there in (one, first_phase):
        assert_close(still_there.state.server["theta"], begin.server["theta"])
    assert trees.sq_dist(two.state.server["theta"], begin.server["theta"]) > 1e-3
    assert_same(one.state.clients, two.state.clients)
    assert_close(one.state.clients, first_phase.state.clients)
    # scored with the received extractor
    assert_same(one.metrics.post, two.metrics.post)


@pytest.mark.slow
def test_alpha_stays_between_0_and_1():
    got = train(alpha=0.5, lr_alpha=10.0)
    alpha = np.asarray(got.state.clients["alpha"])
    assert alpha.shape == (N, 8)
    assert alpha.min() == 0 and alpha.max() == 1
    np.testing.assert_allclose(
        got.metrics.clients["alpha"][-1], alpha.mean(axis=1), rtol=1e-6
    )


@pytest.mark.parametrize(
    "given, low, high", [({}, 0.3, 0.7), ({"lr_alpha": 0.01}, 0.99, 1)]
)
def test_by_default_alpha_leaves_its_start(given, low, high):
    alpha = train(rounds=3, **given).state.clients["alpha"]
    assert low < np.mean(alpha) < high


def test_equal_extractors_leave_alpha_to_its_decay():
    begin = start(FULL, alpha=0.5)
    equal = with_rows(
        begin, w={**toy.rows(begin.clients["w"], 0), **begin.server["theta"]}
    )
    rounds = lambda wd: train(
        FULL, 1, begin=equal, alpha=0.5, lr_alpha=0.1, wd_alpha=wd
    ).state.clients["alpha"]
    assert_same(rounds(0.0), jnp.full((N, 8), 0.5))
    assert_close(rounds(0.2), jnp.full((N, 8), 0.5 * (1 - 0.1 * 0.2)))
    scores = [
        train(FULL, 0, begin=with_rows(equal, alpha=jnp.full(8, a)), alpha=0.5).last
        for a in (0.0, 0.3, 1.0)
    ]
    for score in scores:
        assert_same(score["acc"], scores[0]["large_acc"])


def test_the_extractor_of_the_paper_is_counted():
    net = lambda name: models.model(name, (32, 32, 3), C)  # whose head is not shared
    task = task_of(
        models=tuple(net(f"cnn{k}") for k in range(1, 6)),
        architecture=np.arange(N),
        shared=net("cnn5"),
        input=jax.ShapeDtypeStruct((32, 32, 3), jnp.float32),
    )
    state = jax.eval_shape(ALGORITHMS["pfedafm"](task).init, KEY)
    assert trees.size(state.server) == 665_048


@pytest.mark.parametrize("bn_stats", ["aggregate", "local"])
def test_the_extractors_running_statistics(bn_stats):
    state = start(task_of("norm", bn_stats=bn_stats))
    local = bn_stats == "local"
    assert trees.size(state.server["stats"]) == (0 if local else 16)
    assert trees.size(state.clients["stats"]) == N * (32 if local else 16)


def test_small_models_that_do_not_fit():
    with pytest.raises(
        InputError, match=r"needs a small model .* but it is missing .*\[8\]"
    ):
        ALGORITHMS["pfedafm"](MLP._replace(shared=None))
    with pytest.raises(
        InputError, match=r"but it has 6 and the architectures have \[8\]"
    ):
        ALGORITHMS["pfedafm"](MLP._replace(shared=task_of("linear").models[0]))
    with pytest.raises(
        InputError, match=r"`shared` model does not take inputs of shape \[6\]"
    ):
        ALGORITHMS["pfedafm"](
            MLP._replace(shared=models.model(toy.NETS["mlp"], (5,), C))
        )


@pytest.mark.slow
def test_a_frozen_extractor_is_as_in_a_prediction():
    """It normalises by its running statistics; only those of what moves follow."""
    model = toy.task("norm").models[0]
    w, theta = model.init(KEY), model.init(jax.random.key(6))
    v = {
        "w": averaging.params(w),
        "theta": theta,
        "alpha": jnp.zeros(8),
        "stats": {"w": w["stats"], "theta": theta["stats"]},
    }
    x = toy.federation().examples.x[:8]
    batch = Batch(x, jnp.zeros(8, jnp.int32), jnp.arange(8) < 7, jnp.arange(8))
    for moving, still in ((("w", "alpha"), "theta"), (("theta",), "w")):
        _, stats = objective(model, model, moving)(v, batch, KEY)
        assert_same(stats.pop(still), v["stats"][still])
        ((moved, new),) = stats.items()
        assert trees.sq_dist(new, v["stats"][moved]) > 0


def test_the_extractors_draw_dropout_of_their_own():
    """Equal extractors with different dropout have different features."""
    model = toy.task("dropout").model
    w, x = model.init(KEY), toy.federation().examples.x[:8]
    stats = {"w": w["stats"], "theta": w["stats"]}
    v = {
        "w": averaging.params(w),
        "theta": {"body": w["body"]},
        "alpha": jnp.full(8, 0.5),
        "stats": stats,
    }
    loss = objective(model, model, ("w", "alpha", "theta"))
    batch = Batch(x, jnp.arange(8) % C, jnp.ones(8, bool), jnp.arange(8))
    by = jax.jit(jax.grad(lambda v: loss(v, batch, KEY)[0]))(v)["alpha"]
    assert np.abs(by).max() > 1e-3


@pytest.mark.slow
def test_each_phase_draws_its_own_batches(monkeypatch):
    seen, sgd = [], local_training.sgd

    def noted(key, *given, **options):
        note = lambda data: seen.append(tuple(np.asarray(data).tolist()))
        jax.debug.callback(note, jax.random.key_data(key))
        return sgd(key, *given, **options)

    monkeypatch.setattr(local_training, "sgd", noted)
    toy.train(functools.partial(ALGORITHMS["pfedafm"]), MLP, rounds=1)
    jax.effects_barrier()
    assert len(seen) == len(set(seen)) == 2 * N
