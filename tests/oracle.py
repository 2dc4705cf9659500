"""A two-layer network, its gradient and its minibatches in plain NumPy: whole rounds
are written out with them."""

import jax
import jax.numpy as jnp
import numpy as np
import toy

from fedjax_pfl import keys, local_training


def variables(w) -> list[np.ndarray]:
    """(kernel, bias) of the toy network's hidden layer and of its head."""
    layer = w["body"]["layers"]["0"]
    return [
        np.asarray(x, np.float64)
        for x in (
            layer["kernel"],
            layer["bias"],
            w["head"]["kernel"],
            w["head"]["bias"],
        )
    ]


def forward(w, x):
    """Features and logits."""
    h = np.maximum(x @ w[0] + w[1], 0)
    return h, h @ w[2] + w[3]


def softmax(z):
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def by_logits(z, y):
    """The gradient of the mean cross entropy by the logits."""
    return (softmax(z) - np.eye(z.shape[1])[y]) / len(y)


def cross_entropy(z, y):
    return -np.mean(np.log(softmax(z)[np.arange(len(y)), y]))


def backward(w, x, dz, dh=0):
    """The gradient of a loss, from its gradients by the logits and by the features."""
    h, _ = forward(w, x)
    dh = (dz @ w[2].T + dh) * (h > 0)
    return [x.T @ dh, dh.sum(axis=0), h.T @ dz, dz.sum(axis=0)]


def gradient(w, x, y):
    return backward(w, x, by_logits(forward(w, x)[1], y))


def batches(f, i, key, task, count=1):
    """The minibatches of client i in a round of this key: a list of steps, each of
    `count` pairs (x, y)."""
    key = jax.random.fold_in(jax.random.fold_in(key, 0), i)
    size, own = int(f.train.size[i]), np.asarray(f.train.index[i])
    x, y, steps = np.asarray(f.examples.x, np.float64), np.asarray(f.examples.y), []
    for epoch in range(task.epochs):
        first = jax.random.fold_in(keys.fold(key, keys.Client.SHUFFLE), epoch)
        draws = [first, *(jax.random.fold_in(first, k) for k in range(1, count))]
        orders = [
            own[np.asarray(local_training.shuffle(draw, len(own), size))[:size]]
            for draw in draws
        ]
        for s in range(
            0,
            size - size % task.batch_size if task.drop_last else size,
            task.batch_size,
        ):
            rows = [order[s : s + task.batch_size] for order in orders]
            steps.append([(x[row], y[row]) for row in rows])
    return steps


def mean(models, weights):
    return [
        sum(p * w[k] for p, w in zip(weights, models, strict=True)) / sum(weights)
        for k in range(len(models[0]))
    ]


def close(got, expected) -> None:
    """Variables of the program against arrays of an oracle."""
    for a, b in zip(variables(got), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def federation():
    """The toy federation, whose client 3 has no training examples."""
    f = toy.federation()
    train = f.train._replace(size=f.train.size.at[3].set(0))
    return f._replace(train=train, class_counts=f.class_counts.at[3].set(0))


ROUNDS = [[0, 1, 2, 3, 4], [1, 3, 4]]  # who takes part


def run(factory, task, **hparams):
    """Runs ROUNDS: returns their keys, the states before and after each, and their
    metrics."""
    algorithm, f, ids = (
        factory(task, **hparams),
        federation(),
        jnp.arange(toy.N, dtype=jnp.int32),
    )

    @jax.jit
    def step(key, state, active):
        return toy.one_round(
            algorithm, key, state, toy.cohort(task, ids, active, f, key)
        )

    states, rounds, reports = (
        [algorithm.init(jax.random.key(0))],
        [jax.random.key(10 + t) for t in range(2)],
        [],
    )
    for key, here in zip(rounds, ROUNDS, strict=True):
        state, metrics = step(key, states[-1], jnp.isin(ids, jnp.array(here)))
        states.append(state)
        reports.append(jax.device_get(metrics))
    return rounds, states, reports
