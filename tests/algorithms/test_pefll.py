"""PeFLL: its descriptions of clients, and two rounds by hand."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import toy

from fedjax_pfl import keys, local_training
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.pefll import Draw, normalised


def test_descriptions_have_mean_0_and_variance_1():
    got = normalised(jnp.array([1.0, 5.0, -3.0, 4.0]))
    np.testing.assert_allclose([got.mean(), got.var(ddof=1)], [0, 1], atol=1e-6)
    np.testing.assert_array_equal(normalised(jnp.full(3, 0.7)), 0)
    assert np.isfinite(jax.grad(lambda v: normalised(v)[0])(jnp.ones(3))).all()


def test_classes_without_examples_have_the_logit_0():
    cohort = toy.cohort(by_hand.TASK, range(5), f=by_hand.F)
    x = by_hand.F.examples.x[:3]

    def logits(mask_absent):
        method = ALGORITHMS["pefll"](by_hand.TASK, mask_absent=mask_absent)
        state = method.init(jax.random.key(0))
        predict = lambda c, own: method.predict(state.server, own, c)(x, None)
        return cohort.map(predict, state.clients, phase=None)

    held = np.asarray(by_hand.F.class_counts) > 0
    masked, plain = jax.jit(lambda: (logits(True), logits(False)))()
    assert not held.all()
    np.testing.assert_array_equal(masked, np.where(held[:, None], plain, 0))


def described(i, t):
    """The examples that describe client i in round t."""
    key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[t], 0), i)
    x, y = by_hand.examples(i)
    draw = keys.fold(key, Draw.EXAMPLES)
    length = by_hand.F.train.index.shape[1]
    rows = np.asarray(local_training.shuffle(draw, length, len(y)))[: min(4, len(y))]
    return x[rows], y[rows]


def generated(net, x, y):
    """theta from examples, in the order of `oracle.variables`."""
    layer, out = net["phi"]["body"]["layers"]["0"], net["phi"]["out"]
    h = np.maximum(x @ layer["kernel"] + layer["bias"], 0)
    joint = np.concatenate([h, np.eye(4)[y]], axis=1)
    v = np.mean(joint @ out["kernel"] + out["bias"], axis=0)
    v = (v - v.mean()) / v.std(ddof=1)
    first, second = net["psi"]["hidden"]
    v = v @ first["kernel"] + first["bias"]
    v = np.maximum(v, 0) @ second["kernel"] + second["bias"]
    body, head = (net["psi"]["heads"][part] for part in ("body", "head"))
    layer = body["layers"]["0"]
    heads = layer["kernel"], layer["bias"], head["kernel"], head["bias"]
    return [np.tensordot(v, p["kernel"], 1) + p["bias"] for p in heads]


def slopes(leaves, structure, i, t):
    """The gradient by the networks' parameters, by differences."""
    x, y = described(i, t)
    make = lambda: generated(jax.tree.unflatten(structure, leaves), x, y)
    theta = make()
    change = [a - b for a, b in zip(theta, by_hand.descend(theta, i, t), strict=True)]
    value = lambda: sum(np.sum(a * b) for a, b in zip(make(), change, strict=True))
    found = []
    for leaf in leaves:
        slope = np.zeros(leaf.shape)
        for at in np.ndindex(*leaf.shape):
            old, ends = leaf[at], []
            for leaf[at] in (old + 1e-6, old - 1e-6):
                ends.append(value())
            leaf[at] = old
            slope[at] = (ends[0] - ends[1]) / 2e-6
        found.append(slope)
    return found


def test_two_rounds_by_hand():
    small = {"embedding": 4, "hidden": 5, "hidden_layers": 1}
    states, _ = by_hand.run("pefll", hyper_lr=0.01, **small)
    leaves, structure = jax.tree.flatten(states[0].server["networks"])
    leaves = [np.array(x, np.float64) for x in leaves]
    mu, nu = ([np.zeros(x.shape) for x in leaves] for _ in range(2))
    for t in range(2):
        learn = by_hand.LEARN[t]
        each = [slopes(leaves, structure, i, t) for i in learn]
        g = oracle.mean(each, [1] * len(learn))
        mu = [0.9 * m + 0.1 * x for m, x in zip(mu, g, strict=True)]
        nu = [0.999 * n + 0.001 * x**2 for n, x in zip(nu, g, strict=True)]
        after = states[t + 1].server
        for got, m in zip(jax.tree.leaves(after["adam"][0].mu), mu, strict=True):
            np.testing.assert_allclose(got, m, rtol=1e-3, atol=1e-6)
        found = jax.tree.leaves(after["networks"])
        for old, new, m, n in zip(leaves, found, mu, nu, strict=True):
            first, second = 1 - 0.9 ** (t + 1), 1 - 0.999 ** (t + 1)
            step = 0.01 * (m / first) / (np.sqrt(n / second) + 1e-8)
            known = np.abs(m) > 1e-4
            np.testing.assert_allclose(new[known], (old - step)[known], atol=1e-4)
        leaves = [np.array(x, np.float64) for x in found]
