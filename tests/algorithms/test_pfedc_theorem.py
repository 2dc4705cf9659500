"""Theorem 1 of pFedC: on L2-regularised logistic regression the branches approach their
optimum as 1/T, below its bound."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import simulate
from fedjax_pfl.algorithms import pfedc
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.partition import build
from fedjax_pfl.models import model, nets
from fedjax_pfl.types import Context

N, ROWS, K, C, MU, BATCH, ROUNDS, SEEDS = 4, 32, 3, 3, 0.5, 4, 400, 8
OWN = [(0, 1), (1, 2), (0, 2), (0, 1, 2)]  # classes of each client
STEPS = 2  # per round (E); whole epochs, without replacement, converge faster than 1/T


def data():
    """Returns inputs of norm 1 at most, and labels; the last N rows are not trained."""
    rng = np.random.default_rng(0)
    y = np.concatenate([*(np.resize(own, ROWS) for own in OWN), np.zeros(N, int)])
    x = rng.normal(size=(C, K))[y] + rng.normal(size=(len(y), K))
    x /= np.linalg.norm(x, axis=1).max()
    return x.astype(np.float32), y.astype(np.int32)


def gradients(w, x, t):
    """Returns the gradient of every example's regularised loss, [n, K + 1]."""
    return (1 / (1 + np.exp(-x @ w)) - t)[:, None] * x + MU * w


def minimum(parts):
    """Returns the minimum of the mean of clients' losses, by Newton's method, and its
    value.

    Args:
      parts: inputs [n, K + 1] and answers [n] of each client.
    """
    w = np.zeros(K + 1)
    for _ in range(50):
        slope = np.mean([gradients(w, *part).mean(axis=0) for part in parts], axis=0)
        curvature = np.mean(
            [
                (x.T * (p := 1 / (1 + np.exp(-x @ w))) * (1 - p)) @ x / len(x)
                for x, _ in parts
            ],
            axis=0,
        )
        w = w - np.linalg.solve(curvature + MU * np.eye(K + 1), slope)
    fit = [np.mean(np.log1p(np.exp(x @ w)) - t * (x @ w)) for x, t in parts]
    return w, np.mean(fit) + MU / 2 * w @ w


def constants(parts):
    """Returns kappa, gamma and B of one branch (Li et al. 2020, Theorem 1)."""
    widest = max(np.linalg.norm(x, axis=1).max() for x, _ in parts)
    smooth = MU + widest**2 / 4
    gamma = max(8 * smooth / MU, STEPS) - 1
    steep = (
        2 * widest
    )  # no weights exceed widest / MU, as steps are convex combinations
    best, value = minimum(parts)
    noise = np.mean([gradients(best, *part).var(axis=0).sum() for part in parts])
    noise += steep**2  # bounds the variance at any other weights
    gap = value - np.mean([minimum([part])[1] for part in parts])
    spread = noise / len(parts) + 6 * smooth * gap + 8 * (STEPS - 1) ** 2 * steep**2
    return smooth / MU, gamma, spread, best


@pytest.mark.slow
def test_the_branches_of_a_convex_problem_approach_their_optimum_as_1_over_t():
    x, y = data()
    flat = np.arange(N * ROWS)
    sizes, none = np.full(N, ROWS), np.zeros(N, np.int64)
    tests = N * ROWS + np.arange(N)
    partition = build(flat, sizes, tests, none + 1, flat[:0], none)
    dataset = Dataset("convex", x, y, len(y), C, lambda x: x)
    held = [[i for i in range(N) if c in OWN[i]] for c in range(C)]
    wide = np.hstack([x.astype(float), np.ones((len(x), 1))])
    rows = [np.arange(i * ROWS, (i + 1) * ROWS) for i in range(N)]
    parts = [
        [(wide[rows[i]], (y[rows[i]] == c) * 1.0) for i in held[c]] for c in range(C)
    ]
    known = [constants(part) for part in parts]
    gamma = max(found[1] for found in known)  # one schedule for all branches

    # The learning rate of a round is the number of its first step, plus gamma.
    def optimizer(first):
        steps = optax.scale_by_schedule(lambda s: -2 / (MU * (first + s)))
        return optax.chain(optax.add_decayed_weights(MU), steps)

    federation = federate(dataset, partition)
    task = simulate.task(
        dataset,
        federation,
        model(nets.linear, (K,), C),
        lr=gamma + 1,
        batch_size=BATCH,
        steps=STEPS,
        epochs=None,
        optimizer=optimizer,
    )
    program = simulate.program(pfedc, task, {"task_loss": "batch"}, checked=False)

    def run(key):
        def one(state, t):
            lr = gamma + 1 + t * STEPS
            state, _ = program.round(
                Context(key, program.traced | {"lr": lr}, federation, t),
                state,
                jnp.bool(False),
            )
            return state, state.server["head"]

        start = program.init(key, program.traced)
        _, heads = jax.lax.scan(one, start, jnp.arange(ROUNDS))
        return start.server["head"], heads

    start, heads = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), SEEDS))
    t = (1 + np.arange(ROUNDS)) * STEPS
    for c, (kappa, _, spread, best) in enumerate(known):
        w0, w = (
            np.concatenate([h["kernel"][..., c], h["bias"][..., [c]]], axis=-1)
            for h in (start, heads)
        )
        first = np.mean(np.sum((w0 - best) ** 2, axis=-1))
        distance = np.mean(np.sum((w - best) ** 2, axis=-1), axis=0)  # [ROUNDS]
        bound = (2 * spread / MU + MU * (gamma + 1) / 2 * first) / (gamma + t)
        assert (MU / 2 * distance <= kappa * bound).all()
        # as 1/T: the logarithms fall with slope -1, over the later rounds
        late = slice(ROUNDS // 8, None)
        slope = np.polyfit(np.log(gamma + t[late]), np.log(distance[late]), 1)[0]
        assert -1.5 < slope < -0.7, slope
