"""Tasks of the synthetic federation that every method must learn, and runs of a few
rounds."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fedjax_pfl import models, simulate, testing, traffic, trees
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import method as engine_method
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.placement import Layout
from fedjax_pfl.models import layers, nets
from fedjax_pfl.testing import synthetic
from fedjax_pfl.testing.synthetic import OWN, SHAPE, SIZES, C, N  # noqa: F401  (the tests take them here)
from fedjax_pfl.types import (
    Algorithm,
    Context,
    Federation,
    Method,
    Metrics,
    Model,
    RunState,
    State,
    Task,
    Traffic,
)

PUBLIC = 11  # public examples
POOL = jax.ShapeDtypeStruct((PUBLIC, *SHAPE), jnp.float32)
# methods that need them
ON_PUBLIC = ("fedmd", "sim_pfd", "topk_pfd", "mnfl_het", "feddf", "pfeddf")


class NormNet(nnx.Module):
    """A tiny network with batch norm."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner, self.norm = (
            layers.linear(SHAPE[0], 8, rngs),
            layers.BatchNorm(8, rngs=rngs),
        )

    def __call__(self, x, mask=None, train=False):
        return jax.nn.relu(self.norm(self.inner(x), mask, train))


class DropNet(nnx.Module):
    """A linear layer under dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner, self.drop = layers.linear(SHAPE[0], 8, rngs), nnx.Dropout(0.5)

    def __call__(self, x, train=False, rngs=None):
        return self.drop(self.inner(x), deterministic=not train, rngs=rngs)


def norm_net(input_shape, num_classes, rngs):
    return nets.Net(NormNet(rngs), layers.linear(8, num_classes, rngs))


def drop_net(input_shape, num_classes, rngs):
    return nets.Net(DropNet(rngs), layers.linear(8, num_classes, rngs))


def tiny_mlp(input_shape, num_classes, rngs):
    return nets.mlp(input_shape, num_classes, rngs, hidden=8)


def small_mlp(input_shape, num_classes, rngs):
    return nets.mlp(input_shape, num_classes, rngs, hidden=5)


def images(x):
    """The toy's inputs [B, 6] as images [B, 6, 6, 1] in (-1, 1): every row is the one
    above, rotated."""
    return jnp.tanh(x / 2)[:, (np.arange(6)[:, None] + np.arange(6)) % 6, None].astype(
        jnp.float32
    )


SMALL: dict = {"privacy_pfedc": {"backend": "plain"}}
SMALL["feddva"] = {
    "hidden": 8,
    "latent": 4,
    "personal": 4,
    "head": "personal",
    "cls": 30.0,
}
SMALL["feddbe"] = {"kappa": 2.0}  # the default is for wide features
SMALL["fedtgp"] = {"lam": 0.1, "server_epochs": 5}
SMALL["fedgen"] = {"noise": 8, "hidden": 8, "server_steps": 5}
SMALL["fedl2g"] = {"warmup": 0}
SMALL["floco"] = {"endpoints": 3}
SMALL["ccvr"] = {"samples": 5}
METHODS = ALGORITHMS | {
    name: functools.partial(ALGORITHMS[name], **options)
    for name, options in SMALL.items()
}
# Adam would turn the zero gradient of a bias before a batch norm, which is rounding,
# into steps of full length.
TASKS: dict = {
    "feddva": {
        "prepare": images,
        "optimizer": lambda lr: optax.chain(
            optax.clip_by_global_norm(3.0), optax.sgd(lr)
        ),
    }
}
NETS = {"mlp": tiny_mlp, "norm": norm_net, "dropout": drop_net, "linear": nets.linear}
LORA = models.lora(3, where="dense")


def slow(*values: Any):
    """A case of a parametrised test that is like another one, for `pytest -m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


# the contract has rounds with statistics that stay local, test_reductions.py with
# aggregated ones
each_bn_stats = pytest.mark.parametrize(
    "bn_stats", [*map(slow, ("aggregate", "local", "batch"))]
)


def federation(width: int = 19, seed: int = 0) -> Federation:
    """The synthetic federation with a pool of public examples."""
    return synthetic.federation(width, seed, public=POOL)


def task(net: str = "mlp", **options: Any) -> Task:
    """Local work of two epochs in batches of 4 on the toy federation; equal options
    give the same Task, so that what `train` compiles is for all files."""
    plain = all(x is None or isinstance(x, int | float | str) for x in options.values())
    return (_task if plain else _task.__wrapped__)(net, **options)


@functools.cache
def _model(net: Any, bn_stats: str) -> Model:
    if net == "lora":
        return models.adapted(tiny_mlp, LORA, SHAPE, C)
    return models.model(net, SHAPE, C, bn_stats=bn_stats)


@functools.cache
def _task(net: str, **options: Any) -> Task:
    bn_stats = options.get("bn_stats", "aggregate")
    if "model" in options:
        options["models"] = (options.pop("model"),)
    given, small = (
        {"models": (_model(NETS.get(net, net), bn_stats),)},
        _model(small_mlp, bn_stats),
    )
    return testing.task(**(given | {"shared": small, "public": POOL} | options))


def net_of(method: str) -> str:
    nets = {"fedbn": "norm", "fedap": "norm", "mocha": "linear"}
    nets |= {"hetlora": "lora", "fedsa_lora": "lora", "flora": "lora"}
    return nets.get(method, "mlp")


@functools.cache
def method_task(method: str) -> Task:
    return fitted(method, net_of(method), public=POOL if method in ON_PUBLIC else None)


def fitted(method: str, net: str, **options: Any) -> Task:
    """A task that the method can have: FedDVA's inputs and optimizer, pFedAFM's shared
    model."""
    given = task(net, **(options | TASKS.get(method, {})))
    # of one feature width
    return given._replace(shared=given.models[0]) if method == "pfedafm" else given


def cohort(
    task: Task, ids, active=True, f=None, key=None, t=0, width=1, **more
) -> Cohort:
    """Returns the cohort of a first round; `more` are other fields of Cohort."""
    ids = jnp.asarray(ids, jnp.int32)
    here = jnp.broadcast_to(jnp.asarray(active), ids.shape)
    given = {"evaluated": jnp.bool(False)} | more
    given["layout"] = Layout((len(ids),), width)
    key = jax.random.key(0) if key is None else key
    context = Context(key, {}, federation() if f is None else f, jnp.asarray(t))
    return keyed(Cohort(context, task, ids, here, **given), key)


def keyed(cohort: Cohort, key) -> Cohort:
    """Returns the cohort with `key` as the parent of its clients' keys, as tests by
    hand have it."""
    cohort._key = key
    return cohort


def round_of(made: Algorithm | Method, given: Task | None = None):
    """Returns (key, State, Cohort) -> State, Metrics of what a factory returned."""
    runner = engine_method.run(made, task() if given is None else given, {})

    def run(key, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        new, metrics = runner.round(key, RunState(state), cohort)
        return new.method, metrics

    return run


def written_out(made: Method, given: Task) -> Algorithm:
    """Returns a method as one that writes its own round."""

    def sent(state, cohort, metrics):
        return traffic.both_ways(cohort, state.server)

    return Algorithm(made.init, round_of(made, given), made.predict, made.score, sent)


def one_round(made: Algorithm | Method, key, state: State, cohort: Cohort):
    """Returns the state of all clients and the metrics after a round of a cohort."""
    rows = State(state.server, trees.gather(state.clients, cohort.ids))
    new, metrics = round_of(made)(key, rows, cohort)
    at = cohort.ids, new.clients, cohort.active
    return State(new.server, trees.scatter(state.clients, *at)), metrics


def sent(made: Algorithm | Method, cohort: Cohort) -> Traffic:
    """Returns what a round of this cohort sends."""
    state = jax.eval_shape(made.init, jax.random.key(0))
    runner = engine_method.run(made, task(), {})
    return runner.traffic(RunState(state), cohort, Metrics())


class Trained:
    """Some rounds of an experiment; what was not asked for is not compiled."""

    def __init__(self, steps, program, key, federation, begin, rounds):
        self._steps, self.begin = steps, begin
        self._context = lambda t: Context(key, program.traced, federation, jnp.int32(t))
        self.state, self.rounds, history = begin, rounds, []
        for t in range(rounds):
            args = self._context(t), self.state, jnp.bool(True)
            self.state, metrics = steps["round"](*args)
            history.append(jax.device_get(metrics))
        # [rounds, ...]
        self.metrics = (
            jax.tree.map(lambda *x: np.stack(x), *history) if history else None
        )

    @functools.cached_property
    def last(self):
        """The scores after the last round, {name: [N]}."""
        return self._steps["evaluate"](self._context(self.rounds), self.state)

    def outputs(self, examples: int = 4, client: int = 1):
        """Returns a client's predictions after the last round for the first examples."""
        context = self._context(self.rounds)
        x = context.federation.examples.x[:examples]
        return self._steps["predict"](context, self.state, client, x)

    def __iter__(self):
        return iter((self.state, self.metrics, self.last))


_compiled: dict = {}


def train(
    method,
    given: Task,
    rounds: int = 3,
    key=None,
    federation_=None,
    begin=None,
    options=None,
    **hparams,
) -> Trained:
    """Runs rounds of a method (a name or a factory) one by one, each scored after local
    training.

    Its parts are compiled once for each task and each choice of what is not a float:
    other floats need nothing new. Together they take half of what compiling
    `simulate.curve` takes.

    Args:
      begin: a RunState, or a State of the method.
      options: `uploads` and `server` of `simulate.program`.
    """
    options = options or {}
    factory = METHODS[method] if isinstance(method, str) else method
    program = simulate.program(factory, given, hparams, checked=False, **options)
    values = simulate.hyperparameters(factory) | hparams
    fixed = sorted((k, repr(v)) for k, v in values.items() if k not in program.traced)
    where = (factory, id(given), repr(options), *program.traced, *fixed)
    if where not in _compiled:
        jitted = {
            name: jax.jit(getattr(program, name))
            for name in ("round", "evaluate", "predict")
        }
        # init as it is: its few operations are those of other programs, and compiled
        # with them
        # with the task, so that its id stays its own
        _compiled[where] = (given, jitted | {"init": program.init})
    steps, key = _compiled[where][1], jax.random.key(5) if key is None else key
    begin = steps["init"](key, program.traced) if begin is None else begin
    begin = RunState(begin) if isinstance(begin, State) else begin
    return Trained(
        steps,
        program,
        key,
        simulate.with_frozen(
            federation() if federation_ is None else federation_, given
        ),
        begin,
        rounds,
    )


# what a method returns is checked when it is traced, which in a test is soon
program = functools.partial(simulate.program, checked=False)


def rows(tree, ids):
    """The rows of a tree, on the host: an indexing that compiles nothing."""
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(ids)], tree)


def assert_same(a, b) -> None:
    """Equal trees, bit for bit; NaN equals NaN."""
    chex.assert_trees_all_equal(_on_host(a), _on_host(b))


def assert_finite(tree) -> None:
    """No NaN and no infinity. Scores cannot have them: a prediction of NaN counts as
    wrong."""
    chex.assert_tree_all_finite(_on_host(tree))


def assert_close(a, b, tolerance: float = 1e-6) -> None:
    """Equal trees to rounding."""
    chex.assert_trees_all_close(
        _on_host(a), _on_host(b), rtol=tolerance, atol=tolerance
    )


def _on_host(tree):
    """Arrays of NumPy, for lists and numbers are compared with arrays, too."""
    return jax.tree.map(np.asarray, tree)
