"""Prepares JAX for this machine; chooses the form of convolutions and how many clients
are trained at once.

On a CPU both come from what was measured once (`choose_width`, `layers.form`). On an
accelerator candidates are timed: local SGD of the real model on the real data, of which
most of a round consists. A choice never changes results beyond rounding. The times are
remembered in the user's cache directory for each kind of model, batch and device.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from fedjax_pfl import local_training, losses
from fedjax_pfl.data.tfds import cache_dir
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.placement import make_mesh, padding_overhead
from fedjax_pfl.engine.xla import computation
from fedjax_pfl.models import layers
from fedjax_pfl.types import Array, Batch, Client, Federation, Model, PyTree, Task

LARGE = 50_000  # parameters from which, on a CPU, one client at a time is taken
# convolutions from which forms are not tried: each takes 12 s to compile with 20
MANY = 6
SECONDS = 0.6  # for which the candidates of a choice are timed, three times at least
STEPS = 8  # local steps a client takes in the probe
# how many times as fast another form must be to be taken: less may be chance
MARGIN = 1.1

_log = logging.getLogger(__name__)
T = TypeVar("T", int, str)


def split_cpu() -> None:
    """Makes JAX see a device for each of up to 8 cores, where it runs on the CPU and
    has not started yet.

    Small steps do not fill several cores: clients side by side on them are faster (see
    `benchmarks.throughput`).
    """
    # it has started: the devices are what they are
    with contextlib.suppress(RuntimeError):
        if (
            "JAX_NUM_CPU_DEVICES" not in os.environ
            and "device_count" not in os.environ.get("XLA_FLAGS", "")
        ):
            jax.config.update("jax_num_cpu_devices", min(_cores(), 8))


def keep_compilations() -> None:
    """Lets JAX keep what it compiles in the user's cache directory, unless another is
    set (JAX_COMPILATION_CACHE_DIR).

    Code for a CPU fits machines with the same features only, and not every version of
    jaxlib checks that: each kind of machine and each version has a folder of its own.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        kind = repr([jax.__version__, jaxlib.version.__version__, _machine()])
        folder = hashlib.sha256(kind.encode()).hexdigest()[:16]
        jax.config.update(
            "jax_compilation_cache_dir", str(cache_dir() / "compiled" / folder)
        )
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _machine() -> list[str]:
    """What kind of CPU this is, as exactly as the system says."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [
        platform.machine(),
        platform.processor(),
        *sorted(
            {x for x in lines if x.startswith(("model name", "flags", "Features"))}
        ),
    ]


def _cores() -> int:
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def choose_form(
    task: Task,
    model: Callable[[str], Model],
    federation: Federation,
    clients: int,
    devices: int = 1,
) -> str:
    """The form of the convolutions (see `layers.convolution`).

    On a CPU that of "auto", which goes by what was measured for each shape. Elsewhere
    matrix products and Winograd's form are timed beside it at the least width of
    `choose_width`, unless the model has no convolutions or MANY; a candidate that
    cannot be compiled or run is dropped.

    Args:
      task: with the model in the form that "auto" stands for.
      model: form -> the same model in that form.
      clients: S, the clients of a round.
      devices: of this process, over which they are spread.
    """
    usual = layers.form("auto")
    if jax.default_backend() == "cpu" or len(task.models) > 1:
        return usual
    shapes = _shapes(task)
    count = sum(x.ndim == 4 for x in jax.tree.leaves(shapes))  # kernels
    if not 0 < count < MANY:
        return usual
    tasks = {usual: task} | {
        form: task._replace(models=(model(form),)) for form in ("matmul", "winograd")
    }
    programs = {form: _program(task, shapes) for form, task in tasks.items()}
    # the first of equal ones
    different = {program: form for form, program in reversed(programs.items())}.values()
    tasks = {form: task for form, task in tasks.items() if form in different}
    width = _candidates(-(-clients // devices))[0]
    path = _path(programs, devices, width)
    times = _timed(
        path,
        {form: (task, width, width) for form, task in tasks.items()},
        federation,
        devices,
    )
    _say("Convolutions", times)
    return min(times, key=lambda form: times[form] * (1 if form == usual else MARGIN))


def choose_width(
    task: Task, federation: Federation, clients: int, devices: int = 1
) -> int:
    """The number of clients to train at once on each device.

    On a CPU 4 for models of less than LARGE parameters without convolutions, else 1:
    measured on 2 cores, one client at a time on each of them is fastest for every
    convolutional network. Elsewhere widths are timed on clients with equally many
    steps, and each counts as many steps as it computes for every one that the task's
    own clients take (see `placement.padding_overhead`); a candidate that cannot be
    compiled or run is dropped.

    Args:
      clients: S, the clients of a round.
      devices: of this process, over which they are spread.
    """
    here = -(-clients // devices)
    if jax.default_backend() == "cpu":
        return min(4 if all(map(_is_small, task.models)) else 1, here)
    candidates = _candidates(here)
    if len(candidates) == 1 or len(task.models) > 1:
        return candidates[0]
    path = _path(_program(task, _shapes(task)), devices, candidates)
    least = min(4, -(-task.num_clients // devices))
    times = _timed(
        path,
        {width: (task, width, max(width, least)) for width in candidates},
        federation,
        devices,
    )
    work = _work(task, clients)
    real = {
        width: seconds * padding_overhead(work, width, devices)
        for width, seconds in times.items()
    }
    _say("Width", real)
    return min(real, key=real.__getitem__)


def _is_small(model: Model) -> bool:
    """Has a model less than LARGE parameters and no convolution?"""
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    return sum(x.size for x in leaves) < LARGE and all(x.ndim < 4 for x in leaves)


def _work(task: Task, clients: int) -> np.ndarray:
    """Steps of the clients of a round [S]; where they are drawn, of as many that stand
    for all N."""
    steps = np.sort(local_training.planned(task, task.sizes)[0])
    return steps[(2 * np.arange(clients) + 1) * len(steps) // (2 * clients)]


def _candidates(clients: int) -> Sequence[int]:
    return sorted({min(width, clients) for width in (8, 32, 128)})


def _timed(
    path: Path,
    candidates: Mapping[T, tuple[Task, int, int]],
    federation: Federation,
    devices: int,
) -> dict[T, float]:
    """As `_times`, remembered or found now."""
    times = _recall(path, tuple(candidates))
    return (
        _remembered(path, _times(candidates, federation, devices))
        if times is None
        else times
    )


class _Trial(NamedTuple):
    run: Callable[[], Array]  # compiled
    steps: int  # of all clients together, and of the empty places of the last chunk


def _trial(
    task: Task, width: int, clients: int, federation: Federation, mesh: Mesh | None
) -> _Trial:
    """SGD of `clients` on each device, `width` at once, from zeros and in the order of
    their rows: a draw of the model and a shuffle would take longer to compile than the
    rest."""
    loss, optimizer = losses.classification(task.model), task.optimizer(task.lr)
    shapes = _shapes(task)
    ids = jnp.arange(clients * (1 if mesh is None else mesh.size), dtype=jnp.int32)

    def zeros() -> PyTree:
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return params, params.pop("stats")

    def train(c: Client) -> PyTree:
        def step(carry: PyTree, batch: Batch) -> PyTree:
            params, stats, opt = carry
            grads, stats = jax.grad(
                lambda p: loss({**p, "stats": stats}, batch, c.key), has_aux=True
            )(params)
            updates, opt = optimizer.update(grads, opt, params)
            return optax.apply_updates(params, updates), stats, opt

        params, stats = zeros()
        # its own: side by side each ends by itself
        size = jnp.where(c.train.size > 0, STEPS * task.batch_size, 0)
        carry = (params, stats, optimizer.init(params))
        return local_training.fold(
            c.train._replace(size=size), step, carry, task.batch_size
        )[:2]

    @jax.jit
    def run(key: Array, federation: Federation) -> PyTree:
        nothing: dict[str, Any] = {"round": jnp.int32(0), "evaluated": jnp.bool(False)}
        cohort = Cohort(
            federation, task, ids, ids >= 0, key=key, width=width, mesh=mesh, **nothing
        )
        return cohort.mean(lambda c: (train(c),), default=zeros())[0]

    key = jax.random.key(0)
    compiled = run.lower(key, federation).compile()
    return _Trial(
        lambda: compiled(key, federation),
        STEPS * len(ids) // clients * -(-clients // width) * width,
    )


def _times(
    candidates: Mapping[T, tuple[Task, int, int]], federation: Federation, devices: int
) -> dict[T, float]:
    """Seconds of a client's step with each candidate, (task, width, clients); the best
    of several.

    They take turns, so that what else the machine does then hits all of them.
    """
    mesh = make_mesh(devices, local=True)
    if mesh is not None:
        federation = jax.device_put(federation, NamedSharding(mesh, P()))
    with ThreadPoolExecutor() as pool:  # XLA compiles side by side
        made = {
            name: pool.submit(_trial, *each, federation, mesh)
            for name, each in candidates.items()
        }
    trials = {
        name: trial
        for name, future in made.items()
        if (trial := _runs(name, future)) is not None
    }
    if not trials:  # the run itself then says why
        return {next(iter(candidates)): 1.0}
    best, turns, until = (
        dict.fromkeys(trials, math.inf),
        0,
        time.perf_counter() + SECONDS,
    )
    while turns < 3 or time.perf_counter() < until:
        for name, trial in trials.items():
            begin = time.perf_counter()
            jax.block_until_ready(trial.run())
            best[name] = min(best[name], (time.perf_counter() - begin) / trial.steps)
        turns += 1
    return best


def _runs(name: T, future: Future[_Trial]) -> _Trial | None:
    """The compiled trial if it can be compiled and run, else None."""
    try:
        trial = future.result()
        jax.block_until_ready(trial.run())
    except jax.errors.JaxRuntimeError as error:
        _log.info("%s is left out: %s", name, str(error).splitlines()[0])
        return None
    return trial


def _shapes(task: Task) -> PyTree:
    return jax.eval_shape(task.model.init, jax.random.key(0))


def _program(task: Task, shapes: PyTree) -> str:
    """What the model computes of a batch: its forms, types and sizes; addresses in it
    say nothing."""
    x = jax.ShapeDtypeStruct((task.batch_size, *task.input.shape), task.input.dtype)
    return computation(lambda w, x: task.model.apply(w, task.prepare(x))[0], shapes, x)


def _path(*parts: Any) -> Path:
    """Where a choice is remembered that depends on these parts and on the machine."""
    here = (jax.__version__, jax.devices()[0].device_kind, _cores())
    return (
        cache_dir()
        / "layout"
        / (hashlib.sha256(repr((*here, *parts)).encode()).hexdigest()[:16] + ".json")
    )


def _recall(path: Path, candidates: Sequence[T]) -> dict[T, float] | None:
    try:
        known = json.loads(path.read_text())["seconds_per_step"]
        return {name: float(known[str(name)]) for name in candidates}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remembered(path: Path, times: dict[T, float]) -> dict[T, float]:
    """The times, which are kept, unless another run has kept its own meanwhile: then
    all take those."""
    known = _recall(path, tuple(times))
    if known is not None:
        return known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"seconds_per_step": times}))
    except OSError as error:
        # a cache that cannot be written costs some seconds, no more
        _log.warning("What was tried is not remembered: %s", error)
    return times


def _say(what: str, times: Mapping[T, float]) -> None:
    _log.info(
        "%s: %s",
        what,
        ", ".join(
            f"{name} takes {t * 1e6:.0f} us a client step" for name, t in times.items()
        ),
    )
