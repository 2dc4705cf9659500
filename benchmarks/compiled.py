"""Costs of a compiled program, as the compilers of TPUs and GPUs estimate them.

Neither compiler estimates everything. A TPU's unfused reductions over windows are
counted by their final instruction bundles; operations that remain are named.
"""

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedjax_pfl.local_training import SCOPE

# operations that take no time of their own, or are counted by the program they run
FREE = {"after-all", "bitcast", "constant", "get-tuple-element", "iota", "parameter"}
FREE |= {"add-dependency", "opt-barrier", "partition-id", "replica-id", "tuple"}
# copies that the device makes while it computes
ASYNC = {"async-start", "async-update", "async-done", "copy-start", "copy-done"}
ASYNC |= {"slice-start", "slice-done"}
FREE_CALLS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast"}
FREE_CALLS |= {"PinToDevice", "Sharding"}
REGISTER = 8 * 128  # elements
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
SIZES |= {"s64": 8, "u64": 8, "f64": 8}  # of an element in bytes; all others 4

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_ESTIMATE = re.compile(r'"(?:estimated_cycles|exec_time_us)":"?([\d.e+-]+)')
_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# with the layout, in which S(1) is a TPU's on-chip memory
_SHAPE = re.compile(r"\b(pred|[sufb]f?\d+)\[([\d,]*)\](\{[^}]*S\(1\)\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|\w+_computation=%?([\w.\-]+))"
)


class Operation(NamedTuple):
    """One line of an optimised program."""

    name: str
    opcode: str
    where: str  # the name of the traced operation
    estimate: float | None  # cycles of a TPU, microseconds of a GPU
    dtype: str  # of the first result
    shape: tuple[int, ...]  # of the first result
    bytes: int  # of results and operands in the device's main memory
    small: bool  # fits into one vector register of a TPU
    operands: tuple[str, ...]
    trips: int | None  # of a loop
    called: tuple[str, ...]
    target: str  # of a custom call


class Part(NamedTuple):
    """A loop's body, a branch or the program around them, executed once."""

    kind: str
    trips: int | None  # how often a turn of the surrounding part executes it
    loop: str  # the innermost loop around it of unknown length
    turns: int  # how often a turn of that loop executes it
    cost: float  # what has an estimate or was counted
    counted: float  # the share of `cost` that was counted by instruction bundles
    # by bundles and bytes only, on a GPU by bytes; estimates where there are none
    bundled: float
    operations: list[tuple[float, Operation]]  # the dearest first
    missing: list[Operation]  # neither estimated nor counted: `cost` lacks them


def parse(text: str) -> tuple[str, dict[str, list[Operation]]]:
    """Returns the name of the entry computation and all computations by name."""
    lines: dict[str, list[tuple[str, str]]] = {}
    entry, here = "", ""
    for line in text.split("\n"):
        if header := _HEADER.match(line):
            here = header[2]
            lines[here] = []
            entry = here if header[1] else entry
        elif here and (match := _OPERATION.match(line)):
            lines[here].append((match[1], match[2]))
    lengths = {
        name: _CONSTANT.findall("\n".join(f"= {x}" for _, x in rows))
        for name, rows in lines.items()
    }
    found = {
        name: [_operation(*line, lengths) for line in rows]
        for name, rows in lines.items()
    }
    return entry, {name: _with_operands(rows) for name, rows in found.items()}


def _trips(text: str, lengths: dict[str, list[str]]) -> int | None:
    """Returns the length of a loop: what the compiler states, or the one constant of
    its condition, which is an upper bound where the condition has other terms."""
    if known := _TRIPS.search(text):
        return int(known[1])
    condition = _CONDITION.search(text)
    found = lengths.get(condition[1], []) if condition else []
    return int(found[0]) if len(found) == 1 else None


def _operation(name: str, text: str, lengths: dict[str, list[str]]) -> Operation:
    opcode, estimate = _OPCODE.search(text), _ESTIMATE.search(text)
    target, where = _TARGET.search(text), _NAME.search(text)
    branches = [a or b for a, b in _BRANCHES.findall(text)]
    split = [name.strip(" %") for group in branches for name in group.split(",")]
    results = _SHAPE.findall(text[: opcode.start(1)] if opcode else text)
    operands = text[opcode.end() :].split(")")[0] if opcode else ""
    return Operation(
        name,
        opcode[1] if opcode else "",
        where[1] if where else "",
        float(estimate[1]) if estimate else None,
        results[0][0] if results else "",
        _sides(results[0]) if results else (),
        sum(map(_bytes, results)),
        max(map(_elements, results), default=0) <= REGISTER,
        tuple(_OPERAND.findall(operands)),
        _trips(text, lengths),
        tuple(split or _CALLED.findall(text)),
        target[1] if target else "",
    )


def _with_operands(rows: list[Operation]) -> list[Operation]:
    sizes = {op.name: op.bytes for op in rows}
    reads = [sum(sizes.get(name, 0) for name in op.operands) for op in rows]
    return [
        op._replace(bytes=op.bytes + read) for op, read in zip(rows, reads, strict=True)
    ]


def _products(text: str) -> Iterator[tuple[Operation, list[Operation | None]]]:
    """Yields each matrix product or convolution of an optimised program, those of a
    GPU's libraries included, and its operands."""
    for rows in parse(text)[1].values():
        known = {op.name: op for op in rows}
        for op in rows:
            if op.opcode in ("dot", "convolution") or op.target.startswith("__cublas"):
                yield op, [known.get(name) for name in op.operands]


