"""FedAP: its distances, its limits and two rounds by hand."""

import by_hand
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toy

from fedjax_pfl.algorithms.fedap import weights

RNG = np.random.default_rng(0)


def stats_of(count):
    mean, var = RNG.normal(size=(count, 2)), RNG.uniform(1, 2, size=(count, 2))
    norm = {"mean": jnp.array(mean), "var": jnp.array(var)}
    return {"norm": norm, "rest": {"mean": None, "var": None}}


def inverse(mean, var, i, others, lam):
    d = [
        np.sqrt(
            np.sum((mean[i] - mean[j]) ** 2)
            + np.sum((np.sqrt(var[i]) - np.sqrt(var[j])) ** 2)
        )
        for j in others
    ]
    return (1 - lam) * (1 / np.array(d)) / np.sum(1 / np.array(d))


def test_weights_are_inverse_wasserstein_distances():
    """Client 3 has not trained."""
    stats, seen = stats_of(4), jnp.array([True, True, True, False])
    got = weights(stats, seen, jnp.array([1]), 0.3)[0]
    wanted = inverse(stats["norm"]["mean"], stats["norm"]["var"], 1, [0, 2], 0.3)
    np.testing.assert_allclose(got, [wanted[0], 0, wanted[1], 0], atol=1e-6)


def test_equal_statistics_take_the_whole_weight():
    stats = stats_of(3)
    stats["norm"] = {name: x[jnp.array([0, 0, 1])] for name, x in stats["norm"].items()}
    got = weights(stats, jnp.ones(3, bool), jnp.array([0]), 0.5)[0]
    np.testing.assert_allclose(got, [0, 0.5, 0], atol=1e-6)


def trained(method, rounds, **hparams):
    return toy.train(method, toy.task("norm"), rounds, **hparams).state


@pytest.mark.slow
def test_with_nothing_but_warmup_it_is_fedbn():
    got, wanted = trained("fedap", 3, warmup=1.0), trained("fedbn", 3)
    for i in range(toy.N):
        toy.assert_close(toy.rows(got.server["w"], i), wanted.server, 1e-5)
    toy.assert_close(got.clients, wanted.clients, 1e-5)


def test_two_rounds_by_hand():
    """Without batch norm all others weigh the same; client 3 never trains."""
    lam = 0.3
    states, _ = by_hand.run("fedap", warmup=0.0, lam=lam)
    start = oracle.variables(toy.rows(states[0].server["w"], 0))
    models = dict.fromkeys(range(toy.N), start)
    for t in range(2):
        known = [i for i in by_hand.LEARN[0] if t > 0]
        begin = {}
        for i in by_hand.LEARN[t]:
            others = [models[j] for j in known if j != i]
            share = [lam] + [(1 - lam) / max(len(others), 1)] * len(others)
            begin[i] = oracle.mean([models[i], *others], share)
        for i, w in begin.items():
            models[i] = by_hand.descend(w, i, t)
        for i in range(toy.N):
            oracle.close(toy.rows(states[t + 1].server["w"], i), models[i])
