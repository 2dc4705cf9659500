"""Seconds a round of every method relative to FedAvg's:

    python -m benchmarks.cost [--markdown] [--methods=fedavg,ditto] [--model=cnn]
    [--conv=auto] [--repeats=3] [--json]

One process; 20 clients with 100 images each, batch 10, one local epoch, each method's
own defaults; a round without evaluation. All methods take turns, and a ratio is to a
FedAvg round just before; the medians are printed, with the lowest and the highest. The
steps and samples are those that the settings ask for; what a method does besides, as
with further models, is in `arithmetic`, the operations of a local step relative to
FedAvg's, and in `GFLOP/s` (`fedjax_pfl.engine.flops` says what is counted). `MiB` is
XLA's account of the round on each device, the data apart. Methods that need it have
300 public images, LoRA of rank 4 in all layers, or the linear network, and are
compared with FedAvg there. --json adds the ratios of time, arithmetic and memory to
results/cost.json, from which `python docs/pages.py` writes the columns of
docs/methods/index.md.
"""

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import jax
from absl import flags

from benchmarks import report
from benchmarks.report import table
from benchmarks.runner import Runner
from benchmarks.setting import CLASSES, CLIENTS, SHAPES, build, network
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine.width import automatic_width
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.models import layers
from fedjax_pfl.models.adapted import adapted, lora
from fedjax_pfl.models.layers import CONVOLUTIONS
from fedjax_pfl.types import Federation, Task

FLAGS = flags.FLAGS
FILE = Path(__file__).parent / "results" / "cost.json"
PUBLIC = 300
# what a method needs besides a network and data -> methods
NEEDS = {
    "public": ("fedmd", "feddf", "mnfl_het", "pfeddf", "sim_pfd", "topk_pfd"),
    "adapters": ("fedsa_lora", "hetlora", "flora"),
    "linear": ("mocha",),
}
HPARAMS = {"fedl2g": {"warmup": 0}}  # clients train in the measured rounds


def setting(kind: str, conv: str) -> tuple[Task, Federation]:
    """Returns the task and the clients of a key of NEEDS; "": the usual ones.

    Args:
      conv: form of the convolutions.
    """
    model = "linear" if kind == "linear" else choose("model", FLAGS.model, SHAPES)
    made = None
    if kind == "adapters":
        how, shape = lora(4, where="all"), SHAPES[model]
        made = adapted(network(model), how, shape, CLASSES, conv=conv)
    return build(model, conv=conv, made=made, public=PUBLIC * (kind == "public"))


def main(argv) -> None:
    del argv
    wanted = [choose("method", name, ALGORITHMS) for name in FLAGS.methods]
    wanted = wanted or list(ALGORITHMS)
    choose("conv", FLAGS.conv, CONVOLUTIONS)
    special = {name for names in NEEDS.values() for name in names}
    groups = {"": [x for x in wanted if x not in special]}
    groups |= {kind: [x for x in wanted if x in names] for kind, names in NEEDS.items()}
    print(report.machine())
    print(f"{FLAGS.model}, {CLIENTS} clients, convolutions {layers.form(FLAGS.conv)}")
    peak = report.matmul_peak()
    print(f"matmul peak {peak:.0f} GFLOP/s; medians of {FLAGS.repeats} turns\n")
    head = ("method", "s a round", "of FedAvg", "from", "to", "arithmetic")
    rows: list[tuple] = [(*head, *report.RATES, "compile s", "MiB", "memory")]
    refused: list[str] = []
    for kind, names in groups.items():
        if names:
            rows += measured(kind, names, peak, refused)
    print(table(rows))
    print(f"\nmatmul peak at the end {report.matmul_peak():.0f} GFLOP/s")
    print("\n".join(["", *refused]))
    if FLAGS.json:
        known = json.loads(FILE.read_text()) if FILE.is_file() else {}
        for name, _, ratio, _, _, arithmetic, *_, memory in rows[1:]:
            if name == "fedavg":
                ratio = 1.0  # what was measured is the noise
            found = {"time": ratio, "arithmetic": arithmetic, "memory": memory}
            known[name] = {x: round(value, 2) for x, value in found.items()}
        lines = [f' "{name}": {json.dumps(known[name])}' for name in sorted(known)]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def measured(
    kind: str, names: Iterable[str], peak: float, refused: list[str]
) -> list[tuple]:
    """Returns a row per method, FedAvg's first in the usual setting.

    Args:
      kind: as of `setting`.
      peak: GFLOP/s of matrix products.
      refused: gets a line for each method that cannot train there.
    """
    task, federation = setting(kind, FLAGS.conv)
    plain, _ = setting(kind, "matmul")
    devices, runners = jax.device_count(), {}
    width = automatic_width(task, CLIENTS, devices)
    for name in dict.fromkeys(["fedavg", *names]):
        print(name, file=sys.stderr, flush=True)
        try:
            runners[name] = Runner(
                ALGORITHMS[name],
                task,
                federation,
                width,
                devices,
                hparams=HPARAMS.get(name),
            )
        except InputError as error:
            refused.append(f"{name}: {error}")
            continue
        # the first round is like no other for methods that look back
        for _ in range(2):
            runners[name]()
    turns = [
        {name: (runners["fedavg"](), runner()) for name, runner in runners.items()}
        for _ in range(FLAGS.repeats)
    ]
    rows: list[tuple] = []
    usual = report.flops("fedavg", task, federation, plain.models[0])
    for name, runner in runners.items():
        given = name, task, federation, plain.models[0]
        flops = report.flops(*given, HPARAMS.get(name))
        seconds = statistics.median(turn[name][1] for turn in turns)
        ratios = [turn[name][1] / turn[name][0] for turn in turns]
        rates = report.rates(*report.planned(task), seconds, flops, peak)
        ratio = statistics.median(ratios), min(ratios), max(ratios)
        size = runner.bytes / 2**20
        sizes = size, runner.bytes / runners["fedavg"].bytes
        found = name, seconds, *ratio, flops / usual, *rates, runner.compile, *sizes
        rows.append(found)
    return rows if not kind else rows[1:]


if __name__ == "__main__":
    flags.DEFINE_list(
        "methods",
        [],
        "which methods besides fedavg (default: all that the model allows)",
    )
    flags.DEFINE_string("model", "cnn", "which model: linear, mlp, mlp28, lenet or cnn")
    flags.DEFINE_string("conv", "auto", "form of the convolutions")
    flags.DEFINE_integer("repeats", 3, "turns that a median is taken of", lower_bound=1)
    flags.DEFINE_bool("json", False, f"write the ratios to {FILE.name}")
    report.run(main)
