"""The memory that a run is predicted to take, beside XLA's own account of the programs that it compiles.

    python -m benchmarks.memory [--markdown] [--quick]

20 clients with 100 images of CIFAR-10's shape, half of them in a round, the CNN, batch 10, one device. `XLA` is the
larger of a round and an evaluation: arguments, outputs and temporaries, less what overwrites its arguments; on a CPU
with the rows that are kept in main memory. Both have the data in them. On an accelerator every row is a process of its
own, runs a round and an evaluation, and `device` is what the device held at most. `compile s` is of both programs.
Speed is for `benchmarks.throughput` and `benchmarks.cost`.
"""

import time
from typing import NamedTuple

import jax
from absl import flags

from benchmarks import report
from benchmarks.throughput import CLIENTS, batch_size, build
from fedjax_pfl import memory, offload, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.programs import Program
from fedjax_pfl.types import Array, Federation

FLAGS = flags.FLAGS
METHODS = ("fedavg", "ditto", "fedcp", "pfedc", "fedamp", "fedem")
KEEPING = ("ditto", "fedcp")  # a model or a head for every client, which may lie on the host
PARTICIPATION = 0.5


class Case(NamedTuple):
    """A row of the table."""

    method: str
    width: int = 1
    client_memory: str = "device"
    model: str = "cnn"


class Cost(NamedTuple):
    """Bytes, and seconds."""

    predicted: int
    compiled: int
    compile: float
    device: int | None


def measure(case: Case) -> Cost:
    """Predicts a case's memory, then compiles it; the device's peak is that of the whole process."""
    task, federation = build(case.model)
    task = task._replace(participation=(PARTICIPATION, PARTICIPATION))
    program, key = simulate.program(ALGORITHMS[case.method], task, width=case.width), jax.random.key(0)
    if case.client_memory == "host":
        program = offload.offloaded(program, task)
    predicted = memory.predict(program, key, federation).peak
    begin = time.perf_counter()
    compiled = account(program, key, federation)
    took = time.perf_counter() - begin
    if jax.default_backend() != "cpu":
        for _ in simulate.rounds(program, key, federation, rounds=1):
            pass
    return Cost(predicted, compiled, took, report.device_peak())


def account(program: Program, key: Array, federation: Federation) -> int:
    """XLA's, in bytes, of what a run on one device runs."""
    jobs = [traced.lower().compile().memory_analysis() for traced, *_ in memory._jobs(program, key, federation)]
    sizes = [
        m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes for m in jobs
    ]
    return max(sizes) + (memory._kept(program, key) if jax.default_backend() == "cpu" else 0)


def main(argv) -> None:
    del argv
    model = "mlp" if FLAGS.quick else "cnn"
    print(report.machine())
    print(f"{model}, {CLIENTS} clients, half of them in a round, batch {batch_size(model)}, one device\n")
    cases = [Case(method, width, model=model) for method in METHODS for width in (1, 4)]
    cases += [Case(method, 1, "host", model) for method in KEEPING]
    names = ("method", "width", "state on", "predicted MiB", "XLA MiB", "predicted / XLA", "device MiB", "compile s")
    rows: list[tuple] = [names]
    costs = map(measure, cases) if jax.default_backend() == "cpu" else report.fresh(measure, cases)
    for case, cost in zip(cases, costs, strict=True):
        sizes = (cost.predicted / 2**20, cost.compiled / 2**20, cost.predicted / cost.compiled)
        device = None if cost.device is None else cost.device / 2**20
        rows.append((case.method, str(case.width), case.client_memory, *sizes, device, cost.compile))
    print(report.table(rows))


if __name__ == "__main__":
    report.run(main)
