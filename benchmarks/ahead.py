"""Costs of a round on a TPU or GPU, compiled ahead of time on a machine without one.

    pip install -e '.[tpu]'       # or '.[cuda]'
    python -m benchmarks.ahead --target=v5e --model=cnn --width=20 [--algo=fedavg]

The costs are estimates of the compilers, nothing is measured. Operations to which a
TPU's compiler gives no estimate are counted by their instruction bundles; what has
neither is named, and rates are then printed as upper bounds. `by rates` takes the
bundles, or the bytes at the memory's rate if they take longer, for every operation:
a second opinion on the same program. For a GPU it takes the bytes of every operation
that has an estimate at the memory's rate and the products at the peak, one after the
other. Waits for copies under way are in neither.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.experimental import topologies

from benchmarks import language, report, setting
from benchmarks.compiled import (
    Costs,
    Part,
    bundles,
    float32_products,
    missing,
    step,
)
from fedjax_pfl import simulate
from fedjax_pfl.engine.program import Program
from fedjax_pfl.engine.rounds import free_layouts
from fedjax_pfl.engine.width import automatic_width
from fedjax_pfl.engine.xla import OPTIONS
from fedjax_pfl.kernels.platform import on, platform
from fedjax_pfl.models.nnx_model import flops
from fedjax_pfl.types import Context, Federation, Task

FLAGS = flags.FLAGS
MODELS = ("mlp", "mlp28", "lenet", "cnn", "resnet18")
TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


class Target(NamedTuple):
    """A device, by the maker's numbers."""

    platform: str
    topology: str  # of a TPU; of a GPU a file that describes it
    units: float  # of the compiler's estimates per second
    flops: float  # per second, of matrix products at the default precision
    bandwidth: float  # bytes per second
    memory: float  # bytes


TARGETS = {
    # the clock follows from 4 matrix units of 128x128 (v6e: of 256x256) and the peak
    "v5e": Target("tpu", "v5e:2x2", 1.5e9, 197e12, 819e9, 16e9),
    "v6e": Target("tpu", "v6e:2x2", 1.75e9, 918e12, 1640e9, 32e9),
    "h100": Target("cuda", "h100_sxm.txtpb", 1e6, 495e12, 3350e9, 80e9),
}


class Result(NamedTuple):
    """A compiled round."""

    parts: list[Part]
    arguments: int  # bytes
    temporaries: int  # bytes
    seconds: float  # of compilation


