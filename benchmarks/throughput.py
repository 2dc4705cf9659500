"""Speed of local training: client steps a second, GFLOP/s against the matmul peak,
compile time and memory.

    python -m benchmarks.throughput [--markdown] [--models=mlp,lenet,cnn,resnet18]
    [--pytorch] [--quick] [--repeats=5]

Medians of the repetitions, fewer where they take over ten seconds; compare ratios, not
machines. On a CPU every core is a device of its own, as in `fedjax-pfl run`; the rows
with a plain width use one of them (whose matrix products may still run on all cores),
`auto (D x W)` uses D. A FLOP count has 2 per multiply-add of the plain product or
convolution, the forward pass and both gradients, without the input gradient of the
first layer; Winograd's form needs fewer. `serial` is the plain baseline: a Python loop
over clients and batches of one jitted step with Flax's stock convolution and pooling.
Memory is XLA's own account of the compiled round (arguments, outputs and temporaries,
less what overwrites its arguments), the data apart. With --pytorch the same steps are
timed in PyTorch, too (see `benchmarks.pytorch`): compare them with the row `auto`,
which uses the whole machine as they do. On an accelerator there are more clients and a
row of each form of the convolutions, of which `auto` chooses as fedjax-pfl does;
Winograd's products have the highest precision.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import nnx

from benchmarks import pytorch, report
from benchmarks.report import RATES, matmul_peak, table
from benchmarks.runner import Runner
from benchmarks.setting import (
    BATCH,
    BATCHES,
    CLASSES,
    CLIENTS,
    SHAPES,
    batch_size,
    build,
    network,
)
from benchmarks.stock import stock
from fedjax_pfl import models
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data.datasets import prepare_images
from fedjax_pfl.engine.width import automatic_width
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.types import Federation, Task

WIDTHS = (8, 32, 128)  # on an accelerator, with as many clients as the last
# of a client and round: seconds of work
STEPS = {"linear": 100, "mlp": 400, "mlp28": 200, "lenet": 40, "cnn": 15, "resnet18": 2}
SECONDS = 10  # after which nothing is repeated

FLAGS = flags.FLAGS


class Timing(NamedTuple):
    steps_per_second: float
    compile_seconds: float | None = None
    megabytes: float | None = None


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def cohort(model: str) -> int:
    clients = CLIENTS if on_cpu() else WIDTHS[-1]
    return clients // 5 if model in BATCHES else clients  # where a step takes long


def widths(clients: int) -> list[int]:
    return sorted(
        {min(width, clients) for width in ((1, 4, clients) if on_cpu() else WIDTHS)}
    )


def forms(model: str) -> dict[str, str]:
    """The rows of a model, {name: form of the convolutions}."""
    if network(model) in ("linear", "mlp"):
        return {"ours": "auto"}
    xla = {"XLA conv": "xla"}
    return (
        xla | {"ours": "auto"}
        if on_cpu()
        else xla | {"matmul": "matmul", "winograd": "winograd", "ours": "auto"}
    )


def repeats() -> int:
    return FLAGS.repeats or (1 if FLAGS.quick else 5)


def median_seconds(run: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < repeats() and sum(times) < SECONDS:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def fedavg(task: Task, f: Federation, width: int, devices: int = 1) -> Timing:
    """One FedAvg round, without evaluation, of the whole federation."""
    run = Runner(ALGORITHMS["fedavg"], task, f, width, devices)
    run()
    return Timing(
        report.planned(task)[0] / median_seconds(run), run.compile, run.bytes / 2**20
    )


def serial(model: str, f: Federation, steps: int) -> float:
    """Client steps per second of the plain loop: client after client, then the mean."""
    graph, start, stats = nnx.split(
        stock(model, SHAPES[model], CLASSES), nnx.Param, nnx.BatchStat
    )
    batch, clients = batch_size(model), len(f.train.size)
    sgd = optax.sgd(0.01)

    @jax.jit
    def step(params, opt, x, y):
        def loss(params):
            own = jax.tree.map(jnp.copy, stats)  # which Flax changes in place
            logits = nnx.merge(graph, params, own)(prepare_images(x))
            return jnp.mean(
                optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)
            )

        updates, opt = sgd.update(jax.grad(loss)(params), opt)
        return optax.apply_updates(params, updates), opt

    x, y, index = (
        np.asarray(f.examples.x),
        np.asarray(f.examples.y),
        np.asarray(f.train.index),
    )
    sizes = np.asarray(f.train.size)

    def round_of_clients():
        total = jax.tree.map(jnp.zeros_like, start)
        for own, size in zip(index, sizes, strict=True):
            order = np.random.default_rng(0).permutation(own[:size])
            params, opt = start, sgd.init(start)
            for s in range(steps):
                rows = order[(s * batch) % (size - batch) :][:batch]
                params, opt = step(params, opt, x[rows], y[rows])
            total = jax.tree.map(lambda a, b: a + b / clients, total, params)
        return total

    jax.block_until_ready(round_of_clients())
    return steps * clients / median_seconds(round_of_clients)


def layouts(model: str, peak: float) -> list[tuple]:
    """The rows of one model: the serial baseline, every form at every width, what is
    chosen, PyTorch's."""
    flops = models.flops(network(model), SHAPES[model], CLASSES, batch_size(model))
    steps, clients, devices = (
        2 if FLAGS.quick else STEPS[model],
        cohort(model),
        jax.device_count(),
    )
    task, f = build(model, clients=clients, steps=steps)
    base = serial(model, f, steps)
    rows: list[tuple] = []

    def add(form: str, width: str, timing: Timing) -> None:
        rate = timing.steps_per_second
        rates = report.rates(rate, rate * batch_size(model), 1, flops, peak)
        rows.append((model, form, width, *rates, rate / base, *timing[1:]))

    add("serial", "-", Timing(base))
    for name, form in forms(model).items():
        # ResNet-18 then takes 10 seconds a step: one client
        slow = on_cpu() and form == "xla"
        some = 1 if slow and model in BATCHES else clients
        given = build(
            model, conv=form, clients=some, steps=max(1, steps // 5) if slow else steps
        )
        for width in widths(some):
            add(name, "all" if width == clients else str(width), fedavg(*given, width))
    width = automatic_width(task, clients, devices)
    add("ours", f"auto ({devices} x {width})", fedavg(task, f, width, devices))
    for label, rate in torch_rates(model, steps * clients).items():
        add("PyTorch", label, Timing(rate))
    return rows


def torch_rates(model: str, steps: int) -> dict[str, float]:
    """Steps a second of PyTorch, each in its faster memory format: on a CPU of one
    process with every core, and of one a core; else of one on a GPU."""
    cores, rates, device = (
        report.cores(),
        {},
        pytorch.device() if FLAGS.pytorch else None,
    )
    for processes in sorted({1, cores}) if device == "cpu" else [1] if device else []:
        given = (
            SHAPES[model],
            CLASSES,
            batch_size(model),
            processes,
            max(2, steps // (2 * processes)),
            repeats(),
        )
        measured = pytorch.steps_per_second(model, *given, device=device)
        form = max(measured, key=measured.__getitem__)
        where = (
            f"{processes} x {cores // processes} threads"
            if device == "cpu"
            else "1 GPU"
        )
        rates[f"{where}, {form}"] = measured[form]
    return rates


def rates(task: Task, rate: float, peak: float) -> tuple[float, ...]:
    """The columns RATES of the CNN, at so many steps a second."""
    steps, samples = report.planned(task)
    return report.rates(
        steps,
        samples,
        steps / rate,
        models.flops("cnn", SHAPES["cnn"], CLASSES, BATCH),
        peak,
    )


def uneven(peak: float) -> list[tuple]:
    """Time of a real step on uneven clients (Dirichlet 0.1) against even ones,
    alternating."""
    rows = [
        (
            "clients",
            "sizes",
            "real steps",
            *RATES,
            "compile s",
            "MiB",
            "time a step / even",
        )
    ]
    found: dict[str, list[Timing]] = {"iid": [], "dirichlet": []}
    tasks = {split: build("cnn", split=split) for split in found}
    for _ in range(1 if FLAGS.quick else 3):
        for split, (task, f) in tasks.items():
            width = automatic_width(task, CLIENTS, jax.device_count())
            found[split].append(fedavg(task, f, width, jax.device_count()))
    median = {
        split: statistics.median(timing.steps_per_second for timing in found[split])
        for split in found
    }
    for split, (task, _) in tasks.items():
        rate, sizes = median[split], f"{task.sizes.min()}-{task.sizes.max()}"
        last = (*found[split][0][1:], median["iid"] / rate)
        rows.append(
            (
                f"{CLIENTS} {split}",
                sizes,
                str(report.planned(task)[0]),
                *rates(task, rate, peak),
                *last,
            )
        )
    return rows


def memory(peak: float) -> list[tuple]:
    """XLA's memory of a FedAvg round of one step against the number of clients at the
    same width."""
    rows = [("clients", "width", *RATES, "compile s", "MiB", "relative")]
    for clients in (20, 200):
        task, f = build("cnn", clients=clients, steps=1, each=20)
        timing = fedavg(task, f, 4)
        relative = timing.megabytes / rows[1][-2] if len(rows) > 1 else 1.0
        rows.append(
            (
                str(clients),
                "4",
                *rates(task, timing.steps_per_second, peak),
                *timing[1:],
                relative,
            )
        )
    return rows


def main(argv) -> None:
    del argv
    if FLAGS.pytorch and not pytorch.installed():
        raise InputError("--pytorch needs PyTorch: pip install -e '.[benchmarks]'.")
    if FLAGS.pytorch:
        pytorch.device()
    for model in FLAGS.models:
        choose("model", model, STEPS)
    peak = matmul_peak()
    print(report.machine(*["torch"] * FLAGS.pytorch))
    sizes = [
        f"{model}: {cohort(model)} clients, batch {batch_size(model)}"
        for model in FLAGS.models
    ]
    print(
        f"matmul peak {peak:.0f} GFLOP/s; medians of {repeats()}; {'; '.join(sizes)}\n"
    )
    header = ("model", "form", "width", *RATES, "of serial", "compile s", "MiB")
    rows = [header]
    for model in FLAGS.models:
        rows += layouts(model, peak)
    print(table(rows) + "\n")
    if "cnn" in FLAGS.models:
        print(table(uneven(peak)) + "\n")
        print(table(memory(peak)))
    print(f"\nmatmul peak at the end {matmul_peak():.0f} GFLOP/s")


if __name__ == "__main__":
    flags.DEFINE_list(
        "models",
        ["mlp", "mlp28", "lenet", "cnn"],
        "which models; resnet18, too, takes minutes",
    )
    flags.DEFINE_bool(
        "pytorch", False, "time PyTorch, too: pip install -e '.[benchmarks]'"
    )
    flags.DEFINE_bool(
        "quick", False, "one repetition and few steps, to see that it runs"
    )
    flags.DEFINE_integer(
        "repeats",
        None,
        "of each measurement (default: 5, with --quick 1)",
        lower_bound=1,
    )
    report.run(main)
