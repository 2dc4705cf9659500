"""A round's scores per client as rows of the run directory's files."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.files import Row
from experiments.scores import OF
from fedjax_pfl import simulate


def client_scores(result: simulate.Result, more: Row | None = None) -> Row:
    """The per-client part of a round: participants' ids and losses, `post` in their
    order, `pre` of all clients, and those of further points, if any."""
    row: Row = {"round": result.round}
    if result.metrics is not None:
        active = result.metrics.active
        row |= {
            "ids": result.metrics.ids[active].tolist(),
            "loss": _plain(result.metrics.loss[active]),
        }
        post = {name: values[active] for name, values in result.metrics.post.items()}
        if any(np.isfinite(values).any() for values in post.values()):
            row["post"] = {name: _plain(values) for name, values in post.items()}
    points = ({} if result.pre is None else {"pre": result.pre}) | (more or {})
    return row | {
        point: {name: _plain(x) for name, x in values.items()}
        for point, values in points.items()
    }


def by_architecture(
    result: simulate.Result, architectures: np.ndarray, name: str
) -> simulate.Result:
    """The result with the score `name` of each architecture's clients beside its
    scores, see `parts`.

    Args:
      architectures: [N] names.
    """
    if result.metrics is not None:
        post: Any = parts(result.metrics.post, architectures[result.metrics.ids], name)
        result = result._replace(metrics=result.metrics._replace(post=post))
    return (
        result
        if result.pre is None
        else result._replace(pre=parts(result.pre, architectures, name))
    )


def parts(
    scores: Mapping[str, Any], architectures: np.ndarray, name: str
) -> dict[str, Any]:
    """Scores {name: [S]} and `name` for each architecture, as `acc@lenet`, NaN for the
    clients of others.

    Args:
      architectures: [S] names; without any, where all N clients have the same, nothing
        is added.
    """
    kinds = (
        [kind for kind in dict.fromkeys(architectures) if kind]
        if name in scores
        else []
    )
    own = {
        f"{name}{OF}{kind}": np.where(architectures == kind, scores[name], np.nan)
        for kind in kinds
    }
    return {**scores, **own}


def finite(value: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON has not."""
    return value if np.isfinite(value) else None


def _plain(values: Any) -> list[float | None]:
    """Short numbers that read back to the same float32; null for NaN and infinity."""
    return [
        float(str(x)) if np.isfinite(x) else None
        for x in np.asarray(values, np.float32)
    ]


def clients(point: str, scores: Row) -> Row:
    """How many clients each score is about, {point/NAME_clients: number}; a client
    without a score has NaN or None."""
    found = {
        name: int(np.isfinite(np.asarray(values, float)).sum())
        for name, values in scores.items()
    }
    return {f"{point}/{name}_clients": count for name, count in found.items() if count}
