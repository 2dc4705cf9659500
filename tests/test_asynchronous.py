"""Asynchronous aggregation against synchronous rounds and against values by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import asynchronous, schedule
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Context, Method, RunState, State

KEY = jax.random.key(5)
TASK = toy.task("linear")
ONE = TASK._replace(participation=(0.2, 0.2))  # one client at a time
# methods whose server sees the mean of one upload, and nothing else of a client
TAKEN = set()
for _name, _factory in toy.METHODS.items():
    _made = _factory(toy.method_task(_name))
    if isinstance(_made, Method) and _made.start is None and _made.finish is None:
        TAKEN.add(_name)


# a method of each kind: what is sent, what stays, what the server adds
KINDS = ("fedavg", "ditto", "fedper", "fedbn", "scaffold", "feddyn", "fednova")
KINDS += ("apfl", "fedcp", "feddbe", "pfedfda", "fedproto", "hetlora")


def program(method, task, rule, rounds=4, seconds=None, **options):
    """Returns an asynchronous program and its schedule."""
    given = {"rounds": rounds, "buffer": rule.buffer, "seconds": seconds}
    plan = schedule.arrivals(task, KEY, **given)
    factory = toy.METHODS[method] if isinstance(method, str) else method
    clock = asynchronous.Arrivals(rule, plan)
    return simulate.program(factory, task, clock=clock, **options), plan


def run(made, rounds, state=None, start=0):
    """Returns the results of `rounds`, states on the host."""
    results = simulate.rounds(
        made, KEY, toy.federation(), rounds=rounds, start=start, state=state
    )
    return [r._replace(state=jax.device_get(r.state)) for r in results]


def test_staleness_weights_by_hand():
    tau = jnp.array([0.0, 3.0, 4.0, 8.0])
    wanted = {
        asynchronous.constant(): [1, 1, 1, 1],
        asynchronous.polynomial(): [1, 0.5, 1 / np.sqrt(5), 1 / 3],
        asynchronous.hinge(): [1, 1, 1, 1 / 41],
        asynchronous.hinge(2.0, 3.0): [1, 1, 1 / 3, 1 / 11],
    }
    for weigh, values in wanted.items():
        np.testing.assert_allclose(weigh(tau), values, rtol=1e-6)


@pytest.mark.parametrize("method", [x if x == "fedavg" else toy.slow(x) for x in KINDS])
def test_fedbuff_of_a_whole_cohort_and_equal_clocks_is_synchronous(method):
    """To rounding, with the same traffic, losses and scores."""
    task = toy.method_task(method)
    made, _ = program(method, task, asynchronous.fedbuff(toy.N), 2)
    *_, last = run(made, 2)
    sync = toy.train(method, task, 2)
    toy.assert_close(last.state.server, sync.state.server, 1e-5)
    toy.assert_close(last.state.clients, sync.state.clients, 1e-5)
    toy.assert_close(last.pre, sync.last, 1e-5)


@pytest.mark.parametrize(
    "method", [x if x in ("fedavg", "fednova") else toy.slow(x) for x in ALGORITHMS]
)
def test_methods_are_taken_or_refused(method):
    task = toy.method_task(method)
    given = asynchronous.fedbuff(toy.N)
    if method in TAKEN:
        program(method, task, given)
    else:
        with pytest.raises(InputError, match="cannot run asynchronously"):
            program(method, task, given)


def test_fedasync_with_alpha_1_and_one_client_at_a_time_is_sequential_training():
    """To rounding: a round of one client in FedAvg is its local training."""
    made, plan = program("fedavg", ONE, asynchronous.fedasync(1.0))
    *_, last = run(made, 4)
    sync = toy.train("fedavg", ONE, 4)
    assert np.all(plan.started[:, 0] == np.arange(4))
    toy.assert_close(last.state.server, sync.state.server)
    assert plan.ids[:, 0].tolist() == sync.metrics.ids[:, 0].tolist()


def changes(made, plan, rounds):
    """Yields each update's server before and after it, the models that clients made,
    their weights and staleness; models by training from a kept version alone."""
    results = run(made, rounds)
    servers = [made.init(KEY, made.traced).server]
    servers += [r.state.server for r in results[:rounds]]
    local = toy.program("fedavg", TASK)
    step = jax.jit(
        lambda f, state, t: local.round(
            Context(KEY, local.traced, f, t), state, jnp.bool(False)
        )
    )
    alone = toy.federation()
    for t in range(rounds):
        models = []
        for id, k in zip(plan.ids[t], plan.started[t], strict=True):
            only = jnp.where(jnp.arange(toy.N) == id, alone.train.size, 0)
            f = alone._replace(train=alone.train._replace(size=only))
            begin = RunState(State(servers[k], local.init(KEY, local.traced).clients))
            state, _ = step(f, begin, jnp.int32(k))
            models.append(state.server)
        yield servers, t, models


@pytest.mark.parametrize("kind", ["fedasync", "fedbuff"])
def test_updates_by_hand(kind):
    """The server's new model from the arrivals' models, one by one."""
    times = np.array([1.0, 3.0, 1.5, 0.4, 2.2])
    weigh = asynchronous.polynomial(0.7)
    rule = asynchronous.fedasync(0.6, weigh)
    if kind == "fedbuff":
        rule = asynchronous.fedbuff(2, 0.8, weigh)
    task = TASK._replace(participation=(0.6, 0.6))
    made, plan = program("fedavg", task, rule, 5, times)
    stale = np.arange(5)[:, None] - plan.started
    assert stale.max() > 0
    for servers, t, models in changes(made, plan, 5):
        s = (1.0 + stale[t]) ** -0.7
        x = np.asarray(servers[t]["head"]["kernel"])
        w = [np.asarray(m["head"]["kernel"]) for m in models]
        if kind == "fedasync":
            wanted = (1 - 0.6 * s[0]) * x + 0.6 * s[0] * w[0]
        else:
            n = TASK.sizes[plan.ids[t]]
            old = [np.asarray(servers[k]["head"]["kernel"]) for k in plan.started[t]]
            pairs = zip(n / n.sum() * s, w, old, strict=True)
            wanted = x + 0.8 * sum(p * (a - b) for p, a, b in pairs)
        np.testing.assert_allclose(
            servers[t + 1]["head"]["kernel"], wanted, rtol=1e-5, atol=1e-6
        )


def test_a_run_resumes():
    rule = asynchronous.fedbuff(2)
    task = TASK._replace(participation=(0.6, 0.6))
    made, plan = program("ditto", task, rule, 5, np.array([1.0, 3.0, 1.5, 0.4, 2.2]))
    whole = run(made, 5)
    rest = run(made, 5, state=whole[2].state, start=3)
    toy.assert_same(whole[-1].state, rest[-1].state)
    stale = [r.metrics.clients["staleness"] for r in whole[:5]]
    by_id = [np.argsort(ids) for ids in plan.ids]
    for t, order in enumerate(by_id):
        assert stale[t].tolist() == (t - plan.started[t])[order].tolist()


def test_a_schedule_has_so_many_rounds():
    made, _ = program("fedavg", TASK, asynchronous.fedbuff(2), 3)
    with pytest.raises(InputError, match=r"`rounds` must be in \[0, 3\], got 4"):
        run(made, 4)


def test_several_architectures_are_refused():
    models = toy.task("mlp").models + toy.task("norm").models
    task = TASK._replace(models=models, architecture=np.arange(toy.N) % 2)
    with pytest.raises(InputError, match="one architecture, got 2"):
        program("local", task, asynchronous.fedbuff(2))


@pytest.mark.parametrize("layout", [{"storage": "host"}, toy.slow({"width": 3})])
def test_the_layout_does_not_matter(layout):
    rule = asynchronous.fedbuff(2)
    task = TASK._replace(participation=(0.6, 0.6))
    plain, other = (program("ditto", task, rule, 2, **x)[0] for x in ({}, layout))
    wanted, got = run(plain, 2)[-1], run(other, 2)[-1]
    toy.assert_close(other.unplace(got.state), wanted.state)
    toy.assert_close(got.pre, wanted.pre)
