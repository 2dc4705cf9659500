"""Seconds a round under each option on uploads, relative to the plain round:

    python -m benchmarks.options [--markdown] [--model=mlp28] [--repeats=5]
    [--options=krum,client]

One process: the rounds of all options take turns, and a ratio is to a plain round just
before. Medians are printed. 20 clients with 100 images each, batch 10, one local epoch;
a round without evaluation. Columns are clients per vmapped batch x devices.
"""

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import flags

from benchmarks import report
from benchmarks.report import table
from benchmarks.runner import Runner
from benchmarks.setting import SHAPES, build
from fedjax_pfl import uploads
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import choose
from fedjax_pfl.types import Algorithm, Federation, Method, Task
from fedjax_pfl.uploads.attacks import chosen
from fedjax_pfl.uploads.privacy import per_example
from fedjax_pfl.uploads.robust import RULES

FLAGS = flags.FLAGS
PLAIN = "plain"
COMPRESSIONS = {
    "top_k:0.01": uploads.top_k(0.01),
    "qsgd:4": uploads.qsgd(4),
    "low_rank:2": uploads.low_rank(2),
}


def options(task: Task) -> Iterator[tuple[str, Task, dict[str, Any]]]:
    """Yields the name, the task and the arguments of each option, the plain round
    first."""
    yield PLAIN, task, {}
    attacked = task._replace(malicious=chosen(task.num_clients, 0.2))
    for kind in ("sign_flip", "scale", "gaussian"):
        yield f"malicious {kind}", attacked, _of(uploads.attack(kind))
    for rule in RULES:
        yield f"aggregate {rule}", task, _of(uploads.robust(rule))
    for name, option in COMPRESSIONS.items():
        yield f"compress {name}", task, _of(option)
    yield "dp client", task, _of(uploads.private())
    yield "dp adaptive", task, _of(uploads.private(adaptive=True))
    yield "dp example", task._replace(per_example=per_example(1.0, 1.0)), {}


def _of(option: uploads.Option) -> dict[str, Any]:
    return {"uploads": uploads.chain(option)}


def ratios(
    plain: Callable[..., Algorithm | Method],
    task: Task,
    federation: Federation,
    width: int,
    devices: int,
) -> dict[str, float]:
    """Returns the median ratio of each option; of the plain round its seconds."""
    runners = {
        name: Runner(plain, changed, federation, width, devices, **more)
        for name, changed, more in options(task)
        if name == PLAIN or not FLAGS.options or _chosen(name)
    }
    for runner in runners.values():
        runner()
    turns = [
        {name: (runners[PLAIN](), runner()) for name, runner in runners.items()}
        for _ in range(FLAGS.repeats)
    ]
    found = {
        name: statistics.median(turn[name][1] / turn[name][0] for turn in turns)
        for name in runners
    }
    return found | {PLAIN: statistics.median(turn[PLAIN][1] for turn in turns)}


def _chosen(name: str) -> bool:
    return any(part in name for part in FLAGS.options)


def main(_: list[str]) -> None:
    task, federation = build(choose("model", FLAGS.model, SHAPES))
    plain = ALGORITHMS[choose("method", FLAGS.method, ALGORITHMS)]
    columns = {}
    for devices in (x for x in FLAGS.devices if x <= jax.device_count()):
        for width in FLAGS.widths:
            found = ratios(plain, task, federation, width, devices)
            columns[f"{width} x {devices}"] = found
            print(f"{width} x {devices}", found, file=sys.stderr, flush=True)
            gc.collect()
    print(report.machine())
    print(f"{FLAGS.method}, {FLAGS.model}; medians of {FLAGS.repeats} turns\n")
    rows = [("option", *columns)]
    for name in next(iter(columns.values())):
        shown = f"{name} (s)" if name == PLAIN else name
        rows.append((shown, *(found[name] for found in columns.values())))
    print(table(rows))


if __name__ == "__main__":
    flags.DEFINE_string("method", "fedavg", "method under the options")
    flags.DEFINE_string("model", "mlp28", "network: linear, mlp, mlp28, lenet or cnn")
    flags.DEFINE_list("options", [], "parts of the names of options (default: all)")
    flags.DEFINE_multi_integer("widths", [1, 4], "clients per vmapped batch")
    flags.DEFINE_multi_integer("devices", [1, 2], "devices that a round runs on")
    flags.DEFINE_integer("repeats", 5, "turns that a median is taken of", lower_bound=1)
    report.run(main)
