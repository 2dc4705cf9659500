"""Prepares JAX for this machine, and chooses how many clients are trained at once on each device, by trying.

The choice never changes results beyond rounding. It is remembered in the user's cache directory for each kind of model,
batch and device.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl import local, losses
from fedjax_pfl.clients import Cohort, make_mesh
from fedjax_pfl.data.prepared import cache_dir
from fedjax_pfl.types import Array, Federation, Task

LARGE = 200_000  # parameters from which, on a CPU, one client at a time is taken: fastest for the CNN (see benchmarks)
SECONDS = 0.3  # a candidate is timed for
STEPS = 8  # local steps a client takes in the probe


def split_cpu() -> None:
    """Makes JAX see a device for each of up to 8 cores, where it runs on the CPU and has not started yet.

    Small steps do not fill several cores: clients side by side on them are faster (see `benchmarks.throughput`).
    """
    with contextlib.suppress(RuntimeError):  # it has started: the devices are what they are
        said = "JAX_NUM_CPU_DEVICES" in os.environ or "device_count" in os.environ.get("XLA_FLAGS", "")
        if not said:
            jax.config.update("jax_num_cpu_devices", min(_cores(), 8))


def keep_compilations() -> None:
    """Lets JAX keep what it compiles in the user's cache directory, unless told where (JAX_COMPILATION_CACHE_DIR).

    Code for a CPU fits machines with the same features only, and not every version of jaxlib checks that: each kind of
    machine and each version has a folder of its own.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = hashlib.sha256(repr([jax.__version__, jaxlib.__version__, _machine()]).encode()).hexdigest()[:16]
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled" / folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _machine() -> list[str]:
    """What kind of CPU this is, as exactly as the system says."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [
        platform.machine(),
        platform.processor(),
        *sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))}),
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_width(
    task: Task, federation: Federation, clients: int, devices: int = 1, fits: Callable[[int], bool] = lambda _: True
) -> int:
    """The number of clients to train at once on each device, by timing local training of the real model.

    Args:
      clients: S, the clients of a round.
      devices: of this process, over which they are spread.
      fits: whether a width has the memory it needs; where none has, the least is taken.
    """
    clients = -(-clients // devices)
    shapes = jax.eval_shape(task.model.init, jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(shapes))
    candidates = _candidates(clients)
    if jax.default_backend() == "cpu" and size > LARGE:
        return candidates[0]
    while len(candidates) > 1:
        path = _path(task, shapes, candidates, devices)
        known = _recall(path, candidates)
        if known is None and fits(candidates[-1]):
            return _fastest(task, federation, candidates, devices, path)
        if known is not None and fits(known):
            return known
        candidates = candidates[:-1]
    return candidates[0]


def _candidates(clients: int) -> Sequence[int]:
    tries = (1, 4) if jax.default_backend() == "cpu" else (8, 32, 128)
    return sorted({min(width, clients) for width in tries})


def _fastest(task: Task, federation: Federation, candidates: Sequence[int], devices: int, path: Path) -> int:
    times = {width: seconds_per_step(task, federation, width, devices) for width in candidates}
    best = min(times, key=times.__getitem__)
    logging.info("Width: %s", ", ".join(f"{w} takes {t * 1e6:.0f} us a client step" for w, t in times.items()))
    _remember(path, best, times)
    return best


def seconds_per_step(task: Task, federation: Federation, width: int, devices: int = 1) -> float:
    """Time of one client's SGD step when `width` clients are trained at once on each of the devices; the best of the
    repetitions."""
    probe = task._replace(epochs=None, steps=STEPS)
    loss = losses.classification(task.model)
    mesh = make_mesh(devices, local=True)
    ids = jnp.arange(devices * max(width, min(4, -(-task.num_clients // devices))), dtype=jnp.int32)
    if mesh is not None:
        federation = jax.device_put(federation, NamedSharding(mesh, P()))

    @jax.jit
    def run(key: Array, federation: Federation):
        nothing = {"round": jnp.int32(0), "evaluated": jnp.bool(False)}
        cohort = Cohort(federation, task.prepare, ids, ids >= 0, key=key, width=width, mesh=mesh, **nothing)
        start = task.model.init(key)
        return cohort.mean(lambda c: local.sgd(c.key, c.train, loss, start, probe))

    key = jax.random.key(0)
    jax.block_until_ready(run(key, federation))
    best, until = float("inf"), time.perf_counter() + SECONDS
    while best == float("inf") or time.perf_counter() < until:
        begin = time.perf_counter()
        jax.block_until_ready(run(key, federation))
        best = min(best, time.perf_counter() - begin)
    return best / (STEPS * len(ids))


def _path(task: Task, shapes, candidates: Sequence[int], devices: int) -> Path:
    device = jax.devices()[0]
    x = jax.ShapeDtypeStruct((task.batch_size, *task.input_shape), jnp.float32)
    forward = str(jax.make_jaxpr(lambda w, x: task.model.apply(w, x)[0])(shapes, x))  # its form, types and sizes
    parts = [jax.__version__, device.device_kind, _cores(), devices, candidates, forward]
    return cache_dir() / "layout" / (hashlib.sha256(repr(parts).encode()).hexdigest()[:16] + ".json")


def _recall(path: Path, candidates: Sequence[int]) -> int | None:
    try:
        known = json.loads(path.read_text())["width"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return known if known in candidates else candidates[0]


def _remember(path: Path, width: int, times: dict[int, float]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"width": width, "seconds_per_step": times}))
    except OSError as error:  # a cache that cannot be written costs two seconds, no more
        logging.warning("The choice of width is not remembered: %s", error)
