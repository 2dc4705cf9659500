"""The most memory that a traced program needs at once: nothing is compiled.

The operations are walked in order, with the arrays that are there at each: an array is there from the operation that
makes it to the last one that reads it, the body of a loop counts once, and what a loop carries is updated in place.
What XLA fuses is never there: an element-wise result is an array only where something reads it that needs one (a matrix
product, a loop). In a loop a carried value is copied that is read by something which its next value does not wait for.

The order is that of the trace, as XLA orders operations for little memory. On a CPU it does not: there each one of the
program, not of a loop's body, runs as soon as its operands are there, so that what needs the arguments alone is made
first, and waits (XLA's option is xla_cpu_enable_concurrency_optimized_scheduler; seen with JAX 0.10).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fedjax_pfl.engine.cohort import AXIS
from fedjax_pfl.engine.jaxprs import parameters

_BODIES = ("while", "scan", "cond", "shard_map")
_READERS = ("dot_general", "conv_general_dilated", "sort", "pure_callback", "eigh")  # read whole arrays, make new ones
_WRITERS = ("scatter", "scatter-add", "dynamic_update_slice")  # into an array that is there
_MAKERS = ("gather", "random_bits", "cumsum", "concatenate")  # of arrays; they, and reductions, read what is fused
_VIEWS = ("transpose", "reshape", "squeeze", "unmark", "sharding_constraint")  # of an array: free


def peak(jaxpr: Any, donated: Sequence[bool], spread: Sequence[bool], devices: int = 1, *, eager: bool = False) -> int:
    """Bytes on one device of all arrays that are there at once, those that come in included.

    Args:
      jaxpr: a program over `devices` devices.
      donated: for each of its arguments, whether it may be overwritten.
      spread: likewise, whether each device has only its part of the rows.
      eager: does each operation run as soon as it can?
    """
    flat = Flat(jaxpr, spread, devices)
    return sum(flat.sizes[i] for i in flat.ins) + _walk(flat, donated, eager)


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
            self.outs.append(self._like(pair[0]))
            self.ops.append(Op("select_n", {}, [*pair], self.outs[-1:]))

    def hasten(self) -> set[int]:
        """Puts the operations in the order in which they can run; returns the values that are arrays.

        What a scan stacks is written into zeros, which wait for nothing.
        """
        zeros: list[int] = []
        for place, op in enumerate(self.ops):
            if op.name == "scan":
                stacked = [self._like(i) for i in op.outs[op.params["num_carry"] :]]
                self.ops[place], zeros = op._replace(ins=[*op.ins, *stacked]), zeros + stacked
        self.ops.insert(0, Op("broadcast_in_dim", {}, [], zeros))
        arrays, level = _arrays(self), dict.fromkeys(self.ins, 0)
        for op in self.ops:
            made = not arrays.isdisjoint(op.outs)
            level |= dict.fromkeys(op.outs, max((level.get(i, 0) for i in op.ins), default=0) + made)
        self.ops.sort(key=lambda op: max((level[i] for i in op.outs), default=0))
        return arrays

    def copied(self, old: list[int], new: list[int]) -> int:
        """Bytes of the carried values `old` that have a reader which none of the operations behind `new` waits for."""
        made = {i: place for place, op in enumerate(self.ops) for i in op.outs}
        readers: dict[int, set[int]] = {}
        for place, op in enumerate(self.ops):
            for i in op.ins:
                readers.setdefault(i, set()).add(place)
        total = 0
        for i, o in zip(old, new, strict=True):
            behind, ahead = set(), [made[o]] if o in made else []
            while ahead:
                place = ahead.pop()
                if place not in behind:
                    behind.add(place)
                    ahead += [made[j] for j in self.ops[place].ins if j in made]
            found = self._read(i, readers)
            if behind and not found <= behind and max(found) <= made[o]:  # else it is new anyway
                total += self.sizes[i]
        return total

    def _read(self, value: int, readers: dict[int, set[int]]) -> set[int]:
        """The places of the operations that read a value, or a view of it."""
        found, values = set(), [value]
        while values:
            for place in readers.get(values.pop(), ()):
                if self.ops[place].name in _VIEWS:
                    values += self.ops[place].outs
                else:
                    found.add(place)
        return found

    def _like(self, value: int) -> int:
        self.sizes.append(self.sizes[value])
        return len(self.sizes) - 1

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
            loop = name in _BODIES and eqn.params.get("length") != 1  # a single turn is no loop to XLA
            called = None if loop else eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if called is not None:
                outs = self._inline(getattr(called, "jaxpr", called), given)
            else:
                outs = [self._new(v, on) for v, on in zip(eqn.outvars, self._where(eqn, given), strict=True)]
                self.ops.append(Op(name, parameters(eqn), given, outs))
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


def _walk(flat: Flat, donated: Sequence[bool], eager: bool = False) -> int:
    """Bytes that the operations take at most beside what comes in, what goes out included.

    Args:
      donated: which of what comes in may be overwritten once it is read for the last time.
    """
    arrays = flat.hasten() if eager else _arrays(flat)
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
        inside = _inside(op, eager)
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


def _inside(op: Op, eager: bool) -> int:
    """What the body of a loop or the dearest branch takes, once."""
    p = op.params
    if op.name == "while":
        body, condition, first = Flat(p["body_jaxpr"].jaxpr), p["cond_jaxpr"].jaxpr, p["body_nconsts"]
        if condition.outvars[0].aval.shape:  # clients side by side: who is done keeps what it has
            body.keep(body.ins[first:])
        return max(_turn(body, first, len(body.outs)), _all_new(condition))
    if op.name == "scan":
        body, first, carried = Flat(p["jaxpr"].jaxpr), p["num_consts"], p["num_carry"]
        return sum(body.sizes[i] for i in body.ins[first + carried :]) + _turn(body, first, carried)
    if op.name == "cond":
        return max(_all_new(branch.jaxpr) for branch in p["branches"])
    return _all_new(p["jaxpr"], eager) if op.name == "shard_map" else 0


def _turn(body: Flat, first: int, carried: int) -> int:
    """A loop's body, which carries so many values from the operand `first` on."""
    copies = body.copied(body.ins[first : first + carried], body.outs[:carried])
    return copies + _walk(body, [i >= first for i in range(len(body.ins))])


def _all_new(jaxpr: Any, eager: bool = False) -> int:
    return _walk(Flat(jaxpr), [False] * len(jaxpr.invars), eager)
