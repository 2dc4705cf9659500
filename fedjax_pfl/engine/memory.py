"""Memory requirement of compiled functions, from XLA's analysis."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_pfl.errors import NoRoomError

# the limits of a control group, of both versions
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Memory(NamedTuple):
    """Bytes that a run needs and that exist, on a CPU of the machine, else per device;
    None: unknown."""

    peak: int | None
    total: int | None


def of(executables: list[Any], devices: int = 1) -> Memory:
    """Returns the memory of compiled functions that run one at a time.

    Args:
      devices: of this process; on a CPU they share the machine's memory.
    """
    peak = max(map(account, executables), default=None)
    if jax.default_backend() == "cpu":
        return Memory(peak and peak * devices, host_total())
    return Memory(peak, per_device())


def per_device() -> int | None:
    """Returns the bytes of memory of one of this process's devices; those of a CPU
    share the machine's."""
    if jax.default_backend() == "cpu":
        total = host_total()
        return total and total // jax.local_device_count()
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def host_total() -> int | None:
    """Returns the bytes of memory that this process may use: the machine's, or the
    limit of its control group."""
    found = [int(x) for x in map(_read, LIMITS) if x.isdecimal()]
    if hasattr(os, "sysconf"):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def account(compiled: Any) -> int:
    """Returns the bytes per device of a compiled function: arguments, temporaries, and
    outputs that overwrite no argument; 0 if they are unknown."""
    m = compiled.memory_analysis()
    if m is None:
        return 0
    sent = m.argument_size_in_bytes + m.output_size_in_bytes
    return int(sent + m.temp_size_in_bytes - m.alias_size_in_bytes)


def check(memory: Memory, advice: str) -> None:
    """Raises NoRoomError if a run needs more than all memory."""
    if memory.peak and memory.total and memory.peak > memory.total:
        needed, total = (x / 2**30 for x in (memory.peak, memory.total))
        raise NoRoomError(
            f"The run needs about {needed:.1f} GiB of {total:.1f} GiB: {advice}."
        )
