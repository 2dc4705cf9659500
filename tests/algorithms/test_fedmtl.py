"""FedMTL: two rounds by hand."""

import math

import by_hand
import oracle
import toy


def test_two_rounds_by_hand():
    states, _ = by_hand.run("fedmtl")
    models = [oracle.variables(by_hand.row(states[0], i)) for i in range(5)]
    size = sum(x.size for x in models[0])
    scale = 10.0 ** -(math.floor(math.log10(size) + 1) + 1)
    for t in range(2):
        learn, found = by_hand.LEARN[t], {}
        omega = 1 - 1 / len(learn)
        for i in learn:
            others = [sum(models[j][k] for j in learn if j != i) for k in range(4)]

            def slope(v, x, y, others=others, omega=omega):
                g = oracle.gradient(v, x, y)
                terms = zip(g, v, others, strict=True)
                return [a + 2 * scale * (b + omega**2 * (b + c)) for a, b, c in terms]

            found[i] = by_hand.descend(models[i], i, t, slope)
        for i, w in found.items():
            models[i] = w
        for i in (0, 1, 2, 4):
            oracle.close(by_hand.row(states[t + 1], i), models[i])


def test_pfllibs_penalty_has_no_gradient():
    (*_, found), _ = by_hand.run("fedmtl", variant="pfllib")
    (*_, wanted), _ = by_hand.run("local")
    toy.assert_same(found.clients, wanted.clients)


def test_a_client_alone_is_local_with_weight_decay():
    """omega is then 0, and 2 10^-3 w the gradient of the penalty."""
    states, _ = by_hand.run("fedmtl", rounds=[[2]])
    w = oracle.variables(by_hand.row(states[0], 2))

    def slope(v, x, y):
        g = oracle.gradient(v, x, y)
        return [a + 2e-3 * b for a, b in zip(g, v, strict=True)]

    oracle.close(by_hand.row(states[1], 2), by_hand.descend(w, 2, 0, slope))
