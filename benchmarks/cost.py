"""Seconds a round of every method relative to FedAvg's:

    python -m benchmarks.cost [--markdown] [--methods=fedavg,ditto] [--model=cnn]
    [--conv=auto] [--repeats=3]

One process; 20 clients with 100 images each, batch 10, one local epoch, each method's
own defaults; a round without evaluation. All methods take turns, and a ratio is to a
FedAvg round just before; the medians are printed, with the lowest and the highest. The
steps and samples are those that the settings ask for; what a method does beside them,
as with further models, is in `GFLOP/s` (`fedjax_pfl.engine.flops` says what is
counted). `MiB` is XLA's account of the round on each device, the data apart.
"""

import statistics

import jax
from absl import flags

from benchmarks import report
from benchmarks.report import table
from benchmarks.runner import Runner
from benchmarks.setting import CLIENTS, SHAPES, build, in_form
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine.width import automatic_width
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.models import layers
from fedjax_pfl.models.layers import CONVOLUTIONS

FLAGS = flags.FLAGS


def main(argv) -> None:
    del argv
    chosen = [choose("method", name, ALGORITHMS) for name in FLAGS.methods] or list(
        ALGORITHMS
    )
    task, federation = build(
        choose("model", FLAGS.model, SHAPES),
        conv=choose("conv", FLAGS.conv, CONVOLUTIONS),
    )
    devices = jax.device_count()
    width = automatic_width(task, CLIENTS, devices)
    names = ["fedavg", *(name for name in chosen if name != "fedavg")]
    runners, refused, peak = {}, [], report.matmul_peak()
    for name in names:
        try:
            runners[name] = Runner(ALGORITHMS[name], task, federation, width, devices)
        except InputError as error:
            refused.append(f"{name}: {error}")
            continue
        # the first round is like no other for methods that look back
        for _ in range(2):
            runners[name]()
    turn = lambda: {
        name: (runners["fedavg"](), runner()) for name, runner in runners.items()
    }
    turns = [turn() for _ in range(FLAGS.repeats)]
    print(report.machine())
    print(
        f"{FLAGS.model}, {CLIENTS} clients, convolutions {layers.form(FLAGS.conv)}, "
        f"{devices} x width {width}"
    )
    print(f"matmul peak {peak:.0f} GFLOP/s; medians of {FLAGS.repeats} turns\n")
    rows: list[tuple] = [
        (
            "method",
            "s a round",
            "of FedAvg",
            "from",
            "to",
            *report.RATES,
            "compile s",
            "MiB",
        )
    ]
    for name, runner in runners.items():
        flops = report.flops(name, task, federation, in_form(FLAGS.model, "matmul"))
        seconds = statistics.median(turn[name][1] for turn in turns)
        ratios = [turn[name][1] / turn[name][0] for turn in turns]
        rates = report.rates(*report.planned(task), seconds, flops, peak)
        rows.append(
            (
                name,
                seconds,
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                *rates,
                runner.compile,
                runner.bytes / 2**20,
            )
        )
    print(table(rows))
    print(f"\nmatmul peak at the end {report.matmul_peak():.0f} GFLOP/s")
    print("\n".join(["", *refused]))


if __name__ == "__main__":
    flags.DEFINE_list(
        "methods",
        [],
        "which methods beside fedavg (default: all that the model allows)",
    )
    flags.DEFINE_string("model", "cnn", "which model: linear, mlp, mlp28, lenet or cnn")
    flags.DEFINE_string("conv", "auto", "form of the convolutions")
    flags.DEFINE_integer("repeats", 3, "turns that a median is taken of", lower_bound=1)
    report.run(main)