def products(text: str) -> list[list[tuple[int, ...]]]:
    """Returns the shapes of the operands of each matrix product or convolution."""
    found = _products(text)
    return [[x.shape if x else () for x in operands] for _, operands in found]


def float32_products(text: str) -> tuple[list[str], int]:
    """Returns where the matrix products of two float32 operands come from, and the
    number of all products."""
    found = list(_products(text))
    wide = [
        op.where
        for op, operands in found
        if all(x is not None and x.dtype == "f32" for x in operands[:2])
    ]
    return wide, len(found)


def _sides(shape: tuple[str, str, str]) -> tuple[int, ...]:
    return tuple(int(side) for side in shape[1].split(",") if side)


def _elements(shape: tuple[str, str, str]) -> int:
    return math.prod(_sides(shape))


def _bytes(shape: tuple[str, str, str]) -> int:
    on_chip = bool(shape[2])
    return 0 if on_chip else _elements(shape) * SIZES.get(shape[0], 4)


def bundles(folder: Path) -> dict[str, float | None]:
    """Returns the cycles of each operation by its final instruction bundles.

    Bundles are multiplied by the trips of the loops around them; predicated regions
    count as executed, and waits for memory are not known. None: a loop without a
    constant trip count.

    Args:
      folder: to which the TPU's compiler wrote `*-final_bundles.txt`.
    """
    found = {}
    for path in folder.glob("*-final_bundles.txt"):
        if name := re.match(r"\d+-(.+)-\d+-final_bundles", path.name):
            found[name[1]] = _cycles(path.read_text())
    return found


def _cycles(text: str) -> float | None:
    stack: list[
        tuple[float, str, int | None]
    ] = []  # of loops: outer total, exit, trips
    total = 0.0
    for line in text.split("\n"):
        if not re.match(r"\s*(0x[0-9a-f]+|0)\s", line):
            continue
        if re.match(r"\s*0x[0-9a-f]+ LB", line):
            stack.append((total, "", None))
            total = 0.0
        total += 1
        if stack and (test := re.search(r"%(\w+) = scmp\.[^/]*/\* loop exit", line)):
            bound = re.search(r", (\d+) /\* loop exit", line)
            stack[-1] = (stack[-1][0], test[1], int(bound[1]) if bound else None)
        if stack and stack[-1][1] and f"sbr.rel (!%{stack[-1][1]})" in line:
            outer, _, trips = stack.pop()
            if trips is None:
                return None
            total = outer + total * trips
    return None if stack else total


class Costs:
    """Costs of a program, divided at its loops and branches.

    Args:
      text: the optimised program.
      counted: see `bundles`; empty for a GPU.
      bytes_per_unit: what the memory moves in a cycle or microsecond.
    """

    def __init__(
        self, text: str, counted: dict[str, float | None], bytes_per_unit: float
    ):
        self.entry, self.computations = parse(text)
        self._counted, self._rate = counted, bytes_per_unit

    @functools.cached_property
    def parts(self) -> list[Part]:
        """All parts, the outermost first."""
        found: list[Part] = []
        self._visit(self.entry, 1, self.entry, 1, found)
        return found

    def _visit(
        self, name: str, trips: int | None, loop: str, turns: int, found: list[Part]
    ) -> None:
        loop, turns = (name, 1) if trips is None else (loop, turns * trips)
        position = len(found)
        rows, missing, counted, bundled = [], [], 0.0, 0.0
        for op in self.computations[name]:
            if op.opcode in ("while", "conditional", "call"):
                inner = op.trips if op.opcode == "while" else 1
                for called in op.called:
                    self._visit(called, inner, loop, turns, found)
            elif (cost := self._cost(op)) is not None:
                rows.append((cost, op))
                counted += cost if op.estimate is None else 0
                bundled += self._bundled(op) or cost
            elif not _is_free(op):
                missing.append(op)
        rows.sort(key=lambda row: -row[0])
        cost = sum(cost for cost, _ in rows)
        if rows or missing:
            kind = self._kind(name, len(found) > position)
            costs = cost, counted, bundled
            part = Part(kind, trips, loop, turns, *costs, rows, missing)
            found.insert(position, part)

    def _cost(self, op: Operation) -> float | None:
        unknown = op.estimate is None and self._counted
        return self._bundled(op) if unknown else op.estimate

    def _bundled(self, op: Operation) -> float | None:
        if not self._counted:  # a GPU has no bundles
            return op.bytes / self._rate
        cycles = self._counted.get(op.name)
        return None if cycles is None else max(cycles, op.bytes / self._rate)

    def _kind(self, name: str, has_parts: bool) -> str:
        names = [op.where for op in self.computations[name] if op.where]
        inside = sum(SCOPE in where for where in names)
        if name == self.entry:
            return "round"
        if 2 * inside < len(names):
            return "chunk of clients"
        if any("transpose(" in where for where in names):
            return "local step"
        return "epoch" if has_parts else "pass over data"


def step(parts: list[Part]) -> float:
    """Returns the cost of a local step with the loops in it, all of known length."""
    loop = next(part.loop for part in parts if part.kind == "local step")
    return sum(part.turns * part.cost for part in parts if part.loop == loop)


def _is_free(op: Operation) -> bool:
    """True if an operation takes no time of its own, or that of a few instructions."""
    free = op.opcode in FREE | ASYNC or op.opcode.endswith(("-start", "-done"))
    return free or op.target in FREE_CALLS or op.small


def missing(parts: list[Part]) -> str:
    """Returns the operations without a cost."""
    names = [f"{op.name} {op.target}".strip() for part in parts for op in part.missing]
    return ", ".join(names)
