"""Tests of wrong calls: each raises one sentence before anything is compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import nnx

from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import datasets, loading, partitioners
from fedjax_pfl.data.federate import federate, others
from fedjax_pfl.data.partition import class_counts, of_clients
from fedjax_pfl.data.sources import toys
from fedjax_pfl.engine import unseen, validate
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import nets
from fedjax_pfl.types import Context, Model, State, Subset

NAN, INF = float("nan"), float("inf")
PARTS = ("train", "val", "test")
KEYS = jax.random.split(jax.random.key(0), 2)


@functools.cache
def blobs() -> datasets.Dataset:
    return toys.synthetic(200, toy.C, toy.SHAPE)


@functools.cache
def partitioned():
    return partitioners.partition(blobs(), "iid", num_clients=5, seed=0)


@functools.cache
def net(classes: int = toy.C, shape: tuple = toy.SHAPE):
    return models.model("linear", shape, classes)


@functools.cache
def normed():
    return models.model(toy.norm_net, toy.SHAPE, toy.C)


def make_task(dataset=None, counts=None, model=None, **options):
    dataset = blobs()._replace(**(dataset or {}))
    counts = class_counts(partitioned(), blobs()) if counts is None else counts
    return simulate.task(
        dataset, counts, model or net(), **({"lr": 0.1, "batch_size": 4} | options)
    )


def make_public(**changed):
    return simulate.with_public(given_task(), blobs()._replace(**changed))


@functools.cache
def given_task():
    return make_task(epochs=1, participation=0.6)


def make_program(factory=ALGORITHMS["ditto"], task=None, **options):
    return simulate.program(factory, given_task()._replace(**(task or {})), **options)


@functools.cache
def federation():
    return federate(blobs(), partitioned())


@functools.cache
def compiled():
    return make_program()


def run(change=lambda f: f, **options):
    given = {"key": KEYS[0], "rounds": 1} | options
    return list(
        simulate.rounds(compiled(), given.pop("key"), change(federation()), **given)
    )


def whole_curve(change=lambda f: f, **options):
    given = {"key": jax.random.key(0), "traced": {}, "rounds": 1} | options
    return simulate.curve(
        compiled(), given.pop("key"), given.pop("traced"), change(federation()), **given
    )


@functools.cache
def on_host():
    half = given_task()._replace(participation=(0.5, 0.5))
    return simulate.program("fedavg", half, storage="host")


def ask(id=0, x=None):
    program, key = compiled(), jax.random.key(0)
    state = jax.eval_shape(program.init, key, program.traced)
    return program.predict(
        Context(key, program.traced, federation(), 0),
        state,
        id,
        blobs().x[:2] if x is None else x,
    )


def run_on_host(change):
    program, key = (
        simulate.program(
            "fedper", given_task()._replace(participation=(0.5, 0.5)), storage="host"
        ),
        jax.random.key(0),
    )
    shapes = jax.eval_shape(
        simulate.program("fedper", given_task()).init, key, program.traced
    )
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return next(
        simulate.rounds(
            program, key, federation(), rounds=1, eval_every=0, state=change(state)
        )
    )


@functools.cache
def scorer():
    return unseen.scorer(
        "fedavg", given_task(), unseen.among(given_task(), np.arange(2))
    )


def score_unseen(server=None, rows=slice(2)):
    of = lambda part: Subset(
        *(np.asarray(x)[rows] for x in getattr(federation(), part))
    )
    return scorer()(
        jax.random.key(0),
        federation()._replace(**{part: of(part) for part in PARTS}),
        server,
        1,
    )


def by_hand(**changed):
    """A model without Flax, with some of it otherwise."""
    apply = lambda v, x, mask=None, train=False, key=None: (
        features(v, x)[0] @ v["head"]["w"],
        v["stats"],
    )
    features = lambda v, x, mask=None, train=False, key=None: (
        x @ v["body"]["w"],
        v["stats"],
    )
    init = lambda key: {
        "body": {"w": jnp.ones((6, 3))},
        "head": {"w": jnp.ones((3, toy.C))},
        "stats": {},
    }
    mask = {"body": {"w": False}, "head": {"w": False}, "stats": {}}
    return Model(init, features, lambda w, h: h @ w["w"], apply, mask, 3)._replace(
        **changed
    )


def unseen_of(method):
    return unseen.scorer(method, given_task(), given_task())


def run_short():
    program = make_program(task={"drop_last": True, "batch_size": 99})
    next(simulate.rounds(program, jax.random.key(0), federation(), rounds=1))


def made_of(features, takes, last=lambda h: h):
    """A network whose head takes another number of features, or does more than it
    should."""

    class Head(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(takes, toy.C, rngs=rngs)

        def __call__(self, h):
            return last(self.linear(h))

    make = lambda shape, classes, rngs: nets.Net(
        nnx.Linear(*shape, features, rngs=rngs), Head(rngs)
    )
    return models.model(make, toy.SHAPE, toy.C)


def divide(spec="iid", dataset=None, **options):
    return partitioners.partition(
        blobs()._replace(**(dataset or {})),
        spec,
        **({"num_clients": 5, "seed": 0} | options),
    )


def rows_of(part, change):
    return lambda f: f._replace(**{part: change(getattr(f, part))})


def other_clients(f):
    return f._replace(
        **{part: Subset(*(x[:4] for x in getattr(f, part))) for part in PARTS}
    )


def spoiled(value):
    """The inputs with a wrong number in row 7."""
    x = blobs().x.astype(np.float64)
    x[7, 3] = value
    return x


def give(change=lambda p: p, dataset=None, public=None, **fields):
    dataset = blobs()._replace(**(dataset or {}))
    pool = None if public is None else blobs()._replace(**public)
    return federate(dataset, change(partitioned()._replace(**fields)), public=pool)


def moved(part, value, client=2):
    """A part's rows with another first one of a client's."""
    index = getattr(partitioned(), part).copy()
    index[client, 0] = value
    return index


def without(part, client=2):
    return np.where(np.arange(5) == client, 0, getattr(partitioned(), part))


y, p = blobs().y, partitioned()
WRONG = [
    (make_task, {"dataset": {"y": y[:-1]}}, "y must be 200 integer labels"),
    (make_task, {"dataset": {"x": blobs().x[:150]}}, "y must be 150 integer labels"),
    (
        make_task,
        {"dataset": {"num_train": 201}},
        "`num_train` must be in [1, 200], got 201",
    ),
    (make_task, {"dataset": {"num_train": -1}}, "`num_train` must be in"),
    (
        make_task,
        {"dataset": {"num_train": 10.5}},
        "`num_train` must be an integer, got 10.5",
    ),
    (make_task, {"dataset": {"y": y + 1}}, "labels must be below num_classes=4, got 4"),
    (make_task, {"dataset": {"y": y - 1}}, "y must be labels counted from 0, got -1"),
    (
        make_task,
        {"dataset": {"num_classes": 2}},
        "labels must be below num_classes=2, got 3",
    ),
    (make_task, {"dataset": {"num_classes": 0}}, "`num_classes` must be in"),
    (
        make_task,
        {"dataset": {"num_classes": "4"}},
        "`num_classes` must be an integer, got '4'",
    ),
    (
        make_task,
        {"dataset": {"y": y.astype(float)}},
        "integer labels, one per input, got",
    ),
    (make_task, {"dataset": {"y": y[:, None]}}, "integer labels, one per input, got"),
    (make_task, {"dataset": {"y": y[:0]}}, "integer labels, one per input, got"),
    (
        make_task,
        {"dataset": {"x": blobs().x[:, :0]}},
        "x must be [examples, ...] and not empty",
    ),
    (
        make_task,
        {"dataset": {"x": blobs().x.astype(object)}},
        "x must be uint8 images or real numbers, got object",
    ),
    (
        make_task,
        {"dataset": {"x": blobs().x.astype(str)}},
        "x must be uint8 images or real numbers, got <U",
    ),
    (make_task, {"dataset": {"x": blobs().x * 1j}}, "real numbers, got complex64"),
    (
        make_task,
        {"dataset": {"x": spoiled(NAN)}},
        "x must be finite in float32, row 7 is not",
    ),
    (make_task, {"dataset": {"x": jnp.asarray(spoiled(INF))}}, "row 7 is not"),
    (make_task, {"dataset": {"x": spoiled(-1e300)}}, "row 7 is not"),
    (make_task, {"dataset": {"x": np.zeros(200)}}, "x must be [examples, ...]"),
    (
        make_task,
        {"model": net(3)},
        "must return logits [2, 4] for a batch of 2 of synthetic",
    ),
    (
        make_task,
        {"model": net(4, (7,))},
        "The model fails on inputs of synthetic, of shape (6,) (dot_general",
    ),
    (
        make_task,
        {"model": "linear"},
        "`model` must be a Model, got 'linear': use fedjax_pfl.model(",
    ),
    (
        make_task,
        {"model": made_of(4, 9)},
        "requires contracting dimensions to have the same shape, got (4,) and (9,)",
    ),
    (
        make_task,
        {"dataset": {"prepare": lambda x: x[0]}},
        "must keep the first axis",
    ),
    (
        make_task,
        {"dataset": {"prepare": lambda x: x[:, :3]}},
        "on inputs of synthetic, of shape (3,)",
    ),
    (make_public, {"prepare": lambda x: x[0]}, "must keep the first axis"),
    (
        make_public,
        {"prepare": lambda x: x[:, :3]},
        "must be float32[6] after `prepare`",
    ),
    (
        make_task,
        {"counts": np.ones(5, int)},
        "`class_counts` must be counts [clients, 4], got int64[5]",
    ),
    (make_task, {"counts": np.ones((5, 4))}, "got float64[5, 4]"),
    (make_task, {"counts": np.ones((5, 3), int)}, "got int64[5, 3]"),
    (make_task, {"counts": -np.ones((5, 4), int)}, "`class_counts` must be counts"),
    (make_task, {"counts": "iid"}, "got <U3[]"),
    (
        make_task,
        {"model": by_hand(apply=lambda v, x, mask, train, key: (x, {}))},
        "missing 3 required positional arguments",
    ),
    (
        run_on_host,
        {"change": lambda s: State({}, {})},
        "`state` must be one of this program and layout",
    ),
    (
        score_unseen,
        {"rows": slice(5)},
        "must have the task's 2 clients, got 5",
    ),
    (
        score_unseen,
        {"server": {}},
        "The server must be that of this method: ['head']['bias'] must be float32[4], got missing",
    ),
    (
        make_task,
        {"bn_stats": "foo"},
        "Unknown bn_stats 'foo': Choose one of aggregate, local, batch",
    ),
    (
        make_task,
        {"bn_stats": "Local"},
        "Unknown bn_stats 'Local': did you mean 'local'?",
    ),
    (make_task, {"bn_stats": None}, "Unknown bn_stats None"),
    *(
        (make_task, {"lr": x}, f"`lr` must be in (0, inf), got {x}")
        for x in (0, -1, NAN, INF)
    ),
    *(
        (make_task, {"lr": x}, f"`lr` must be a number, got {x!r}")
        for x in ("fast", None, [0.1], True, 1j)
    ),
    *(
        (
            make_task,
            {"batch_size": x},
            f"`batch_size` must be in [1, 2,147,483,647], got {x}",
        )
        for x in (0, -4, 2**31)
    ),
    *(
        (make_task, {"batch_size": x}, f"`batch_size` must be an integer, got {x!r}")
        for x in (2.5, "10", None, NAN)
    ),
    *((make_task, {"rounds": x}, "`rounds` must be in") for x in (-1, 2**40)),
    *(
        (make_task, {"rounds": x}, f"`rounds` must be an integer, got {x!r}")
        for x in (2.5, "3", True)
    ),
    *((make_task, {"epochs": x}, "`epochs` must be in") for x in (-1, 2**31)),
    *(
        (make_task, {"epochs": x}, f"`epochs` must be an integer, got {x!r}")
        for x in (0.5, 0.0, False, "one")
    ),
    *(
        (make_task, {"epochs": None, "steps": x}, "`steps` must be in")
        for x in (-1, 2**31)
    ),
    *(
        (
            make_task,
            {"epochs": None, "steps": x},
            f"`steps` must be an integer, got {x!r}",
        )
        for x in (0.5, 0.0, "one")
    ),
    (make_task, {"epochs": 1, "steps": 1}, "exactly one of `epochs` and `steps`"),
    *(
        (make_task, {"participation": x}, "`participation` must be in")
        for x in (0, 1.5, -0.1, NAN)
    ),
    *(
        (make_task, {"participation": (0.1, x)}, "`participation` must be in")
        for x in (0, 1.5, -0.1, NAN)
    ),
    (
        make_task,
        {"participation": (0.9, 0.1)},
        "`participation` must be a number or (low, high)",
    ),
    (
        make_task,
        {"participation": (0.1, 0.2, 0.3)},
        "`participation` must be a number or (low, high)",
    ),
    (
        make_task,
        {"participation": "half"},
        "`participation` must be a number, got 'half'",
    ),
    (make_task, {"participation": None}, "`participation` must be a number, got None"),
    (
        make_task,
        {"optimizer": optax.sgd(0.1)},
        "`optimizer` must be a function lr -> optax.GradientTransformation",
    ),
    (make_task, {"optimizer": lambda lr: lr}, "(InputError: its result is none)"),
    (
        make_task,
        {"optimizer": lambda lr: optax.sgd(lr, momentun=0.9)},
        "unexpected keyword argument 'momentun'",
    ),
    (
        make_task,
        {"optimizer": lambda lr: optax.MultiSteps(optax.sgd(lr), 2)},
        "(InputError: its result is none)",
    ),
    (
        make_task,
        {
            "optimizer": lambda lr: optax.sgd(
                optax.warmup_cosine_decay_schedule(0, lr, 2, 9)
            )
        },
        "(TracerBoolConversionError: ",
    ),
    (
        make_program,
        {"factory": "fedavgg"},
        "Unknown algo 'fedavgg': did you mean 'fedavg'?",
    ),
    (
        make_program,
        {"factory": "Ditto "},
        "Unknown algo 'Ditto ': did you mean 'ditto'?",
    ),
    (
        make_program,
        {"hparams": {"lamda": 1.0}},
        "Unknown hyperparameter 'lamda': did you mean 'lam'?",
    ),
    *(
        (make_program, {"hparams": {"lam": x}}, f"`lam` must be a number, got {x!r}")
        for x in ("2", None, [1.0], True)
    ),
    *(
        (make_program, {"hparams": {"lam": x}}, "`lam` must be in")
        for x in (-1, NAN, INF)
    ),
    (
        make_program,
        {"factory": "fedrep", "hparams": {"head_epochs": 1.5}},
        "`head_epochs` must be an integer, got 1.5",
    ),
    (
        make_program,
        {"factory": "fedrep", "hparams": {"head_epochs": "2"}},
        "`head_epochs` must be an integer, got '2'",
    ),
    (
        make_program,
        {"factory": "apfl", "hparams": {"adaptive": 1}},
        "`adaptive` must be True or False, got 1",
    ),
    *(
        (make_program, {"lr_decay": x}, f"`lr_decay` must be in (0, inf), got {x}")
        for x in (0, -1, NAN, INF)
    ),
    *(
        (make_program, {"lr_decay": x}, f"`lr_decay` must be a number, got {x!r}")
        for x in ("0.9", None)
    ),
    *((make_program, {"width": x}, "`width` must be in") for x in (0, -1)),
    *(
        (make_program, {"width": x}, f"`width` must be an integer, got {x!r}")
        for x in (1.5, "auto", None)
    ),
    *((make_program, {"devices": x}, "`devices` must be in") for x in (0, -1, 99)),
    *(
        (make_program, {"devices": x}, f"`devices` must be an integer, got {x!r}")
        for x in (1.5, "all", None)
    ),
    *(
        (make_program, {"task": {"bn_stats": x}}, "Unknown bn_stats")
        for x in ("foo", 1)
    ),
    *((make_program, {"task": {"lr": x}}, "`lr` must be") for x in (0, "fast")),
    *(
        (make_program, {"task": {"batch_size": x}}, "`batch_size` must be")
        for x in (0, 2.5)
    ),
    *(
        (make_program, {"task": {"participation": x}}, "`participation` must be")
        for x in (0, "all")
    ),
    (
        make_program,
        {"task": {"models": (None,)}},
        "`models` and `shared` must be made by",
    ),
    (
        make_program,
        {"task": {"class_counts": np.ones((5, 7), int)}},
        "got int64[5, 7]",
    ),
    (
        make_program,
        {"task": {"sizes": np.ones(5, int)}},
        "`sizes` must equal",
    ),
    (
        run,
        {"change": other_clients},
        "must have the task's 5 clients, got 4",
    ),
    (
        run,
        {"change": lambda f: toy.federation()},
        "class counts must be those of the task",
    ),
    (
        run,
        {"change": rows_of("train", lambda r: r._replace(size=r.size - 1))},
        "class counts must be those of the task",
    ),
    (
        run,
        {"change": rows_of("test", lambda r: Subset(r.index[:4], r.size[:4]))},
        "must have the task's 5 clients, got 4",
    ),
    (
        run,
        {"change": rows_of("examples", lambda e: e._replace(x=e.x[:, :3]))},
        "must be float32[6] as the task's, got float32[3]",
    ),
    (
        run,
        {"change": rows_of("examples", lambda e: e._replace(x=e.x > 0))},
        "got bool[6]",
    ),
    (
        run,
        {"change": rows_of("class_counts", lambda c: c[::-1])},
        "class counts must be those of the task",
    ),
    (
        run_short,
        {},
        "`batch_size` must be at most",
    ),
    (run, {"change": lambda f: None}, "`federation` must be made by federate"),
    *(
        (run, {"rounds": x}, f"`rounds` must be an integer, got {x!r}")
        for x in (2.5, "3", None, NAN)
    ),
    *((run, {"rounds": x}, "`rounds` must be in") for x in (-1, 2**31)),
    *((run, {"eval_every": x}, "`eval_every` must be in") for x in (-1, -10)),
    *(
        (run, {"eval_every": x}, f"`eval_every` must be an integer, got {x!r}")
        for x in (0.5, "1", None)
    ),
    *((run, {"state_every": x}, "`state_every` must be in") for x in (0, -1)),
    *((run, {"start": x}, f"`start` must be in [0, 1], got {x}") for x in (-1, 2)),
    *(
        (run, {"start": x}, f"`start` must be an integer, got {x!r}")
        for x in (0.5, None)
    ),
    (run, {"start": 1}, "start=1 needs the `state`"),
    (run, {"state": (1, 2)}, "`state` must be one of this program"),
    *(
        (run, {"key": x}, "`key` must be made by jax.random.key")
        for x in (0, None, KEYS)
    ),
    (whole_curve, {"rounds": -1}, "`rounds` must be in"),
    (whole_curve, {"eval_every": -1}, "`eval_every` must be in"),
    (whole_curve, {"traced": {"lamb": 1.0}}, "Unknown traced hyperparameter 'lamb'"),
    (
        whole_curve,
        {"change": other_clients},
        "must have the task's 5 clients, got 4",
    ),
    *(
        (ask, {"id": x}, "`client` must be")
        for x in (-1, 5, 99, 1.5, 1.0, jnp.float32(1), "1", [1])
    ),
    (
        ask,
        {"x": blobs().x[0]},
        "`x` must be a batch of raw inputs",
    ),
    (ask, {"x": blobs().x[:, :5].tolist()}, "`x` must be a batch of raw inputs"),
    (unseen_of, {"method": "ditt"}, "Unknown algo 'ditt': did you mean 'ditto'?"),
    (make_task, {"shared": "mlp"}, "`models` and `shared` must be made by"),
    (
        make_task,
        {"architecture": np.zeros(5)},
        "`architecture` must give each of the 5 clients",
    ),
    *(
        (
            divide,
            {"dataset": {"y": y[:-1]}, "spec": spec},
            "y must be 200 integer labels",
        )
        for spec in ("iid", "dirichlet")
    ),
    (give, {"dataset": {"x": spoiled(NAN)}}, "row 7 is not"),
    (
        give,
        {"dataset": {"x": blobs().x.astype(str)}},
        "x must be uint8 images or real numbers, got <U",
    ),
    (give, {"public": {"x": spoiled(NAN)}}, "row 7 is not"),
    (give, {"change": lambda p: tuple(p)}, "partition must be a Partition"),
    (give, {"change": lambda p: p.train}, "partition must be a Partition"),
    (
        give,
        {"test": p.train, "test_sizes": p.train_sizes},
        "train and test must not share rows",
    ),
    (
        give,
        {"val": p.test, "val_sizes": p.test_sizes},
        "val and test must not share rows",
    ),
    (give, {"train": moved("train", p.train[2, 1])}, "train must hold every row once"),
    (give, {"train": moved("train", p.train[3, 0])}, "train must hold every row once"),
    (
        give,
        {"test": moved("test", p.train[3, 0])},
        "train and test must not share rows",
    ),
    (
        give,
        {"train": moved("train", 200)},
        "train must hold rows of the data set, 0..199, got 0..200",
    ),
    (
        give,
        {"test": moved("test", -1)},
        "test must hold rows of the data set, 0..199, got -1..",
    ),
    (
        give,
        {"train_sizes": without("train_sizes")},
        "train must have an example of every client, got none of client 2",
    ),
    (give, {"test_sizes": without("test_sizes")}, "got none of client 2"),
    (
        give,
        {"train": p.train.astype(float)},
        "train must be a flat array of integers, got float64",
    ),
    (
        others,
        {
            "federation": federation(),
            "dataset": blobs(),
            "partition": p._replace(test=p.train),
        },
        "must not share rows",
    ),
    (
        of_clients,
        {"train": [[True]], "test": [[1]]},
        "`train` must have a list of row numbers for each of 1",
    ),
    (
        of_clients,
        {"train": iter([]), "test": []},
        "for each of 0 clients",
    ),
    (
        functools.partial(partitioners.partition, spec="iid", num_clients=5, seed=0),
        {"dataset": (blobs().x, y)},
        "must be a fedjax_pfl.Dataset, got tuple",
    ),
    (divide, {"dataset": {"num_train": 500}}, "`num_train` must be in"),
    (
        divide,
        {"dataset": {"num_classes": 3}},
        "labels must be below num_classes=3, got 3",
    ),
    (divide, {"num_clients": "5"}, "`clients` must be an integer, got '5'"),
    (divide, {"seed": "x"}, "`seed` must be an integer, got 'x'"),
    (
        divide,
        {"spec": "dirichlet", "alpha": "small"},
        "`alpha` must be a number, got 'small'",
    ),
    (divide, {"val_fraction": "none"}, "`val_fraction` must be a number, got 'none'"),
    (divide, {"test_fraction": None}, "`test_fraction` must be a number, got None"),
    (divide, {"test_split": None}, "Unknown test_split None"),
    (divide, {"spec": None}, "Unknown partition None"),
    (divide, {"spec": divide}, "Unknown partition <function"),
    (
        models.model,
        {"factory": "linearr", "input_shape": (6,), "num_classes": 4},
        "did you mean 'linear'?",
    ),
    (
        models.model,
        {"factory": None, "input_shape": (6,), "num_classes": 4},
        "Unknown model None",
    ),
    (
        models.model,
        {"factory": "linear", "input_shape": 6, "num_classes": 4},
        "`input_shape` must be a shape",
    ),
    (
        models.model,
        {"factory": "linear", "input_shape": (6,), "num_classes": 0},
        "`num_classes` must be in",
    ),
    (
        models.model,
        {"factory": "linear", "input_shape": (6,), "num_classes": 2.5},
        "`num_classes` must be an integer",
    ),
    (
        models.model,
        {"factory": "linear", "input_shape": (6.5,), "num_classes": 4},
        "must be a shape",
    ),
    (
        models.model,
        {"factory": "linear", "input_shape": (0,), "num_classes": 4},
        "must be a shape",
    ),
    (loading.load, {"source": "digit"}, "did you mean 'digits'?"),
    (loading.load, {"source": None}, "Hugging Face data set, got NoneType"),
    (loading.load, {"source": "DIGITS"}, "did you mean 'digits'?"),
    (
        toys.synthetic,
        {"num_examples": 2.5},
        "`num_examples` must be an integer, got 2.5",
    ),
    (
        toys.synthetic,
        {"num_classes": "4"},
        "`num_classes` must be an integer, got '4'",
    ),
    (toys.synthetic, {"num_examples": 3}, "`num_examples` must be in"),
    (toys.synthetic, {"shape": 8}, "`shape` must be a shape"),
    (
        datasets.subset,
        {"dataset": blobs(), "fraction": 0, "seed": 0},
        "`data_fraction` must be in",
    ),
    (
        datasets.subset,
        {"dataset": blobs(), "fraction": "half", "seed": 0},
        "`data_fraction` must be a number, got 'half'",
    ),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_call_is_one_sentence(case):
    function, arguments, sentence = WRONG[case]
    events = []
    listen = lambda name, *_, **__: events.append(name)
    federation(), compiled(), on_host(), scorer()
    jax.monitoring.register_event_time_span_listener(listen)
    try:
        with pytest.raises(InputError) as error:
            function(**arguments)
    finally:
        jax.monitoring.unregister_event_time_span_listener(listen)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert function is run or "/jax/core/compile/backend_compile_duration" not in events


def test_a_state_and_a_key_of_other_kinds_are_taken():
    """A tree with an unknown node, whose values cannot be compared, and a key that is
    not typed."""
    tree = {"a": jax.tree_util.Partial(len, np.zeros(2, np.float32))}
    tree["b"] = np.zeros(3, np.int32)
    validate.state(
        tree, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    )
    for wrong in ({"a": tree["a"]}, tree | {"b": np.zeros(4)}, list(tree.values())):
        with pytest.raises(InputError, match="`state` must be one of this program"):
            validate.state(wrong, tree)
    validate.key(jax.random.PRNGKey(0))
    validate.key(jax.random.key(0, impl="threefry2x32"))


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_a_key_whose_draws_depend_on_the_others_is_refused(kind):
    """JAX draws from the first of the keys that are vmapped, so a width would change
    results."""
    said = f"`key` must not be of the kind {kind}, whose draws depend on the width"
    with pytest.raises(InputError, match=said):
        validate.key(jax.random.key(0, impl=kind))
    with jax.default_prng_impl(kind), pytest.raises(InputError, match=said):
        validate.key(jax.random.PRNGKey(0))
    with pytest.raises(InputError, match=said):
        validate.key(jax.random.split(jax.random.key(0, impl=kind)), (2,))


@pytest.mark.parametrize("method, hparams", [("fedphp", {}), ("mocha", {})])
def test_a_schedule_over_the_rounds_needs_their_number(method, hparams):
    task = given_task()._replace(rounds=None, shared=net())
    with pytest.raises(
        InputError, match=r"This method needs rounds, .*: give rounds= to `task`"
    ):
        ALGORITHMS[method](task, **hparams)
    ALGORITHMS["fedavg"](task)


def test_a_single_participation_and_the_name_of_a_method_are_accepted():
    assert given_task().participation == (0.6, 0.6)
    by_name, by_value = (
        simulate.program(m, given_task()).traced for m in ("ditto", ALGORITHMS["ditto"])
    )
    assert by_name == by_value
    assert (
        make_task(
            lr=jnp.float32(0.1), batch_size=np.int64(4), rounds=np.int32(3)
        ).rounds
        == 3
    )
    assert make_program(hparams={"lam": 2}).traced["lam"] == 2.0


@pytest.mark.slow  # one operation after another
def test_without_compilation_it_is_the_same_run():
    program = simulate.program(
        ALGORITHMS["fedavg"], toy.task("linear", epochs=None, steps=1)
    )
    one = lambda: list(
        simulate.rounds(
            program, jax.random.key(0), toy.federation(), rounds=2, eval_every=2
        )
    )
    compiled = one()
    with jax.disable_jit():
        plain = one()
    toy.assert_close(
        [(r.pre, r.metrics and r.metrics.loss) for r in plain],
        [(r.pre, r.metrics and r.metrics.loss) for r in compiled],
        1e-5,
    )


def test_another_pool_of_public_examples_is_refused():
    task, pool = toy.task("linear"), toy.federation().public
    program = toy.program(ALGORITHMS["fedmd"], task)
    others = {
        "public examples must be float32": (
            None,
            pool._replace(x=jnp.zeros((3, *toy.SHAPE))),
            pool._replace(x=pool.x.astype(jnp.int32)),
        ),
    }
    for said, pools in others.items():
        for other in pools:
            with pytest.raises(InputError, match=said):
                next(
                    simulate.rounds(
                        program,
                        jax.random.key(0),
                        toy.federation()._replace(public=other),
                        rounds=1,
                    )
                )


@pytest.mark.slow
def test_public_examples_may_have_no_labels():
    """Every y is -1, or some are: nobody reads them."""
    assert make_public(y=np.append(blobs().y[1:], -1)).public is not None
    unlabelled = blobs()._replace(y=np.full(len(blobs().y), -1))
    task, given = (
        simulate.with_public(given_task(), unlabelled),
        federate(blobs(), partitioned(), public=unlabelled),
    )
    program = toy.program(ALGORITHMS["fedmd"], task)
    assert next(simulate.rounds(program, jax.random.key(0), given, rounds=1)).metrics
    wide = unlabelled._replace(x=blobs().x.astype(np.float64))
    pool = federate(blobs(), partitioned(), public=wide).public
    assert (
        simulate.with_public(given_task(), wide).public.dtype
        == pool.x.dtype
        == jnp.float32
    )
    assert make_task({"x": wide.x}, epochs=1).input.dtype == jnp.float32


def test_an_optimizer_for_some_of_the_weights_and_an_augmentation_are_accepted():
    frozen = lambda lr: optax.multi_transform(
        {"body": optax.set_to_zero(), "head": optax.sgd(lr)},
        {"body": "body", "head": "head"},
    )
    by_structure = lambda lr: optax.masked(
        optax.sgd(lr), {"body": {"w": True}, "head": {"v": False}}
    )
    noisy = lambda key, x: x + jax.random.normal(key, x.shape)
    for optimizer in (frozen, by_structure, optax.adamw):
        assert make_task(optimizer=optimizer, augment=noisy).augment is noisy


def test_steps_alone_are_the_local_work():
    made = make_task(steps=3)
    assert (made.epochs, made.steps) == (None, 3) and make_task().epochs == 1


def test_a_model_that_is_listed_twice_is_one_architecture():
    mlp, other = net(), normed()
    twice = make_task(model=[mlp, mlp])
    assert twice.models == (mlp,) and not twice.architecture.any()
    n = twice.num_clients
    mixed = make_task(model=[mlp, other, mlp])
    assert mixed.models == (mlp, other) and mixed.architecture.tolist() == [
        [0, 1, 0][i % 3] for i in range(n)
    ]
    given = make_task(model=[other, mlp, other], architecture=[2, 1, *[0] * (n - 2)])
    assert given.models == (other, mlp) and given.architecture.tolist() == [
        0,
        1,
        *[0] * (n - 2),
    ]


@pytest.mark.slow
def test_traced_values_that_are_left_out_are_the_programs():
    program, key = (
        make_program("fedprox", {"rounds": 1}, lr_decay=0.5),
        jax.random.key(0),
    )
    state, step = program.init(key, {}), jax.jit(program.round)
    assert set(program.traced) == {"lr", "lr_decay", "mu"}
    whole, none, some, other = (
        step(Context(key, traced, federation(), 1), state, True)[0].server
        for traced in (program.traced, {}, {"mu": program.traced["mu"]}, {"lr": 0.2})
    )
    toy.assert_same(none, whole)
    toy.assert_same(some, whole)
    assert not np.allclose(other["head"]["kernel"], whole["head"]["kernel"])


def test_a_task_has_named_arguments():
    with pytest.raises(TypeError, match="epoch"):
        make_task(epoch=2)
    assert (make_task().epochs, make_task(steps=3).epochs) == (1, None)


def test_metrics_are_one_name_or_several():
    assert make_task(metrics="auc").metrics == ("auc",)
    assert make_task(metrics=["acc", "f1"]).metrics == ("f1",)
    assert validate.task(given_task()._replace(metrics="acc")).metrics == ()
    with pytest.raises(InputError, match="Unknown metric 'acu': did you mean 'auc'"):
        make_task(metrics="acu")
