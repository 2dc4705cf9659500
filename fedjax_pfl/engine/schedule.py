"""Order of arrivals in an asynchronous run, simulated on the host."""

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import keys, local_training
from fedjax_pfl.engine.sampling import sample
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.types import Array, Task

BLOCK = 64  # versions of the server whose draws are computed together


class Schedule(NamedTuple):
    """T updates of the server by K clients each, as NumPy arrays.

    Version t of the server is its state before update t.
    """

    ids: np.ndarray  # [T, K] int32, in the order of arrival
    started: np.ndarray  # [T, K] int32, version that the client received
    seconds: np.ndarray  # [T] time of the update, from 0
    slot: np.ndarray  # [T] int32, where version t is kept
    source: np.ndarray  # [T, K] int32, where version `started` is kept
    slots: int  # versions that are kept at once


def arrivals(
    task: Task,
    key: Array,
    *,
    rounds: int,
    buffer: int,
    seconds: np.ndarray | None = None,
) -> Schedule:
    """Simulates which clients arrive when.

    As many clients train at once as a round of the task has. Whenever one of them
    arrives another one starts with the present version, until `buffer` have arrived and
    the server makes the next version. A client that has arrived does not start again
    before that. Clients are drawn as a round of that number draws them. Those without
    a local step never start. Arrivals at one time are ordered by their starts.

    Args:
      key: of the run.
      rounds: T, updates of the server.
      buffer: K, arrivals per update.
      seconds: [N] from a client's start to its arrival; None: 1 each.

    Raises:
      InputError: a value is invalid, or the buffer is larger than the number of clients
        that train.
    """
    able = local_training.planned(task, task.sizes)[0] > 0
    check("rounds", rounds, 1, np.iinfo(np.int32).max, whole=True)
    check("buffer", buffer, 1, int(able.sum()), whole=True)
    low, high = task.cohort_sizes
    if low != high or task.sampling is not None:
        raise InputError(
            "An asynchronous run draws a fixed number of clients uniformly: give one "
            "`participation` and no `sampling`."
        )
    times = np.ones(task.num_clients) if seconds is None else np.asarray(seconds)
    if times.shape != able.shape or not np.all(np.isfinite(times) & (times >= 0)):
        raise InputError(
            f"`seconds` must be [{task.num_clients}] finite and not negative."
        )
    draw = _Draws(task, key, able)
    pairs, ends, waiting = _simulated(draw, times, rounds, buffer, high)
    ids, started = np.moveaxis(np.array(pairs, np.int32), -1, 0)
    slot, slots = _slots(started, waiting)
    return Schedule(ids, started, np.array(ends), slot, slot[started], slots)


class _Draws:
    """Candidates of each version in their order."""

    def __init__(self, task: Task, key: Array, able: np.ndarray):
        self._n, self._able, self._key = task.num_clients, able, key
        self._blocks: dict[int, Any] = {}

        def draw(t: Array) -> tuple[Array, Array]:
            stream = keys.fold(keys.round_key(key, t), keys.Round.SAMPLING)
            return sample(stream, task, t)

        self._draw = jax.jit(jax.vmap(draw))

    def __call__(self, version: int) -> Iterator[int]:
        """Yields a round's draw, and then all clients."""
        block, at = divmod(version, BLOCK)
        if block not in self._blocks:
            versions = jnp.arange(BLOCK, dtype=jnp.int32) + block * BLOCK
            self._blocks = {block: jax.device_get(self._draw(versions))}
        ids, active = (x[at] for x in self._blocks[block])
        yield from self._allowed(ids[active])
        if len(ids) < self._n:
            data = np.asarray(jax.random.key_data(self._key)).tolist()
            rng = np.random.default_rng([*data, version])
            yield from self._allowed(rng.permutation(self._n))

    def _allowed(self, ids: np.ndarray) -> Iterable[int]:
        return ids[self._able[ids]].tolist()


def _simulated(
    draw: _Draws, seconds: np.ndarray, rounds: int, buffer: int, concurrency: int
) -> tuple[list[list[tuple[int, int]]], list[float], set[int]]:
    """Returns the pairs (id, version at the start) of each update, its time, and the
    versions of the clients that have not arrived in the end."""
    running: list[tuple[float, int, int, int]] = []  # end, number, id, version
    found: list[list[tuple[int, int]]] = []
    ends: list[float] = []
    held: list[tuple[int, int]] = []
    busy, started, now, order = set[int](), 0, 0.0, draw(0)
    while len(found) < rounds:
        while len(running) < concurrency:
            id = next((i for i in order if i not in busy), None)
            if id is None:
                break
            heapq.heappush(running, (now + seconds[id], started, id, len(found)))
            busy.add(id)
            started += 1
        now = running[0][0]
        # all arrivals of one time come before the next start
        while running and running[0][0] == now and len(found) < rounds:
            _, _, id, version = heapq.heappop(running)
            held.append((id, version))
            if len(held) == buffer:
                found.append(held)
                ends.append(now)
                busy -= {id for id, _ in held}
                held, order = [], draw(len(found))
    waiting = [version for *_, version in running] + [version for _, version in held]
    return found, ends, set(waiting)


def _slots(started: np.ndarray, waiting: set[int]) -> tuple[np.ndarray, int]:
    """Returns the slot [T] of each version, and the number of slots.

    A version takes the lowest slot that no version has which is still needed, so that
    more updates change no earlier slot.
    """
    rounds = len(started)
    last = np.arange(rounds)
    np.maximum.at(last, started, np.arange(rounds)[:, None])
    last[[version for version in waiting if version < rounds]] = rounds
    slot, free, ends = np.zeros(rounds, np.int32), list[int](), list[tuple[int, int]]()
    slots = 0
    for version in range(rounds):
        while ends and ends[0][0] < version:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if not free:
            heapq.heappush(free, slots)
            slots += 1
        slot[version] = heapq.heappop(free)
        heapq.heappush(ends, (int(last[version]), int(slot[version])))
    return slot, slots
