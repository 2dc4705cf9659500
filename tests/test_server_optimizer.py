"""FedOpt: a step of an optimizer at the server in place of the mean."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
import toy
from documents import ROOT
from flax import nnx
from toy import assert_close, assert_same

from fedjax_pfl import models, server_optimizer, simulate, testing
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers, nets
from fedjax_pfl.server_optimizer import RATE, optimized

AVERAGE = [
    name
    for name in sorted(ALGORITHMS)
    if toy.METHODS[name](toy.method_task(name)).averages
]
QUICK = ("scaffold",)  # the weights beside the control variate
# rounding is no step of it
PAPERS = optimized("fedavg", lambda lr: optax.adam(lr, b2=0.99, eps=1e-3))
NORMS = toy.task("norm", participation=(0.5, 0.5))


@pytest.mark.parametrize(
    "method", [name if name in QUICK else toy.slow(name) for name in AVERAGE]
)
def test_plain_sgd_of_rate_1_is_the_mean(method):
    given = toy.method_task(method)
    alone = toy.train(method, given, rounds=2)
    under = toy.train(optimized(toy.METHODS[method], optax.sgd), given, rounds=2)
    assert_close(under.state.server.method, alone.state.server, 1e-5)
    assert_close(under.state.clients, alone.state.clients, 1e-5)
    assert_close(under.metrics, alone.metrics, 1e-5)
    assert_close(under.last, alone.last, 1e-5)


def adam(w, gradient, m, v, t, rate, b1=0.9, b2=0.99, eps=1e-3):
    """One step, by the book: w, and the averages m and v."""
    m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
    return w - rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps), m, v


@pytest.mark.slow
def test_adam_steps_along_the_mean_difference():
    """Two rounds of FedAvg with half of the clients; running statistics are averaged as
    ever."""
    under = toy.train(PAPERS, NORMS, rounds=2, **{RATE: 0.05})
    server = jax.device_get(under.begin.server.method)
    leaves, structure = jax.tree.flatten_with_path(server)
    averages = [(np.zeros_like(x), np.zeros_like(x)) for _, x in leaves]
    program = simulate.program("fedavg", NORMS, checked=False)
    step = jax.jit(program.round)
    for t in range(2):
        # of FedAvg no client keeps anything
        state = under.begin._replace(server=server)
        plain, _ = step(
            jax.random.key(5),
            program.traced,
            toy.federation(),
            state,
            np.int32(t),
            np.bool_(True),
        )
        new = []
        for i, ((path, w), mean) in enumerate(
            zip(leaves, jax.tree.leaves(plain.server), strict=True)
        ):
            moved, *averages[i] = adam(
                w, w - np.asarray(mean), *averages[i], t + 1, 0.05
            )
            new.append(
                np.asarray(mean) if "stats" in jax.tree_util.keystr(path) else moved
            )
        server = jax.tree.unflatten(structure, new)
        leaves = jax.tree.flatten_with_path(server)[0]
    assert_close(under.state.server.method, server, 1e-4)
    apart = jax.tree.map(
        lambda a, b: np.abs(a - np.asarray(b)).max(), server, plain.server
    )
    # not the mean
    assert (
        apart["body"]["inner"]["kernel"] > 1e-3
        and max(jax.tree.leaves(apart["stats"])) == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_contract_holds_under_a_server_optimizer(method):
    """A round in which nobody trains leaves the optimizer's state as it was, padding
    and order count for nothing, and the rate is traced."""
    testing.check_algorithm(optimized(ALGORITHMS[method]))


def test_a_round_in_which_nobody_trains_moves_nothing():
    """Though Adam's averages are not zero."""
    empty = toy.federation()
    before = toy.train(PAPERS, NORMS, rounds=2, **{RATE: 0.05}).state
    sizes, counts = (np.zeros_like(x) for x in (empty.train.size, empty.class_counts))
    empty = empty._replace(train=empty.train._replace(size=sizes), class_counts=counts)
    after = toy.train(
        PAPERS, NORMS, rounds=1, federation_=empty, begin=before, **{RATE: 0.05}
    ).state
    assert_same(after.server, before.server)


