"""Names, order, units and formatting of the scores in a run's metrics.

A column of metrics.jsonl is POINT/SCORE, the mean over clients, or POINT/SCORE with the
suffix of another statistic: `pre/acc`, `post/acc_micro`.
"""

from collections.abc import Iterable
from typing import NamedTuple

Headline = tuple[str, str]  # the deciding score, and "max" or "min"
ACCURACY: Headline = ("acc", "max")
POINTS = {
    "pre": "before",
    "post": "after",
    "post_latest": "latest after",
    "val": "validation, before",
    "unseen": "held-out clients, before",
    "unseen_post": "held-out clients, after",
}  # relative to local training
AFTER = ("post", "post_latest", "unseen_post")  # scored after a round's local training
STATISTICS = {
    "macro": "",
    "micro": "_micro",
    "std": "_std",
    "worst10": "_worst10",
    "best10": "_best10",
    "clients": "_clients",
}
TITLES = {
    "macro": "mean",
    "micro": "mean over examples",
    "std": "std over clients",
    "worst10": "worst 10 %",
    "best10": "best 10 %",
    "clients": "clients",
}
LEADING = ("acc", "acc_present", "task_acc")  # shown before the others
OF = "@"  # in a score of one architecture's clients: acc@lenet
_SHARES = {"acc", "accuracy", "recall", "bal"}
_LOWER = ("reconstruction", "kl_", "loss", "error", "perplexity")
_BASELINES = {
    "acc_present": "acc_majority",
    "acc_groups": "acc_majority",
    "recall_macro": "recall_majority",
}
METHODS = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg_ft": "FedAvg, fine-tuned",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "per_fedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "lg_fedavg": "LG-FedAvg",
    "fedbabu": "FedBABU",
    "fedbn": "FedBN",
    "fedma": "FedMA",
    "pfedma": "FedMA, fine-tuned",
    "fedrod": "FedRoD",
    "ditto": "Ditto",
    "apfl": "APFL",
    "fedamp": "FedAMP",
    "fedphp": "FedPHP",
    "fedala": "FedALA",
    "fedfomo": "FedFomo",
    "pfedhn": "pFedHN",
    "mocha": "MOCHA",
    "fedproto": "FedProto",
    "fd": "FD",
    "fml": "FML",
    "fedkd": "FedKD",
    "fedapen": "FedAPEN",
    "mnfl": "MNFL",
    "mnfl_het": "MNFL",
    "fedmd": "FedMD",
    "sim_pfd": "Sim-pFD",
    "topk_pfd": "TopK-pFD",
    "feddf": "FedDF",
    "pfeddf": "FedDF, fine-tuned",
    "fedem": "FedEM",
    "fedcp": "FedCP",
    "feddva": "FedDVA",
    "pfedc": "pFedC",
    "privacy_pfedc": "Privacy-pFedC",
    "pfedafm": "pFedAFM",
}  # display names


class Column(NamedTuple):
    """The meaning of a column of metrics.jsonl."""

    point: str
    score: str
    statistic: str


def column(name: str) -> Column | None:
    """Reads a column's name; None for a column that is no score."""
    point, slash, score = name.partition("/")
    if not slash or point not in POINTS:
        return None
    for statistic, ending in STATISTICS.items():
        if ending and score.endswith(ending):
            return Column(point, score.removesuffix(ending), statistic)
    return Column(point, score, "macro")


def split(headline: str) -> Column:
    """Reads a preset's headline such as `pre/acc_micro`.

    Raises:
      ValueError: it has no point.
    """
    found = column(headline)
    if found is None:
        raise ValueError(f"{headline} is not POINT/SCORE.")
    return found


def is_share(score: str) -> bool:
    """Returns whether a score is in [0, 1], judged by the words of its name."""
    return not _SHARES.isdisjoint(score.partition(OF)[0].split("_"))


def better(score: str, headline: Headline = ACCURACY) -> str:
    """Returns "max" or "min": the better of two values of a score."""
    name = score.partition(OF)[0]
    if name == headline[0]:
        return headline[1]
    lower = any(word in name for word in _LOWER) and not is_share(name)
    return "min" if lower else "max"


def baseline(score: str) -> str:
    """Returns the name of a score's majority baseline."""
    return _BASELINES.get(score, f"{score}_majority")


def ordered(scores: Iterable[str], headline: Headline = ACCURACY) -> list[str]:
    """Sorts scores: the headline and its architectures', the leading ones, the rest."""
    found = list(dict.fromkeys(scores))
    parts = [name for name in found if name.startswith(headline[0] + OF)]
    first = [x for x in dict.fromkeys((headline[0], *parts, *LEADING)) if x in found]
    return [*first, *(name for name in found if name not in first)]


def label(score: str) -> str:
    """Returns a score's title in tables, with its unit."""
    return f"{score} (%)" if is_share(score) else score


def text(score: str, value: float, digits: int = 1) -> str:
    """Formats a value without its unit; empty for NaN."""
    if value != value:
        return ""
    return f"{100 * value:.{digits}f}" if is_share(score) else f"{value:.4g}"


def mean_std(score: str, mean: float, std: float, digits: int = 1) -> str:
    """Formats a mean and, where known, its standard deviation."""
    spread = text(score, std, digits)
    return text(score, mean, digits) + (f" ± {spread}" if spread else "")
