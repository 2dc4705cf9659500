"""Tests of the differences between methods.

In one setting of the data: Wilcoxon's signed-rank test of each pair of methods over
pairs of clients within seeds, with Holm's correction. Over several settings: Friedman's
test of the mean ranks, with Nemenyi's critical difference (Demsar, JMLR 2006).
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import metrics, results
from fedjax_pfl.experiment.results import Run

LEVEL = 0.05
WILCOXON = "Wilcoxon p-values"
RANKS = "Mean ranks"


class Ranks(NamedTuple):
    """Friedman's test of methods over settings."""

    means: pd.Series  # mean rank of each method, 1 is best, the best first
    settings: int
    p: float
    difference: float  # of mean ranks that is critical at LEVEL


def scores(runs: Sequence[Run], headline: str) -> pd.DataFrame:
    """Returns each client's value: a row per setting, seed and client, a column per
    method.

    Raises:
      InputError: clients have no such score.
    """
    point, score, _ = metrics.split(headline)
    methods, data = results.labels(runs, "method"), results.labels(runs, "data")
    columns: dict[str, list[pd.Series]] = {}
    for run in runs:
        path, seed = str(run.path), run.config["seed"]
        own = pd.concat({(data[path], seed): results.last_scores(run, score)})
        own = own.reindex(columns=[point])[point]
        columns.setdefault(methods[path], []).append(own)
    # runs may differ in settings that no label has
    means = {
        name: pd.concat(x).groupby(level=[0, 1, 2], sort=False).mean()
        for name, x in columns.items()
    }
    table = pd.DataFrame(means)
    if table.isna().all(axis=None):
        raise InputError(f"Clients have no score {headline}.")
    return table.rename_axis(["setting", "seed", "client"])


def wilcoxon(table: pd.DataFrame) -> pd.DataFrame:
    """Returns p-values of all pairs of methods, after Holm's correction.

    Args:
      table: of one setting, as `scores` returns it. Ties count as Pratt proposed.
    """
    raw = {}
    for a, b in itertools.combinations(table.columns, 2):
        gain = (table[a] - table[b]).dropna()
        test = stats.wilcoxon(gain, zero_method="pratt") if gain.any() else None
        raw[a, b] = 1.0 if test is None else test.pvalue
    ordered = pd.Series(raw, dtype=float).sort_values()
    holm = (ordered * np.arange(len(ordered), 0, -1)).cummax().clip(upper=1)
    found = pd.DataFrame(np.nan, index=table.columns, columns=table.columns)
    for (a, b), p in holm.items():
        found.loc[a, b] = found.loc[b, a] = p
    return found


def friedman(table: pd.DataFrame, better: str = "max") -> Ranks:
    """Compares at least three methods over at least two settings.

    Args:
      table: as `scores` returns it; the means over seeds and clients are compared.

    Raises:
      InputError: there are fewer methods or settings with all of them.
    """
    means = table.groupby("setting", sort=False).mean().dropna()
    n, k = means.shape
    if n < 2 or k < 3:
        raise InputError(
            f"--test=friedman needs 3 methods in 2 settings of the data, got {k}, {n}."
        )
    ranks = means.rank(axis=1, ascending=better == "min").mean().sort_values()
    quantile = stats.studentized_range.ppf(1 - LEVEL, k, np.inf) / np.sqrt(2)
    p = stats.friedmanchisquare(*means.to_numpy().T).pvalue
    return Ranks(ranks, n, float(p), float(quantile * np.sqrt(k * (k + 1) / (6 * n))))


def tables(
    runs: Sequence[Run], headline: str, test: str
) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """Returns tables of text by title, and by label the p-value against the best."""
    values, against = scores(runs, headline), dict[str, str]()
    better = metrics.better(metrics.split(headline)[1], runs[0].headline)
    if test == "friedman":
        ranks = friedman(values, better)
        title = (
            f"{RANKS} by {headline} over {ranks.settings} settings "
            f"(Friedman p = {ranks.p:.2g}, critical difference {ranks.difference:.2f})"
        )
        cells = ranks.means.map("{:.2f}".format).rename_axis("method")
        return {title: cells.to_frame("mean rank")}, against
    both, found = results.labels(runs), dict[str, pd.DataFrame]()
    of, data = results.labels(runs, "method"), results.labels(runs, "data")
    for setting, rows in values.groupby("setting", sort=False):
        own = rows.dropna(axis=1, how="all")
        p = wilcoxon(own).map(lambda x: "" if x != x else f"{x:.2g}")
        best = own.mean().idxmax() if better == "max" else own.mean().idxmin()
        here = [path for path in data if data[path] == setting]
        against |= {both[path]: p.loc[of[path], best] or "best" for path in here}
        parts = [f"{WILCOXON} of {headline}", str(setting)]
        pairs = f"{len(own.dropna())} pairs of clients, Holm"
        found[", ".join(filter(None, [*parts, pairs]))] = p.rename_axis("method")
    return found, against
