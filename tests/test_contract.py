"""What every method must hold, over every entry of ALGORITHMS.

One compiled round a method serves most rows, because cohort, state, learning rate and round are its arguments.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import C, N, assert_close, assert_same, rows

from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.types import State

pytestmark = [pytest.mark.contract, pytest.mark.parametrize("method", ALGORITHMS)]

# Mean losses of rounds 0, 5 and 11 under each method's defaults, measured when the method was built.
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
DEFAULTS = json.loads((Path(__file__).parent / "defaults.json").read_text())  # losses see few of them
IDS = np.array([3, 0, 4, 1], np.int32)
KEY = jax.random.key(7)


def run(
    method, ids=IDS, active=(True,) * 4, federation=None, width=1, state=None, t=2, evaluated=True, devices=1, **numbers
):
    """One round on an explicit cohort; the rows of `state` [N] are gathered here."""
    state = toy.start(method) if state is None else state
    numbers = toy.numbers(method) | numbers
    here = State(state.server, rows(state.clients, np.minimum(ids, N - 1)))
    federation = toy.federation() if federation is None else federation
    args = (KEY, numbers, federation, here, np.asarray(ids), np.asarray(active), jnp.int32(t), jnp.bool(evaluated))
    return toy.compiled_round(method, width, devices)(*args)


def per_client(metrics):
    return metrics._replace(server={})


def test_order_of_the_cohort_does_not_matter(method):
    order = np.array([2, 0, 3, 1])
    state, metrics, _ = run(method)
    state_2, metrics_2, _ = run(method, ids=IDS[order])
    assert_same(state_2.server, state.server)
    assert_same(state_2.clients, rows(state.clients, order))
    assert_same(per_client(metrics_2), rows(per_client(metrics), order))


def test_padded_rows_may_hold_anything(method):
    f = toy.federation()
    nobody = f.examples.x.shape[0] - 1
    poisoned = f._replace(
        examples=f.examples._replace(x=f.examples.x.at[nobody].set(jnp.nan), y=f.examples.y.at[nobody].set(3))
    )
    assert_same(run(method, federation=poisoned)[:2], run(method)[:2])


def test_inactive_clients_have_no_influence(method):
    active = (True, False, True, True)  # client 0 drops out
    f = toy.federation()
    own = f.train.index[0][: int(f.train.size[0])]
    x = np.array(f.examples.x)
    x[own] = np.nan
    poisoned = f._replace(examples=f.examples._replace(x=x))
    state, metrics, sent = run(method, active=active)
    state_2, metrics_2, _ = run(method, active=active, federation=poisoned)
    here = np.array(active)
    assert_same(state.server, state_2.server)
    assert_same(rows(state.clients, here), rows(state_2.clients, here))
    assert_same(rows(per_client(metrics), here), rows(per_client(metrics_2), here))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.server))
    assert sent.down[1] == sent.up[1] == sent.messages[1] == 0


def test_any_number_of_clients_is_one_compilation_and_absent_ones_stay_bit_for_bit(method):
    task = toy.method_task(method)._replace(participation=(0.2, 1.0))
    program = simulate.program(toy.METHODS[method], task)
    step, state, f, numbers = jax.jit(program.round), toy.start(method), toy.federation(), []
    for t in (3, 4, 5):
        before = state
        state, metrics = step(KEY, program.numbers, f, before, jnp.int32(t), jnp.bool(False))
        took_part = np.zeros(N, bool)
        took_part[metrics.ids[metrics.active]] = True
        numbers.append(took_part.sum())
        assert_same(rows(state.clients, ~took_part), rows(before.clients, ~took_part))
        changed = [
            np.any(np.asarray(x != y)[took_part])
            for x, y in zip(*map(jax.tree.leaves, (state.clients, before.clients)), strict=True)
        ]
        assert any(changed) or not changed
    assert numbers == [3, 2, 5]  # drawn by the key alone, the same for every method
    assert step._cache_size() == 1


@pytest.mark.parametrize("without", ["clients", "examples"])
def test_a_round_in_which_nobody_trains_keeps_the_server(method, without):
    f, active = toy.federation(), (without != "clients",) * 4
    if without == "examples":
        nothing = f.train._replace(size=jnp.zeros_like(f.train.size))
        f = f._replace(train=nothing, class_counts=jnp.zeros_like(f.class_counts))
    before = State(run(method)[0].server, toy.start(method).clients)  # after a round nothing in the server is zero
    other = {name: value / 2 for name, value in toy.numbers(method).items()}  # mixing by one would be exact by itself
    for numbers in ({}, other):
        assert_same(run(method, active=active, federation=f, state=before, **numbers)[0].server, before.server)


def test_layout_does_not_matter(method):
    """Two devices with four places each, half of them empty (a padding's id is no client's), in chunks of three; and
    rows of training examples that are padded further."""
    places = np.array([3, N + 1, 0, N + 3, 4, N, N + 2, 1], np.int32)
    real = np.array([0, 2, 4, 7])
    state, metrics, sent = run(
        method, ids=places, active=places < N, federation=toy.federation(width=24), devices=2, width=3
    )
    state_1, metrics_1, sent_1 = run(method)
    assert_close(state.server, state_1.server, 1e-5)
    assert_close(
        rows((state.clients, per_client(metrics), sent), real), (state_1.clients, per_client(metrics_1), sent_1), 1e-5
    )


def test_same_arguments_same_bits(method):
    assert_same(run(method)[:2], run(method)[:2])


def test_one_compilation(method):
    run(method)
    before = toy.compiled_round(method)._cache_size()
    run(method, t=9, lr=0.03, active=(False, True, True, False), ids=np.array([0, 1, 2, 3], np.int32), evaluated=False)
    assert toy.compiled_round(method)._cache_size() == before


def test_state_keeps_its_structure(method):
    before = toy.start(method)
    after, metrics, _ = run(method)
    shape = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shape(after.server) == shape(before.server)
    assert shape(after.clients) == shape(rows(before.clients, IDS))
    assert metrics.loss.shape == (4,)


def test_post_is_scored_only_when_wanted(method):
    _, metrics, _ = run(method, evaluated=False)
    assert all(np.isnan(x).all() for x in metrics.post.values())
    _, metrics, _ = run(method)
    assert np.isfinite(metrics.post["acc"]).all()


def test_learns(method):
    got = toy.train(method, toy.method_task(method), rounds=12, key=KEY)
    chance = np.mean([1 / len(own) for own in toy.OWN])  # 0.55: argmax over the client's own classes
    assert np.mean(got.last["acc_present"]) > chance + 0.2
    loss = got.metrics.loss.mean(axis=1)
    assert loss[-1] < loss[0]
    drifted = "a default has drifted, or a stream of keys"
    np.testing.assert_allclose(loss[[0, 5, 11]], GOLDEN[method], rtol=1e-3, atol=1e-5, err_msg=drifted)


def test_a_low_precision_state_keeps_its_type(method):
    task = toy.method_task(method)

    def low(key):
        init = task.model.init(key)
        return init | {"body": jax.tree.map(lambda x: x.astype(jnp.bfloat16), init["body"])}

    program = simulate.program(toy.METHODS[method], task._replace(models=(task.model._replace(init=low),)))
    numbers = jax.tree.map(jnp.float32, program.numbers)  # as they are traced, not as weak Python floats
    before = jax.eval_shape(program.init, KEY, numbers)
    args = (KEY, numbers, toy.federation(), before, jnp.int32(0), jnp.bool(False))
    after, _ = jax.eval_shape(program.round, *args)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, before)
    assert not any(x.weak_type for x in jax.tree.leaves(before))  # round 1 would be compiled a second time


def test_defaults_are_the_recorded_ones(method):
    assert simulate.hyperparameters(ALGORITHMS[method]) == DEFAULTS[method]


def formula(method: str) -> tuple[np.ndarray, np.ndarray]:
    """Scalars down and up of the clients 3, 0, 4, 1, from the sheets' table 28.1."""
    body, head = 6 * 8 + 8, 8 * C + C
    policy = 8 * 16 + 16 + 2 * 16
    classes = np.array([2, 2, 4, 2])
    ones = np.ones(4, int)
    table = {
        "local": 0 * ones,
        "fedper": body * ones,
        "fedrep": body * ones,
        "fedbabu": body * ones,
        "lg_fedavg": head * ones,
        "fedem": 3 * (body + head) * ones,
        "fedcp": (body + head + policy) * ones,
        "scaffold": 2 * (body + head) * ones,
        "feddva": (76 + 536 + 112 + (180 + 2) + 140 + 536 + 112) * ones,  # two convolutions, posterior; embeddings first
        "pfedc": body + classes * (8 + 1),
        "privacy_pfedc": (body + head + C) * ones,  # all branches and the client's part in them, here unencrypted
    }
    columns = (6 + 1) * C * ones  # one-vs-rest, a constant among the features
    apart = {
        "fedfomo": (5 * (body + head) * ones, (body + head + N) * ones),  # M = 5 models down
        "mocha": (columns + 2, columns),  # Sigma_tt and rho
    }
    both = table.get(method, (body + head) * ones)
    return apart.get(method, (both, both))


def test_traffic_is_the_sheets_formula(method):
    _, _, sent = run(method)
    down, up = formula(method)
    np.testing.assert_array_equal(sent.down, down)
    np.testing.assert_array_equal(sent.up, up)
