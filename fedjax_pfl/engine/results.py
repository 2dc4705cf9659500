"""What is known of a round on the host: its results, whether they are finite, and its
row in a table."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import evaluation
from fedjax_pfl.engine.program import Round
from fedjax_pfl.errors import DivergenceError
from fedjax_pfl.types import State

_NAMED = 10  # clients that an error names


class Result(NamedTuple):
    """What `simulate.rounds` yields: host arrays, and the state after the round, valid
    until the next is asked for."""

    round: int
    state: State | None  # None where not wanted, see there
    metrics: Round | None  # None in the closing row
    # {name: [N]}, scores before the round, where evaluated
    pre: dict[str, np.ndarray] | None


def without_padding(metrics: Round, num_clients: int) -> Round:
    """What is known of the cohort's clients only, by id."""
    real = np.argsort(metrics.ids)[: np.sum(metrics.ids < num_clients)]
    return jax.tree.map(lambda x: x[real], metrics._replace(server={}))._replace(
        server=metrics.server
    )


def check_finite(t: int, metrics: Round) -> None:
    """Raises DivergenceError if the loss or the state of an active client is not finite
    after round t."""
    # the loss may be of another model than the one that is kept, as Ditto's is
    found: dict[str, Any] = {
        "loss": ~np.isfinite(metrics.loss),
        "state (or the server's)": ~metrics.finite,
    }
    for what, bad in found.items():
        if (bad := bad & metrics.active).any():
            raise DivergenceError(
                f"The {what} of {_clients(metrics.ids[bad])} is not finite in round "
                f"{t}: lower the learning rate "
                "(--lr), or clip gradients (--clip, in Python by the task's optimizer)."
            )


def _clients(ids: Any) -> str:
    shown = ", ".join(map(str, ids[:_NAMED]))
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"client{'s' if len(ids) > 1 else ''} {shown}{more}"


def record(result: Result, test_sizes: np.ndarray) -> dict[str, Any]:
    """The row of a metrics table for one round: statistics over clients, without
    per-client vectors.

    Args:
      test_sizes: [N] test examples.

    Returns:
      round, loss (mean over participants; 0 of one that took no step), participants,
      traffic, and for every score pre/NAME (macro), pre/NAME_micro, _std, _worst10 and
      _best10, likewise post/.
    """
    row: dict[str, Any] = {"round": result.round}
    if result.metrics is not None:
        m = result.metrics
        active, ids = m.active, m.ids
        row |= {
            "loss": float(np.mean(m.loss[active])),
            "participants": int(active.sum()),
        }
        sent = {name: x for name, x in m.traffic._asdict().items() if x is not None}
        row |= {
            f"traffic/{name}": int(np.asarray(x, np.int64).sum())
            for name, x in sent.items()
        }
        row |= statistics(
            "post",
            {k: np.where(active, v, np.nan) for k, v in m.post.items()},
            test_sizes[ids],
        )
        row |= {name: float(np.mean(x[active])) for name, x in m.clients.items()}
        row |= {name: float(x) for name, x in m.server.items() if np.ndim(x) == 0}
        for name, x in m.server.items():
            if np.ndim(x):
                row |= {
                    f"{name}/{what}": float(f(x))
                    for what, f in (("mean", np.mean), ("min", np.min), ("max", np.max))
                }
    return row | statistics("pre", result.pre or {}, test_sizes)


def statistics(
    point: str, scores: dict[str, np.ndarray], weights: np.ndarray
) -> dict[str, float]:
    """Statistics of scores [N], NaN where a client has none, with weights [N], under
    the names of `record`."""
    row = {}
    for name, values in scores.items():
        for statistic, value in evaluation.statistics(values, weights).items():
            if not math.isnan(value):
                row[
                    f"{point}/{name}"
                    + ("" if statistic == "macro" else f"_{statistic}")
                ] = value
    return row
