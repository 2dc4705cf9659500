"""Choice among the values of a sweep by a validation score: selection.json.

The file has `by`, the score, and `chosen`: for every method and setting of the data the
values with the best mean over seeds, their runs, those at the edge of their grid, and
how many were tried.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedjax_pfl.experiment import metrics, results
from fedjax_pfl.experiment.config import FREE, SETTINGS
from fedjax_pfl.experiment.results import SELECTION, Run
from fedjax_pfl.experiment.run_directory import RunDirectory

_COMPARED = ["algo", *results.DATA]


def choose(runs: Sequence[Run], by: str) -> dict[str, Any]:
    """Returns the content of selection.json.

    Args:
      by: POINT/SCORE on validation examples.

    Raises:
      InputError: no run has the score.
    """
    rows, values, sign = results.at(results.final(runs), by)
    # text of None, too, which `astype` leaves to be dropped
    cells = rows[[*_COMPARED, "label"]].map(str).assign(value=values)
    chosen = []
    for _, group in cells.groupby(_COMPARED, sort=False):
        seeds = group.groupby("label", sort=False)["value"].agg(["mean", "std"])
        label = (sign * seeds["mean"]).idxmax()
        mean, std = seeds.loc[label]
        own = rows.loc[group.index[group["label"] == label]]
        edges = _edges(rows.loc[group.index], own.iloc[0])
        chosen.append(
            dict(zip(_COMPARED, group[_COMPARED].iloc[0], strict=True))
            | {"label": label, "mean": mean, "std": None if std != std else std}
            | {"tried": len(seeds), "edges": edges}
            | {"runs": [Path(x).name for x in own["run"].unique()]}
        )
    return {"by": by, "chosen": chosen}


def _edges(grid: pd.DataFrame, own: pd.Series) -> list[str]:
    """Returns the numeric settings whose chosen value is the first or the last."""
    skipped, found = {"seed", *_COMPARED, *FREE}, []
    for name in grid:
        values = pd.to_numeric(grid[name], errors="coerce").unique()
        setting = name.startswith("hparams.") or name in SETTINGS
        if not setting or name in skipped or len(values) < 2 or pd.isna(values).any():
            continue
        if own[name] in (values.min(), values.max()):
            listed = ", ".join(f"{x:g}" for x in sorted(values))
            found.append(f"{name.removeprefix('hparams.')}={own[name]:g} of {listed}")
    return found


def write(root: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Writes selection.json and returns its content.

    An earlier choice by the same score is kept for other methods and settings.
    """
    directory, known = RunDirectory(root), [_key(x) for x in content["chosen"]]
    before = directory.read(SELECTION, {})
    if before.get("by") == content["by"]:
        kept = [x for x in before["chosen"] if _key(x) not in known]
        content = content | {"chosen": kept + content["chosen"]}
    directory.write(SELECTION, content)
    return content


def _key(chosen: dict[str, Any]) -> list[Any]:
    return [chosen[name] for name in _COMPARED]


def grid(runs: Sequence[Run], content: dict[str, Any]) -> pd.DataFrame:
    """Returns a table of text: the validation score of all values, the best first."""
    rows, values, sign = results.at(results.final(runs), content["by"])
    point, score, _ = metrics.split(content["by"])
    chosen = {name for each in content["chosen"] for name in each["runs"]}
    names = rows["run"].map(lambda path: Path(path).name)
    table = rows.assign(value=values, chosen=names.isin(chosen))
    seeds = table.groupby("label", sort=False)
    table = seeds["value"].agg(["mean", "std", "count"]).join(seeds["chosen"].any())
    table = table.loc[(-sign * table["mean"]).sort_values(kind="stable").index]
    pairs = zip(table["mean"], table["std"], strict=True)
    found = {
        f"{point}/{metrics.label(score)}": [metrics.mean_std(score, *x) for x in pairs],
        "runs": table["count"].astype(str),
        "chosen": table["chosen"].map({True: "yes", False: ""}),
    }
    return pd.DataFrame(found, index=table.index).rename_axis("method")


def sentences(content: dict[str, Any]) -> list[str]:
    """Returns a sentence on what was chosen, one on values at an edge, and one where
    methods had grids of different sizes."""
    chosen = content["chosen"]
    found = [f"Chosen by {content['by']}: {'; '.join(x['label'] for x in chosen)}."]
    edges = [f"{x['algo']}: {edge}" for x in chosen for edge in x["edges"]]
    found += [f"At the edge of its grid: {'; '.join(edges)}."] * bool(edges)
    tried = {x["algo"]: x["tried"] for x in chosen if "tried" in x}
    if len(set(tried.values())) > 1:
        listed = ", ".join(f"{n} of {algo}" for algo, n in tried.items())
        found.append(f"Chosen among unequal numbers of values: {listed}.")
    return found
