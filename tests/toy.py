"""The toy federation every method must learn, and one cache of compiled rounds for the tests of a worker."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fedjax_pfl import models, simulate, traffic
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.placement import make_mesh
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


def images(x):
    """The toy's inputs [B, 6] as images [B, 6, 6, 1] in (-1, 1): every row is the one above, rotated."""
    return jnp.tanh(x / 2)[:, (np.arange(6)[:, None] + np.arange(6)) % 6, None].astype(jnp.float32)


SMALL: dict = {"privacy_pfedc": {"backend": "plain"}}
SMALL["feddva"] = {"hidden": 8, "latent": 4, "personal": 4, "head": "personal", "cls": 30.0}
METHODS = ALGORITHMS | {name: functools.partial(ALGORITHMS[name], **options) for name, options in SMALL.items()}
# Adam would turn the zero gradient of a bias before a batch norm, which is rounding, into steps of full length.
TASKS: dict = {
    "feddva": {"prepare": images, "optimizer": lambda lr: optax.chain(optax.clip_by_global_norm(3.0), optax.sgd(lr))}
}
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
        "models": (models.model(NETS[net], SHAPE, C, bn_stats=bn_stats),),
        "architecture": np.zeros(N, np.int32),
        "sizes": np.asarray(f.train.size),
        "class_counts": np.asarray(f.class_counts),
        "num_classes": C,
        "input": jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        "prepare": lambda x: x.astype(jnp.float32),
        "lr": 0.1,
        "optimizer": optax.sgd,
        "batch_size": 4,
        "epochs": 2,
        "rounds": 3,
    }
    if "model" in options:
        options["models"] = (options.pop("model"),)
    return Task(**(given | options))


def net_of(method: str) -> str:
    return {"fedbn": "norm", "mocha": "linear"}.get(method, "mlp")


@functools.cache
def method_task(method: str) -> Task:
    return task(net_of(method), **TASKS.get(method, {}))


@functools.cache
def compiled_round(method: str, width: int = 1, devices: int = 1):
    """One jitted round of a method: (key, numbers, federation, state, ids, active, t, evaluated)."""
    mesh = make_mesh(devices)
    given = method_task(method)
    defaults = simulate.hyperparameters(METHODS[method])
    static = {k: v for k, v in defaults.items() if not isinstance(v, float)}

    @jax.jit
    def run(key, numbers, f, state, ids, active, t, evaluated):
        floats = {k: v for k, v in numbers.items() if k != "lr"}
        algorithm = METHODS[method](given._replace(lr=numbers["lr"]), **static, **floats)
        cohort = Cohort(f, given, ids, active, key=key, round=t, evaluated=evaluated, width=width, mesh=mesh)
        new, metrics = algorithm.round(key, state, cohort)
        return new, metrics, (algorithm.traffic or traffic.uploads)(state, cohort, metrics)

    return run


@functools.cache
def start(method: str) -> State:
    """A state in which everybody has trained and the clients differ, so that mixing them up would show."""
    state = jax.jit(METHODS[method](method_task(method)).init)(jax.random.key(1))
    on = jnp.ones(4, bool)
    for t, ids in enumerate((np.array([1, 2, 3, 4], np.int32), np.array([0, 1, 2, 3], np.int32))):
        here = State(state.server, rows(state.clients, ids))
        args = (jax.random.key(3), numbers(method), federation(), here, ids, on, jnp.int32(t), jnp.bool(False))
        new = compiled_round(method)(*args)[0]
        state = State(new.server, jax.tree.map(lambda x, n, ids=ids: _put(x, ids, n), state.clients, new.clients))
    rng = np.random.default_rng(2)
    real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # a counter stays what it is
    noisy = lambda x: jnp.asarray(x + 0.1 * rng.normal(size=x.shape).astype(x.dtype) if real(x) else x)
    return State(state.server, jax.tree.map(noisy, state.clients))


def _put(x, ids, new) -> np.ndarray:
    x = np.array(x)
    x[ids] = np.asarray(new)
    return x


class Trained:
    """Some rounds of an experiment; what was not asked for is not compiled."""

    def __init__(self, steps, program, key, federation, begin, rounds):
        self._steps, self._args, self.begin = steps, (key, program.numbers, federation), begin
        self.state, self.rounds, history = begin, rounds, []
        for t in range(rounds):
            args = (*self._args, self.state, jnp.int32(t), jnp.bool(True))
            self.state, metrics = steps["round"](*args)
            history.append(jax.device_get(metrics))
        self.metrics = jax.tree.map(lambda *x: np.stack(x), *history) if history else None  # [rounds, ...]

    @functools.cached_property
    def last(self):
        """The scores after the last round, {name: [N]}."""
        return self._steps["evaluate"](*self._args, self.state, jnp.int32(self.rounds))

    def __iter__(self):
        return iter((self.state, self.metrics, self.last))


_compiled: dict = {}


def train(method, given: Task, rounds: int = 3, key=None, federation_=None, begin=None, **hparams) -> Trained:
    """Runs rounds of a method (a name or a factory) one by one, each scored after local training.

    Its parts are compiled once for each task and each choice of what is not a float: other floats need nothing new.
    Together they take half of what compiling `simulate.curve` takes.
    """
    factory = METHODS[method] if isinstance(method, str) else method
    program = simulate.program(factory, given, hparams, checked=False)  # as it is traced, which is soon
    values = simulate.hyperparameters(factory) | hparams
    fixed = sorted((k, repr(v)) for k, v in values.items() if k not in program.numbers)
    where = (factory, id(given), *program.numbers, *fixed)
    if where not in _compiled:
        jitted = {name: jax.jit(getattr(program, name)) for name in ("init", "round", "evaluate")}
        _compiled[where] = (given, jitted)  # with the task, so that its id stays its own
    steps, key = _compiled[where][1], jax.random.key(5) if key is None else key
    begin = steps["init"](key, program.numbers) if begin is None else begin
    return Trained(steps, program, key, federation() if federation_ is None else federation_, begin, rounds)


def rows(tree, ids):
    """The rows of a tree, on the host: an indexing that compiles nothing."""
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(ids)], tree)


def numbers(method: str) -> dict[str, Any]:
    defaults = simulate.hyperparameters(METHODS[method])
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
