"""What clients of several architectures in one federation cost:

    python -m benchmarks.mixed [--markdown] [--architectures=cnn1,...,cnn5]
    [--repeats=3] [--mixed_clients=10]

Each line divides the seconds of a round by those of what it is made of: the mixed
federation by the sum of a federation for each architecture's clients alone (all by
Local), FedProto by Local, FML by Local and Local of everybody's small model, MNFL by
Local and by its passes over the public examples alone. FML clips its gradients, which
takes time, so it is divided by Local with the same clipping, too. Compilation is
divided likewise, apart. One process, a round without evaluation; all take turns, a
ratio is of one turn, and the medians are printed. Clients have 100 images of 32x32x3,
batches of 10 and one epoch; 300 public images in batches of 256. Then the same ratio of
FedProto and FML in the multiply-adds of their matrix products (`engine.flops`).
"""

import functools
import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks import report
from benchmarks.runner import Runner
from benchmarks.setting import BATCH, CLASSES, dataset
from fedjax_pfl import (
    architectures,
    evaluation,
    local_training,
    models,
    optimizers,
    simulate,
)
from fedjax_pfl.algorithms import ALGORITHMS, public_data
from fedjax_pfl.algorithms.knowledge_transfer import mixtures
from fedjax_pfl.averaging import predictor
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.partitioners import partition
from fedjax_pfl.engine.flops import flops_of_step
from fedjax_pfl.types import Algorithm, Federation, Metrics, Own, State, Task

FLAGS = flags.FLAGS

PUBLIC_BATCH = 256
GOALS = {
    "mixed": 1.10,
    "FedProto": 1.3,
    "FML": 1.15,
    "FML, all clipped": 1.15,
    "MNFL": 1.25,
}


class Setting(NamedTuple):
    """What is federated."""

    architectures: tuple[str, ...]
    shape: tuple[int, ...] = (32, 32, 3)
    clients: int = 10
    each: int = 100  # images of a client
    public: int = 300


class Line(NamedTuple):
    """One comparison: a round, or compiling it, divided by the sum of what it is made
    of."""

    name: str
    seconds: float  # of a round, the median
    ratio: float
    goal: float
    compile: float
    compile_ratio: float


def passes(task: Task) -> Algorithm:
    """The client's part of an exchange of predictions: those for the public examples,
    and a pass of training on them.

    Nothing is exchanged, and nobody trains on private examples.
    """
    public_task = task._replace(batch_size=PUBLIC_BATCH)

    def round(key, state, cohort):
        index = jnp.arange(task.public.shape[0])

        def client(c, w):
            data = public_data.subset(c.public, index, c.train.size > 0)
            target = jax.nn.softmax(
                public_data.logits(c.model, w, data, task.num_classes, PUBLIC_BATCH)
            )
            loss = public_data.distillation(c.model, target, mixtures.divergence)
            w, value = local_training.sgd(c.key, data, loss, w, public_task, epochs=1)
            return Own(w), value, evaluation.post(cohort, c, predictor(c.model, w))

        w, value, post = cohort.map(client, state.clients)
        return State((), w), Metrics(value, post)

    init = lambda key: State(
        (), architectures.stack(task, lambda model: model.init(key))
    )
    predict = lambda server, w, c: predictor(c.model, w)
    return Algorithm(
        init, round, predict, evaluation.classification, one_architecture=False
    )


def operations(setting: Setting) -> dict[str, float]:
    """Multiply-adds of the local work of FedProto by those of Local, and of FML by
    those of Local and of Local of everybody's small model; convolutions counted as
    products of matrices."""
    _, f, task = made(setting, "matmul")
    count = lambda name, task=task: flops_of_step(ALGORITHMS[name], task, f)
    return {
        "FedProto": count("fedproto") / count("local"),
        "FML": count("fml") / (count("local") + count("local", all_small(task))),
    }


def alone(task: Task, federation: Federation, group: int) -> tuple[Task, Federation]:
    """Returns the clients of one architecture as a federation of their own."""
    ids = architectures.members(task, group)
    splits = ("train", "val", "test", "class_counts")
    rows = {
        name: jax.tree.map(lambda x: x[ids], getattr(federation, name))
        for name in splits
    }
    fields = {
        "sizes": task.sizes[ids],
        "class_counts": task.class_counts[ids],
        "models": (task.models[group],),
    }
    return task._replace(
        **fields, architecture=np.zeros(len(ids), int)
    ), federation._replace(**rows)


