"""What many clients cost: start-up, a round and memory against the clients, the cohort
and the devices.

    python -m benchmarks.scaling [--markdown] [--quick] [--repeats=20]

Every row is a process of its own. Ditto (a personal model a client) with the digits'
MLP; clients have 10 to 50 images of 8x8 pixels, batch 10, one local epoch, no
evaluation. Start-up: `partition`, from a loaded data set to the federation on the
device; `build`, the program and its trace; `compile`, with the first round. A round is
the median, with what it fetches; its steps, of
both models, are those of an average cohort, and `of peak` is against the matmul peak of
the whole machine. `peak MiB` is what the device, on a CPU the process, took at most,
and `XLA` what XLA accounts for the compiled functions.
"""

import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from benchmarks import report
from benchmarks.report import matmul_peak, table
from benchmarks.setting import BATCH, CLASSES, SHAPES, dataset
from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data import federate
from fedjax_pfl.data.partition import Partition, build

FLAGS = flags.FLAGS
LEAST, MOST = 10, 50
SHAPE = SHAPES["mlp"]


class Case(NamedTuple):
    """A row of the table."""

    clients: int
    cohort: int = 100
    devices: int = 1
    client_memory: str = "device"
    rounds: int = 20


class Cost(NamedTuple):
    """Seconds; steps and examples of a round; bytes."""

    partition: float
    build: float
    compile: float
    round: float
    steps: float
    samples: float
    peak: int
    account: int | None


def partitioned(clients: int) -> Partition:
    """Random clients with LEAST to MOST training images each, and a third as many to
    test."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(LEAST, MOST + 1, clients)
    tests = sizes // 3
    order = rng.permutation(_examples(clients))[: sizes.sum() + tests.sum()]
    nothing = np.zeros(0, np.int32), np.zeros(clients, np.int32)
    return build(order[: sizes.sum()], sizes, order[sizes.sum() :], tests, *nothing)


def _examples(clients: int) -> int:
    return clients * MOST * 4 // 3


def measure(case: Case) -> Cost:
    """Runs one case in this process, which should be a fresh one."""
    data, key = dataset(SHAPE, _examples(case.clients)), jax.random.key(0)  # starts JAX
    begin = time.perf_counter()
    federation = jax.block_until_ready(
        federate.federate(data, partitioned(case.clients))
    )
    ready = time.perf_counter()
    part = case.cohort / case.clients
    options = {
        "lr": 0.01,
        "batch_size": BATCH,
        "epochs": 1,
        "participation": (part, part),
    }
    task = simulate.task(
        data, federation.class_counts, models.model("mlp", SHAPE, CLASSES), **options
    )
    layout = {"devices": case.devices, "storage": case.client_memory}
    program = simulate.program(ALGORITHMS["ditto"], task, **layout)
    built = time.perf_counter()
    functions, ends = simulate.compiled(program, key, federation, eval_every=0), [built]
    account = functions.memory.peak
    for result in simulate.rounds(
        program,
        key,
        federation,
        rounds=case.rounds + 1,
        eval_every=0,
        functions=functions,
    ):
        if result.metrics is not None:  # else it is the closing evaluation
            ends.append(time.perf_counter())
    first, *times = np.diff(ends)
    peak = report.device_peak() or report.process_peak()
    # Ditto trains two models
    steps, samples = (2 * part * x for x in report.planned(task))
    return Cost(
        ready - begin,
        built - ready,
        float(first),
        statistics.median(times),
        steps,
        samples,
        peak,
        account,
    )


def measured(cases: list[Case], peak: float) -> list[tuple]:
    """The rows of a table; `peak` in GFLOP/s."""
    names = (
        "clients",
        "cohort",
        "devices",
        "state on",
        "partition s",
        "build s",
        "compile s",
        "ms a round",
        "relative",
    )
    found: list[tuple] = [(*names, *report.RATES, "peak MiB", "XLA MiB")]
    flops = models.flops("mlp", SHAPE, CLASSES, BATCH)
    for case, cost in zip(cases, report.fresh(measure, cases), strict=True):
        base = found[1][7] if len(found) > 1 else cost.round * 1e3
        names = tuple(str(x) for x in case[:3])
        seconds = (
            cost.partition,
            cost.build,
            cost.compile,
            cost.round * 1e3,
            cost.round * 1e3 / base,
        )
        rates = report.rates(cost.steps, cost.samples, cost.round, flops, peak)
        found.append(
            (
                *names,
                case.client_memory,
                *seconds,
                *rates,
                cost.peak / 2**20,
                cost.account and cost.account / 2**20,
            )
        )
    return found


def main(argv) -> None:
    del argv
    rounds = FLAGS.repeats or (2 if FLAGS.quick else 20)
    many, peak = (100, 1000) if FLAGS.quick else (100, 1000, 10_000), matmul_peak()
    show = lambda title, cases: print(f"{title}:\n\n{table(measured(cases, peak))}\n")
    print(report.machine())
    print(f"matmul peak {peak:.0f} GFLOP/s; medians of {rounds}\n")
    memories = lambda n: ("device", "host") if n > 100 else ("device",)
    cases = [
        Case(n, client_memory=where, rounds=rounds)
        for n in many
        for where in memories(n)
    ]
    show("Against the clients, 100 of them in a round", cases)
    show(
        "Against the cohort",
        [
            Case(many[-1], cohort=s, rounds=rounds)
            for s in (10, 100, 1000)
            if s < many[-1]
        ],
    )
    spread = [2**i for i in range(10) if 2**i <= jax.device_count()]
    show(
        "Against the devices",
        [Case(many[-1], devices=d, rounds=rounds) for d in spread],
    )


if __name__ == "__main__":
    flags.DEFINE_bool(
        "quick", False, "two rounds, and no 10,000 clients, to see that it runs"
    )
    flags.DEFINE_integer(
        "repeats",
        None,
        "rounds of a median (default: 20, with --quick 2)",
        lower_bound=1,
    )
    report.run(main)
