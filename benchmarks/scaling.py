"""What many clients cost: start-up, a round and memory against the clients, the cohort and the devices.

    python -m benchmarks.scaling [--markdown] [--quick]

Every row is a process of its own. Ditto (a personal model a client) with the digits' MLP; clients have 10 to 50 images
of 8x8 pixels, batch 10, one local epoch, no evaluation. Start-up: `deal`, from a loaded data set to the federation on
the device; `build`, the program and its trace, with the memory it predicts; `compile`, with the first round. A round
is the median of 20, with what it fetches. `process` is what the process took at most, in MiB, and `predicted` what its
arrays were said to take.
"""

import multiprocessing
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags

from benchmarks.throughput import BATCH, CLASSES, SHAPES, dataset, table
from fedjax_pfl import memory, models, offload, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import federate, rows
from fedjax_pfl.layout import split_cpu

FLAGS = flags.FLAGS
ROUNDS, LEAST, MOST = 20, 10, 50
SHAPE = SHAPES["mlp"]


class Case(NamedTuple):
    """A row of the table."""

    clients: int
    cohort: int = 100
    devices: int = 1
    client_memory: str = "device"
    rounds: int = ROUNDS


class Cost(NamedTuple):
    """Seconds, and bytes."""

    deal: float
    build: float
    compile: float
    round: float
    peak: int
    predicted: int


def dealt(clients: int) -> rows.Partition:
    """Random clients with LEAST to MOST training images each, and a third as many to test."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(LEAST, MOST + 1, clients)
    tests = sizes // 3
    order = rng.permutation(_examples(clients))[: sizes.sum() + tests.sum()]
    nothing = np.zeros(0, np.int32), np.zeros(clients, np.int32)
    return rows.build(order[: sizes.sum()], sizes, order[sizes.sum() :], tests, *nothing)


def _examples(clients: int) -> int:
    return clients * MOST * 4 // 3


def measure(case: Case) -> Cost:
    """Runs one case in this process, which should be a fresh one."""
    split_cpu()
    data, key = dataset(SHAPE, _examples(case.clients)), jax.random.key(0)  # starts JAX
    begin = time.perf_counter()
    federation = jax.block_until_ready(federate.federate(data, dealt(case.clients)))
    ready = time.perf_counter()
    part = case.cohort / case.clients
    options = {"lr": 0.01, "batch_size": BATCH, "epochs": 1, "participation": (part, part)}
    task = simulate.task(data, federation.class_counts, models.model("mlp", SHAPE, CLASSES), **options)
    program = simulate.program(ALGORITHMS["ditto"], task, width=1, devices=case.devices)
    if case.client_memory == "host":
        program = offload.offloaded(program, task)
    predicted = memory.predict(program, key, federation).peak
    built = time.perf_counter()
    ends = [built]
    for result in simulate.rounds(program, key, federation, rounds=case.rounds + 1, eval_every=0):
        if result.metrics is not None:  # else it is the closing evaluation
            ends.append(time.perf_counter())
    first, *times = np.diff(ends)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Cost(ready - begin, built - ready, float(first), statistics.median(times), peak, predicted)


def measured(cases: list[Case]) -> list[tuple]:
    """The rows of a table."""
    names = ("clients", "cohort", "devices", "state on", "deal s", "build s", "compile s", "ms a round", "relative")
    found: list[tuple] = [(*names, "process", "predicted")]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for case, cost in zip(cases, pool.map(measure, cases), strict=True):
            base = found[1][7] if len(found) > 1 else cost.round * 1e3
            names = tuple(str(x) for x in case[:3])
            seconds = (cost.deal, cost.build, cost.compile, cost.round * 1e3, cost.round * 1e3 / base)
            found.append((*names, case.client_memory, *seconds, cost.peak / 2**20, cost.predicted / 2**20))
    return found


def main(argv) -> None:
    del argv
    split_cpu()
    device, short = jax.devices()[0], {"rounds": 2} if FLAGS.quick else {}
    many = (100, 1000) if FLAGS.quick else (100, 1000, 10_000)
    print(f"jax {jax.__version__}, {device.platform} {device.device_kind}, {jax.device_count()} device(s)\n")
    print("Against the clients, 100 of them in a round:\n")
    memories = lambda n: ("device", "host") if n > 100 else ("device",)
    print(table(measured([Case(n, client_memory=where, **short) for n in many for where in memories(n)])) + "\n")
    print("Against the cohort:\n")
    print(table(measured([Case(many[-1], cohort=s, **short) for s in (10, 100, 1000) if s < many[-1]])) + "\n")
    spread = [2**i for i in range(10) if 2**i <= jax.device_count()]
    print("Against the devices:\n")
    print(table(measured([Case(many[-1], devices=d, **short) for d in spread])))


if __name__ == "__main__":
    app.run(main)
