"""FedTGP: its margin, its loss and two rounds of the clients by hand."""

import by_hand
import jax.numpy as jnp
import numpy as np
import oracle

from fedjax_pfl.algorithms.fedtgp import contrast, largest_gap


def test_the_margin_is_the_largest_distance_to_a_nearest_class():
    """The means over the clients are 0, 3 and 7; the fourth class is not known."""
    proto = jnp.array([[[0.0, 4.0, 7.0, 9.0]], [[0.0, 2.0, 9.0, 9.0]]])
    has = jnp.array([[True, True, True, False], [True, True, False, False]])
    assert largest_gap(proto, has) == 4
    assert largest_gap(proto, has & (jnp.arange(4) == 1)[None]) == np.inf


def test_the_loss_by_hand():
    rng = np.random.default_rng(0)
    proto, h, y = rng.normal(size=(4, 3)), rng.normal(size=(5, 3)), np.arange(5) % 4
    d = np.linalg.norm(h[:, None] - proto[None], axis=2) + 0.7 * np.eye(4)[y]
    mask = jnp.arange(5) < 3
    got = contrast(*map(jnp.asarray, (proto, h, y)), mask, 0.7)
    np.testing.assert_allclose(got, oracle.cross_entropy(-d[:3], y[:3]), rtol=1e-5)


def test_two_rounds_by_hand():
    """The clients' training; the prototypes are the server's."""
    lam = 0.6
    states, _ = by_hand.run("fedtgp", lam=lam, server_epochs=3)
    models = [oracle.variables(by_hand.row(states[0], 0))] * 5
    for t in range(2):
        proto = states[t].server["proto"].T
        for i in by_hand.LEARN[t]:

            def slope(v, x, y, proto=proto, on=t > 0):
                h, z = oracle.forward(v, x)
                dh = on * 2 * lam * (h - proto[y]) / 8 / len(y)
                return oracle.backward(v, x, oracle.by_logits(z, y), dh)

            models[i] = by_hand.descend(models[i], i, t, slope)
        for i in range(5):
            oracle.close(by_hand.row(states[t + 1], i), models[i])


def test_the_server_lowers_its_loss():
    states, reports = by_hand.run("fedtgp", lam=0.6, server_epochs=3)
    means, classes = [], []
    for i in by_hand.LEARN[0]:
        x, y = by_hand.examples(i)
        h = oracle.forward(oracle.variables(by_hand.row(states[1], i)), x)[0]
        means += [h[y == c].mean(axis=0) for c in sorted(set(y))]
        classes += sorted(set(y))
    h, y = np.float32(means), np.array(classes)
    gap, all_ = reports[0].server["margin"], jnp.ones(len(y), bool)
    before, after = (
        contrast(jnp.asarray(s.server["proto"].T), h, y, all_, gap) for s in states[:2]
    )
    assert after < before and states[1].server["known"].all()