@pytest.mark.parametrize(
    "method",
    [
        optimized("fedavg", lambda lr: optax.sgd(lr, 0.9)),
        toy.slow(ALGORITHMS["pfedhn"]),
    ],
)
def test_no_momentum_moves_the_server_where_nobody_takes_a_step(method):
    """With drop_last clients 0, 2 and 4, of fewer examples than a batch, have none."""
    s = testing.subject(method, testing.task(batch_size=10, drop_last=True))
    given = {"ids": np.arange(toy.N, dtype=np.int32), "t": 2}
    moved, same = (
        testing.run(s, active=np.isin(np.arange(toy.N), who), **given)[0]
        for who in ((0, 1), (0, 2, 4))
    )
    assert_same(same.server, s.start.server)
    with pytest.raises(AssertionError):
        assert_same(moved.server, s.start.server)


STILL = {
    "a body that is not trained": ("fedrep", {"body_epochs": 0}, {}),
    "no step": ("ditto", {}, {"epochs": None, "steps": 0}),
    "a mean that is mixed with what was before": (
        "scaffold",
        {"server_lr": 0.3},
        {"epochs": 0},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [toy.slow(name) if name == "no step" else name for name in STILL]
)
def test_rounding_is_no_gradient(case):
    """Adam would normalise it: weights that nobody trains moved by steps of full
    length."""
    method, hparams, work = STILL[case]
    run = toy.train(
        optimized(method), toy.task(**work), rounds=2, **hparams, **{RATE: 0.01}
    )
    assert_same(run.state.server, run.begin.server)


def test_the_mean_of_many_equal_models_is_no_gradient():
    """The error of a sum grows with its terms; a change of 0.1 % is none."""
    w = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    mean = functools.reduce(np.add, [np.float32(1 / 500) * w] * 500)
    assert np.abs(mean / w - 1).max() > 16 * np.finfo(np.float32).eps
    assert not np.any(server_optimizer._difference(500, w, mean))
    assert np.all(server_optimizer._difference(500, w, w * np.float32(1.001)))


def test_what_averages_is_in_the_server_and_other_methods_are_refused():
    for name in ALGORITHMS:
        given, factory = toy.method_task(name), toy.METHODS[name]
        method = factory(given)
        if name in AVERAGE:
            server = jax.eval_shape(method.init, jax.random.key(0)).server
            assert all(jax.tree.leaves(server[part]) for part in method.averages), name
        else:
            with pytest.raises(InputError, match="cannot have a server optimizer"):
                optimized(factory)(given)


def test_a_network_whose_body_has_no_weights_is_no_reason():
    simulate.program(optimized(ALGORITHMS["ditto"]), toy.task("linear"))


def test_the_documents_name_the_methods():
    text = (ROOT / "docs" / "command-line.md").read_text()
    [listed] = re.findall(r"Methods that average weights: (.*?)\.\n", text, re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", listed)) == AVERAGE


@pytest.mark.slow
def test_an_optimizer_that_decays_weights_decays_those_of_before():
    rule = lambda lr: optax.chain(optax.add_decayed_weights(0.5), optax.sgd(lr))
    given = toy.method_task("fedavg")
    plain = toy.train("fedavg", given, rounds=1)
    under = toy.train(
        optimized(ALGORITHMS["fedavg"], rule), given, rounds=1, **{RATE: 0.2}
    )
    expected = jax.tree.map(
        lambda w, mean: w - 0.2 * (w - mean + 0.5 * w),
        plain.begin.server,
        plain.state.server,
    )
    assert_close(under.state.server.method, expected)


def test_a_head_that_never_moves_is_no_weight_of_the_server():
    assert ALGORITHMS["fedbabu"](toy.method_task("fedbabu")).averages == ("body",)


@pytest.mark.slow
def test_a_module_called_stats_has_weights_of_the_server():
    class Body(nnx.Module):
        def __init__(self, rngs):
            self.stats = layers.linear(toy.SHAPE[0], 8, rngs)

        def __call__(self, x):
            return jax.nn.relu(self.stats(x))

    net = lambda shape, classes, rngs: nets.Net(
        Body(rngs), layers.linear(8, classes, rngs)
    )
    task = toy.task(models=(models.model(net, toy.SHAPE, toy.C),))
    run = toy.train(optimized("fedavg", optax.sgd), task, rounds=1, **{RATE: 1e-6})
    assert_close(run.state.server.method["body"], run.begin.server.method["body"])
