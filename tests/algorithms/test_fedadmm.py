"""FedADMM: its identity and two rounds by hand."""

import by_hand
import oracle
import pytest

from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError


@pytest.mark.parametrize("start", ["server", "client"])
def test_two_rounds_by_hand(start):
    rho, eta = 0.4, 0.8
    states, _ = by_hand.run("fedadmm", rho=rho, server_lr=eta, start=start)
    theta = oracle.variables(states[0].server["w"])
    w, dual = [theta] * 5, [[0 * x for x in theta] for _ in range(5)]
    for t in range(2):
        changes = []
        for i in by_hand.LEARN[t]:
            if start == "server":
                w[i] = theta
            before = augmented(w[i], dual[i], rho)

            def slope(v, x, y, theta=theta, mine=dual[i]):
                terms = zip(oracle.gradient(v, x, y), mine, v, theta, strict=True)
                return [g + a + rho * (b - c) for g, a, b, c in terms]

            w[i] = by_hand.descend(w[i], i, t, slope)
            terms = zip(dual[i], w[i], theta, strict=True)
            dual[i] = [a + rho * (b - c) for a, b, c in terms]
            after = augmented(w[i], dual[i], rho)
            changes.append([a - b for a, b in zip(after, before, strict=True)])
        change = oracle.mean(changes, [1] * len(changes))
        theta = [a + eta * b for a, b in zip(theta, change, strict=True)]
        oracle.close(states[t + 1].server["w"], theta)
        for i in range(5):
            if start == "client":
                oracle.close(by_hand.row(states[t + 1], i, "w"), w[i])
            oracle.close(by_hand.row(states[t + 1], i, "y"), dual[i])


def augmented(w, dual, rho):
    return [a + b / rho for a, b in zip(w, dual, strict=True)]


def test_the_server_has_the_mean_augmented_model():
    """After a round of all clients from their own models, with server_lr = 1."""
    rho = 0.1
    states, _ = by_hand.run("fedadmm", rho=rho, server_lr=1.0, start="client")
    rows = [by_hand.row(states[1], i) for i in by_hand.LEARN[0]]
    both = [[oracle.variables(r[name]) for name in ("w", "y")] for r in rows]
    wanted = oracle.mean([augmented(*pair, rho) for pair in both], [1] * len(both))
    oracle.close(states[1].server["w"], wanted)


def test_the_own_start_needs_a_larger_penalty():
    fedadmm = ALGORITHMS["fedadmm"]
    with pytest.raises(InputError, match=r"`rho` must be in \[0.1, inf\), got 0.01"):
        fedadmm(by_hand.TASK, start="client", rho=0.01)
    fedadmm(by_hand.TASK, start="client")
    fedadmm(by_hand.TASK, rho=0.01)
