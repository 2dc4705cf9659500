"""The toy federation every method must learn, and one cache of compiled rounds for the tests of a worker."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fedjax_pfl import models, simulate, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.clients import Cohort, make_mesh
from fedjax_pfl.models import layers, nets
from fedjax_pfl.types import Examples, Federation, Rows, State, Task

N, C, SHAPE = 5, 4, (6,)
SIZES = np.array([7, 19, 1, 12, 4])  # training examples: uneven, one client with a single example
OWN = [(0, 1), (1, 2), (3,), (2, 0), (0, 1, 2, 3)]  # the classes of each client


class NormNet(nnx.Module):
    """A tiny network with batch norm."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner, self.norm = layers.linear(SHAPE[0], 8, rngs), layers.BatchNorm(8, rngs=rngs)

    def __call__(self, x, mask=None, train=False):
        return jax.nn.relu(self.norm(self.inner(x), mask, train))


def norm_net(input_shape, num_classes, rngs):
    return nets.Net(NormNet(rngs), layers.linear(8, num_classes, rngs))


def tiny_mlp(input_shape, num_classes, rngs):
    return nets.mlp(input_shape, num_classes, rngs, hidden=8)


NETS = {"mlp": tiny_mlp, "norm": norm_net, "linear": nets.linear}


def federation(width: int = 19, seed: int = 0) -> Federation:
    """N clients over shared Gaussian blobs; `width` is the padded length of the training rows."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(C, *SHAPE)) * 2
    test = np.maximum(SIZES // 3, 2)
    y = np.concatenate([np.resize(own, n + m) for own, n, m in zip(OWN, SIZES, test, strict=True)])
    x = (centres[y] + rng.normal(size=(len(y), *SHAPE))).astype(np.float32)
    x = np.concatenate([x, np.zeros((1, *SHAPE), np.float32)])  # the last example is nobody's: padding points to it
    y = np.append(y, 0).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(SIZES + test)])[:-1]

    def rows(first, sizes, width):
        index = np.full((N, width), len(y) - 1, np.int32)
        for i in range(N):
            index[i, : sizes[i]] = first[i] + np.arange(sizes[i])
        return Rows(jnp.asarray(index), jnp.asarray(sizes, jnp.int32))

    counts = np.stack([np.bincount(y[s : s + n], minlength=C) for s, n in zip(starts, SIZES, strict=True)])
    nothing = Rows(jnp.zeros((N, 0), jnp.int32), jnp.zeros(N, jnp.int32))
    return Federation(
        Examples(jnp.asarray(x), jnp.asarray(y)),
        rows(starts, SIZES, width),
        nothing,
        rows(starts + SIZES, test, int(test.max())),
        jnp.asarray(counts, jnp.int32),
    )


def task(net: str = "mlp", **options: Any) -> Task:
    """Local work of two epochs in batches of 4 on the toy federation."""
    f = federation()
    bn_stats = options.get("bn_stats", "aggregate")
    given = {
        "model": models.model(NETS[net], SHAPE, C, bn_stats=bn_stats),
        "sizes": np.asarray(f.train.size),
        "class_counts": np.asarray(f.class_counts),
        "num_classes": C,
        "input_shape": SHAPE,
        "prepare": lambda x: x.astype(jnp.float32),
        "lr": 0.1,
        "optimizer": optax.sgd,
        "batch_size": 4,
        "epochs": 2,
        "rounds": 3,
    }
    return Task(**(given | options))


def net_of(method: str) -> str:
    return {"fedbn": "norm", "mocha": "linear"}.get(method, "mlp")


@functools.cache
def method_task(method: str) -> Task:
    return task(net_of(method))


@functools.cache
def compiled_round(method: str, width: int = 1, devices: int = 1):
    """One jitted round of a method: (key, numbers, federation, state, ids, active, t, evaluated)."""
    mesh = make_mesh(devices)
    given = method_task(method)
    defaults = simulate.hyperparameters(ALGORITHMS[method])
    static = {k: v for k, v in defaults.items() if not isinstance(v, float)}

    @jax.jit
    def run(key, numbers, f, state, ids, active, t, evaluated):
        floats = {k: v for k, v in numbers.items() if k != "lr"}
        algorithm = ALGORITHMS[method](given._replace(lr=numbers["lr"]), **static, **floats)
        cohort = Cohort(f, given.prepare, ids, active, key=key, round=t, evaluated=evaluated, width=width, mesh=mesh)
        new, metrics = algorithm.round(key, state, cohort)
        return new, metrics, algorithm.traffic(state, cohort, metrics)

    return run


@functools.cache
def start(method: str) -> State:
    """A state in which everybody has trained and the clients differ, so that mixing them up would show."""
    state = ALGORITHMS[method](method_task(method)).init(jax.random.key(1))
    on = jnp.ones(4, bool)
    for t, ids in enumerate((jnp.array([1, 2, 3, 4], jnp.int32), jnp.array([0, 1, 2, 3], jnp.int32))):
        rows = State(state.server, trees.gather(state.clients, ids))
        args = (jax.random.key(3), numbers(method), federation(), rows, ids, on, jnp.int32(t), jnp.bool(False))
        new = compiled_round(method)(*args)[0]
        state = State(new.server, trees.scatter(state.clients, ids, new.clients, on))
    noise = [jax.random.fold_in(jax.random.key(2), i) for i in range(len(jax.tree.leaves(state.clients)))]
    leaves, structure = jax.tree.flatten(state.clients)
    real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # a counter stays what it is
    leaves = [x + 0.1 * jax.random.normal(k, x.shape) if real(x) else x for x, k in zip(leaves, noise, strict=True)]
    return State(state.server, jax.tree.unflatten(structure, leaves))


def numbers(method: str) -> dict[str, Any]:
    defaults = simulate.hyperparameters(ALGORITHMS[method])
    return {"lr": 0.1} | {k: v for k, v in defaults.items() if isinstance(v, float)}


def assert_same(a, b) -> None:
    """Equal trees, bit for bit; NaN equals NaN."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_close(a, b, tolerance: float = 1e-6) -> None:
    """Equal trees to rounding."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)
