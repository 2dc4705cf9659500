"""GPFL: its valve by hand and two rounds by slow derivatives."""

import by_hand
import jax
import numpy as np
import oracle
import toy

from fedjax_pfl import models
from fedjax_pfl.algorithms.gpfl import Valve


def layer_norm(x, p):
    x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    return x * p["scale"] + p["bias"]


def valve(cov, h, condition):
    def branch(name):
        x = np.maximum(condition @ cov[name]["kernel"] + cov[name]["bias"], 0)
        return layer_norm(x, cov[f"{name}_norm"])

    return np.maximum(h * (branch("gamma") + 1) + branch("beta"), 0)


def loss(w, received, i, x, y, lam):
    """The client's loss, without weight decay."""
    layer = w["body"]["layers"]["0"]
    h = np.maximum(x @ layer["kernel"] + layer["bias"], 0)
    count = np.asarray(by_hand.F.class_counts[i])
    gce = received["gce"]
    personal = valve(w["cov"], h, count / count.sum() @ gce)
    common = valve(w["cov"], h, gce.mean(axis=0))
    value = oracle.cross_entropy(personal @ w["head"]["kernel"] + w["head"]["bias"], y)
    unit = lambda a: a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-6)
    value += oracle.cross_entropy(unit(common) @ unit(w["gce"]).T, y)
    return value + lam * np.linalg.norm(common - gce[y])


def slope(w, *args):
    """Central differences of all parameters."""
    flat, tree = jax.tree.flatten(w)
    grads = [np.zeros_like(x) for x in flat]
    for x, g in zip(flat, grads, strict=True):
        for k in np.ndindex(x.shape):
            old, ends = x[k], []
            for e in (1e-6, -1e-6):
                x[k] = old + e
                ends.append(loss(jax.tree.unflatten(tree, flat), *args))
            x[k], g[k] = old, (ends[0] - ends[1]) / 2e-6
    return jax.tree.unflatten(tree, grads)


def test_a_round_by_slow_derivatives():
    lam, mu = 0.2, 0.1
    states, _ = by_hand.run("gpfl", rounds=[[2, 4]], lam=lam, mu=mu)
    start = {k: x for k, x in states[0].server.items() if k not in ("head", "stats")}
    received = jax.tree.map(lambda x: np.array(x, float), start)
    learn, models = [2, 4], []
    for i in learn:
        head = jax.tree.map(
            lambda x: np.array(x, float), by_hand.row(states[0], i)["head"]
        )
        w = jax.tree.map(np.copy, received | {"head": head})
        for x, y in by_hand.batches(i, 0):
            g = slope(w, received, i, x, y, lam)
            for part in w:
                decay = mu if part in ("gce", "cov") else 0
                w[part] = jax.tree.map(
                    lambda a, b, d=decay: a - by_hand.LR * (b + d * a), w[part], g[part]
                )
        models.append(w)
        toy.assert_close(by_hand.row(states[1], i)["head"], w.pop("head"), 1e-4)
    share = toy.SIZES[learn] / toy.SIZES[learn].sum()
    mean = jax.tree.map(
        lambda *x: sum(p * a for p, a in zip(share, x, strict=True)), *models
    )
    got = {k: states[1].server[k] for k in mean}
    toy.assert_close(got, mean, 1e-4)


def test_a_valve_of_zeros_is_a_relu():
    h = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    network = models.network(lambda rngs: Valve(4, rngs))
    zero = jax.tree.map(np.zeros_like, network.init(jax.random.key(0)))
    got, _ = network.apply(zero, (h, np.ones((1, 4), np.float32)))
    np.testing.assert_array_equal(got, np.maximum(h, 0))
