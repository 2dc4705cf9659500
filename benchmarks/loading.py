"""Host memory while a frozen language model is read from safetensors.

    python -m benchmarks.loading [--model=llama3-1b] [--base_devices=1] [--quick]

Random weights in bfloat16 are written to four files. A process of its own reads them
by `simulate.program` to the devices, on Linux those of a CPU. `peak` is the most memory
that this adds to the process, less the bytes of the base on the devices. `read` is the
most that it adds to read each variable and to drop it, as for an accelerator. Both are
relative to the size of the largest file, too."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import traverse_util

from benchmarks import language, report
from fedjax_pfl import models, simulate
from fedjax_pfl.engine import frozen
from fedjax_pfl.models import families, nnx_model, pretrained
from fedjax_pfl.models.checkpoints import WEIGHTS, Config

FLAGS = flags.FLAGS
PARTS, LENGTH = 4, 8
OF = ("peak of a part", "read of a part")
FORMS = (("bfloat16", "unrolled"), ("bfloat16", "scanned"), ("float32", "unrolled"))


class Case(NamedTuple):
    """A row of the table."""

    folder: str
    model: str
    dtype: str
    blocks: str
    devices: int


class Cost(NamedTuple):
    """Bytes on the devices, and further bytes of the process at most."""

    placed: int
    peak: int
    read: int


def write(folder: Path, name: str) -> int:
    """Writes random weights in parts, and returns the bytes of the largest file."""
    from safetensors.numpy import save_file

    given = list(_shapes(name))
    ends = np.cumsum([np.prod(shape) for _, shape in given])
    of = (PARTS * (ends - 1) // ends[-1]).tolist()
    draw, where = np.random.default_rng(0), {}
    for i in range(PARTS):
        file = f"model-{i + 1}-of-{PARTS}.safetensors"
        part = {
            name: (draw.random(shape, np.float32) - 0.5).astype(jnp.bfloat16)
            for (name, shape), here in zip(given, of, strict=True)
            if here == i
        }
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "config.json").write_text(json.dumps(language.MODELS[name]))
    index = json.dumps({"weight_map": where})
    (folder / f"{WEIGHTS}.index.json").write_text(index)
    return max((folder / file).stat().st_size for file in where.values())


def _shapes(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and the shape of each tensor in the file, block by block."""
    settings = language.MODELS[name]
    family = families.TYPES["llama"](Config(settings), language.Absent())  # type: ignore[arg-type]
    plain = nnx_model.model(family.factory, (LENGTH,), **_texts(name))
    body = jax.eval_shape(plain.init, jax.random.key(0))["body"]
    flat = traverse_util.flatten_dict(body)
    for path in sorted(flat, key=lambda path: [int(x) for x in path if x.isdecimal()]):
        shape = flat[path].shape
        module = family.file_name(path[:-1])
        start = "" if module in families.HEADS else family.prefix
        yield f"{start}{module}.weight", shape[::-1] if path[-1] == "kernel" else shape


def _texts(name: str) -> dict[str, Any]:
    words = language.MODELS[name]["vocab_size"]
    known = {"positions": LENGTH, "vocabulary": words, "input_dtype": jnp.int32}
    return {"num_classes": words, **known}


def measure(case: Case) -> Cost:
    """Reads the weights to the devices."""
    found = pretrained.load(case.folder)
    form = {"base": found.variables, "base_dtype": case.dtype, "blocks": case.blocks}
    shape, lora = (LENGTH,), models.lora(8)
    net = models.adapted(found.factory, lora, shape, **_texts(case.model), **form)
    task = language.task(case.model, 2, LENGTH, model=net)
    layout = {"devices": case.devices, "base_devices": case.devices}
    jax.device_put(np.zeros(8))  # starts the devices
    before = _held()
    for x in frozen.values(task):
        np.asarray(x)
    read = report.process_peak() - before
    before = _held()
    made = simulate.program("fedavg", task, checked=False, **layout)
    placed = sum(x.nbytes for x in frozen.values(made.task))
    return Cost(placed, report.process_peak() - before - placed, read)


def _held() -> int:
    """Returns the bytes of the process, from which its peak starts again."""
    Path("/proc/self/clear_refs").write_text("5")
    return report.process_peak()


def main(argv: list[str]) -> None:
    """Prints a row per form of the base."""
    del argv
    name, devices = FLAGS.model, FLAGS.base_devices
    name = "llama-tiny" if FLAGS.quick else name
    print(report.machine("safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        largest = write(Path(folder), name)
        cases = [Case(folder, name, *form, devices) for form in FORMS]
        print(f"{name}, largest of {PARTS} files {largest / 2**20:.0f} MiB\n")
        rows: list[tuple] = [
            ("base", "blocks", "devices", *(f"{x} MiB" for x in Cost._fields), *OF)
        ]
        for case, cost in zip(cases, report.fresh(measure, cases), strict=True):
            sizes = (x / 2**20 for x in cost)
            kind = (case.dtype, case.blocks, str(devices))
            rows.append((*kind, *sizes, cost.peak / largest, cost.read / largest))
    print(report.table(rows))


if __name__ == "__main__":
    flags.DEFINE_enum("model", "llama3-1b", list(language.MODELS), "its shapes")
    flags.DEFINE_integer(
        "base_devices", 1, "devices that share the base", lower_bound=1
    )
    flags.DEFINE_bool("quick", False, "a tiny model, to see that it runs")
    report.run(main)
