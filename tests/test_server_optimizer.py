"""FedOpt: a step of an optimizer at the server in place of the mean."""

import re

import jax
import numpy as np
import optax
import pytest
import toy
from documents import ROOT
from flax import nnx
from toy import assert_close, assert_same

from fedjax_pfl import models, simulate, testing, uploads
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers, nets
from fedjax_pfl.types import Context, Method
from fedjax_pfl.uploads.server import SERVERS

AVERAGE = [
    name
    for name in sorted(ALGORITHMS)
    if getattr(toy.METHODS[name](toy.method_task(name)), "averages", ())
]
QUICK = ("scaffold",)  # the weights beside the control variate
PAPERS = {"server": uploads.fedadam(0.05)}
NORMS = toy.task("norm", participation=(0.5, 0.5))


@pytest.mark.parametrize(
    "method", [name if name in QUICK else toy.slow(name) for name in AVERAGE]
)
def test_plain_sgd_of_rate_1_is_the_mean(method):
    given = toy.method_task(method)
    alone = toy.train(method, given, rounds=2)
    under = toy.train(method, given, rounds=2, options={"server": optax.sgd(1.0)})
    assert_close(under.state.server, alone.state.server, 1e-5)
    assert_close(under.state.clients, alone.state.clients, 1e-5)
    assert_close(under.metrics, alone.metrics, 1e-5)
    assert_close(under.last, alone.last, 1e-5)


def adam(w, gradient, m, v, t, rate, b1=0.9, b2=0.99, eps=1e-3):
    """One step, by Algorithm 2: w, and the averages m and v."""
    m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
    return w - rate * m / (np.sqrt(v) + eps), m, v


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad", "fedavgm"])
def test_two_steps_are_those_of_the_paper(name):
    """From accumulators of 0, without a correction of their bias."""
    step, w = SERVERS[name](0.1).made(), {"w": np.float32([1.0, -2.0])}
    state, m, v = step.init(w), np.zeros(2), np.zeros(2)
    for g in (np.float32([0.5, -0.1]), np.float32([0.2, 0.3])):
        updates, state = step.update({"w": g}, state, w)
        if name == "fedavgm":
            m = 0.9 * m + g
            wanted = -0.1 * m
        else:
            b1 = 0.0 if name == "fedadagrad" else 0.9
            m = b1 * m + (1 - b1) * g
            v = {
                "fedadam": 0.99 * v + 0.01 * g**2,
                "fedyogi": v - 0.01 * g**2 * np.sign(v - g**2),
                "fedadagrad": v + g**2,
            }[name]
            wanted = -0.1 * m / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(updates["w"], wanted, rtol=1e-4)


@pytest.mark.slow
def test_adam_steps_along_the_mean_difference():
    """Two rounds of FedAvg with half of the clients; running statistics are averaged as
    ever."""
    under = toy.train("fedavg", NORMS, rounds=2, options=PAPERS)
    model = jax.device_get(under.begin.server)
    leaves, structure = jax.tree.flatten_with_path(model)
    averages = [(np.zeros_like(x), np.zeros_like(x)) for _, x in leaves]
    program = simulate.program("fedavg", NORMS, checked=False)
    step = jax.jit(program.round)
    for t in range(2):
        # of FedAvg no client keeps anything
        begin = program.init(jax.random.key(5), program.traced)
        state = begin._replace(method=begin.method._replace(server=model))
        plain, _ = step(
            Context(jax.random.key(5), program.traced, toy.federation(), np.int32(t)),
            state,
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
        model = jax.tree.unflatten(structure, new)
        leaves = jax.tree.flatten_with_path(model)[0]
    assert_close(under.state.server, model, 1e-3)
    apart = jax.tree.map(
        lambda a, b: np.abs(a - np.asarray(b)).max(), model, plain.server
    )
    # not the mean
    assert (
        apart["body"]["inner"]["kernel"] > 1e-3
        and max(jax.tree.leaves(apart["stats"])) == 0
    )


def test_a_round_in_which_nobody_trains_moves_nothing():
    """Though Adam's averages are not zero."""
    empty = toy.federation()
    before = toy.train("fedavg", NORMS, rounds=2, options=PAPERS).state
    sizes, counts = (np.zeros_like(x) for x in (empty.train.size, empty.class_counts))
    empty = empty._replace(train=empty.train._replace(size=sizes), class_counts=counts)
    given = {"federation_": empty, "begin": before, "options": PAPERS}
    after = toy.train("fedavg", NORMS, rounds=1, **given).state
    assert_same((after.server, after.optimizer), (before.server, before.optimizer))


@pytest.mark.slow
def test_no_momentum_moves_the_server_where_nobody_takes_a_step():
    """With drop_last clients 0, 2 and 4, of fewer examples than a batch, have none."""
    task = testing.task(batch_size=10, drop_last=True)
    s = testing.subject(ALGORITHMS["pfedhn"], task)
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
    options = {"server": optax.adam(0.01)}
    run = toy.train(method, toy.task(**work), rounds=2, options=options, **hparams)
    assert_same(run.state.server, run.begin.server)


@pytest.mark.slow
def test_options_are_composed_and_traced():
    options = {
        "uploads": uploads.chain(uploads.top_k(0.5)),
        "server": uploads.fedadam(),
    }
    program = simulate.program("ditto", toy.task(), **options)
    assert program.traced["server.lr"] == 0.1 and program.traced["compress.fraction"]
    run = toy.train("ditto", toy.task(), rounds=2, options=options)
    toy.assert_finite(run.state)


def test_what_averages_is_in_the_server_and_other_methods_are_refused():
    for name in ALGORITHMS:
        given, factory = toy.method_task(name), toy.METHODS[name]
        method = factory(given)
        if name in AVERAGE:
            state = jax.eval_shape(method.init, jax.random.key(0)).server
            assert all(jax.tree.leaves(state[part]) for part in method.averages), name
            continue
        why = "takes no options on uploads"
        if isinstance(method, Method):
            why = "cannot have a server optimizer"
        with pytest.raises(InputError, match=why):
            simulate.program(factory, given, server=optax.sgd(1.0), checked=False)


def test_a_network_whose_body_has_no_weights_is_no_reason():
    simulate.program("ditto", toy.task("linear"), server=optax.adam(0.1))


def test_the_documents_name_the_methods():
    text = (ROOT / "docs" / "command-line.md").read_text()
    [listed] = re.findall(r"Methods that average weights: (.*?)\.\n", text, re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", listed)) == AVERAGE


@pytest.mark.slow
def test_an_optimizer_that_decays_weights_decays_those_of_before():
    rule = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.2))
    given = toy.method_task("fedavg")
    plain = toy.train("fedavg", given, rounds=1)
    under = toy.train("fedavg", given, rounds=1, options={"server": rule})
    expected = jax.tree.map(
        lambda w, mean: w - 0.2 * (w - mean + 0.5 * w),
        plain.begin.server,
        plain.state.server,
    )
    assert_close(under.state.server, expected)


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
    options = {"server": optax.sgd(1e-6)}
    run = toy.train("fedavg", task, rounds=1, options=options)
    assert_close(run.state.server["body"], run.begin.server["body"])
