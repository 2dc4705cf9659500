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
from toy import C, N, assert_close, assert_same

from fedjax_pfl import simulate, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.types import State

METHODS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ALGORITHMS]
pytestmark = [pytest.mark.contract, pytest.mark.parametrize("method", METHODS)]

# Mean losses of rounds 0, 5 and 11 under each method's defaults, measured when the method was built.
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
IDS = np.array([3, 0, 4, 1], np.int32)
KEY = jax.random.key(7)


def run(method, ids=IDS, active=(True,) * 4, federation=None, width=1, state=None, t=2, lr=0.1, evaluated=True):
    """One round on an explicit cohort; the rows of `state` [N] are gathered here."""
    state = toy.start(method) if state is None else state
    numbers = toy.numbers(method) | {"lr": lr}
    rows = State(state.server, trees.gather(state.clients, jnp.asarray(ids)))
    federation = toy.federation() if federation is None else federation
    args = (KEY, numbers, federation, rows, jnp.asarray(ids), jnp.asarray(active), jnp.int32(t), jnp.bool(evaluated))
    return toy.compiled_round(method, width)(*args)


def per_client(metrics):
    return {name: x for name, x in metrics.items() if name == "post" or np.ndim(x)}


def test_order_of_the_cohort_does_not_matter(method):
    order = np.array([2, 0, 3, 1])
    state, metrics, _ = run(method)
    state_2, metrics_2, _ = run(method, ids=IDS[order])
    assert_same(state_2.server, state.server)
    assert_same(state_2.clients, trees.gather(state.clients, order))
    assert_same(per_client(metrics_2), trees.gather(per_client(metrics), order))


def test_padded_rows_may_hold_anything(method):
    f = toy.federation()
    nobody = f.examples.x.shape[0] - 1
    poisoned = f._replace(
        examples=f.examples._replace(x=f.examples.x.at[nobody].set(jnp.nan), y=f.examples.y.at[nobody].set(3))
    )
    assert_same(run(method, federation=poisoned)[:2], run(method)[:2])


def test_padding_may_have_any_length(method):
    assert_same(run(method, federation=toy.federation(width=24))[:2], run(method)[:2])


def test_inactive_clients_have_no_influence(method):
    active = (True, False, True, True)  # client 0 drops out
    f = toy.federation()
    own = f.train.index[0][: int(f.train.size[0])]
    poisoned = f._replace(examples=f.examples._replace(x=f.examples.x.at[own].set(jnp.nan)))
    state, metrics, sent = run(method, active=active)
    state_2, metrics_2, _ = run(method, active=active, federation=poisoned)
    here = np.array(active)
    assert_same(state.server, state_2.server)
    assert_same(trees.gather(state.clients, here), trees.gather(state_2.clients, here))
    assert_same(trees.gather(per_client(metrics), here), trees.gather(per_client(metrics_2), here))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.server))
    assert sent.down[1] == sent.up[1] == sent.messages[1] == 0


def test_absent_clients_stay_bit_for_bit(method):
    task = toy.method_task(method)._replace(participation=(0.2, 0.8))
    program = simulate.program(ALGORITHMS[method], task)
    before = toy.start(method)
    state, metrics = jax.jit(program.round)(
        KEY, program.numbers, toy.federation(), before, jnp.int32(0), jnp.bool(False)
    )
    took_part = np.zeros(N, bool)
    took_part[metrics["ids"][metrics["active"]]] = True
    assert 1 <= took_part.sum() <= 4
    assert_same(trees.gather(state.clients, ~took_part), trees.gather(before.clients, ~took_part))
    changed = [
        np.any(np.asarray(x != y)[took_part])
        for x, y in zip(*map(jax.tree.leaves, (state.clients, before.clients)), strict=True)
    ]
    assert any(changed) or not changed


def test_layout_does_not_matter(method):
    reference = run(method)
    for width in (3, 4):
        assert_close(run(method, width=width)[:2], reference[:2], 2e-6)


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
    assert shape(after.clients) == shape(trees.gather(before.clients, IDS))
    assert metrics["loss"].shape == (4,)


def test_post_is_scored_only_when_wanted(method):
    _, metrics, _ = run(method, evaluated=False)
    assert all(np.isnan(x).all() for x in metrics["post"].values())
    _, metrics, _ = run(method)
    assert np.isfinite(metrics["post"]["acc"]).all()


def test_learns(method):
    program = simulate.program(ALGORITHMS[method], toy.method_task(method))
    _, metrics, last = jax.jit(lambda key: simulate.curve(program, key, program.numbers, toy.federation(), rounds=12))(
        KEY
    )
    chance = np.mean([1 / len(own) for own in toy.OWN])  # 0.55: argmax over the client's own classes
    assert metrics["pre"]["acc_present"].shape == (12, N)
    assert np.mean(last["acc_present"]) > chance + 0.2
    assert metrics["loss"][-1].mean() < metrics["loss"][0].mean()
    losses = [float(metrics["loss"][t].mean()) for t in (0, 5, 11)]
    np.testing.assert_allclose(losses, GOLDEN[method], rtol=1e-3, err_msg="a default has drifted, or a stream of keys")


def test_a_low_precision_state_keeps_its_type(method):
    task = toy.method_task(method)

    def low(key):
        init = task.model.init(key)
        return init | {"body": jax.tree.map(lambda x: x.astype(jnp.bfloat16), init["body"])}

    program = simulate.program(ALGORITHMS[method], task._replace(model=task.model._replace(init=low)))
    numbers = jax.tree.map(jnp.float32, program.numbers)  # as they are traced, not as weak Python floats
    before = jax.eval_shape(program.init, KEY, numbers)
    args = (KEY, numbers, toy.federation(), before, jnp.int32(0), jnp.bool(False))
    after, _ = jax.eval_shape(program.round, *args)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, before)


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
        "fedcp": (body + head + policy) * ones,
        "scaffold": 2 * (body + head) * ones,
        "pfedc": body + classes * (8 + 1),
    }
    both = table.get(method, (body + head) * ones)
    return both, both


def test_traffic_is_the_sheets_formula(method):
    _, _, sent = run(method)
    down, up = formula(method)
    np.testing.assert_array_equal(sent.down, down)
    np.testing.assert_array_equal(sent.up, up)
