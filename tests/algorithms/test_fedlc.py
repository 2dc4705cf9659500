"""FedLC: its limits and two rounds by hand."""

import by_hand
import numpy as np
import oracle


def test_without_margins_it_is_fedavg():
    by_hand.same_server("fedlc", "fedavg", tau=0.0)


def test_two_rounds_by_hand():
    tau = 0.8
    states, _ = by_hand.run("fedlc", tau=tau)
    w = oracle.variables(states[0].server)
    for t in range(2):
        models = []
        for i in by_hand.LEARN[t]:
            n = np.asarray(by_hand.F.class_counts[i], np.float64)
            margin = tau * np.where(n > 0, np.maximum(n, 1) ** -0.25, 1e9)

            def slope(v, x, y, margin=margin):
                z = oracle.forward(v, x)[1] - margin
                return oracle.backward(v, x, oracle.by_logits(z, y))

            models.append(by_hand.descend(w, i, t, slope))
        w = oracle.mean(models, by_hand.sizes(t))
        oracle.close(states[t + 1].server, w)
