"""Names, order, units and formatting of the scores in a run's metrics.

A column of metrics.jsonl is POINT/SCORE, the mean over clients, or
POINT/SCORE/STATISTIC: `pre/acc`, `post/acc/micro`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedjax_pfl import simulate
from fedjax_pfl.engine.parts import BENIGN
from fedjax_pfl.engine.results import columns, of_round, scores
from fedjax_pfl.errors import InputError
from fedjax_pfl.evaluation import STATISTICS
from fedjax_pfl.experiment.groups import Evaluation
from fedjax_pfl.experiment.types import Experiment
from fedjax_pfl.uploads import privacy
from fedjax_pfl.uploads.privacy import Guarantee

Row = dict[str, Any]
VAL = simulate.VAL

Headline = tuple[str, str]  # the deciding score, and "max" or "min"
ACCURACY: Headline = ("acc", "max")
POINTS = {
    "train": "training",
    "pre": "before",
    "post": "after",
    "post_latest": "latest after",
    "val": "validation, before",
    "unseen": "held-out clients, before",
    "unseen_post": "held-out clients, after",
}  # relative to local training; train/loss is the column `loss`
AFTER = (
    "train",
    "post",
    "post_latest",
    "unseen_post",
)  # scored after a round's local training
TITLES = {
    "macro": "mean",
    "micro": "mean over examples",
    "std": "std over clients",
    "worst10": "worst 10 %",
    "best10": "best 10 %",
}
# the statistic as a suffix, in runs of an earlier version
_SUFFIX = re.compile(rf"^({'|'.join(POINTS)})/([^/]+)_({'|'.join(STATISTICS[1:])})$")
OWN = "method"  # in scores.jsonl: the method's own values of a round's participants
CLOCK = "clock/seconds"  # simulated seconds of a round of an asynchronous run
LEADING = ("acc", "acc_present", "task_acc")  # shown before the others
OF = "@"  # in a score of one architecture's clients: acc@lenet
_SHARES = {"acc", "accuracy", "recall", "bal", "auc", "ap", "f1", "ece"}
_SHARES |= {"exact", "hamming", "rouge"}
_LOWER = ("reconstruction", "kl_", "loss", "error", "perplexity")
_LOWER_WORDS = {"ece", "mse", "mae"}
_BASELINES = {
    "acc_present": "acc_majority",
    "acc_groups": "acc_majority",
    "recall_macro": "recall_majority",
}


def split(name: str) -> tuple[str, str, str]:
    """Reads `pre/acc/micro` as point, score and statistic; InputError if it is none."""
    point, _, rest = name.partition("/")
    score, _, statistic = rest.partition("/")
    statistic = statistic or "macro"
    if point not in POINTS or not score or statistic not in STATISTICS:
        raise InputError(f"{name} is not POINT/SCORE, such as pre/acc.")
    return point, score, statistic


def renamed(row: Row) -> Row:
    """Returns a row of metrics.jsonl with today's names of columns."""
    if any(name.endswith("/clients") for name in row):
        return row
    return {_SUFFIX.sub(r"\1/\2/\3", name): value for name, value in row.items()}


def is_share(score: str) -> bool:
    """Returns whether a score is in [0, 1], judged by the words of its name."""
    return not _SHARES.isdisjoint(re.split("[/_]", score.partition(OF)[0]))


def better(score: str, headline: Headline = ACCURACY) -> str:
    """Returns "max" or "min": the better of two values of a score."""
    name = score.partition(OF)[0].removeprefix(BENIGN)
    if name == headline[0]:
        return headline[1]
    lower = any(word in name for word in _LOWER) and not is_share(name)
    lower = lower or not _LOWER_WORDS.isdisjoint(re.split("[/_]", name))
    return "min" if lower else "max"


def watched(evaluation: Evaluation, usual: Headline) -> Headline:
    """Returns the score of --watch, else the first of --metrics, else the usual one of
    method and labels."""
    listed = usual[0] if evaluation.metrics is None else evaluation.scores[0]
    name = (evaluation.watch or "").removeprefix(VAL) or listed
    return name, better(name, usual)


def baseline(score: str) -> str:
    """Returns the name of a score's majority baseline."""
    return _BASELINES.get(score, f"{score}_majority")


def ordered(scores: Iterable[str], headline: Headline = ACCURACY) -> list[str]:
    """Sorts scores: the headline and its architectures', the leading ones, the rest."""
    found = dict.fromkeys(scores)
    parts = [name for name in found if name.startswith(headline[0] + OF)]
    first = [x for x in (headline[0], *parts, *LEADING) if x in found]
    return list(dict.fromkeys([*first, *found]))


def label(score: str) -> str:
    """Returns a score's title in tables, with its unit."""
    return f"{score} (%)" if is_share(score) else score


