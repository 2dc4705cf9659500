"""pFedLA: its mixtures and two rounds by hand."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import toy

from fedjax_pfl.algorithms.pfedla import mixture, numbered

RNG = np.random.default_rng(0)


def test_equal_models_are_their_mixture():
    """To the last bit."""
    w = {"body": jnp.array(np.tile(RNG.normal(size=(1, 5)), (4, 1)), jnp.float32)}
    alpha = jnp.array([[0.1, 0.2, 0.3, 0.4]])
    np.testing.assert_array_equal(
        mixture(alpha, w, 2, {"body": 0})["body"], w["body"][0]
    )


def test_a_layer_is_a_module_with_its_statistics():
    w = toy.task("norm").model.init(jax.random.key(0))
    layer, count = numbered(w)
    norm = layer["body"]["norm"]
    assert count == 3 and norm["scale"] == norm["bias"]
    assert layer["stats"]["norm"] == {"mean": norm["bias"], "var": norm["bias"]}
    assert (
        len({norm["bias"], layer["head"]["bias"], layer["body"]["inner"]["bias"]}) == 3
    )


HYPER, LAYER = 5.0, [0, 0, 1, 1]  # of the kernels and biases of body and head


class Hyper:
    """A hypernetwork in NumPy."""

    def __init__(self, row):
        psi, f = row["psi"], lambda x: np.asarray(x, np.float64)
        self.v = f(row["v"])
        self.mlp = [[f(p["kernel"]), f(p["bias"])] for p in psi["mlp"]]
        self.head = [f(psi["head"]["kernel"]), f(psi["head"]["bias"])]

    def weights(self, here):
        self.x, self.here = [self.v], here
        for kernel, bias in self.mlp:
            self.x.append(np.maximum(self.x[-1] @ kernel + bias, 0))
        out = np.tensordot(self.x[-1], self.head[0], 1) + self.head[1]
        self.a = np.maximum(out, 0) * here
        self.alpha = self.a / self.a.sum(axis=1, keepdims=True)
        return self.alpha

    def step(self, slope):
        """A step along the gradient `slope` [L, N] by the weights."""
        mean = np.sum(self.alpha * slope, axis=1, keepdims=True)
        out = (slope - mean) / self.a.sum(axis=1, keepdims=True) * (self.a > 0)
        dx = np.tensordot(self.head[0], out, 2)
        self.head[0] -= HYPER * np.multiply.outer(self.x[-1], out)
        self.head[1] -= HYPER * out
        for part, x, y in zip(
            self.mlp[::-1], self.x[-2::-1], self.x[:0:-1], strict=True
        ):
            dz = dx * (y > 0)
            dx = part[0] @ dz
            part[0] = part[0] - HYPER * np.outer(x, dz)
            part[1] = part[1] - HYPER * dz
        self.v = self.v - HYPER * dx


def test_two_rounds_by_hand():
    small = {"embedding": 5, "hidden": 6}
    states, _ = by_hand.run("pfedla", hyper_lr=HYPER, **small)
    start = oracle.variables(toy.rows(states[0].server["w"], 0))
    models, seen = [start] * toy.N, np.zeros(toy.N)
    nets = [Hyper(by_hand.row(states[0], i, "hyper")) for i in range(toy.N)]
    for t in range(2):
        new = list(models)
        for i in by_hand.LEARN[t]:
            alpha = nets[i].weights(np.maximum(seen, np.arange(toy.N) == i))
            begin = [
                sum(a * w[k] for a, w in zip(alpha[LAYER[k]], models, strict=True))
                for k in range(4)
            ]
            new[i] = by_hand.descend(begin, i, t)
            slope = np.zeros((2, toy.N))
            for j, w in enumerate(models):
                for k in range(4):
                    slope[LAYER[k], j] += np.sum((begin[k] - new[i][k]) * w[k])
            nets[i].step(slope)
        models = new
        seen[by_hand.LEARN[t]] = 1
        for i in range(toy.N):
            oracle.close(toy.rows(states[t + 1].server["w"], i), models[i])
            got = Hyper(by_hand.row(states[t + 1], i, "hyper"))
            parts = [(got.v, nets[i].v), *zip(got.head, nets[i].head, strict=True)]
            for a, b in zip(got.mlp, nets[i].mlp, strict=True):
                parts += zip(a, b, strict=True)
            for a, b in parts:
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)
    assert np.abs(nets[1].v - Hyper(by_hand.row(states[0], 1, "hyper")).v).max() > 1e-3


def test_the_default_rate_moves_the_weights():
    """At 0.005 those of the second round, after which all models count, remain."""
    task, moved = toy.task(), []
    for rate in ({}, {"hyper_lr": 0.005}):
        found = toy.train("pfedla", task, 8, **rate).metrics.clients["self_weight"]
        moved.append(np.abs(found[-1] - found[1]).max())
    assert moved[0] > 0.1 and moved[1] < 0.01