def all_small(task: Task) -> Task:
    """The task with the small model, which is the last architecture, for everybody."""
    return task._replace(
        models=task.models[-1:], architecture=np.zeros(task.num_clients, int)
    )


def made(setting: Setting, conv: str = "auto") -> tuple[Dataset, Federation, Task]:
    """The mixed federation."""
    data = dataset(setting.shape, setting.clients * setting.each * 4 // 3)
    pool = dataset(setting.shape, setting.public)
    f = federate(
        data, partition(data, "iid", num_clients=setting.clients, seed=0), public=pool
    )
    nets = [
        models.model(name, setting.shape, CLASSES, conv=conv)
        for name in setting.architectures
    ]
    own = {"lr": 0.01, "batch_size": BATCH, "epochs": 1, "shared": nets[-1]}
    return (
        data,
        f,
        simulate.with_public(simulate.task(data, f.class_counts, nets, **own), pool),
    )


def measure(setting: Setting, repeats: int) -> list[Line]:
    """Times all that is compared, in turns."""
    _, f, task = made(setting)
    devices = jax.device_count()
    run = lambda factory, given: Runner(factory, *given, 1, devices)
    runners = {
        f"part{g}": run(ALGORITHMS["local"], alone(task, f, g))
        for g in range(len(task.models))
    }
    runners["small"] = run(ALGORITHMS["local"], (all_small(task), f))
    largest = simulate.hyperparameters(ALGORITHMS["fml"])["clip"]
    clipped = task._replace(
        optimizer=lambda lr: optax.chain(optimizers.clipped(largest), optax.sgd(lr))
    )
    runners["clipped"] = run(ALGORITHMS["local"], (clipped, f))
    runners["small, clipped"] = run(ALGORITHMS["local"], (all_small(clipped), f))
    mnfl = functools.partial(
        ALGORITHMS["mnfl_het"], public_batch=PUBLIC_BATCH, public_size=setting.public
    )
    factories = {
        "mixed": ALGORITHMS["local"],
        "FedProto": ALGORITHMS["fedproto"],
        "FML": ALGORITHMS["fml"],
    }
    factories |= {"MNFL": mnfl, "passes": passes}
    runners |= {name: run(factory, (task, f)) for name, factory in factories.items()}
    of = {"mixed": [name for name in runners if name.startswith("part")]}
    of |= {
        "FedProto": ["mixed"],
        "MNFL": ["mixed", "passes"],
    }
    of |= {"FML": ["mixed", "small"], "FML, all clipped": ["clipped", "small, clipped"]}
    for runner in runners.values():
        runner(), runner()
    runners["FML, all clipped"] = runners["FML"]
    turns = [
        {name: runner() for name, runner in runners.items()} for _ in range(repeats)
    ]
    compile = {name: runner.compile for name, runner in runners.items()}
    ratio = lambda seconds, name: (
        seconds[name] / sum(seconds[other] for other in of[name])
    )
    median = lambda values: statistics.median(list(values))
    return [
        Line(
            name,
            median(turn[name] for turn in turns),
            median(ratio(turn, name) for turn in turns),
            goal,
            compile[name],
            ratio(compile, name),
        )
        for name, goal in GOALS.items()
    ]


def main(argv) -> None:
    del argv
    setting = Setting(tuple(FLAGS.architectures), clients=FLAGS.mixed_clients)
    print(report.machine())
    nets = ", ".join(setting.architectures)
    print(
        f"{setting.clients} clients of {nets}; {jax.device_count()} x width 1; medians "
        f"of {FLAGS.repeats} turns\n"
    )
    header = ("round", "s", "of its parts", "goal", "compile s", "of its parts'")
    print(report.table([header, *measure(setting, FLAGS.repeats)]))
    found = ", ".join(
        f"{name} {ratio:.2f}" for name, ratio in operations(setting).items()
    )
    print(f"\nMultiply-adds by those of its parts: {found}")


if __name__ == "__main__":
    flags.DEFINE_list(
        "architectures",
        ["cnn1", "cnn2", "cnn3", "cnn4", "cnn5"],
        "client i has number i mod G",
    )
    flags.DEFINE_integer("mixed_clients", 10, "clients in all", lower_bound=1)
    flags.DEFINE_integer("repeats", 3, "turns that a median is taken of", lower_bound=1)
    report.run(main)