def text(score: str, value: float | None, digits: int = 1) -> str:
    """Formats a value without its unit; empty for NaN and None."""
    if value is None or value != value:
        return ""
    return f"{100 * value:.{digits}f}" if is_share(score) else f"{value:.4g}"


def quantity(score: str, value: float | None) -> str:
    """Formats a value with its unit; empty for NaN and None."""
    shown = text(score, value)
    return f"{shown} %" if shown and is_share(score) else shown


def mean_std(score: str, mean: float, std: float, digits: int = 1) -> str:
    """Formats a mean and, where known, its standard deviation."""
    spread = text(score, std, digits)
    return text(score, mean, digits) + (f" ± {spread}" if spread else "")


def points(result: simulate.Result) -> dict[str, dict[str, np.ndarray]]:
    """Returns the scores of all clients before the round, {point: {score: [N]}}."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, values in (result.pre or {}).items():
        point = "val" if name.startswith(VAL) else "pre"
        found.setdefault(point, {})[name.removeprefix(VAL)] = values
    return found


def by_client(result: simulate.Result, more: Mapping[str, Any]) -> Row:
    """Returns the row of scores.jsonl: participants, their losses and the method's own
    values, scores per client.

    Args:
      more: {point: {score: [clients]}} of further clients.
    """
    row: Row = {"round": result.round}
    if result.metrics is not None:
        active = result.metrics.active
        row["ids"] = result.metrics.ids[active].tolist()
        row["loss"] = _plain(result.metrics.loss[active])
        if own := result.metrics.clients:
            row[OWN] = {name: _plain(x[active]) for name, x in own.items()}
        post = {name: x[active] for name, x in result.metrics.post.items()}
        if any(np.isfinite(x).any() for x in post.values()):
            row["post"] = {name: _plain(x) for name, x in post.items()}
    for point, found in (points(result) | dict(more)).items():
        row[point] = {name: _plain(x) for name, x in found.items()}
    return row


def row(
    result: simulate.Result,
    experiment: Experiment,
    latest: Mapping[str, np.ndarray] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Row:
    """Returns the row of metrics.jsonl: statistics over clients, without vectors.

    Args:
      latest: {score: [N]}, every client's last score after local training, if not all
        participate; NaN for clients not seen yet.
      more: {point: {score: [clients]}} of unseen clients.
    """
    e, m, found = experiment, result.metrics, of_round(result)
    by: dict[str, Any] = {name: (x, e.partition) for name, x in points(result).items()}
    for name, x in (more or {}).items():
        by[name] = (x, e.unseen.partition if e.unseen else e.partition)
    if m is not None:
        if e.config.dp is not None:
            private = guarantee(e, result.round + 1)
            found |= {"epsilon": private.epsilon, "delta": private.delta}
        if e.schedule is not None:
            seconds = np.diff(e.schedule.seconds, prepend=0)
            found[CLOCK] = float(seconds[result.round])
        for name, x in zip(("steps", "examples"), e.planned, strict=True):
            found[f"work/{name}"] = int(x[m.ids[m.active]].sum())
        post = {}
        for name, x in m.post.items():
            post[name] = np.full(e.task.num_clients, np.nan, x.dtype)
            post[name][m.ids] = np.where(m.active, x, np.nan)
        by["post"] = (post, e.partition)
        if latest and any(np.isfinite(x).any() for x in post.values()):
            by["post_latest"] = (latest, e.partition)
    for point, (values, partition) in by.items():
        wide = values if point.startswith("unseen") else by_network(values, e)
        sizes = partition.val_sizes if point == "val" else partition.test_sizes
        found |= columns(scores(result.round, point, wide, sizes))
    return {name: x if np.isfinite(x) else None for name, x in found.items()}


def guarantee(e: Experiment, rounds: int) -> Guarantee:
    """Returns the guarantee of an experiment with --dp after some rounds."""
    given = {"delta": e.config.dp_delta, "sampling": e.config.dp_sampling}
    return privacy.guarantee(e.program, rounds, **given)


def by_network(values: Mapping[str, np.ndarray], e: Experiment) -> dict[str, Any]:
    """Returns scores [N] and the headline per network, such as `acc@lenet`."""
    name, kinds = e.headline[0], list(dict.fromkeys(e.networks))
    if len(kinds) == 1 or name not in values:
        return dict(values)
    own = {
        f"{name}@{k}": np.where(e.networks == k, values[name], np.nan) for k in kinds
    }
    return {**values, **own}


def _plain(values: Any) -> list[float | None]:
    """Returns the shortest numbers that read back to the same float32; null for NaN."""
    numbers = np.asarray(values, np.float32)
    return [float(str(x)) if np.isfinite(x) else None for x in numbers]
