"""What a program hands to the library: every wrong call is one sentence, before
anything is compiled."""

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
from fedjax_pfl.data import datasets, partitioners
from fedjax_pfl.data.federate import federate, others
from fedjax_pfl.data.partition import class_counts, of_clients
from fedjax_pfl.engine import host_state, unseen, validate
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import nets
from fedjax_pfl.types import Model, State, Subset

NAN, INF = float("nan"), float("inf")
PARTS = ("train", "val", "test")
KEYS = jax.random.split(jax.random.key(0), 2)
SCHEDULE = "let its peak be 1 and scale by it, optax.chain"


@functools.cache
def blobs() -> datasets.Dataset:
    return datasets.synthetic(200, toy.C, toy.SHAPE)


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


def transformed(by):
    return simulate.program("fedavg", given_task(), transform=by)


@functools.cache
def on_host():
    return host_state.program("fedavg", given_task()._replace(participation=(0.5, 0.5)))


def curve_on_host():
    return simulate.curve(on_host(), KEYS, {}, federation(), rounds=1)


def ask(id=0, x=None):
    program, key = compiled(), jax.random.key(0)
    state = jax.eval_shape(program.init, key, program.traced)
    return program.predict(
        key,
        program.traced,
        federation(),
        state,
        0,
        id,
        blobs().x[:2] if x is None else x,
    )


def run_on_host(change):
    program, key = (
        host_state.program("fedper", given_task()._replace(participation=(0.5, 0.5))),
        jax.random.key(0),
    )
    shapes = jax.eval_shape(
        simulate.program("fedper", given_task()).init, key, program.traced
    )
    state = State(
        *(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), part) for part in shapes)
    )
    return next(
        simulate.rounds(
            program, key, federation(), rounds=1, eval_every=0, state=change(state)
        )
    )


