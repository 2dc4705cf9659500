"""The longest kernels of one round, by the profiler of JAX.

    python -m benchmarks.profiled [--algo=fedavg] [--model=cnn] [--clients=100]
    [--width=N] [--top=10]

Prints the number of kernels per local step and the kernels with the most time.
"""

import collections
import tempfile
from pathlib import Path

import jax
from absl import flags
from jax.profiler import ProfileData

from benchmarks import report, setting
from benchmarks.runner import Runner
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine.width import automatic_width
from fedjax_pfl.errors import InputError, choose

FLAGS = flags.FLAGS
# of the lines of a trace: kernels of a GPU, operations of a TPU and of a CPU
LINES = ("Stream", "XLA Ops", "tf_XLA", "tf_xla", "Eigen")


def kernels(folder: Path) -> list[tuple[str, float]]:
    """Returns name and seconds of every kernel in a trace.

    Raises:
      InputError: the trace has none.
    """
    found: list[tuple[str, float]] = []
    for path in folder.rglob("*.xplane.pb"):
        planes = list(ProfileData.from_file(str(path)).planes)
        devices = [plane for plane in planes if plane.name.startswith("/device:")]
        for plane in devices or planes:
            for line in plane.lines:
                if any(name in line.name for name in LINES):
                    found += [(e.name, e.duration_ns / 1e9) for e in line.events]
    if not found:
        raise InputError("The trace of this device holds no kernels.")
    return found


def main(argv: list[str]) -> None:
    """Profiles one round and prints its longest kernels."""
    del argv
    task, federation = setting.build(FLAGS.model, clients=FLAGS.clients)
    width = FLAGS.width or automatic_width(task, FLAGS.clients)
    method = ALGORITHMS[choose("method", FLAGS.algo, ALGORITHMS)]
    run = Runner(method, task, federation, width, 1)
    run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds = run()
        found = kernels(Path(folder))
    steps = report.planned(task)[0]
    total, times = sum(time for _, time in found), collections.Counter[str]()
    counts = collections.Counter(name for name, _ in found)
    for name, time in found:
        times[name] += time
    turns = steps / width
    print(f"{seconds:.4f} s a round, {total:.4f} s of kernels, {steps} client steps")
    print(f"{len(found)} kernels, {len(found) / turns:.1f} per local step of a batch")
    rows = [("kernel", "times", "ms", "share")]
    for name, time in times.most_common(FLAGS.top):
        share = f"{time / total:.1%}"
        rows.append((name[:60], str(counts[name]), f"{time * 1e3:.2f}", share))
    print(report.table(rows))


if __name__ == "__main__":
    flags.DEFINE_string("algo", "fedavg", "method")
    flags.DEFINE_string("model", "cnn", "network")
    flags.DEFINE_integer("clients", 100, "clients of the round", lower_bound=1)
    flags.DEFINE_integer("width", None, "clients at once; auto", lower_bound=1)
    flags.DEFINE_integer("top", 10, "kernels to print", lower_bound=1)
    report.run(main)
