"""The memory that a run takes, as XLA accounts for the programs that it compiles.

    python -m benchmarks.memory [--markdown] [--quick] [--repeats=3]

20 clients with 100 images of CIFAR-10's shape, half of them in a round, the CNN, batch
10, one device. `XLA` is the larger of a round and an evaluation: arguments, outputs and
temporaries, less what overwrites its arguments, the data among them; of rows that are
kept in main memory it knows nothing. On an accelerator every row is a process of its
own, and `device` is what the device held at most while it ran. `compile s` is of both
programs and of the first state's. The rates are
of a round without evaluation, the median, counted as in `benchmarks.cost`; --quick
takes the MLP."""

import itertools
import statistics
import time
from typing import NamedTuple

import jax
from absl import flags

from benchmarks import report
from benchmarks.setting import CLIENTS, batch_size, build, in_form
from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS

FLAGS = flags.FLAGS
METHODS = ("fedavg", "ditto", "fedcp", "pfedc", "fedamp", "fedem")
# a model or a head for every client, which may lie on the host
KEEPING = ("ditto", "fedcp")
PARTICIPATION = 0.5


class Case(NamedTuple):
    """A row of the table."""

    method: str
    width: int = 1
    client_memory: str = "device"
    model: str = "cnn"
    rounds: int = 3


class Cost(NamedTuple):
    """Bytes, and seconds; steps and examples of a round, operations of a step."""

    compiled: int | None
    compile: float | None
    round: float
    steps: float
    samples: float
    flops: float
    device: int | None


def measure(case: Case) -> Cost:
    """Compiles a case and runs some rounds; the device's peak is that of the whole
    process."""
    task, federation = build(case.model)
    task = task._replace(participation=(PARTICIPATION, PARTICIPATION))
    key, layout = (
        jax.random.key(0),
        {"width": case.width, "storage": case.client_memory},
    )
    program = simulate.program(ALGORITHMS[case.method], task, **layout)
    begin = time.perf_counter()
    functions = simulate.compiled(program, key, federation, eval_every=0)
    # on the host each part is compiled later
    took, ends = None if program.on_host else time.perf_counter() - begin, []
    for _ in simulate.rounds(
        program,
        key,
        federation,
        rounds=1 + case.rounds,
        eval_every=0,
        functions=functions,
    ):
        ends.append(time.perf_counter())
    # then it is evaluated
    seconds = statistics.median(
        b - a for a, b in itertools.pairwise(ends[: 1 + case.rounds])
    )
    steps, samples = (PARTICIPATION * x for x in report.planned(task))
    flops = report.flops(case.method, task, federation, in_form(case.model, "matmul"))
    return Cost(
        functions.memory.peak,
        took,
        seconds,
        steps,
        samples,
        flops,
        report.device_peak(),
    )


def main(argv) -> None:
    del argv
    model = "mlp" if FLAGS.quick else "cnn"
    peak = report.matmul_peak()
    print(report.machine())
    print(
        f"{model}, {CLIENTS} clients, half of them in a round, batch "
        f"{batch_size(model)}, one device"
    )
    print(f"matmul peak {peak:.0f} GFLOP/s; medians of {FLAGS.repeats}\n")
    cases = [
        Case(method, width, "device", model, FLAGS.repeats)
        for method in METHODS
        for width in (1, 4)
    ]
    cases += [Case(method, 1, "host", model, FLAGS.repeats) for method in KEEPING]
    sizes = ("XLA MiB", "device MiB")
    rows: list[tuple] = [
        ("method", "width", "state on", *report.RATES, *sizes, "compile s")
    ]
    costs = (
        map(measure, cases)
        if jax.default_backend() == "cpu"
        else report.fresh(measure, cases)
    )
    for case, cost in zip(cases, costs, strict=True):
        rates = report.rates(cost.steps, cost.samples, cost.round, cost.flops, peak)
        device = None if cost.device is None else cost.device / 2**20
        found = (cost.compiled and cost.compiled / 2**20, device)
        rows.append(
            (
                case.method,
                str(case.width),
                case.client_memory,
                *rates,
                *found,
                cost.compile,
            )
        )
    print(report.table(rows))
    print(f"\nmatmul peak at the end {report.matmul_peak():.0f} GFLOP/s")


if __name__ == "__main__":
    flags.DEFINE_bool(
        "quick", False, "the MLP in place of the CNN, to see that it runs"
    )
    flags.DEFINE_integer(
        "repeats", 3, "rounds that a median is taken of", lower_bound=1
    )
    report.run(main)
