"""Runs whose data change: a sequence of federations, with the state handed over."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_pfl.engine import distributed, frozen
from fedjax_pfl.engine.batch import lowered
from fedjax_pfl.engine.program import Program
from fedjax_pfl.engine.results import Result
from fedjax_pfl.engine.rounds import Compiled, arguments, compiled, rounds as run_rounds
from fedjax_pfl.types import Array, Federation, RunState


class Phase(NamedTuple):
    """The rounds on one federation, and the scores after them."""

    results: list[Result]  # without states
    state: RunState  # after the last round, valid until the next phase
    # {name: [phases so far, N]}, scores on the test examples of each phase
    seen: dict[str, np.ndarray]


def phases(
    programs: Sequence[Program],
    key: Array,
    federations: Sequence[Federation],
    *,
    rounds: int,
    eval_every: int = 1,
) -> Iterator[Phase]:
    """Runs a method on one federation after the other, `rounds` rounds on each.

    The state and the numbers of the rounds continue: equal federations give the same
    as one run. Programs that differ in arguments only are compiled once
    (`partition.keep` gives federations of equal shapes).

    Args:
      programs: one per federation, of its own task and with the same clients.

    Yields:
      a Phase after the rounds of each federation.

    Raises:
      DivergenceError: as `rounds`.
    """
    made: dict[object, Compiled] = {}
    past: list[tuple[Program, Federation, Compiled]] = []
    state: RunState | None = None
    for i, (program, federation) in enumerate(zip(programs, federations, strict=True)):
        alike: object = i
        if not program.on_host:
            placed = frozen.with_frozen(federation, program.task)
            placed = placed._replace(placement=program.placement)
            alike = lowered(program, placed)
        if alike not in made:
            made[alike] = compiled(program, key, federation, eval_every=eval_every)
        past.append((program, federation, made[alike]))
        results = list(
            run_rounds(
                program,
                key,
                federation,
                rounds=(i + 1) * rounds,
                eval_every=eval_every,
                start=i * rounds,
                state=None if state is None else program.place(state),
                functions=made[alike],
            )
        )
        state = program.unplace(results[-1].state)  # type: ignore[arg-type]  # the last Result has one
        found = [_scores(*each, key, state, results[-1].round) for each in past]
        seen = {name: np.stack([scores[name] for scores in found]) for name in found[0]}
        yield Phase([x._replace(state=None) for x in results], state, seen)


def _scores(
    program: Program,
    federation: Federation,
    run: Compiled,
    key: Array,
    state: RunState,
    t: int,
) -> dict[str, np.ndarray]:
    """Returns the scores of a state, with rows by client id, on a federation."""
    context = arguments(program, key, federation, run)._replace(t=np.int32(t))
    return distributed.fetch(run.evaluate(context, program.place(state)))
