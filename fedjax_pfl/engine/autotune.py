"""Prepares JAX for this machine; chooses the form of convolutions and how many clients are trained at once, by trying.

What is timed is local SGD of the real model on the real data, of which most of a round consists; the round of a method
would take too long to compile. A choice never changes results beyond rounding. The times are remembered in the user's
cache directory for each kind of model, batch and device, so that the next run on this machine chooses the same.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl import local, losses
from fedjax_pfl.data.tfds import cache_dir
from fedjax_pfl.engine.cohort import Cohort, lanes, make_mesh
from fedjax_pfl.models import layers
from fedjax_pfl.types import Array, Batch, Client, Federation, Model, PyTree, Task

LARGE = 200_000  # parameters from which, on a CPU, one client at a time is taken: fastest for the CNN (see benchmarks)
MANY = 6  # convolutions from which forms are not tried: each takes 3 s to compile with 2 convolutions, 12 s with 20
SECONDS = 0.6  # for which the candidates of a choice are timed, three times at least
STEPS = 8  # local steps a client takes in the probe
MARGIN = 1.1  # how many times as fast another form must be to be taken: less may be chance

_log = logging.getLogger(__name__)
T = TypeVar("T", int, str)


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


def choose_form(
    task: Task,
    model: Callable[[str], Model],
    federation: Federation,
    clients: int,
    devices: int = 1,
    fits: Callable[[int], bool] = lambda _: True,
) -> str:
    """The form of the convolutions (see `layers.convolution`), by timing local SGD of the real model.

    Tried against what "auto" stands for are the forms that may win here and are another program: on a CPU plain matrix
    products (with XLA's own convolution a step takes 8 to 60 times as long), elsewhere Winograd's, too. All are timed
    at the least width that `choose_width` tries. Where nothing is tried, because the model has no convolutions or
    MANY, or that width does not fit, it is that of "auto", which goes by what was measured for each shape.

    Args:
      task: with the model in the form that "auto" stands for.
      model: form -> the same model in that form.
      clients, devices, fits: as in `choose_width`.
    """
    usual = layers.form("auto")
    shapes = _shapes(task)
    count = sum(x.ndim == 4 for x in jax.tree.leaves(shapes))  # kernels
    if count >= MANY:
        _log.info("Convolutions: %s, by their shapes; with %d of them trying takes too long to compile.", usual, count)
    if not 0 < count < MANY:
        return usual
    others = ("matmul",) if jax.default_backend() == "cpu" else ("matmul", "winograd")
    tasks = {usual: task} | {form: task._replace(model=model(form)) for form in others}
    programs = {form: _program(task, shapes) for form, task in tasks.items()}
    different = {program: form for form, program in reversed(programs.items())}.values()  # the first of equal ones
    tasks = {form: task for form, task in tasks.items() if form in different}
    width = _candidates(-(-clients // devices))[0]
    path = _path(programs, devices, width)
    times = _recall(path, tuple(tasks))
    if len(tasks) == 1 or (times is None and not fits(width)):
        return usual
    if times is None:
        given = {form: (task, width, width) for form, task in tasks.items()}
        times = _remembered(path, _times(given, federation, devices))
    _say("Convolutions", times)
    return min(times, key=lambda form: times[form] * (1 if form == usual else MARGIN))


def choose_width(
    task: Task, federation: Federation, clients: int, devices: int = 1, fits: Callable[[int], bool] = lambda _: True
) -> int:
    """The number of clients to train at once on each device, by timing local SGD of the real model.

    Timed are clients with equally many steps; a width then counts as many as it computes for each step that the task's
    own clients, or so many of them, are to take (see `clients.lanes`).

    Args:
      clients: S, the clients of a round.
      devices: of this process, over which they are spread.
      fits: whether a width has the memory it needs; where none has, the least is taken.
    """
    shapes, work, fits = _shapes(task), _work(task, clients), functools.cache(fits)
    candidates = _candidates(-(-clients // devices))
    if jax.default_backend() == "cpu" and sum(x.size for x in jax.tree.leaves(shapes)) > LARGE:
        _log.info("Width: %d, not tried: a CPU is fastest so with models of over %d parameters.", candidates[0], LARGE)
        return candidates[0]
    while len(candidates) > 1:
        path = _path(_program(task, shapes), devices, candidates)
        times = _recall(path, candidates)
        if times is None and fits(candidates[-1]):
            times = _remembered(path, _times_of_widths(task, federation, candidates, devices))
        if times is not None:
            real = {width: seconds * lanes(work, width, devices) for width, seconds in times.items()}
            best = min(real, key=real.__getitem__)
            if fits(best):
                _say("Width", real)
                return best
        candidates = candidates[:-1]
    _log.info("Width: %d, not tried: there are no more clients, or there is memory for no more.", candidates[0])
    return candidates[0]


def _work(task: Task, clients: int) -> np.ndarray:
    """Steps of the clients of a round [S]; where they are drawn, of as many that stand for all N."""
    steps = np.sort(local.planned(task, task.sizes)[0])
    return steps[(2 * np.arange(clients) + 1) * len(steps) // (2 * clients)]


def _candidates(clients: int) -> Sequence[int]:
    tries = (1, 4) if jax.default_backend() == "cpu" else (8, 32, 128)
    return sorted({min(width, clients) for width in tries})


def _times_of_widths(task: Task, federation: Federation, candidates: Sequence[int], devices: int) -> dict[int, float]:
    least = min(4, -(-task.num_clients // devices))
    return _times({width: (task, width, max(width, least)) for width in candidates}, federation, devices)


class _Trial(NamedTuple):
    run: Callable[[], Array]  # compiled
    steps: int  # of all clients together, and of the empty places of the last chunk


def _trial(task: Task, width: int, clients: int, federation: Federation, mesh: Mesh | None) -> _Trial:
    """SGD of `clients` on each device, `width` at once, from zeros and in the order of their rows: a draw of the model
    and a shuffle would take longer to compile than the rest."""
    loss, optimizer = losses.classification(task.model), task.optimizer(task.lr)
    shapes = _shapes(task)
    ids = jnp.arange(clients * (1 if mesh is None else mesh.size), dtype=jnp.int32)

    def train(c: Client) -> PyTree:
        def step(carry: PyTree, batch: Batch) -> PyTree:
            params, stats, opt = carry
            grads, stats = jax.grad(lambda p: loss({**p, "stats": stats}, batch, c.key), has_aux=True)(params)
            updates, opt = optimizer.update(grads, opt, params)
            return optax.apply_updates(params, updates), stats, opt

        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        stats = params.pop("stats")
        size = jnp.where(c.train.size > 0, STEPS * task.batch_size, 0)  # its own: side by side each ends by itself
        carry = (params, stats, optimizer.init(params))
        return local.fold(c.train._replace(size=size), step, carry, task.batch_size)[:2]

    @jax.jit
    def run(key: Array, federation: Federation) -> PyTree:
        nothing = {"round": jnp.int32(0), "evaluated": jnp.bool(False)}
        return Cohort(federation, task.prepare, ids, ids >= 0, key=key, width=width, mesh=mesh, **nothing).mean(train)

    key = jax.random.key(0)
    compiled = run.lower(key, federation).compile()
    return _Trial(lambda: compiled(key, federation), STEPS * len(ids) // clients * -(-clients // width) * width)


def _times(candidates: Mapping[T, tuple[Task, int, int]], federation: Federation, devices: int) -> dict[T, float]:
    """Seconds of a client's step with each candidate, (task, width, clients); the best of several.

    They take turns, so that what else the machine does then hits all of them.
    """
    mesh = make_mesh(devices, local=True)
    if mesh is not None:
        federation = jax.device_put(federation, NamedSharding(mesh, P()))
    with ThreadPoolExecutor() as pool:  # XLA compiles side by side
        made = {name: pool.submit(_trial, *each, federation, mesh) for name, each in candidates.items()}
    trials = {name: trial.result() for name, trial in made.items()}
    best, turns, until = dict.fromkeys(trials, math.inf), 0, time.perf_counter() + SECONDS
    while turns < 3 or time.perf_counter() < until:
        for name, trial in trials.items():
            begin = time.perf_counter()
            jax.block_until_ready(trial.run())
            best[name] = min(best[name], (time.perf_counter() - begin) / trial.steps)
        turns += 1
    return best


def _shapes(task: Task) -> PyTree:
    return jax.eval_shape(task.model.init, jax.random.key(0))


def _program(task: Task, shapes: PyTree) -> str:
    """What the model computes of a batch: its forms, types and sizes; addresses in it say nothing."""
    x = jax.ShapeDtypeStruct((task.batch_size, *task.input_shape), jnp.float32)
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(lambda w, x: task.model.apply(w, x)[0])(shapes, x)))


def _path(*parts: Any) -> Path:
    """Where a choice is remembered that depends on these parts and on the machine."""
    here = (jax.__version__, jax.devices()[0].device_kind, _cores())
    return cache_dir() / "layout" / (hashlib.sha256(repr((*here, *parts)).encode()).hexdigest()[:16] + ".json")


def _recall(path: Path, candidates: Sequence[T]) -> dict[T, float] | None:
    try:
        known = json.loads(path.read_text())["seconds_per_step"]
        return {name: float(known[str(name)]) for name in candidates}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remembered(path: Path, times: dict[T, float]) -> dict[T, float]:
    """The times, which are kept, unless another run has kept its own meanwhile: then all take those."""
    known = _recall(path, tuple(times))
    if known is not None:
        return known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"seconds_per_step": times}))
    except OSError as error:  # a cache that cannot be written costs some seconds, no more
        _log.warning("What was tried is not remembered: %s", error)
    return times


def _say(what: str, times: Mapping[T, float]) -> None:
    _log.info("%s: %s", what, ", ".join(f"{name} takes {t * 1e6:.0f} us a client step" for name, t in times.items()))
