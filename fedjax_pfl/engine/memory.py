"""How much memory a run takes, as XLA accounts for what it has compiled, and how much
there is."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil

from fedjax_pfl.errors import NoRoomError

# of the second version and of the first
_CGROUPS = ("memory.max", "memory/memory.limit_in_bytes")


class Memory(NamedTuple):
    """What a run takes and what there is, in bytes; on a CPU of the machine, else per
    device; None: unknown."""

    peak: int | None
    free: int | None  # for this process, now
    total: int | None


def account(compiled: Any) -> int | None:
    """Bytes per device while a compiled function runs: arguments, outputs (less what
    they overwrite), temporaries."""
    m = compiled.memory_analysis()
    if m is None:
        return None
    return int(
        m.argument_size_in_bytes
        + m.output_size_in_bytes
        + m.temp_size_in_bytes
        - m.alias_size_in_bytes
    )


def of(executables: list[Any], kept: int = 0, devices: int = 1) -> Memory:
    """The memory of a run whose compiled functions these are, one running at a time.

    Args:
      kept: bytes of rows in main memory.
      devices: of this process; on a CPU they share the machine's memory.
    """
    sizes = [size for size in map(account, executables) if size]
    peak = max(sizes, default=None)
    if jax.default_backend() == "cpu":
        free, total = machine()
        return Memory(None if peak is None else peak * devices + kept, free, total)
    most = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return Memory(peak, most, most)


def say(memory: Memory) -> str:
    """`memory: about 85 MiB of 21 GiB`; nothing if it is unknown."""
    if memory.peak is None:
        return ""
    there = "" if memory.free is None else f" of {size(memory.free)}"
    return f"memory: about {size(memory.peak)}{there}"


def check(memory: Memory, advice: str) -> None:
    """Raises NoRoomError if a run takes more than all the memory that there is."""
    if (
        memory.peak is not None
        and memory.total is not None
        and memory.peak > memory.total
    ):
        raise NoRoomError(
            f"The run would take about {size(memory.peak)}, and there are "
            f"{size(memory.total)}: {advice}."
        )


def size(count: int) -> str:
    """Bytes in MiB or GiB."""
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return (
        f"{count / unit:.2g} {name}"
        if count < 10 * unit
        else f"{count / unit:,.0f} {name}"
    )


def machine() -> tuple[int, int]:
    """The main memory in bytes that is free, and that there is, for this process."""
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    limits = [_limit(Path("/sys/fs/cgroup") / name, memory.total) for name in _CGROUPS]
    return min(memory.available, *(limit - own for limit in limits)), min(
        memory.total, *limits
    )


def _limit(file: Path, otherwise: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # there is none, or it says "max"
        return otherwise
