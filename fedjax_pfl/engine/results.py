"""Per-round results, copied to the host."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import evaluation
from fedjax_pfl.engine.divergence import Found, wrong
from fedjax_pfl.engine.parts import Round
from fedjax_pfl.errors import DivergenceError
from fedjax_pfl.types import RunState

_NAMED = 10  # most client ids in an error


class Result(NamedTuple):
    """One round of `simulate.rounds`: host arrays, and the state after the round, valid
    until the next result."""

    round: int
    state: RunState | None  # None where not requested, see `state_every`
    metrics: Round | None  # None in the last result
    # {name: [N]}, scores before the round, if evaluated
    pre: dict[str, np.ndarray] | None


class Score(NamedTuple):
    """One statistic over clients of a score in a round."""

    round: int
    point: str  # pre, post, ...
    score: str
    statistic: str  # of `evaluation.statistics`
    value: float


def result(
    t: int,
    state: RunState | None,
    metrics: Round | None,
    pre: dict[str, np.ndarray] | None,
    num_clients: int,
    cause: Callable[[int, str, np.ndarray], Found],
) -> Result:
    """Returns the Result of round t, of the cohort's clients by id without padding;
    raises DivergenceError with its cause if it is not finite."""
    if metrics is not None:
        real = np.argsort(metrics.ids)[: np.sum(metrics.ids < num_clients)]
        rows = jax.tree.map(lambda x: x[real], metrics._replace(server={}))
        metrics = rows._replace(server=metrics.server)
        check_finite(t, metrics, cause)
    return Result(t, state, metrics, pre)


def check_finite(
    t: int, metrics: Round, cause: Callable[[int, str, np.ndarray], Found]
) -> None:
    """Raises DivergenceError if the loss or the state of an active client is not finite
    after round t."""
    for name, mask in wrong(metrics).items():
        if mask.any():
            found = cause(t, name, np.asarray(metrics.ids)[mask])
            ids = found.ids
            named = f"{len(ids)} clients ({ids[:_NAMED]})"
            raise DivergenceError(
                f"The {found.name} of {named if len(ids) > 1 else f'client {ids[0]}'} "
                f"is not finite in round {t}: {found.hint}."
            )


def record(result: Result, test_sizes: np.ndarray) -> dict[str, Any]:
    """Returns the row of a metrics table for one round, with statistics over clients.

    Args:
      test_sizes: [N] test examples.

    Returns:
      the columns of `of_round` and, for every score, pre/NAME (mean over clients) and
      pre/NAME/STATISTIC: micro, std, worst10, best10 and clients; likewise post/.
    """
    t, m, rows = result.round, result.metrics, list[Score]()
    if m is not None:
        post = {name: np.where(m.active, x, np.nan) for name, x in m.post.items()}
        rows += scores(t, "post", post, test_sizes[m.ids])
    rows += scores(t, "pre", result.pre or {}, test_sizes)
    return of_round(result) | columns(rows)


def of_round(result: Result) -> dict[str, Any]:
    """Returns round, loss (mean over participants; 0 for one that took no step),
    participants, traffic and the method's own metrics."""
    row, m = {"round": result.round}, result.metrics
    return row if m is None else row | _of_participants(m)


def _of_participants(m: Round) -> dict[str, Any]:
    active = m.active
    row = {"loss": float(np.mean(m.loss[active])), "participants": int(active.sum())}
    for name, x in m.traffic._asdict().items():
        if x is not None:
            row[f"traffic/{name}"] = int(np.asarray(x, np.int64).sum())
    row |= {name: float(np.mean(x[active])) for name, x in m.clients.items()}
    for name, x in m.server.items():
        if np.ndim(x):
            row |= {
                f"{name}/mean": float(np.mean(x)),
                f"{name}/min": float(np.min(x)),
                f"{name}/max": float(np.max(x)),
            }
        else:
            row[name] = float(x)
    return row


def scores(
    t: int, point: str, values: Mapping[str, np.ndarray], weights: np.ndarray
) -> list[Score]:
    """Returns the statistics of scores {name: [N]} with weights [N]; none of a score
    that is NaN for all clients."""
    return [
        Score(t, point, name, statistic, value)
        for name, of_clients in values.items()
        for statistic, value in evaluation.statistics(of_clients, weights).items()
        if not math.isnan(value)
    ]


def columns(rows: Iterable[Score]) -> dict[str, float]:
    """Returns scores of a round as the columns of `record`."""
    found = {}
    for row in rows:
        mean = row.statistic == "macro"
        words = (
            (row.point, row.score) if mean else (row.point, row.score, row.statistic)
        )
        found["/".join(words)] = row.value
    return found