@contextmanager
def prepared(target: Target) -> Iterator[tuple[jax.sharding.Sharding, Path]]:
    """Yields a sharding for arrays on the target and the folder of its bundles.

    The compilers read their flags once: of a process's targets, the first one's hold.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        only = "--xla_jf_dump_llo_pass_label_regex=^final_bundles"
        os.environ.setdefault("LIBTPU_INIT_ARGS", f"{dump} {only}")
        xla = os.environ.get("XLA_FLAGS", "")
        if target.platform == "cuda" and "cost_model_stats" not in xla:
            stats = "--xla_gpu_collect_cost_model_stats=true"
            os.environ["XLA_FLAGS"] = f"{xla} {stats}"
        for name, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        yield jax.sharding.SingleDeviceSharding(_device(target)), Path(folder)


def _device(target: Target) -> Any:
    return devices(target)[0]


def devices(target: Target, count: int = 1) -> list[Any]:
    """Returns devices of the target, of a TPU up to 16."""
    if target.platform == "tpu":
        topology = target.topology if count <= 4 else f"{FLAGS.target}:4x4"
        options: dict[str, Any] = {"topology_name": topology}
    else:
        description = Path(__file__).parent / "targets" / target.topology
        options = {"topology_name": "", "topology": f"1x1x{count}"}
        options["target_config"] = description.read_text()
    found = topologies.get_topology_desc(platform=target.platform, **options)
    return list(found.devices)


def lower(
    program: Program,
    federation: Federation,
    sharding: jax.sharding.Sharding,
    *,
    step: bool = True,
) -> jax.stages.Lowered:
    """Lowers a round, or without `step` an evaluation, for a device that this machine
    need not have."""

    def abstract(x: Any) -> jax.ShapeDtypeStruct:
        dtype = getattr(x, "dtype", None) or jnp.asarray(x).dtype
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype, sharding=sharding)

    traced = {name: np.float32(value) for name, value in program.traced.items()}
    state = jax.eval_shape(program.init, jax.random.key(0), traced)
    arguments = (
        Context(jax.random.key(0), traced, federation, np.int32(0)),
        state,
        np.bool_(0),
    )
    arguments = arguments if step else arguments[:-1]
    options: dict[str, Any] = {"compiler_options": OPTIONS.get(platform(), {})}
    options |= {"donate_argnums": 1} if step else {}
    layouts = free_layouts(program, federation)
    if layouts is not None:  # for a single round: without the number of rounds
        options["in_shardings"] = layouts[: len(arguments)]
    function = jax.jit(program.round if step else program.evaluate, **options)
    return function.lower(*jax.tree.map(abstract, arguments))


def compiled_round(
    target: Target,
    where: tuple[jax.sharding.Sharding, Path],
    algo: str,
    task: Task,
    federation: Federation,
    width: int,
) -> Result:
    """Compiles a round of a method with `width` clients at once for the target.

    Args:
      where: as `prepared` yields it; the folder is emptied.
    """
    sharding, folder = where
    begin = time.time()
    program = simulate.program(algo, task, width=width, checked=False)
    compiled = lower(program, federation, sharding).compile()
    seconds, memory = time.time() - begin, compiled.memory_analysis()
    rate = target.bandwidth / target.units
    parts = Costs(compiled.as_text(), bundles(folder), rate).parts
    for path in folder.iterdir():
        path.unlink()
    sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
    return Result(parts, *sizes, seconds)


def floors(target: Target, model: str, task: Task, width: int) -> tuple[float, float]:
    """Returns the least seconds of a local step: of its products at the peak, and of
    weights and gradients once through memory."""
    shapes = jax.eval_shape(task.model.init, jax.random.key(0))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    classes, batch = setting.CLASSES, setting.batch_size(model)
    count = flops(setting.network(model), setting.SHAPES[model], classes, batch)
    return width * count / target.flops, width * 3 * size / target.bandwidth


def row(target: Target, model: str, task: Task, width: int, result: Result) -> tuple:
    """Returns a row of the table."""
    products, weights = floors(target, model, task, width)
    steps = [part for part in result.parts if part.kind == "local step"]
    holes = missing(steps)
    seconds = sum(part.cost for part in steps) / target.units
    second = sum(part.bundled for part in steps) / target.units
    if target.platform == "cuda":
        second += products
    counted = sum(part.counted for part in steps) / target.units / seconds
    rate = f"{width / seconds:,.0f}"
    operations = sum(len(part.operations) + len(part.missing) for part in steps)
    return (
        model,
        str(width),
        f"at most {rate}" if holes else rate,
        f"{width / second:,.0f}" if second else None,
        f"{seconds * 1e6:,.0f}",
        str(operations),
        f"{counted:.0%}",
        f"{seconds / max(products, weights):.1f}",
        f"{(result.arguments + result.temporaries) / 1e6:,.0f}",
        f"{result.seconds:.0f}",
        holes or "nothing",
    )


COLUMNS = ("model", "width", "client steps/s", "by rates", "step us")
COLUMNS += ("operations", "counted")
COLUMNS += ("times the floor", "memory MB", "compile s", "without a cost")


def show(target: Target, result: Result, top: int) -> None:
    """Prints the parts of a round with their dearest operations."""
    for part in result.parts:
        holes = missing([part])
        total = f"{part.cost / target.units * 1e6:,.1f} us"
        total += f", and without a cost: {holes}" if holes else ""
        print(f"{part.kind} (times {part.trips or '?'}): {total}")
        for cost, op in part.operations[:top]:
            where = "/".join(op.where.split("/")[-2:])
            print(f"  {cost / target.units * 1e6:10,.1f}  {op.name:36} {where[-60:]}")


def estimate(
    target: Target, where: tuple[jax.sharding.Sharding, Path], model: str
) -> tuple:
    """Compiles the round of a network that the flags describe; returns its row."""
    with on("tpu" if target.platform == "tpu" else "gpu"):
        clients = FLAGS.clients or max(FLAGS.width or 0, setting.CLIENTS)
        task, federation = setting.build(model, clients=clients, conv=FLAGS.conv)
        width = FLAGS.width or automatic_width(task, clients)
        result = compiled_round(target, where, FLAGS.algo, task, federation, width)
    if FLAGS.top:
        show(target, result, FLAGS.top)
    return row(target, model, task, width, result)


LANGUAGE = ("model", "clients x base", "width", "tokens", "arguments GiB")
LANGUAGE += ("temporaries GiB", "step ms", "of the peak", "float32 products")
LANGUAGE += ("MB of each collective", "compile s")


def language_row(target: Target, where: Path, model: str) -> tuple:
    """Compiles the round of a language model over devices; returns its row: memory of a
    device, of a TPU the time of a step of `width` clients without collectives, the time
    of its products with the base at the peak, relative to that, and what collectives
    move."""
    count, base = FLAGS.devices, FLAGS.base_devices
    width, length = FLAGS.width or 4, FLAGS.length
    groups = count // base
    clients = FLAGS.clients or 2 * width * groups
    layout = {"width": width, "devices": count, "base_devices": base}
    begin = time.time()
    kind = "tpu" if target.platform == "tpu" else "gpu"
    with on(kind), language.devices(devices(target, count)):
        made = language.program(
            model, FLAGS.algo, clients=clients, length=length, **layout
        )
        compiled = language.lower(made).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    costs = Costs(text, bundles(where), target.bandwidth / target.units)
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    moved = language.collectives(text)
    result = Result(costs.parts, *sizes, time.time() - begin)
    if FLAGS.top:
        show(target, result, FLAGS.top)
    wide, products = float32_products(text)
    if FLAGS.top:
        print("\n".join(f"float32: {where}" for where in sorted(set(wide))))
    times: tuple[str | None, ...] = (None, None)
    if kind == "tpu":  # a GPU's attention has no estimate that could be true
        seconds = step(result.parts) / target.units
        least = language.operations(made) * width * length / base / target.flops
        times = f"{1000 * seconds:.0f}", f"{least / seconds:.0%}"
    return (
        model,
        f"{groups} x {base}",
        str(width),
        str(length),
        *(f"{x / 2**30:.2f}" for x in sizes),
        *times,
        f"{len(wide)} of {products}",
        ", ".join(f"{kind} {x / 1e6:,.0f}" for kind, x in sorted(moved.items())),
        f"{result.seconds:.0f}",
    )


def main(argv: list[str]) -> None:
    """Compiles the rounds that the flags ask for and prints their costs."""
    del argv
    jax.config.update("jax_platforms", "cpu")
    target, rows = TARGETS[FLAGS.target], [COLUMNS]
    if FLAGS.devices > 4:
        os.environ["TPU_ACCELERATOR_TYPE"] = f"v5litepod-{FLAGS.devices}"
    with prepared(target) as where:
        if spoken := [model for model in FLAGS.model if model in language.MODELS]:
            rows = [LANGUAGE]
            rows += [language_row(target, where[1], model) for model in spoken]
        else:
            rows += [estimate(target, where, x) for x in FLAGS.model or MODELS]
    print(f"{FLAGS.target}, {FLAGS.algo}: estimates of the compiler, nothing measured")
    print(report.table(rows))


if __name__ == "__main__":
    flags.DEFINE_enum("target", "v5e", list(TARGETS), "device to compile for")
    known = [*MODELS, *language.MODELS]
    flags.DEFINE_multi_enum("model", [], known, "networks; all small unless given")
    flags.DEFINE_integer("devices", 16, "devices of a language model", lower_bound=2)
    flags.DEFINE_integer("base_devices", 4, "of them share its base", lower_bound=1)
    flags.DEFINE_integer("length", 512, "tokens of a text", lower_bound=2)
    flags.DEFINE_string("algo", "fedavg", "method")
    flags.DEFINE_integer("width", None, "clients at once; auto", lower_bound=1)
    flags.DEFINE_integer("clients", None, "clients of the round; 20, or the width")
    flags.DEFINE_string("conv", "auto", "form of the convolutions")
    flags.DEFINE_integer("top", 0, "operations to print of each part", lower_bound=0)
    report.run(main)
