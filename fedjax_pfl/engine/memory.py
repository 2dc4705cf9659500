"""Memory that a run needs, from XLA's analysis of its compiled functions, and memory
that there is."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil

from fedjax_pfl.errors import NoRoomError

# of control groups, versions 2 and 1
_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


class Memory(NamedTuple):
    """Bytes that a run needs and that there are, on a CPU of the machine, else per
    device; None: unknown."""

    peak: int | None
    free: int | None  # for this process, now
    total: int | None


def of(executables: list[Any], kept: int = 0, devices: int = 1) -> Memory:
    """Returns the memory of compiled functions that run one at a time.

    Args:
      kept: bytes of rows in host memory.
      devices: of this process; on a CPU they share the machine's memory.
    """
    peak = max((size for size in map(account, executables) if size), default=None)
    if jax.default_backend() == "cpu":
        free, total = machine()
        return Memory(None if peak is None else peak * devices + kept, free, total)
    most = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return Memory(peak, most, most)


def account(compiled: Any) -> int | None:
    """Returns the bytes per device of a compiled function: arguments, temporaries, and
    outputs that overwrite no argument."""
    m = compiled.memory_analysis()
    if m is None:
        return None
    sent = m.argument_size_in_bytes + m.output_size_in_bytes
    return int(sent + m.temp_size_in_bytes - m.alias_size_in_bytes)


def say(memory: Memory) -> str:
    """Formats memory, `memory: about 85 MiB of 21 GiB`; empty if it is unknown."""
    if memory.peak is None:
        return ""
    there = "" if memory.free is None else f" of {size(memory.free)}"
    return f"memory: about {size(memory.peak)}{there}"


def check(memory: Memory, advice: str) -> None:
    """Raises NoRoomError if a run needs more than all the memory there is."""
    if memory.peak and memory.total and memory.peak > memory.total:
        raise NoRoomError(
            f"The run needs about {size(memory.peak)}, and there are "
            f"{size(memory.total)}: {advice}."
        )


def size(count: int) -> str:
    """Formats bytes in MiB or GiB."""
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    digits = ".2g" if count < 10 * unit else ",.0f"
    return f"{count / unit:{digits}} {name}"


def machine() -> tuple[int, int]:
    """Returns the free and the total main memory in bytes for this process."""
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    free, total = memory.available, memory.total
    for file in _LIMITS:
        # there may be no such file, or it may contain "max"
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(file).read_text())
            free, total = min(free, limit - own), min(total, limit)
    return free, total
