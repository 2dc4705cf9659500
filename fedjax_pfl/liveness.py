"""The most memory that a traced program needs at once: nothing is compiled.

The operations are walked in order, with the arrays that are there at each: an array is there from the operation that
makes it to the last one that reads it, the body of a loop counts once, and what a loop carries is updated in place.
What XLA fuses is never there: an element-wise result is an array only where something reads it that needs one (a matrix
product, a loop).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fedjax_pfl.clients import AXIS

_BODIES = ("while", "scan", "cond", "shard_map")
_READERS = ("dot_general", "conv_general_dilated", "sort", "pure_callback", "eigh")  # read whole arrays, make new ones
_WRITERS = ("scatter", "scatter-add", "dynamic_update_slice")  # into an array that is there
_MAKERS = ("gather", "random_bits", "cumsum", "concatenate")  # of arrays; they, and reductions, read what is fused
_VIEWS = ("transpose", "reshape", "squeeze", "unmark", "sharding_constraint")  # of an array: free


def peak(jaxpr: Any, donated: Sequence[bool], spread: Sequence[bool], devices: int = 1) -> int:
    """Bytes on one device of all arrays that are there at once, those that come in included.

    Args:
      jaxpr: a program over `devices` devices.
      donated: for each of its arguments, whether it may be overwritten.
      spread: likewise, whether each device has only its part of the rows.
    """
    flat = Flat(jaxpr, spread, devices)
    return sum(flat.sizes[i] for i in flat.ins) + _walk(flat, donated)


class Op(NamedTuple):
    """One operation; its values are numbered."""

    name: str
    params: dict[str, Any]
    ins: list[int]
    outs: list[int]

    @property
    def reads_arrays(self) -> bool:
        return self.name in _BODIES + _READERS + _WRITERS

    @property
    def makes_arrays(self) -> bool:
        return self.reads_arrays or self.name in _MAKERS or self.name.startswith(("reduce_", "arg"))

    @property
    def in_place(self) -> bool:
        """May a result take the place of an operand?"""
        return self.name in _WRITERS or not self.makes_arrays or self.name in ("while", "scan", "cond")


class Flat:
    """The operations of a jaxpr, calls inlined.

    Attributes:
      ops: in order.
      sizes: bytes of each value, on one device.
      ins, outs: the values that come in and go out.
    """

    def __init__(self, jaxpr: Any, spread: Sequence[bool] = (), devices: int = 1):
        self.ops: list[Op] = []
        self.sizes: list[int] = []
        self._spread: list[bool] = []
        self._devices = devices
        self.ins = [self._new(v, on) for v, on in zip(jaxpr.invars, spread or [False] * len(jaxpr.invars), strict=True)]
        self.outs = self._inline(jaxpr, self.ins)

    def keep(self, old: list[int]) -> None:
        """Adds that each result is chosen between the new value and the old one."""
        new, self.outs = self.outs, []
        for pair in zip(new, old, strict=True):
            self.sizes.append(self.sizes[pair[0]])
            self.outs.append(len(self.sizes) - 1)
            self.ops.append(Op("select_n", {}, [*pair], self.outs[-1:]))

    def _new(self, v: Any, spread: bool = False) -> int:
        size = _bytes(v)
        self.sizes.append(-(-size // self._devices) if spread else size)
        self._spread.append(spread)
        return len(self.sizes) - 1

    def _inline(self, jaxpr: Any, ins: list[int]) -> list[int]:
        at = dict(zip(jaxpr.invars, ins, strict=True)) | {v: self._new(v) for v in jaxpr.constvars}
        number = lambda v: self._new(v) if hasattr(v, "val") else at[v]  # a literal is new each time
        for eqn in jaxpr.eqns:
            given, name = [number(v) for v in eqn.invars], eqn.primitive.name
            called = None if name in _BODIES else eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if called is not None:
                outs = self._inline(getattr(called, "jaxpr", called), given)
            else:
                outs = [self._new(v, on) for v, on in zip(eqn.outvars, self._where(eqn, given), strict=True)]
                self.ops.append(Op(name, eqn.params, given, outs))
            at |= dict(zip(eqn.outvars, outs, strict=True))
        return [number(v) for v in jaxpr.outvars]

    def _where(self, eqn: Any, given: list[int]) -> list[bool]:
        """Which results lie spread over the devices, a part on each."""
        if eqn.primitive.name == "sharding_constraint":
            return [AXIS in eqn.params["sharding"].spec]
        if eqn.primitive.name == "shard_map":
            return [AXIS in spec for spec in eqn.params["out_specs"]]
        rows = {v.aval.shape[:1] for v, i in zip(eqn.invars, given, strict=True) if self._spread[i]}
        return [v.aval.shape[:1] in rows for v in eqn.outvars]


def _bytes(v: Any) -> int:
    key = jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
    return math.prod(v.aval.shape) * (8 if key else v.aval.dtype.itemsize)


def _walk(flat: Flat, donated: Sequence[bool]) -> int:
    """Bytes that the operations take at most beside what comes in, what goes out included.

    Args:
      donated: which of what comes in may be overwritten once it is read for the last time.
    """
    arrays = _arrays(flat)
    read, last = _reads(flat, arrays)
    owned = {i for i, on in zip(flat.ins, donated, strict=True) if on}
    live = peak = 0
    for place, op in enumerate(flat.ops):
        if arrays.isdisjoint(op.outs):
            continue
        dying = sorted(flat.sizes[i] for i in read[place] if i in owned and last[i] == place)
        new = 0
        for size in (flat.sizes[i] for i in op.outs):
            if op.in_place and size in dying:
                dying.remove(size)
            else:
                new += size
        inside = _inside(op)
        peak = max(peak, live + (max(new, inside) if op.name in ("cond", "shard_map") else new + inside))
        owned |= {i for i in op.outs if i in last}
        live += new - sum(dying) - sum(flat.sizes[i] for i in op.outs if i not in last)
    return peak


def _arrays(flat: Flat) -> set[int]:
    """The values that are arrays; the others are fused into what reads them."""
    found = {*flat.ins, *flat.outs}
    viewed = {op.outs[0]: op.ins[0] for op in flat.ops if op.name in _VIEWS}
    for op in flat.ops:
        if op.makes_arrays:
            found.update(op.outs)
        for i in op.ins if op.reads_arrays else []:
            while i in viewed:
                i = viewed[i]
            found.add(i)
    return found


def _reads(flat: Flat, arrays: set[int]) -> tuple[list[set[int]], dict[int, int]]:
    """The arrays that each operation reads, and the place of the last one that reads an array."""
    sources: dict[int, set[int]] = {}
    read: list[set[int]] = []
    last: dict[int, int] = {}
    for place, op in enumerate(flat.ops):
        read.append(set().union(*(sources.get(i, {i}) for i in op.ins)))
        fused = arrays.isdisjoint(op.outs)
        sources |= dict.fromkeys([i for i in op.outs if i not in arrays], read[-1])
        last |= {} if fused else dict.fromkeys(read[-1], place)
    return read, last | dict.fromkeys(flat.outs, len(flat.ops))


def _inside(op: Op) -> int:
    """What the body of a loop or the dearest branch takes, once."""
    p = op.params
    if op.name == "while":
        body, condition = Flat(p["body_jaxpr"].jaxpr), p["cond_jaxpr"].jaxpr
        first = p["body_nconsts"]
        if condition.outvars[0].aval.shape:  # clients side by side: who is done keeps what it has
            body.keep(body.ins[first:])
        return max(_walk(body, [i >= first for i in range(len(body.ins))]), _all_new(condition))
    if op.name == "scan":
        body, first = Flat(p["jaxpr"].jaxpr), p["num_consts"]
        slices = sum(body.sizes[i] for i in body.ins[first + p["num_carry"] :])
        return slices + _walk(body, [i >= first for i in range(len(body.ins))])
    if op.name == "cond":
        return max(_all_new(branch.jaxpr) for branch in p["branches"])
    return _all_new(p["jaxpr"]) if op.name == "shard_map" else 0


def _all_new(jaxpr: Any) -> int:
    return _walk(Flat(jaxpr), [False] * len(jaxpr.invars))
