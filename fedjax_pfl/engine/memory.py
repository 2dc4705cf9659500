"""How much memory a run takes, predicted before anything is compiled, and how much there is.

XLA's own account of the larger of a compiled round and evaluation is met within 0.84 and 1.34: 22 methods with a small
network on a CPU, one or four clients at a time, three or all of five in the round (some stand in the tests; for the CNN
see `benchmarks.memory`). On top come the process itself, compiling, and a checkpoint while it is written.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl.engine import liveness
from fedjax_pfl.engine.cohort import AXIS
from fedjax_pfl.engine.program import Program
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Federation, PyTree, State

_CGROUPS = ("memory.max", "memory/memory.limit_in_bytes")  # of the second version and of the first


class Memory(NamedTuple):
    """What a run takes and what there is, in bytes: on a CPU of the whole machine, else of each device."""

    peak: int  # predicted, of all arrays that are there at once
    free: int | None  # of it now, for this process; None: not known
    total: int | None

    @property
    def fits(self) -> bool:
        """Is there enough, as far as is known?"""
        return self.free is None or self.peak <= self.free


def predict(program: Program, key: Array, federation: Federation) -> Memory:
    """The memory of a program's rounds and evaluations; traces them, which running them then need not do."""
    data = sum(x.nbytes for x in jax.tree.leaves(federation))  # is there already
    devices = 1 if program.mesh is None else program.mesh.size
    peak = max(_peak(*job, devices) for job in _jobs(program, key, federation))
    if jax.default_backend() == "cpu":
        free, total = _machine()
        here = 1 if program.mesh is None else len(program.mesh.local_devices)
        return Memory(peak * here + _kept(program, key), free + data, total)
    most = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return Memory(peak, most, most)


def _jobs(program: Program, key: Array, federation: Federation) -> Iterator[tuple[Any, tuple, bool]]:
    """What a run runs, traced, with the arguments that `simulate.rounds` gives it, and whether it takes over the state
    among them, always the fourth."""
    numbers = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in program.numbers}
    t, wanted = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool)
    state, drawn = _state(program, key), ()
    if program.functions is None:
        drawn = jax.eval_shape(program.parts.draw, key, t)
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*drawn[0].shape, *x.shape[1:]), x.dtype), state.clients)
        state = State(state.server, rows)
    homes = program.homes
    if program.mesh is not None:
        everywhere, apart = (NamedSharding(program.mesh, spec) for spec in (P(), P(AXIS)))
        homes, key, numbers, federation = _placed((homes, key, numbers, federation), everywhere)
        state = State(_placed(state.server, everywhere), _placed(state.clients, apart))
    given = (key, numbers, federation, state)
    before, during = (*given, *drawn[:1], t), (*given, *drawn, t, wanted)
    if program.functions is None:
        yield jax.jit(program.parts.score).trace(*before), before, False
        yield jax.jit(program.parts.train, donate_argnums=3).trace(*during), during, True
        return
    place = lambda given: ((homes, given[0]), *given[1:])
    yield jax.jit(program.functions.evaluate).trace(homes, *before), place(before), False
    yield jax.jit(program.functions.round, donate_argnums=4).trace(homes, *during), place(during), True


def _state(program: Program, key: Array) -> State:
    numbers = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in program.numbers}
    return jax.eval_shape(program.parts.init if program.functions is None else program.init, key, numbers)


def _kept(program: Program, key: Array) -> int:
    """Bytes of the rows that are kept in main memory."""
    rows = jax.tree.leaves(_state(program, key).clients) if program.functions is None else []
    return sum(x.size * x.dtype.itemsize for x in rows)


def say(memory: Memory) -> str:
    """`memory: about 85 MiB of 21 GiB`."""
    there = "" if memory.free is None else f" of {_size(memory.free)}"
    return f"memory: about {_size(memory.peak)}{there}"


def check(memory: Memory, advice: str) -> None:
    """Warns of a run that will hardly fit, with what may help.

    Raises:
      InputError: it is predicted to take more than twice of all the memory that there is.
    """
    if memory.fits:
        return
    assert memory.free is not None and memory.total is not None
    if memory.peak > 2 * memory.total:
        raise InputError(
            f"The run would take about {_size(memory.peak)}, and there are {_size(memory.total)}: {advice}."
        )
    logging.warning("The run will take about %s, but %s are free: %s.", _size(memory.peak), _size(memory.free), advice)


def _size(count: int) -> str:
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:.2g} {name}" if count < 10 * unit else f"{count / unit:,.0f} {name}"


def _placed(tree: PyTree, where: NamedSharding) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def _peak(traced: Any, arguments: tuple, donates: bool, devices: int) -> int:
    parts = (*arguments[:3], arguments[3].server, arguments[3].clients, *arguments[4:])
    of = [part for part, tree in enumerate(parts) for _ in jax.tree.leaves(tree)]
    donated = [donates and part in (3, 4) for part in of]
    spread = [part == 4 and devices > 1 for part in of]
    return liveness.peak(traced.jaxpr.jaxpr, donated, spread, devices, eager=jax.default_backend() == "cpu")


def _machine() -> tuple[int, int]:
    """The main memory in bytes that is free, and that there is, for this process."""
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    limits = [_limit(Path("/sys/fs/cgroup") / name, memory.total) for name in _CGROUPS]
    return min(memory.available, *(limit - own for limit in limits)), min(memory.total, *limits)


def _limit(file: Path, otherwise: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # there is none, or it says "max"
        return otherwise
