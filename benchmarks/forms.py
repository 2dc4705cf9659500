"""Forms of the convolutions, widths and loops of one network, their rounds in turns.

    python -m benchmarks.forms [--model=cnn] [--clients=100] [--forms=auto,xla]
    [--widths=20,100] [--loops=dynamic,static] [--repeats=7] [--markdown]

A round is one epoch of FedAvg over 150 images of each client. Every variant is compiled
first; then each trains one round after the other, and the medians are printed. What
does not compile is named.
"""

import itertools
import statistics
import time

import jax
from absl import flags

from benchmarks import report, setting
from benchmarks.runner import Runner
from fedjax_pfl.algorithms import ALGORITHMS

FLAGS = flags.FLAGS


def compiled(form: str, width: int, loop: str) -> Runner:
    """One variant, compiled and run once."""
    task, federation = setting.build(
        FLAGS.model, conv=form, clients=FLAGS.clients, each=FLAGS.each
    )
    task = task._replace(loop=loop)
    run = Runner(ALGORITHMS[FLAGS.algo], task, federation, width, 1)
    run()
    return run


def main(argv: list[str]) -> None:
    """Compiles all variants, runs them in turns and prints a table."""
    del argv
    print(report.machine(), flush=True)
    kinds = itertools.product(FLAGS.forms, map(int, FLAGS.widths), FLAGS.loops)
    runs: dict[tuple[str, int, str], Runner] = {}
    for kind in kinds:
        begin = time.perf_counter()
        try:
            runs[kind] = compiled(*kind)
        except jax.errors.JaxRuntimeError as error:
            print(kind, "does not compile:", str(error).splitlines()[0], flush=True)
            continue
        print(kind, f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    times: dict[tuple[str, int, str], list[float]] = {kind: [] for kind in runs}
    for _ in range(FLAGS.repeats):
        for kind, run in runs.items():
            times[kind].append(run())
    task, _ = setting.build(FLAGS.model, clients=FLAGS.clients, each=FLAGS.each)
    steps = report.planned(task)[0]
    rows: list[tuple] = [
        ("network", "form", "width", "loop", "steps/s", "round ms", "compile s", "MiB")
    ]
    for kind, run in runs.items():
        seconds = statistics.median(times[kind])
        form, width, loop = kind
        cost = (steps / seconds, seconds * 1e3, run.compile, run.bytes / 2**20)
        rows.append((FLAGS.model, form, str(width), loop, *cost))
    print(report.table(rows), flush=True)


if __name__ == "__main__":
    flags.DEFINE_string("model", "cnn", "network")
    flags.DEFINE_string("algo", "fedavg", "method")
    flags.DEFINE_integer("clients", 100, "clients of the round", lower_bound=1)
    flags.DEFINE_integer("each", 200, "images of a client, 3/4 to train on")
    flags.DEFINE_list("forms", ["auto"], "of the convolutions")
    flags.DEFINE_list("widths", ["20", "100"], "clients at once")
    flags.DEFINE_list("loops", ["dynamic"], "trip counts")
    flags.DEFINE_integer("repeats", 7, "rounds of each variant", lower_bound=1)
    report.run(main)
