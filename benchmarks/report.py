"""What every benchmark prints: the machine and the versions, the matmul peak, rates
against it, memory, a table."""

import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from fedjax_pfl import local_training
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine.flops import flops_of_step
from fedjax_pfl.engine.frozen import with_frozen
from fedjax_pfl.engine.xla import split_cpu
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment.run_directory import versions
from fedjax_pfl.types import Federation, Model, Task

FLAGS = flags.FLAGS
flags.DEFINE_bool("markdown", False, "print the tables as Markdown")

RATES = ("steps/s", "samples/s", "GFLOP/s", "of peak")


def run(main: Callable[[list[str]], None]) -> None:
    """Runs a benchmark's main; what a user got wrong is one sentence.

    A CPU's cores are devices, and an accelerator's memory is taken as it is needed, so
    that processes can share it.
    """

    def guarded(argv: list[str]) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        split_cpu()
        try:
            main(argv)
        except InputError as error:
            sys.exit(str(error))

    app.run(guarded)


def machine(*packages: str) -> str:
    """The processor, the devices that JAX sees, the precision of its float32 products,
    and the versions of what is measured and of further packages.

    The default precision is float32 on a CPU, TF32 on recent NVIDIA GPUs, bfloat16 on a
    TPU.
    """
    found = versions() | {name: metadata.version(name) for name in packages}
    names = ("git", "python", "jax", "jaxlib", "flax", *packages)
    precision = jax.config.values["jax_default_matmul_precision"] or "default"
    where = (
        f"{cores()} cores of {_processor()}; {found['device']}, matmul precision "
        f"{precision}; "
    )
    return where + ", ".join(f"{x} {found[x]}" for x in names)


def cores() -> int:
    """Those that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [
        line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def matmul_peak() -> float:
    """GFLOP/s of float32 matrix products at the default precision, the best of several.

    Of 2048^3 on a CPU; on an accelerator, for which that is too short beside the call,
    of 8192^3."""
    side = 2048 if jax.default_backend() == "cpu" else 8192
    a = jax.random.normal(jax.random.key(0), (side, side))
    product = jax.jit(lambda a: a @ a)
    jax.block_until_ready(product(a))
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready(product(a))
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best / 1e9


def rates(
    steps: float, samples: float, seconds: float, flops: float, peak: float
) -> tuple[float, ...]:
    """The columns RATES.

    Args:
      steps: client steps in the time.
      samples: training examples in them.
      seconds: the time.
      flops: of a step.
      peak: GFLOP/s, of the same process.
    """
    gflops = steps * flops / seconds / 1e9
    return steps / seconds, samples / seconds, gflops, gflops / peak


def planned(task: Task) -> tuple[int, int]:
    """Steps and examples of a round of every client."""
    steps, examples = local_training.planned(task, task.sizes)
    return int(steps.sum()), int(examples.sum())


def flops(
    method: str,
    task: Task,
    federation: Federation,
    plain: Model,
    hparams: dict[str, Any] | None = None,
) -> float:
    """Floating-point operations of a method's own for each planned step.

    Args:
      plain: the task's model, its convolutions in the form "matmul" (see
        `flops_of_step`).
    """
    shared = None if task.shared is None else plain
    task = task._replace(models=(plain,), shared=shared)
    held = with_frozen(federation, task)
    return flops_of_step(ALGORITHMS[method], task, held, hparams)


def account(compiled: jax.stages.Compiled) -> int:
    """XLA's, in bytes on each device: arguments, outputs and temporaries, less what
    overwrites its arguments."""
    m: Any = compiled.memory_analysis()
    taken = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return taken - m.alias_size_in_bytes


def device_peak() -> int | None:
    """Bytes that the first device held at most, if it tells; a CPU does not."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def process_peak() -> int:
    """Bytes of main memory that this process took at most."""
    status = Path("/proc/self/status")
    # what getrusage tells a process that was started by another begins with the other's
    # memory
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def fresh(function: Callable[[Any], Any], cases: Iterable[Any]) -> Iterator[Any]:
    """The function's results, each from a process of its own, one after another: their
    peaks are their own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, mp_context=spawn, initializer=split_cpu, max_tasks_per_child=1
    ) as pool:
        yield from pool.map(function, cases)


def cell(x: str | float | None) -> str:
    return (
        x
        if isinstance(x, str)
        else "-"
        if x is None
        else f"{x:.3g}"
        if x < 100
        else f"{x:.0f}"
    )


def table(rows: list[tuple]) -> str:
    """Aligned columns, or Markdown."""
    cells = [tuple(map(cell, row)) for row in rows]
    if FLAGS.markdown:
        head, *body = cells
        rule = ("---", *["---:"] * (len(head) - 1))
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in cells
    )
