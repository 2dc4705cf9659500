"""Memory requirement of compiled functions, from XLA's analysis."""

from typing import Any, NamedTuple

import jax
import psutil

from fedjax_pfl.errors import NoRoomError


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
        return Memory(peak and peak * devices, psutil.virtual_memory().total)
    stats = jax.local_devices()[0].memory_stats() or {}
    return Memory(peak, stats.get("bytes_limit"))


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
