"""FedGen: its limit, a client by hand, and the training of the generator."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import oracle

from fedjax_pfl import keys, models
from fedjax_pfl.algorithms.fedgen import Draw, Generator

SMALL = {"noise": 3, "hidden": 6, "server_steps": 5}
NETWORK = models.network(lambda rngs: Generator(7, 6, 8, rngs), bn_stats="batch")


def generated(net, key):
    """A batch of four features and their labels."""
    prior = np.asarray(by_hand.TASK.class_counts).sum(axis=0)
    prior = jnp.log(jnp.asarray(prior, jnp.float32))
    y = jax.random.categorical(keys.fold(key, Draw.LABELS), prior, shape=(4,))
    z = jax.random.uniform(keys.fold(key, Draw.NOISE), (4, 3))
    x = jnp.concatenate([z, jax.nn.one_hot(y, 4)], axis=1)
    w = {"params": net, "stats": {}}
    h, _ = NETWORK.apply(w, x, mask=jnp.ones(4, bool), train=True)
    return np.asarray(h, float), np.asarray(y)


def test_without_generated_features_it_is_fedavg():
    by_hand.same_server("fedgen", "fedavg", alpha=0.0, **SMALL)


def test_a_client_by_hand():
    """Client 2, alone, with one example and so one step per epoch."""
    alpha = 0.7
    states, _ = by_hand.run("fedgen", rounds=[[2]], alpha=alpha, **SMALL)
    w, net = oracle.variables(states[0].server["w"]), states[0].server["net"]
    key = jax.random.fold_in(jax.random.fold_in(by_hand.KEYS[0], 0), 2)
    for s, (x, y) in enumerate(by_hand.batches(2, 0)):
        step = jax.random.fold_in(keys.fold(key, keys.Client.STEP), s)
        h, label = generated(net, keys.fold(step, keys.Step.LOSS))
        dz = alpha * oracle.by_logits(h @ w[2] + w[3], label)
        g = oracle.gradient(w, x, y)
        g = [*g[:2], g[2] + h.T @ dz, g[3] + dz.sum(axis=0)]
        w = [a - by_hand.LR * b for a, b in zip(w, g, strict=True)]
    oracle.close(states[1].server["w"], w)


def test_the_generator_lowers_the_loss_of_the_mean_head():
    states, _ = by_hand.run("fedgen", alpha=0.7, **SMALL)
    head = oracle.variables(states[2].server["w"])[2:]
    values = []
    for state in (states[0], states[2]):
        h, y = generated(state.server["net"], jax.random.key(3))
        values.append(oracle.cross_entropy(h @ head[0] + head[1], y))
    assert values[1] < values[0]
