"""Robust aggregation and malicious clients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy import assert_close, assert_same

from fedjax_pfl import aggregate, simulate, uploads
from fedjax_pfl.data import shifts
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Context
from fedjax_pfl.uploads import attacks
from fedjax_pfl.uploads.robust import RULES

# five honest uploads near 1, two malicious ones far away, one that is absent
X = np.float32([1.0, 1.1, 0.9, 1.2, 0.8, -50.0, 90.0, np.nan])
HERE = np.arange(8) < 7


def combined(rule, stack, weight=None, here=HERE, share=0.3):
    shares = aggregate.shares(None if weight is None else jnp.asarray(weight), here)
    each = jax.tree.map(lambda _: shares, stack)
    return RULES[rule](jax.tree.map(jnp.asarray, stack), each, share)


def ruled(rule, **values):
    return {"uploads": uploads.chain(uploads.robust(rule, **values))}


def attacked(kind, scale=1.0, rule=None, share=0.2):
    """Returns a task with malicious clients, and the options of their attack."""
    parts = [uploads.attack(kind, scale)] + ([uploads.robust(rule)] if rule else [])
    task = toy.task()._replace(malicious=attacks.chosen(toy.N, share))
    return task, {"uploads": uploads.chain(*parts)}


@pytest.mark.parametrize(
    "rule, wanted",
    [
        ("median", 1.0),
        # 3 of 7 at each end
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


@pytest.mark.parametrize("share, kept", [(0.0, 7), (0.2, 3), (0.45, 1)])
def test_trimmed_mean_cuts_the_share(share, kept):
    found = combined("trimmed_mean", X, share=share)
    x = np.sort(X[:7])
    cut = (7 - kept) // 2
    assert_close(found, np.mean(x[cut : 7 - cut], dtype=np.float32), 1e-5)


def test_krum_compares_updates():
    """Beside models of norm 79 the attacker's is as near as the honest ones'."""
    rng = np.random.default_rng(0)
    honest = 1e-3 * rng.normal(size=(6, 100)).astype(np.float32) / 10
    wrong = -30 * honest.mean(axis=0, keepdims=True)
    stack = np.concatenate([honest, wrong])
    found = combined("krum", stack, here=np.ones(7, bool), share=1 / 7)
    assert np.min(np.abs(honest - np.asarray(found)).max(axis=1)) == 0


def the_mean(stack, shares, share):
    weigh = lambda p, x: jnp.sum(jax.vmap(aggregate.weigh)(p, x), axis=0)
    return jax.tree.map(weigh, shares, stack)


@pytest.mark.parametrize(
    "method", ["fedavg", "fedproto", *map(toy.slow, ("lg_fedavg", "feddf"))]
)
def test_the_mean_as_a_rule_is_the_plain_run(method, monkeypatch):
    monkeypatch.setitem(RULES, "median", the_mean)
    given = toy.method_task(method)
    plain = toy.train(method, given, rounds=2)
    found = toy.train(method, given, rounds=2, options=ruled("median"))
    assert_close(found.state.method, plain.state.method, 1e-5)


@pytest.mark.slow
def test_the_layout_changes_nothing():
    f, key = toy.federation(), jax.random.key(3)

    def run(width, devices=1):
        layout = {"width": width, "devices": devices, "checked": False}
        options = ruled("trimmed_mean") | layout
        program = simulate.program("fedavg", toy.task(), **options)
        start = program.init(key, program.traced)
        step = jax.jit(program.round)
        return step(Context(key, program.traced, f, 0), start, False)[0].server

    assert_close(run(1), run(3), 1e-6)
    assert_close(run(1), run(2, devices=2), 1e-6)


def test_an_attacker_is_outvoted():
    """One of five clients sends a huge update: the mean is lost, the median is not."""
    start = toy.train("fedavg", toy.task(), rounds=0).begin.server

    def moved(rule):
        task, options = attacked("scale", 1e4, rule)
        trained = toy.train("fedavg", task, rounds=1, options=options)
        far = jax.tree.map(
            lambda a, b: np.max(np.abs(a - b)), trained.state.server, start
        )
        return max(jax.tree.leaves(far))

    assert moved(None) > 10
    assert moved("median") < 2


def test_nobody_malicious_is_the_plain_run():
    task, options = attacked("sign_flip", share=0.0)
    plain = toy.train("fedavg", toy.task(), rounds=2)
    found = toy.train("fedavg", task, rounds=2, options=options)
    assert_close(found.state.server, plain.state.server, 1e-6)
    assert_close(found.last["acc"], plain.last["acc"])
    assert_same(found.last["benign_acc"], found.last["acc"])


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "gaussian"])
def test_malicious_clients_send_what_the_attack_names(kind):
    task, options = attacked(kind)
    bad = task.malicious
    assert bad.sum() == 1
    plain = toy.train("fedavg", toy.task(), rounds=1)
    found = toy.train("fedavg", task, rounds=1, options=options)
    # others are unchanged
    assert_same(found.metrics.loss[0][~bad], plain.metrics.loss[0][~bad])
    assert np.isnan(found.last["benign_acc"][bad]).all()
    assert not np.isnan(found.last["benign_acc"][~bad]).any()
    assert np.isnan(found.metrics.post["benign_acc"][0][bad]).all()
    if kind == "scale":  # once the update is the update
        assert_close(found.state.server, plain.state.server, 1e-6)
        return
    if kind == "sign_flip":
        task, options = attacked("scale", 0.0)
        alone = toy.train("fedavg", task, rounds=1, options=options)
        # mean(plain) - mean(without) = weight times the update, taken away once more
        wanted = jax.tree.map(
            lambda a, b: 2 * a - b, alone.state.server, plain.state.server
        )
        assert_close(found.state.server, wanted, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sign_flip", "gaussian"])
def test_running_statistics_are_honest(kind):
    task, options = attacked(kind, 5.0)
    task = toy.task("norm")._replace(malicious=task.malicious)
    plain = toy.train("fedavg", toy.task("norm"), rounds=1)
    found = toy.train("fedavg", task, rounds=1, options=options)
    assert_close(found.state.server["stats"], plain.state.server["stats"], 1e-6)


@pytest.mark.parametrize(
    "y, wanted",
    [
        (np.int32([0, 1, 2, 0]), [2, 1, 2, 0]),
        (
            np.int32([[0, -1], [1, 2], [2, 0], [0, 0]]),
            [[2, -1], [1, 0], [2, 0], [0, 0]],
        ),
        (np.array([[True, False]] * 4), [[False, True]] * 2 + [[True, False]] * 2),
        (np.float32([[1], [-2], [3], [0]]), [[-1], [2], [3], [0]]),
    ],
    ids=["classes", "positions", "several", "targets"],
)
def test_flipped_labels_are_data(y, wanted):
    """Those of client 1, which has the first two rows."""

    class Labels:
        def __init__(self, y):
            self.y, self.num_classes = y, 3

        def _replace(self, y):
            return Labels(y)

    class Rows:
        train, train_sizes = np.array([[3, 2], [0, 1]]), np.array([2, 2])

    assert_same(shifts.flipped(Labels(y), Rows, np.array([1])).y, np.array(wanted))


@pytest.mark.slow
def test_values_are_checked():
    with pytest.raises(InputError, match="rule"):
        uploads.robust("mean_ish")
    with pytest.raises(InputError, match="`malicious` must be in"):
        attacks.chosen(5, 1.0)
    with pytest.raises(InputError, match="fedamp takes no options on uploads"):
        simulate.program("fedamp", toy.method_task("fedamp"), **ruled("median"))
    with pytest.raises(InputError, match="malicious_share"):
        uploads.robust("median", 0.5)
    with pytest.raises(InputError, match="needs `malicious`"):
        options = uploads.chain(uploads.attack("scale"))
        simulate.program("fedavg", toy.task(), uploads=options)
    few = toy.task(participation=(0.4, 0.4))
    with pytest.raises(InputError, match="trims no client of a round of 2"):
        simulate.program("fedavg", few, **ruled("trimmed_mean"))
