"""FedNTD: its limits and two rounds by hand."""

import by_hand
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from fedjax_pfl.algorithms.fedntd import not_true


@pytest.mark.slow
def test_without_distillation_it_is_fedavg():
    by_hand.same_server("fedntd", "fedavg", beta=0.0, tau=1.0)


def test_the_labels_logit_does_not_matter():
    z, y = np.float32([[1, 2, 3], [0, 1, -1]]), jnp.array([2, 0])
    other = z.copy()
    other[[0, 1], [2, 0]] = 50
    np.testing.assert_array_equal(not_true(z, y, 2.0), not_true(other, y, 2.0))
    p = np.exp(not_true(z, y, 2.0)) * (z != z[[[0], [1]], [[2], [0]]])
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-6)


def without(z, y, tau):
    """The softmax without the label's class, 0 there."""
    z = np.where(np.eye(z.shape[1])[y] > 0, -np.inf, z / tau)
    return oracle.softmax(z)


def test_two_rounds_by_hand():
    beta, tau = 0.6, 2.0
    states, _ = by_hand.run("fedntd", beta=beta, tau=tau)
    w = oracle.variables(states[0].server)
    for t in range(2):
        models = []
        for i in by_hand.LEARN[t]:

            def slope(v, x, y, w=w):
                z, taught = oracle.forward(v, x)[1], oracle.forward(w, x)[1]
                # tau^2 times the derivative of the divergence, (q - p) / tau
                dz = tau * (without(z, y, tau) - without(taught, y, tau)) / len(y)
                return oracle.backward(v, x, oracle.by_logits(z, y) + beta * dz)

            models.append(by_hand.descend(w, i, t, slope))
        w = oracle.mean(models, by_hand.sizes(t))
        oracle.close(states[t + 1].server, w)
