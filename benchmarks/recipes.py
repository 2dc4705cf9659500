"""Whole recipes of the field, evaluation included: seconds a round and for all of their
rounds.

    python -m benchmarks.recipes [--markdown] [--recipes=pfl_research,pfllib_20]
    [--repeats=3] [--conv=auto] [--images=N]

Images are random, of the recipe's shape, number and distribution over clients. A round
and an evaluation of all clients (personalised, on a quarter of each client's examples)
are compiled apart and timed by themselves, medians; `s a round` has the recipe's share
of evaluations. The method is FedAvg. `of peak` is against the matmul peak of the same
process, counted as in `benchmarks.throughput`, evaluation as time without work. The
memory is the device's peak where it tells, else that of the process, data included;
either is the most until then, so for its own name one recipe a call.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import report
from benchmarks.report import matmul_peak, table
from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data.datasets import Dataset, prepare_images
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.data.partitioners import partition
from fedjax_pfl.engine.width import automatic_width
from fedjax_pfl.errors import choose


class Recipe(NamedTuple):
    """One epoch of local SGD a round."""

    source: str
    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    images: int  # in all; a quarter of each client's is for testing
    cohort: int
    batch: int
    lr: float
    rounds: int
    eval_every: int
    split: str = "iid"


_CIFAR = {"shape": (32, 32, 3), "classes": 10, "batch": 10}
_PFLLIB = {
    "model": "cnn",
    **_CIFAR,
    "lr": 0.005,
    "rounds": 2000,
    "eval_every": 5,
    "split": "dirichlet",
}
RECIPES = {
    "pfl_research": Recipe(
        "pfl-research's CIFAR-10 benchmark: 1,000 users of 50 training images, cohort "
        "50",
        **_CIFAR,
        model="cnn_dropout",
        clients=1000,
        images=66_667,
        cohort=50,
        lr=0.1,
        rounds=1500,
        eval_every=10,
    ),
    "pfllib_20": Recipe(
        "PFLlib's CIFAR-10, 20 clients", **_PFLLIB, clients=20, images=60_000, cohort=20
    ),
    "pfllib_100": Recipe(
        "PFLlib's CIFAR-10, 100 clients",
        **_PFLLIB,
        clients=100,
        images=60_000,
        cohort=100,
    ),
    "flute": Recipe(
        "FLUTE's FEMNIST: 3,400 users of about 200 training images, cohort 10",
        model="cnn_dropout",
        shape=(28, 28, 1),
        classes=62,
        clients=3400,
        images=900_000,
        cohort=10,
        batch=20,
        lr=0.1,
        rounds=1500,
        eval_every=50,
    ),
}

FLAGS = flags.FLAGS


class Cost(NamedTuple):
    """Of one recipe: seconds, medians; steps and examples of a round; bytes."""

    layout: str
    start: float
    compile: float
    round: float
    evaluation: float
    steps: float
    samples: float
    peak: int


def images(recipe: Recipe) -> Dataset:
    """Random bytes and labels in equal numbers."""
    rng, size = np.random.default_rng(0), recipe.images
    x = np.frombuffer(rng.bytes(size * int(np.prod(recipe.shape))), np.uint8).reshape(
        size, *recipe.shape
    )
    y = np.arange(size, dtype=np.int32) % recipe.classes
    return Dataset("random", x, y, size, recipe.classes, prepare_images)


def partitioned(recipe: Recipe) -> tuple[Dataset, Partition]:
    """The images and who owns which, always the same."""
    data = images(recipe)
    return data, partition(
        data, recipe.split, num_clients=recipe.clients, seed=0, alpha=0.1
    )


def seconds(function: Callable, *args, repeats: int) -> tuple[float, float]:
    """Seconds of the function's compilation, and the median of its calls' without the
    first."""
    begin = time.perf_counter()
    compiled = (
        jax.jit(function, compiler_options=simulate.compiler_options())
        .lower(*args)
        .compile()
    )
    compiling, times = time.perf_counter() - begin, []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - begin)
    return compiling, statistics.median(times[1:])


def measure(recipe: Recipe, conv: str = "auto", repeats: int = 3, **options) -> Cost:
    """FedAvg by a recipe; `options` are further fields of its Task."""
    begin = time.perf_counter()
    (data, owned), devices = partitioned(recipe), jax.device_count()
    f = federate(data, owned)
    net = models.model(recipe.model, recipe.shape, recipe.classes, conv=conv)
    share = recipe.cohort / recipe.clients
    options |= {"epochs": 1, "participation": (share, share), "rounds": recipe.rounds}
    task = simulate.task(
        data, f.class_counts, net, lr=recipe.lr, batch_size=recipe.batch, **options
    )
    start = time.perf_counter() - begin
    width = automatic_width(task, recipe.cohort, devices)
    program = simulate.program(ALGORITHMS["fedavg"], task, width=width, devices=devices)
    if program.mesh is not None:
        f = jax.device_put(f, NamedSharding(program.mesh, PartitionSpec()))
    context = program.context(jax.random.key(0), f)
    state = jax.jit(program.init)(context.key, context.traced)
    given = context, state, jnp.bool(False)
    compiling, each = seconds(program.round, *given, repeats=repeats)
    more, scores = seconds(program.evaluate, *given[:-1], repeats=repeats)
    steps, samples = report.planned(task)
    peak = report.device_peak() or report.process_peak()
    return Cost(
        f"{devices} x {width}",
        start,
        compiling + more,
        each,
        scores,
        steps * share,
        samples * share,
        peak,
    )


def row(name: str, recipe: Recipe, cost: Cost, peak: float) -> tuple:
    """Of the table."""
    a_round = cost.round + cost.evaluation / recipe.eval_every
    flops = models.flops(recipe.model, recipe.shape, recipe.classes, recipe.batch)
    rates = report.rates(cost.steps, cost.samples, a_round, flops, peak)
    total = (a_round * recipe.rounds / 60, cost.start, cost.compile, cost.peak / 2**30)
    return (name, cost.layout, cost.round, cost.evaluation, a_round, *rates, *total)


def main(argv) -> None:
    del argv
    chosen = {name: RECIPES[choose("recipe", name, RECIPES)] for name in FLAGS.recipes}
    chosen = {
        name: x._replace(images=FLAGS.images or x.images) for name, x in chosen.items()
    }
    peak = matmul_peak()
    print(report.machine())
    print(f"matmul peak {peak:.0f} GFLOP/s; FedAvg, medians of {FLAGS.repeats}\n")
    for name, recipe in chosen.items():
        print(
            f"{name}: {recipe.source}; {recipe.model}, batch {recipe.batch}, "
            f"evaluation every {recipe.eval_every}"
        )
    measures = ("round s", "evaluation s", "s a round", *report.RATES)
    rows: list[tuple] = [
        (
            "recipe",
            "layout",
            *measures,
            "all rounds min",
            "start s",
            "compile s",
            "peak GiB",
        )
    ]
    for name, recipe in chosen.items():
        rows.append(row(name, recipe, measure(recipe, FLAGS.conv, FLAGS.repeats), peak))
    print("\n" + table(rows))
    print(f"\nmatmul peak at the end {matmul_peak():.0f} GFLOP/s")


if __name__ == "__main__":
    flags.DEFINE_list("recipes", list(RECIPES), f"of {', '.join(RECIPES)}")
    flags.DEFINE_integer("images", None, "fewer images in all, to see that it runs")
    flags.DEFINE_string("conv", "auto", "form of the convolutions")
    flags.DEFINE_integer(
        "repeats", 3, "rounds and evaluations that a median is taken of", lower_bound=1
    )
    report.run(main)
