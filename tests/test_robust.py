"""Robust aggregation and malicious clients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import assert_close, assert_same

from fedjax_pfl import aggregate, simulate
from fedjax_pfl.errors import InputError
from fedjax_pfl.privacy import attacks, robust

# five honest uploads near 1, two malicious ones far away, one that is absent
X = np.float32([1.0, 1.1, 0.9, 1.2, 0.8, -50.0, 90.0, np.nan])
HERE = np.arange(8) < 7


def combined(rule, stack, weight=None, here=HERE, share=0.3):
    shares = aggregate.shares(None if weight is None else jnp.asarray(weight), here)
    default = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), stack)
    return robust.RULES[rule](jax.tree.map(jnp.asarray, stack), shares, default, share)


@pytest.mark.parametrize(
    "rule, wanted",
    [
        ("median", 1.0),
        # 2 of 7 at each end
        ("trimmed_mean", 1.0),
        # 7 - 3 - 2 = 2 neighbours: 0.9 and 1.1, both 0.1 away
        ("krum", 1.0),
        # without the 3 of the largest scores: those two, and 0.8 or 1.2
        ("multi_krum", 1.0),
        ("geometric_median", 1.0),
    ],
)
def test_rules_have_their_known_answers(rule, wanted):
    tolerance = 0.06 if rule in ("multi_krum", "geometric_median") else 1e-6
    assert abs(combined(rule, X) - wanted) < tolerance
    # more numbers than one, and NaN of a malicious client
    stack = {"a": np.stack([X, 2 * X], axis=1), "b": np.where(X == 90, np.nan, X)}
    found = combined(rule, stack)
    assert_close(
        found, {"a": wanted * np.float32([1, 2]), "b": np.float32(wanted)}, 0.1
    )


def test_krum_takes_an_upload_and_the_median_a_number_of_each():
    stack = np.float32([[0, 0], [0, 3], [3, 0], [1, 1], [9, 9]])
    everybody = np.ones(5, bool)
    assert_same(combined("krum", stack, here=everybody, share=0.2), np.float32([1, 1]))
    assert_same(combined("median", stack, here=everybody), np.float32([1, 1]))
    even = np.arange(5) < 4
    assert_same(combined("median", stack, here=even), np.float32([0.5, 0.5]))


def test_weights_by_class_leave_clients_out_of_columns():
    stack = np.float32([[1, 10], [2, 20], [3, 30], [4, 40]])
    weight = np.float32([[1, 0], [1, 1], [1, 1], [0, 1]])
    found = combined("median", stack, weight, np.ones(4, bool))
    assert_same(found, np.float32([2, 30]))


@pytest.mark.parametrize("share, kept", [(0.0, 7), (0.2, 5), (0.45, 1)])
def test_trimmed_mean_cuts_the_share(share, kept):
    found = combined("trimmed_mean", X, share=share)
    x = np.sort(X[:7])
    cut = (7 - kept) // 2
    assert_close(found, np.mean(x[cut : 7 - cut], dtype=np.float32), 1e-5)


def the_mean(stack, shares, default, share):
    parts = jax.vmap(aggregate.weigh)(shares, stack)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), parts)


@pytest.mark.parametrize(
    "method", ["fedavg", "fedproto", *map(toy.slow, ("lg_fedavg", "feddf"))]
)
def test_the_mean_as_a_rule_is_the_plain_run(method, monkeypatch):
    monkeypatch.setitem(robust.RULES, "median", the_mean)
    given = toy.method_task(method)
    plain = toy.train(method, given, rounds=2)
    ruled = toy.train(robust.robust(toy.METHODS[method]), given, rounds=2)
    assert_close(ruled.state, plain.state, 1e-5)


@pytest.mark.slow
def test_the_layout_changes_nothing():
    under = robust.robust("fedavg", "trimmed_mean")
    f, key = toy.federation(), jax.random.key(3)

    def run(width, devices=1):
        layout = {"width": width, "devices": devices, "checked": False}
        program = simulate.program(under, toy.task(), **layout)
        start = program.init(key, program.traced)
        step = jax.jit(program.round)
        return step(key, program.traced, f, start, 0, False)[0].server

    assert_close(run(1), run(3), 1e-6)
    assert_close(run(1), run(2, devices=2), 1e-6)


def test_an_attacker_is_outvoted():
    """One of five clients sends a huge update: the mean is lost, the median is not."""
    attacked = attacks.malicious("fedavg", 0.2, "scale")
    start = toy.train("fedavg", toy.task(), rounds=0).begin.server
    options = {"rounds": 1, "attack_scale": 1e4}

    def moved(factory):
        trained = toy.train(factory, toy.task(), **options)
        far = jax.tree.map(
            lambda a, b: np.max(np.abs(a - b)), trained.state.server, start
        )
        return max(jax.tree.leaves(far))

    assert moved(attacked) > 10
    assert moved(robust.robust(attacked)) < 2


def test_nobody_malicious_is_the_plain_run():
    nobody = attacks.malicious("fedavg", 0.0)
    plain = toy.train("fedavg", toy.task(), rounds=2)
    found = toy.train(nobody, toy.task(), rounds=2)
    assert_same(found.state, plain.state)
    assert_same(found.last["acc"], plain.last["acc"])
    assert_same(found.last["benign_acc"], plain.last["acc"])


@pytest.mark.parametrize(
    "attack", [toy.slow(x) if x == "label_flip" else x for x in attacks.ATTACKS]
)
def test_malicious_clients_send_what_the_attack_names(attack):
    bad = attacks.chosen(toy.N, 0.2)
    assert bad.sum() == 1
    plain = toy.train("fedavg", toy.task(), rounds=1)
    found = toy.train(attacks.malicious("fedavg", 0.2, attack), toy.task(), rounds=1)
    # others are unchanged
    assert_same(found.metrics.loss[0][~bad], plain.metrics.loss[0][~bad])
    assert np.isnan(found.last["benign_acc"][bad]).all()
    assert not np.isnan(found.last["benign_acc"][~bad]).any()
    assert np.isnan(found.metrics.post["benign_acc"][0][bad]).all()
    if attack == "scale":  # once the update is the update
        assert_close(found.state.server, plain.state.server, 1e-6)
        return
    if attack == "sign_flip":
        alone = toy.train(
            attacks.malicious("fedavg", 0.2, "scale"),
            toy.task(),
            rounds=1,
            attack_scale=0.0,
        )
        # mean(plain) - mean(without) = weight times the update, taken away once more
        wanted = jax.tree.map(
            lambda a, b: 2 * a - b, alone.state.server, plain.state.server
        )
        assert_close(found.state.server, wanted, 1e-5)


@pytest.mark.slow
def test_values_are_checked():
    with pytest.raises(InputError, match="rule"):
        robust.robust("fedavg", "mean_ish")
    with pytest.raises(InputError, match="`malicious` must be in"):
        attacks.malicious("fedavg", 1.0)
    with pytest.raises(InputError, match="fedamp: clients send nothing through"):
        simulate.program(robust.robust("fedamp"), toy.method_task("fedamp"))
    made = functools.partial(simulate.program, robust.robust("fedavg"), toy.task())
    with pytest.raises(InputError, match="malicious_share"):
        made({"malicious_share": 0.5})
