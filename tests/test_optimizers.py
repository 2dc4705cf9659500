"""The task's optimizer: which parameters it sees, and what is said where it fails."""

import contextlib

import jax
import numpy as np
import optax
import pytest
import toy

from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine.method import Setting, bound
from fedjax_pfl.errors import InputError

# where each state keeps what the name "head" stands for; the other parameters must move
HEADS = {
    "fml": lambda s: [s.server["head"], s.clients["w"]["head"]],
    "fedkd": lambda s: [s.server["head"], s.clients["w"]["head"]],
    "fedapen": lambda s: [s.server["head"], s.clients["w"]["head"]],
    "pfedafm": lambda s: [s.clients["w"]["head"]],
    "fedrod": lambda s: [s.server["head"], s.clients["head"]],
    "fedma": lambda s: [s.server["head"]],
    "apfl": lambda s: [s.server["head"], s.clients["v"]["head"]],
    "ditto": lambda s: [s.server["head"], s.clients["v"]["head"]],
}
# two heads; two models; a model that stays at its client
QUICK = ("fedrod", "apfl", "pfedafm")


def frozen_heads(lr):
    """SGD of what is not called "head"."""
    label = lambda params: {
        part: "still" if part == "head" else "moving" for part in params
    }
    return optax.multi_transform(
        {"moving": optax.sgd(lr), "still": optax.set_to_zero()}, label
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [name if name in QUICK else toy.slow(name) for name in HEADS]
)
def test_an_optimizer_that_selects_by_name_sees_each_models_own_parts(method):
    run = toy.train(
        method, toy.fitted(method, toy.net_of(method), optimizer=frozen_heads), rounds=2
    )
    before, after = jax.device_get((run.begin, run.state))
    toy.assert_close(HEADS[method](before), HEADS[method](after))
    bodies = lambda state: [
        x for path, x in jax.tree.leaves_with_path(state) if "body" in str(path)
    ]
    for a, b in zip(bodies(before), bodies(after), strict=True):
        assert not np.array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("method", [toy.slow("fedavg"), "scaffold"])
def test_a_server_optimizer_that_selects_by_name_sees_the_parts_of_a_model(method):
    """SCAFFOLD's server has the model as a part of its own."""
    run = toy.train(method, toy.task(), rounds=1, options={"server": frozen_heads(1.0)})
    before, after = (
        state.server.get("w", state.server) for state in (run.begin, run.state)
    )
    toy.assert_same(before["head"], after["head"])
    assert not np.array_equal(*(jax.tree.leaves(x["body"])[0] for x in (before, after)))


@pytest.mark.slow
def test_weights_that_no_client_trains_stay_under_adam_at_the_server():
    """Their mean is what they were to rounding, of which Adam would make steps of full
    length."""
    run = toy.train(
        "fedavg",
        toy.task(optimizer=frozen_heads),
        rounds=2,
        options={"server": optax.adam(0.01)},
    )
    before, after = (state.server for state in (run.begin, run.state))
    toy.assert_same(before["head"], after["head"])
    assert not np.array_equal(*(jax.tree.leaves(x["body"])[0] for x in (before, after)))


OTHERS = {
    "momentum": lambda lr: optax.sgd(lr, 0.9),
    "adam": optax.adam,
    "clipped": lambda lr: optax.chain(optax.clip_by_global_norm(50.0), optax.sgd(lr)),
    "schedule": lambda lr: optax.chain(
        optax.sgd(lr), optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10**6))
    ),
    "sign": optax.sign_sgd,
}
PLAIN = {
    "sgd": optax.sgd,
    "decayed": lambda lr: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(lr)),
    "frozen": frozen_heads,
}
# methods that compute with the path of plain SGD; all others take any optimizer
PLAIN_SGD = ("scaffold", "fednova")


@pytest.mark.parametrize("method", ALGORITHMS)
def test_only_plain_sgd_is_taken_where_the_derivation_needs_it(method):
    task, factory = toy.method_task(method), toy.METHODS[method]
    for rule in PLAIN.values():
        bound(Setting(factory, task._replace(optimizer=rule), {}))
    for rule in OTHERS.values():
        with (
            pytest.raises(
                InputError, match=r"takes no `optimizer` of this kind: .* plain SGD"
            )
            if method in PLAIN_SGD
            else contextlib.nullcontext()
        ):
            bound(Setting(factory, task._replace(optimizer=rule), {}))
