"""FedSR: its divergence, and a client by slow derivatives."""

import by_hand
import jax
import numpy as np
import oracle
import toy

from fedjax_pfl import keys
from fedjax_pfl.algorithms.fedsr import Draw, divergence

softplus = lambda x: np.log1p(np.exp(x))


def kl(mean, sigma, prior, y):
    r = softplus(prior["sigma"])[y]
    mean, sigma = mean * prior["scale"], sigma * prior["scale"]
    gap = (sigma**2 + (mean - prior["mean"][y]) ** 2) / (2 * r**2)
    return np.sum(np.log(r / sigma) + gap - 0.5, axis=1)


def test_the_divergence_of_equal_gaussians_is_0():
    rng = np.random.default_rng(0)
    prior = {
        "mean": rng.normal(size=(3, 5)),
        "sigma": rng.normal(size=(3, 5)),
        "scale": 1.0,
    }
    y, sigma = np.array([2, 0]), softplus(prior["sigma"])
    found = divergence(*map(np.float32, (prior["mean"][y], sigma[y])), prior, y)
    np.testing.assert_allclose(found, 0, atol=1e-5)
    assert (divergence(prior["mean"][y] + 1, sigma[y], prior, y) > 0).all()


def loss(w, x, y, noise, l2r, cmi):
    layer = w["body"]["layers"]["0"]
    h = np.maximum(x @ layer["kernel"] + layer["bias"], 0)
    mean, sigma = np.split(h @ w["map"]["kernel"] + w["map"]["bias"], 2, axis=1)
    sigma = softplus(sigma)
    z = mean + sigma * noise
    value = oracle.cross_entropy(z @ w["head"]["kernel"] + w["head"]["bias"], y)
    value += l2r * np.mean(np.linalg.norm(z, axis=1))
    return value + cmi * np.mean(kl(mean, sigma, w["prior"], y))


def slope(w, *args):
    """Central differences of all parameters."""
    flat, tree = jax.tree.flatten(w)
    grads = [np.zeros_like(x) for x in flat]
    for x, g in zip(flat, grads, strict=True):
        for k in np.ndindex(x.shape):
            old, ends = x[k], []
            for e in (1e-5, -1e-5):
                x[k] = old + e
                ends.append(loss(jax.tree.unflatten(tree, flat), *args))
            x[k], g[k] = old, (ends[0] - ends[1]) / 2e-5
    return jax.tree.unflatten(tree, grads)


def test_a_client_by_slow_derivatives():
    """Client 2, alone, with one example and so one step per epoch."""
    l2r, cmi = 0.3, 0.2
    states, _ = by_hand.run("fedsr", rounds=[[2]], l2r=l2r, cmi=cmi)
    own = by_hand.row(states[0], 2)["prior"]
    w = {k: x for k, x in states[0].server.items() if k in ("body", "head", "map")}
    w = jax.tree.map(lambda x: np.array(x, float), w | {"prior": own})
    key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[0], 0), 2)
    for s, (x, y) in enumerate(by_hand.batches(2, 0)):
        step = jax.random.fold_in(keys.fold(key, keys.Client.STEP), s)
        draw = keys.fold(keys.fold(step, keys.Step.LOSS), Draw.NOISE)
        noise = np.asarray(jax.random.normal(draw, (4, 8)), float)[:1]
        g = slope(w, x, y, noise, l2r, cmi)
        w = jax.tree.map(lambda a, b: np.array(a - by_hand.LR * b), w, g)
    toy.assert_close(by_hand.row(states[1], 2)["prior"], w.pop("prior"), 1e-4)
    toy.assert_close({k: states[1].server[k] for k in w}, w, 1e-4)


def test_the_mean_is_uniform():
    """Of two clients with other numbers of examples, each also trained alone."""
    assert len(by_hand.examples(0)[1]) != len(by_hand.examples(1)[1])
    found = []
    for ids in ([0], [1], [0, 1]):
        server = by_hand.run("fedsr", rounds=[ids])[0][1].server
        found.append({part: server[part] for part in ("body", "head", "map")})
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *found[:2])
    toy.assert_close(found[2], mean, 1e-5)
