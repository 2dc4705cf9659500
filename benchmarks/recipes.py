"""Whole recipes of the field, evaluation included: seconds a round and for all of their rounds.

    python -m benchmarks.recipes [--markdown] [--recipes=pfl_research,pfllib_20] [--repeats=3] [--conv=auto]

Images are random, of the recipe's shape, number and distribution over clients. A round and an evaluation of all clients
(personalised, on a quarter of each client's examples) are compiled apart and timed by themselves, medians; `s a round`
has the recipe's share of evaluations. The method is FedAvg. `of peak` is against the matmul peak of the same process,
counted as in `benchmarks.throughput`, evaluation as time without work. The memory is the device's peak where it tells,
on a CPU that of the process until then, data included.
"""

import resource
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.throughput import matmul_peak, table
from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.checks import choose
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.partition import partition
from fedjax_pfl.data.sources import Dataset, prepare_images
from fedjax_pfl.layout import choose_width, split_cpu


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
_PFLLIB = {"model": "cnn", **_CIFAR, "lr": 0.005, "rounds": 2000, "eval_every": 5, "split": "dirichlet"}
RECIPES = {
    "pfl_research": Recipe(
        "pfl-research's CIFAR-10 benchmark: 1,000 users of 50 training images, cohort 50",
        **_CIFAR,
        model="cnn_dropout",
        clients=1000,
        images=66_667,
        cohort=50,
        lr=0.1,
        rounds=1500,
        eval_every=10,
    ),
    "pfllib_20": Recipe("PFLlib's CIFAR-10, 20 clients", **_PFLLIB, clients=20, images=60_000, cohort=20),
    "pfllib_100": Recipe("PFLlib's CIFAR-10, 100 clients", **_PFLLIB, clients=100, images=60_000, cohort=100),
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
flags.DEFINE_list("recipes", list(RECIPES), f"of {', '.join(RECIPES)}")
flags.DEFINE_integer("repeats", 3, "rounds and evaluations timed", lower_bound=1)
flags.DEFINE_integer("images", None, "fewer images in all, to see that it runs")
flags.DEFINE_string("conv", "auto", "form of the convolutions")


def images(recipe: Recipe) -> Dataset:
    """Random bytes and labels in equal numbers."""
    rng, size = np.random.default_rng(0), FLAGS.images or recipe.images
    x = np.frombuffer(rng.bytes(size * int(np.prod(recipe.shape))), np.uint8).reshape(size, *recipe.shape)
    y = np.arange(size, dtype=np.int32) % recipe.classes
    return Dataset("random", x, y, size, recipe.classes, prepare_images)


def seconds(function, *args) -> tuple[float, float]:
    """The first call's seconds, with compilation, and the median of the others'."""
    times = []
    for _ in range(1 + FLAGS.repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - begin)
    return times[0], statistics.median(times[1:])


def peak_memory() -> float:
    """GiB."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) / 2**30


def measure(name: str, recipe: Recipe, peak: float) -> tuple:
    """A row of the table."""
    begin = time.perf_counter()
    data, devices = images(recipe), jax.device_count()
    f = federate(data, partition(data, recipe.split, num_clients=recipe.clients, seed=0, alpha=0.1))
    net = models.model(recipe.model, recipe.shape, recipe.classes, conv=FLAGS.conv)
    share = recipe.cohort / recipe.clients
    options = {"epochs": 1, "participation": (share, share), "rounds": recipe.rounds}
    task = simulate.task(data, f.class_counts, net, lr=recipe.lr, batch_size=recipe.batch, **options)
    start = time.perf_counter() - begin
    width = choose_width(task, f, recipe.cohort, devices)
    program = simulate.program(ALGORITHMS["fedavg"], task, width=width, devices=devices)
    key, numbers = jax.random.key(0), {name: jnp.asarray(x, float) for name, x in program.numbers.items()}
    if program.mesh is not None:
        f = jax.device_put(f, NamedSharding(program.mesh, PartitionSpec()))
    state = jax.jit(program.init)(key, numbers)
    t, wanted = jnp.int32(0), jnp.bool(False)
    first, each = seconds(jax.jit(program.round), key, numbers, f, state, t, wanted)
    first_scores, scores = seconds(jax.jit(program.evaluate), key, numbers, f, state, t)
    a_round = each + scores / recipe.eval_every
    steps = float(np.ceil(task.sizes / recipe.batch).sum() * share)
    flops = models.flops(recipe.model, recipe.shape, recipe.classes, recipe.batch) / 1e9
    compiling = first - each + first_scores - scores
    rates = (steps / a_round, float(task.sizes.sum() * share) / a_round, steps / a_round * flops)
    total = (a_round * recipe.rounds / 60, start, compiling, peak_memory())
    return (name, f"{devices} x {width}", each, scores, a_round, *rates, rates[-1] / peak, *total)


def main(argv) -> None:
    del argv
    split_cpu()
    chosen = {name: RECIPES[choose("recipe", name, RECIPES)] for name in FLAGS.recipes}
    device, peak = jax.devices()[0], matmul_peak()
    print(f"jax {jax.__version__}, {device.platform} {device.device_kind}, {jax.device_count()} device(s)")
    print(f"matmul peak {peak:.0f} GFLOP/s; FedAvg, medians of {FLAGS.repeats}\n")
    for name, recipe in chosen.items():
        print(f"{name}: {recipe.source}; {recipe.model}, batch {recipe.batch}, evaluation every {recipe.eval_every}")
    measures = ("round s", "evaluation s", "s a round", "steps/s", "samples/s", "GFLOP/s", "of peak")
    rows: list[tuple] = [("recipe", "layout", *measures, "all rounds min", "start s", "compile s", "peak GiB")]
    rows += [measure(name, recipe, peak) for name, recipe in chosen.items()]
    print("\n" + table(rows))
    print(f"\nmatmul peak at the end {matmul_peak():.0f} GFLOP/s")


if __name__ == "__main__":
    app.run(main)