def read_only(x):
    x.flags.writeable = False
    return x


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
        "num_train=201 is outside its range [1, 200]",
    ),
    (make_task, {"dataset": {"num_train": -1}}, "num_train=-1 is outside"),
    (
        make_task,
        {"dataset": {"num_train": 10.5}},
        "num_train=10.5 must be a whole number",
    ),
    (make_task, {"dataset": {"y": y + 1}}, "labels must be below num_classes=4, got 4"),
    (make_task, {"dataset": {"y": y - 1}}, "y must be labels counted from 0, got -1"),
    (
        make_task,
        {"dataset": {"num_classes": 2}},
        "labels must be below num_classes=2, got 3",
    ),
    (make_task, {"dataset": {"num_classes": 0}}, "num_classes=0 is outside"),
    (
        make_task,
        {"dataset": {"num_classes": "4"}},
        "num_classes='4' must be a whole number",
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
    (
        make_task,
        {"dataset": {"prepare": None}},
        "`prepare` of synthetic fails on a batch",
    ),
    (make_task, {"dataset": {"x": np.zeros(200)}}, "x must be [examples, ...]"),
    (
        make_task,
        {"model": net(3)},
        "The model has 3 outputs, but synthetic has 4 classes",
    ),
    (
        make_task,
        {"model": net(5)},
        "The model has 5 outputs, but synthetic has 4 classes",
    ),
    (
        make_task,
        {"model": net(4, (7,))},
        "The model does not take the inputs of synthetic, of shape (6,)",
    ),
    (
        make_task,
        {"model": "linear"},
        "makes it: model(name, dataset.x.shape[1:], dataset.num_classes)",
    ),
    (
        make_task,
        {"model": models.MODELS["linear"]},
        "must be a Model, as fedjax_pfl.models.model makes it.",
    ),
    (
        make_task,
        {"model": made_of(4, 9)},
        "The model's head does not take its body's features, of shape (4,)",
    ),
    (
        make_task,
        {"model": made_of(4, 4, lambda h: h[:, None])},
        "shape=(2, 1, 4), dtype=float32) of a batch of 2",
    ),
    (
        make_task,
        {"model": made_of(4, 4, lambda h: h[:1])},
        "it must be logits [B, C], [2, 4]",
    ),
    (
        make_task,
        {"model": made_of(4, 4, lambda h: (h, h))},
        "it must be logits [B, C], [2, 4]",
    ),
    (
        make_task,
        {"dataset": {"prepare": np.asarray}},
        "`prepare` of synthetic fails on a batch float32[2, 6] (The",
    ),
    (
        make_task,
        {"dataset": {"prepare": lambda x: x[0]}},
        "must keep the first axis",
    ),
    (
        make_task,
        {"dataset": {"prepare": lambda x: x[:, :3]}},
        "make it with that shape, which prepare makes",
    ),
    (
        make_public,
        {"prepare": np.asarray},
        "`prepare` of synthetic fails on a batch float32[2, 6] (The",
    ),
    (make_public, {"prepare": lambda x: x[0]}, "must keep the first axis"),
    (
        make_public,
        {"prepare": lambda x: x[:, :3]},
        "like the clients' own, float32[6] prepared, but those",
    ),
    (make_public, {"x": spoiled(NAN)}, "x must be finite in float32"),
    (
        make_task,
        {"counts": np.ones(5, int)},
        "class_counts is int64[5]: it must be [clients, classes]",
    ),
    (make_task, {"counts": np.ones((5, 4))}, "class_counts is float64[5, 4]"),
    (make_task, {"counts": np.ones((5, 3), int)}, "class_counts has 3 classes"),
    (make_task, {"counts": -np.ones((5, 4), int)}, "the least count -1"),
    (make_task, {"counts": np.ones((0, 4), int)}, "class_counts is int64[0, 4]"),
    (make_task, {"counts": "iid"}, "class_counts is <U3[]"),
    (
        make_task,
        {"counts": partitioned()},
        "class_counts is a Partition: give `class_counts` of the Federation",
    ),
    (
        make_task,
        {"counts": federation()},
        "class_counts is a Federation: give `class_counts` of the Federation",
    ),
    (
        make_task,
        {"model": by_hand(init=lambda key: {"body": {}, "head": {}})},
        '{"body", "head", "stats"}, nested',
    ),
    (make_task, {"model": by_hand(bn_mask={})}, "bn_mask must be like its variables"),
    (
        make_task,
        {"model": by_hand(num_features=7)},
        "The model's num_features is 7, and its features are",
    ),
    (
        make_task,
        {"model": by_hand(apply=lambda v, x: (x, {}))},
        "`apply` does not take (variables, x, mask=None",
    ),
    (
        make_task,
        {"model": by_hand(apply=lambda v, x, mask, train, key: (x, {}))},
        "train=False, key=None): missing",
    ),
    (
        make_task,
        {"model": by_hand(features=lambda v, x, **_: x)},
        "`features` must return two things, the outputs",
    ),
    (
        run_on_host,
        {"change": lambda s: State({}, {})},
        "The state is not one of this program",
    ),
    (
        run_on_host,
        {"change": lambda s: jax.tree.map(read_only, s)},
        "which rounds overwrite: `place` the state first",
    ),
    (
        score_unseen,
        {"rows": slice(5)},
        "The federation has 5 clients, but the task was made for 2",
    ),
    (
        score_unseen,
        {"server": {}},
        "The server is not one that fedavg has trained here: [",
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
    (
        make_task,
        {"bn_stats": "batch", "model": normed()},
        "bn_stats='batch' is of tasks whose models keep no",
    ),
    (make_task, {"bn_stats": "batch", "shared": normed()}, "make them with it too"),
    *(
        (make_task, {"lr": x}, f"lr={x} is outside its range (0, inf)")
        for x in (0, -1, NAN, INF)
    ),
    *(
        (make_task, {"lr": x}, f"lr={x!r} must be a number")
        for x in ("fast", None, [0.1], True, 1j)
    ),
    *(
        (
            make_task,
            {"batch_size": x},
            f"batch_size={x} is outside its range [1, 2,147,483,647]",
        )
        for x in (0, -4, 2**31)
    ),
    *(
        (make_task, {"batch_size": x}, f"batch_size={x!r} must be a whole number")
        for x in (2.5, "10", None, NAN)
    ),
    *((make_task, {"rounds": x}, f"rounds={x} is outside") for x in (-1, 2**40)),
    *(
        (make_task, {"rounds": x}, f"rounds={x!r} must be a whole number")
        for x in (2.5, "3", True)
    ),
    *((make_task, {"epochs": x}, f"epochs={x} is outside") for x in (-1, 2**31)),
    *(
        (make_task, {"epochs": x}, f"epochs={x!r} must be a whole number")
        for x in (0.5, 0.0, False, "one")
    ),
    *(
        (make_task, {"epochs": None, "steps": x}, f"steps={x} is outside")
        for x in (-1, 2**31)
    ),
    *(
        (make_task, {"epochs": None, "steps": x}, f"steps={x!r} must be a whole number")
        for x in (0.5, 0.0, "one")
    ),
    (make_task, {"epochs": 1, "steps": 1}, "give exactly one of the two"),
    (make_task, {"epochs": None}, "give exactly one of the two"),
    *(
        (make_task, {"participation": x}, f"participation={x} is outside")
        for x in (0, 1.5, -0.1, NAN)
    ),
    *(
        (make_task, {"participation": (0.1, x)}, f"participation={x} is outside")
        for x in (0, 1.5, -0.1, NAN)
    ),
    (make_task, {"participation": (0.9, 0.1)}, "write it as 0.1:0.9"),
    (
        make_task,
        {"participation": (0.1, 0.2, 0.3)},
        "must be a number, or a range of two",
    ),
    (
        make_task,
        {"participation": np.array([0.1, 0.2, 0.3])},
        "must be a number, or a range of two",
    ),
    (make_task, {"participation": "half"}, "participation='half' must be a number"),
    (make_task, {"participation": None}, "participation=None must be a number"),
    (make_task, {"drop_last": "yes"}, "drop_last='yes' must be True or False"),
    (make_task, {"drop_last": 2}, "drop_last=2 must be True or False"),
    (
        make_task,
        {"optimizer": optax.sgd(0.1)},
        "optimizer must be a function of the learning rate",
    ),
    (
        make_task,
        {"optimizer": "sgd"},
        "optimizer must be a function of the learning rate",
    ),
    (make_task, {"optimizer": lambda lr: lr}, "but this one returns float"),
    (
        make_task,
        {"optimizer": lambda lr: optax.sgd(lr, momentun=0.9)},
        "but this one fails (TypeError: ",
    ),
    (
        make_task,
        {"optimizer": lambda lr: optax.sgd(optax.cosine_decay_schedule(lr, 0))},
        "fails (ValueError: ",
    ),
    (
        make_task,
        {"optimizer": lambda lr: optax.MultiSteps(optax.sgd(lr), 2)},
        "returns MultiSteps, so add .gradient_transformation()",
    ),
    (
        make_task,
        {
            "optimizer": lambda lr: optax.sgd(
                optax.warmup_cosine_decay_schedule(0, lr, 2, 9)
            )
        },
        SCHEDULE,
    ),
    (make_task, {"optimizer": lambda lr: optax.sgd(float(lr))}, SCHEDULE),
    (
        make_task,
        {"optimizer": lambda: optax.sgd(0.1)},
        "optimizer must be a function of the learning rate",
    ),
    (make_task, {"sizes": np.ones(5, int)}, "Unknown option of a task 'sizes'"),
    (
        make_task,
        {"epoch": 2},
        "Unknown option of a task 'epoch': did you mean 'epochs'?",
    ),
    (make_task, {"optimizer": optax.lbfgs}, "optimizer asks for more than a gradient"),
    (make_task, {"optimizer": optax.polyak_sgd}, "'value'): take another"),
    (
        make_task,
        {"augment": lambda x: x},
        "1 positional argument but 2 were given): it must be of JAX",
    ),
    (
        make_task,
        {"augment": lambda key, x: np.asarray(x)},
        "augment fails (The numpy.ndarray conversion",
    ),
    (
        make_task,
        {"augment": lambda key, x: x[:2]},
        "of a batch [4, 6]: it must keep the shape",
    ),
    (
        make_task,
        {"augment": lambda key, x: (x, x)},
        "of a batch [4, 6]: it must keep the shape",
    ),
    (
        make_program,
        {"task": {"augment": lambda key, x: x[..., None]}},
        "of a batch [4, 6]: it must keep the shape",
    ),
    (make_task, {"augment": "flip"}, "augment='flip' must be a function"),
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
    (make_program, {"factory": None}, "None is no method"),
    (make_program, {"factory": 7}, "7 is no method"),
    (
        make_program,
        {"hparams": {"lamda": 1.0}},
        "Unknown hyperparameter 'lamda': did you mean 'lam'?",
    ),
    *(
        (make_program, {"hparams": {"lam": x}}, f"lam={x!r} must be a number")
        for x in ("2", None, [1.0], True)
    ),
    *(
        (make_program, {"hparams": {"lam": x}}, f"lam={x} is outside")
        for x in (-1, NAN, INF)
    ),
    (make_program, {"hparams": [("lam", 1)]}, "hparams must be a dict"),
    (
        make_program,
        {"factory": "fedrep", "hparams": {"head_epochs": 1.5}},
        "head_epochs=1.5 must be a whole number",
    ),
    (
        make_program,
        {"factory": "fedrep", "hparams": {"head_epochs": "2"}},
        "head_epochs='2' must be a whole number",
    ),
    (
        make_program,
        {"factory": "scaffold", "hparams": {"weights": 3}},
        "weights=3 must be text",
    ),
    (
        make_program,
        {"factory": "scaffold", "hparams": {"weights": "Dat"}},
        "did you mean 'data'?",
    ),
    (
        make_program,
        {"factory": "privacy_pfedc", "hparams": {"encrypt_phi": 1}},
        "encrypt_phi=1 must be True or False",
    ),
    *(
        (make_program, {"lr_decay": x}, f"lr_decay={x} is outside its range (0, inf)")
        for x in (0, -1, NAN, INF)
    ),
    *(
        (make_program, {"lr_decay": x}, f"lr_decay={x!r} must be a number")
        for x in ("0.9", None)
    ),
    *((make_program, {"width": x}, f"width={x} is outside") for x in (0, -1)),
    *(
        (make_program, {"width": x}, f"width={x!r} must be a whole number")
        for x in (1.5, "auto", None)
    ),
    *(
        (make_program, {"devices": x}, f"devices={x} is outside its range")
        for x in (0, -1, 99)
    ),
    *(
        (make_program, {"devices": x}, f"devices={x!r} must be a whole number")
        for x in (1.5, "all", None)
    ),
    *(
        (make_program, {"task": {"bn_stats": x}}, "Unknown bn_stats")
        for x in ("foo", 1)
    ),
    *((make_program, {"task": {"lr": x}}, "lr=") for x in (0, "fast")),
    *((make_program, {"task": {"batch_size": x}}, "batch_size=") for x in (0, 2.5)),
    *(
        (make_program, {"task": {"participation": x}}, "participation=")
        for x in (0, "all")
    ),
    (make_program, {"task": {"models": (None,)}}, "model=None must be a Model"),
    (
        make_program,
        {"task": {"class_counts": np.ones((5, 7), int)}},
        "class_counts has 7 classes",
    ),
    (
        make_program,
        {"task": {"sizes": np.ones(5, int)}},
        "sizes are not the sums of class_counts",
    ),
    (
        run,
        {"change": other_clients},
        "The federation has 4 clients, but the task was made for 5",
    ),
    (
        run,
        {"change": lambda f: toy.federation()},
        "hold other training examples than the task's",
    ),
    (
        run,
        {"change": rows_of("train", lambda r: r._replace(size=r.size - 1))},
        "hold other training examples",
    ),
    (
        run,
        {"change": rows_of("train", lambda r: r._replace(index=r.index + 200))},
        "train holds the row",
    ),
    (
        run,
        {"change": rows_of("test", lambda r: r._replace(index=r.index - 200))},
        "test holds the row",
    ),
    (
        run,
        {"change": rows_of("test", lambda r: r._replace(size=r.size + 99))},
        "it has no room",
    ),
    (
        run,
        {"change": rows_of("test", lambda r: Subset(r.index[:4], r.size[:4]))},
        "5 clients in train, and in test",
    ),
    (
        run,
        {"change": rows_of("examples", lambda e: e._replace(x=e.x[:, :3]))},
        "The federation's examples are float32[3]",
    ),
    (
        run,
        {"change": rows_of("examples", lambda e: e._replace(x=e.x > 0))},
        "The federation's examples are bool[",
    ),
    (
        run,
        {"change": rows_of("class_counts", lambda c: c[::-1])},
        "hold other training examples",
    ),
    (
        run,
        {"change": rows_of("examples", lambda e: e._replace(y=e.y[:50]))},
        "200 inputs x but 50 labels y",
    ),
    (
        run,
        {"change": rows_of("examples", lambda e: e.__class__(e.x[:50], e.y[:50]))},
        "is it another data set?",
    ),
    (
        run,
        {"change": rows_of("examples", lambda e: e._replace(x=e.x[:50]))},
        "50 inputs x but 200 labels y",
    ),
    (run, {"change": rows_of("examples", lambda e: e._replace(y=e.y + 2))}, "labels"),
    (
        run_short,
        {},
        "drop_last with batches of 99 leaves nothing to train on: the largest client "
        "has",
    ),
    (run, {"change": lambda f: None}, "federation=None must be a Federation"),
    *(
        (run, {"rounds": x}, f"rounds={x!r} must be a whole number")
        for x in (2.5, "3", None, NAN)
    ),
    *((run, {"rounds": x}, f"rounds={x} is outside") for x in (-1, 2**31)),
    *((run, {"eval_every": x}, f"eval_every={x} is outside") for x in (-1, -10)),
    *(
        (run, {"eval_every": x}, f"eval_every={x!r} must be a whole number")
        for x in (0.5, "1", None)
    ),
    *((run, {"state_every": x}, f"state_every={x} is outside") for x in (0, -1)),
    *((run, {"start": x}, f"start={x} is outside its range [0, 1]") for x in (-1, 2)),
    *((run, {"start": x}, f"start={x!r} must be a whole number") for x in (0.5, None)),
    (run, {"start": 1}, "start=1 needs the state after so many rounds"),
    (run, {"state": (1, 2)}, "The state is not one of this program"),
    *((run, {"key": x}, "The key must be a single one") for x in (0, None, KEYS)),
    (whole_curve, {"rounds": -1}, "rounds=-1 is outside"),
    (whole_curve, {"eval_every": -1}, "eval_every=-1 is outside"),
    (whole_curve, {"traced": {"lr": -0.1}}, "lr=-0.1 is outside"),
    (whole_curve, {"traced": {"lamb": 1.0}}, "Unknown traced hyperparameter 'lamb'"),
    (
        whole_curve,
        {"change": other_clients},
        "The federation has 4 clients, but the task was made for 5",
    ),
    (
        transformed,
        {"by": "clip"},
        "transform must be a function (key, upload, default) that returns",
    ),
    (
        transformed,
        {"by": lambda key, upload: upload},
        "but this one fails (TypeError: ",
    ),
    (transformed, {"by": lambda *_: None}, "is missing and must be float32"),
    (
        transformed,
        {"by": lambda key, upload, _: jax.tree.map(lambda x: x[:1], upload)},
        "and must be float32",
    ),
    (
        transformed,
        {"by": lambda key, upload, _: jax.tree.map(jnp.int32, upload)},
        "int32[4] and must be float32[4]",
    ),
    (curve_on_host, {}, "This program keeps its clients on the host"),
    (whole_curve, {"traced": None}, "traced=None must be {name: value}: {} for"),
    *(
        (ask, {"id": x}, f"There is no client {x}: ids are 0 to 4")
        for x in (-1, 5, 99, 1.5, 1.0, jnp.float32(1), "1", [1])
    ),
    (
        ask,
        {"x": blobs().x[0]},
        "x is [6]: it must be a batch of raw inputs, [B, 6]; of one example take "
        "x[None]",
    ),
    (ask, {"x": blobs().x[:, :5].tolist()}, "x is [200, 5]: it must be a batch"),
    (ask, {"x": 1.0}, "x is []: it must be a batch"),
    (unseen_of, {"method": "ditt"}, "Unknown algo 'ditt': did you mean 'ditto'?"),
    (make_task, {"shared": "mlp"}, "shared='mlp' must be a Model"),
    (
        make_task,
        {"architecture": np.zeros(5)},
        "architecture is of float64: it must hold for each client",
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
        "list of row numbers per client, got bool",
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
    (divide, {"dataset": {"num_train": 500}}, "num_train=500 is outside"),
    (
        divide,
        {"dataset": {"num_classes": 3}},
        "labels must be below num_classes=3, got 3",
    ),
    (divide, {"num_clients": "5"}, "clients='5' must be a whole number"),
    (divide, {"seed": "x"}, "seed='x' must be a whole number"),
    (divide, {"spec": "dirichlet", "alpha": "small"}, "alpha='small' must be a number"),
    (divide, {"val_fraction": "none"}, "val_fraction='none' must be a number"),
    (divide, {"test_fraction": None}, "test_fraction=None must be a number"),
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
        "input_shape=6 must be a shape",
    ),
    (
        models.model,
        {"factory": "linear", "input_shape": (6,), "num_classes": 0},
        "num_classes=0 is outside",
    ),
    (
        models.model,
        {"factory": "linear", "input_shape": (6,), "num_classes": 2.5},
        "num_classes=2.5 must be a whole",
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
    (datasets.load, {"source": "digit"}, "did you mean 'digits'?"),
    (datasets.load, {"source": None}, "Hugging Face data set, got NoneType"),
    (datasets.load, {"source": "DIGITS"}, "did you mean 'digits'?"),
    (
        datasets.synthetic,
        {"num_examples": 2.5},
        "num_examples=2.5 must be a whole number",
    ),
    (
        datasets.synthetic,
        {"num_classes": "4"},
        "num_classes='4' must be a whole number",
    ),
    (datasets.synthetic, {"num_examples": 3}, "num_examples=3 is outside"),
    (datasets.synthetic, {"shape": 8}, "shape=8 must be a shape"),
    (
        datasets.subset,
        {"dataset": blobs(), "fraction": 0, "seed": 0},
        "data_fraction=0 is outside",
    ),
    (
        datasets.subset,
        {"dataset": blobs(), "fraction": "half", "seed": 0},
        "data_fraction='half' must be a number",
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
    tree = {"a": jax.tree_util.Partial(len, np.zeros(2)), "b": np.zeros(3)}
    validate.state(
        tree, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    )
    for wrong in ({"a": tree["a"]}, tree | {"b": np.zeros(4)}, list(tree.values())):
        with pytest.raises(InputError, match="The state is not one of this program"):
            validate.state(wrong, tree)
    validate.key(jax.random.PRNGKey(0))
    validate.key(jax.random.key(0, impl="threefry2x32"))


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_a_key_whose_draws_depend_on_the_others_is_refused(kind):
    """JAX draws from the first of the keys that are vmapped, so a width would change
    results."""
    said = (
        f"The key is of the kind {kind}, whose draws under jax.vmap depend on the "
        "other keys"
    )
    with pytest.raises(InputError, match=said):
        validate.key(jax.random.key(0, impl=kind))
    with jax.default_prng_impl(kind), pytest.raises(InputError, match=said):
        validate.key(jax.random.PRNGKey(0))
    with pytest.raises(InputError, match=said):
        validate.kind_of_key(jax.random.split(jax.random.key(0, impl=kind)))


def test_a_factory_without_arguments_gets_a_sentence():
    with pytest.raises(InputError, match="<lambda>"):
        simulate.program(lambda: None, given_task())


@pytest.mark.parametrize(
    "method, hparams", [("fedphp", {}), ("fedkd", {"svd": True}), ("mocha", {})]
)
def test_a_schedule_over_the_rounds_needs_their_number(method, hparams):
    task = given_task()._replace(rounds=None, shared=net())
    with pytest.raises(
        InputError, match=r"This method needs rounds, .*: give rounds= to `task`"
    ):
        ALGORITHMS[method](task, **hparams)
    ALGORITHMS["fedavg"](task)


def test_there_are_enough_of_them():
    assert len(WRONG) >= 150


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


@pytest.mark.slow  # other tests of rounds see it
def test_what_is_right_is_not_refused():
    results = run(rounds=1)
    assert [r.round for r in results] == [0, 1]
    assert run(rounds=1, start=1, state=results[-1].state)[0].round == 1


def test_debug_nans_needs_scores_in_every_round():
    with jax.debug_nans(True):
        with pytest.raises(
            InputError, match="jax_debug_nans needs eval_every=1, not 2"
        ):
            run(rounds=2, eval_every=2)
        assert len(run(rounds=1)) == 2


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
    task, pool = toy.task("linear")._replace(public_classes=3), toy.federation().public
    program = toy.program(ALGORITHMS["fedmd"], task, {"public_epochs": 0})
    others = {
        "public examples are not the task's float32": (
            None,
            pool._replace(x=jnp.zeros((3, *toy.SHAPE))),
            pool._replace(x=pool.x.astype(jnp.int32)),
        ),
        r"have labels -1\.\.-1, but those of the task 3 classes": (
            pool._replace(y=jnp.full_like(pool.y, -1)),
        ),
        r"have labels 3\.\.3, but those of the task 3 classes": (
            pool._replace(y=jnp.full_like(pool.y, 3)),
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
    """Every y is -1: then nothing can train on labels, and what needs none runs."""
    unlabelled = blobs()._replace(y=np.full(len(blobs().y), -1))
    task, given = (
        simulate.with_public(given_task(), unlabelled),
        federate(blobs(), partitioned(), public=unlabelled),
    )
    assert task.public_classes == 0 and make_public().public_classes == toy.C
    with pytest.raises(
        InputError, match="Training on public examples needs their labels"
    ):
        simulate.program("fedmd", task, {"public_epochs": 1})
    program = toy.program(ALGORITHMS["fedmd"], task, {"public_epochs": 0})
    assert next(simulate.rounds(program, jax.random.key(0), given, rounds=1)).metrics
    wide = unlabelled._replace(x=blobs().x.astype(np.float64))
    pool = federate(blobs(), partitioned(), public=wide).public
    assert (
        simulate.with_public(given_task(), wide).public.dtype
        == pool.x.dtype
        == jnp.float32
    )
    assert make_task({"x": wide.x}, epochs=1).input.dtype == jnp.float32
    with pytest.raises(InputError, match=r"y must be labels counted from 0, got -1"):
        make_public(y=np.append(blobs().y[1:], -1))


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


def test_a_model_of_64_bits_is_refused():
    with jax.enable_x64(True):
        double = models.model(
            functools.partial(tiny, param_dtype=jnp.float64), toy.SHAPE, toy.C
        )
        with pytest.raises(
            InputError, match="A model has variables of float64, and states are float32"
        ):
            make_task(epochs=1, model=double)


def tiny(input_shape, num_classes, rngs, param_dtype):
    linear = functools.partial(nnx.Linear, rngs=rngs, param_dtype=param_dtype)
    return nets.Net(linear(input_shape[-1], 4), linear(4, num_classes))


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


def test_traced_values_that_are_left_out_are_the_programs():
    program, key = (
        make_program("fedprox", {"rounds": 1}, lr_decay=0.5),
        jax.random.key(0),
    )
    state, step = program.init(key, {}), jax.jit(program.round)
    assert set(program.traced) == {"lr", "lr_decay", "mu"}
    whole, none, some, other = (
        step(key, traced, federation(), state, 1, True)[0].server
        for traced in (program.traced, {}, {"mu": program.traced["mu"]}, {"lr": 0.2})
    )
    toy.assert_same(none, whole)
    toy.assert_same(some, whole)
    assert not np.allclose(other["head"]["kernel"], whole["head"]["kernel"])
