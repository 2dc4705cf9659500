"""Results of finished runs as pandas frames.

`load` reads one run directory, `frame` makes one tidy table of many: a row per run,
round, point and score, with the settings of the run. The other functions select,
aggregate and format rows of that table. No data set is loaded and no network is built.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.experiment import metrics, presets
from fedjax_pfl.experiment.metrics import Headline

# settings of the data, in which all runs of a comparison are expected to agree
DATA = (
    *("dataset", "data_fraction", "marks", "test_split", "partition", "alpha"),
    *("classes_per_client", "clients", "unseen"),
)
# columns of the frame that describe a row; settings that change no score
_ROW = ("run", "label", "status", "round", "completed", "megabytes", "seconds")
_IGNORED = (
    *("algo", "preset", "seed", "digests", "eval_every", "checkpoint_every", "conv"),
    *("width", "devices", "client_memory", "tensorboard", "wandb", "data_dir"),
)
_COUNTS = ("down", "up", "ints", "public_data")  # traffic in numbers of 4 bytes
_ROUNDING = 1e-6  # scores are float32


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory, as far as it has come.

    Attributes:
      config: content of config.json.
      summary: content of summary.json; empty if there is none yet.
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]

    @functools.cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per round, with the columns of metrics.jsonl."""
        return pd.DataFrame(_rows(self.path / "metrics.jsonl"))

    @functools.cached_property
    def scores(self) -> pd.DataFrame:
        """Every client's scores: columns round, point, score, client and value."""
        rows = []
        for row in _rows(self.path / "scores.jsonl"):
            for point in metrics.POINTS:
                for score, values in row.get(point, {}).items():
                    ids = row["ids"] if point == "post" else range(len(values))
                    pairs = zip(ids, values, strict=True)
                    rows += [(row["round"], point, score, *pair) for pair in pairs]
        columns = ["round", "point", "score", "client", "value"]
        return pd.DataFrame(rows, columns=columns).astype({"value": float})

    @property
    def headline(self) -> Headline:
        """The score that decides, and the better of its values."""
        if known := self.summary.get("headline"):
            return known["score"], known["better"]
        found = [metrics.column(name) for name in self.metrics]
        scores = metrics.ordered(column.score for column in found if column)
        name = next(iter(scores), metrics.ACCURACY[0])
        return name, metrics.better(name)

    @property
    def status(self) -> str:
        """running, interrupted, diverged or complete."""
        return self.summary.get("status", "running")


def _rows(path: Path) -> list[dict[str, Any]]:
    """Reads a .jsonl; a last line without its end is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error


def load(path: str | Path) -> Run:
    """Reads a run directory.

    Raises:
      InputError: it has no config.json, or a file cannot be read.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise InputError(f"{path} is not a run directory: it has no config.json.")
    summary = path / "summary.json"
    known = _json(summary) if summary.is_file() else {}
    return Run(path, _json(path / "config.json"), known)


def find(paths: Iterable[str | Path]) -> list[Run]:
    """Loads run directories, and those inside the directories of sweeps.

    Raises:
      InputError: a path is neither, or there is none.
    """
    found = []
    for path in map(Path, paths):
        inside = sorted(
            path.glob("*/config.json"), key=lambda x: _natural(x.parent.name)
        )
        own = [path / "config.json"] if (path / "config.json").exists() else inside
        if not own:
            raise InputError(f"{path} is not a run directory, nor one of a sweep.")
        found += [load(file.parent) for file in own]
    if not found:
        raise InputError("Name run directories, or the directory of a sweep.")
    return found


def _natural(name: str) -> tuple[str, int]:
    """Sorts seed10 after seed9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def frame(runs: Iterable[str | Path | Run]) -> pd.DataFrame:
    """Returns one tidy table of runs: a row per run, round, point and score.

    Columns: run (path), label (method and settings in which the runs differ), status,
    round, completed (rounds of training before the score was taken), megabytes and
    seconds until then, examples and first_examples (processed by clients until then,
    and of them in the first round), point, score, the statistics over clients (macro,
    micro, std, worst10 and best10 by what is better, clients), and every setting;
    hyperparameters as hparams.NAME.
    """
    loaded = [run if isinstance(run, Run) else load(run) for run in runs]
    parts = [part for run in loaded if not (part := _tidy(run)).empty]
    if not parts:
        raise InputError("The runs have no evaluated round yet.")
    table = pd.concat(parts, ignore_index=True)
    return table.assign(label=table["run"].map(labels(loaded)))


def _tidy(run: Run) -> pd.DataFrame:
    rows = run.metrics
    columns = {name: column for name in rows if (column := metrics.column(name))}
    if not columns:
        return pd.DataFrame()
    wide = rows.set_index("round")[list(columns)].astype(float)
    names = ["point", "score", "statistic"]
    wide.columns = pd.MultiIndex.from_tuples(columns.values(), names=names)
    long = wide.stack(["point", "score"], future_stack=True)
    long = long.reindex(columns=list(metrics.STATISTICS)).dropna(subset="macro")
    long = long.reset_index().rename_axis(columns=None)
    lower = [metrics.better(name, run.headline) == "min" for name in long["score"]]
    ends = ["worst10", "best10"]  # in the rows the lowest and the highest tenth
    long.loc[lower, ends] = long.loc[lower, ends[::-1]].to_numpy()
    after = _spent(run)
    before = after.shift(fill_value=0)
    late = long["point"].isin(metrics.AFTER)
    spent = before.loc[long["round"]].reset_index(drop=True)
    spent[late] = after.loc[long.loc[late, "round"]].set_axis(long.index[late])
    settings = {"run": str(run.path), "status": run.status} | _settings(run.config)
    return pd.concat([long, spent], axis=1).assign(**settings)


def _spent(run: Run) -> pd.DataFrame:
    """Returns what was spent until the end of each round, indexed by round."""
    rows = run.metrics.set_index("round")
    zero = pd.Series(0.0, rows.index)
    trained = rows.get("participants", zero * np.nan).notna()
    numbers = sum((rows.get(f"traffic/{x}", zero).fillna(0) for x in _COUNTS), zero)
    sent = 4 * numbers + rows.get("traffic/encrypted", zero).fillna(0)
    summary = run.summary
    timed = summary.get("timed", summary.get("rounds")) or np.nan
    mean = summary.get("seconds", {}).get("train", np.nan) / timed
    seconds = rows.get("seconds", zero + mean).where(trained, 0)
    examples = rows.get("work/examples", zero).fillna(0)
    each = {"completed": trained, "megabytes": sent / 1e6, "seconds": seconds}
    table = pd.DataFrame(each | {"examples": examples}).cumsum()
    first = examples.iloc[0] if len(examples) else 0
    return table.assign(first_examples=first).astype({"completed": int})


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run as values of cells."""
    flat = {name: x for name, x in config.items() if name not in ("hparams", "digests")}
    flat |= {f"hparams.{name}": x for name, x in config.get("hparams", {}).items()}
    return {n: x if np.isscalar(x) or x is None else str(x) for n, x in flat.items()}


def labels(runs: Sequence[Run]) -> dict[str, str]:
    """Names runs by their method and the settings in which they differ: {path: name}.

    Runs that differ in their seed only have the same name. A setting of the data counts
    where any two runs differ, another where two runs of the method do.
    """
    table = pd.DataFrame([_settings(run.config) for run in runs])
    table = table.astype(object).where(table.notna(), None)
    names = [n for n in table if n not in _IGNORED]
    result = {}
    for i, run in enumerate(runs):
        same = table[table["algo"] == run.config["algo"]]
        scope = {n: table if n in DATA else same for n in names}
        parts = [
            f"{name.removeprefix('hparams.')}={table.at[i, name]}"
            for name in names
            if scope[name][name].nunique(dropna=False) > 1
            and table.at[i, name] is not None
        ]
        result[str(run.path)] = ", ".join([user_code.short(run.config["algo"]), *parts])
    return result


def last(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of each run's last evaluation, for every point and score."""
    keys = ["run", "point", "score"]
    return table.loc[table.groupby(keys, sort=False)["completed"].idxmax()]


def best(table: pd.DataFrame, by: str = "val/acc") -> pd.DataFrame:
    """Returns each run's rows after the rounds that score best on validation examples.

    Args:
      by: POINT/SCORE. Any point but val chooses on test examples and is optimistic.

    Raises:
      InputError: no run has this score.
    """
    wanted = metrics.split(by)
    at = table[(table["point"] == wanted.point) & (table["score"] == wanted.score)]
    if at.empty:
        raise InputError(f"No run has {by}: see --val_fraction.")
    sign = 1 if metrics.better(wanted.score) == "max" else -1
    chosen = (sign * at[wanted.statistic]).groupby(at["run"]).idxmax()
    rounds = at.loc[chosen].set_index("run")["completed"]
    return table[table["completed"] == table["run"].map(rounds)]


def over_seeds(rows: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Returns mean and sample standard deviation over the runs of a label.

    Args:
      rows: of a tidy frame.
      by: further columns to group by, such as completed.

    Returns:
      rows label, point, score and `by`; columns (statistic, "mean" or "std"), and
      ("run", "count"). The statistics are over clients, mean and std over seeds.
    """
    keys = ["label", "point", "score", *by]
    values = ["macro", "micro", "std", "worst10", "best10", "megabytes", "seconds"]
    groups = rows.groupby(keys, sort=False)
    table = groups[values].agg(["mean", "std"])
    table["run", "count"] = groups["run"].nunique()
    return table


def render(table: pd.DataFrame, style: str = "markdown") -> str:
    """Formats a table of text as markdown, latex, csv or html."""
    flat = table.reset_index()
    if style == "markdown":
        return flat.to_markdown(index=False, disable_numparse=True)
    if style == "latex":
        return flat.to_latex(index=False, escape=True).replace("±", r"$\pm$")
    return flat.to_csv(index=False) if style == "csv" else flat.to_html(index=False)


def to_target(
    table: pd.DataFrame, level: float, headline: str = "pre/acc"
) -> pd.DataFrame:
    """Returns when each run first reached a score: completed, megabytes and seconds.

    Args:
      level: of a score in %, its share: 0.9.
      headline: POINT/SCORE; `post/acc_micro` asks for the mean over examples.

    Returns:
      one row per run, in its order; NaN where the level was never reached.
    """
    wanted = metrics.split(headline)
    at = table[(table["point"] == wanted.point) & (table["score"] == wanted.score)]
    choose("score", wanted.score, table["score"].unique())
    sign = 1 if metrics.better(wanted.score) == "max" else -1
    reached = sign * at[wanted.statistic] >= sign * level - _ROUNDING * abs(level)
    first = at[reached].drop_duplicates("run").set_index("run")
    columns = ["completed", "megabytes", "seconds", "examples", "first_examples"]
    runs = table.drop_duplicates("run").set_index("run")
    return runs[["label"]].join(first[columns])


def select(table: pd.DataFrame, by: str = "val/acc") -> pd.DataFrame:
    """Returns the rows of each method's best label by its mean over seeds."""
    ends, wanted = over_seeds(last(table)), metrics.split(by)
    try:
        values = ends.xs((wanted.point, wanted.score), level=("point", "score"))
    except KeyError:
        raise InputError(f"No run has {by}: see --val_fraction.") from None
    means = values[wanted.statistic, "mean"]
    means = means if metrics.better(wanted.score) == "max" else -means
    algo = table.drop_duplicates("label").set_index("label")["algo"]
    chosen = means.groupby(algo.reindex(means.index)).idxmax()
    return table[table["label"].isin(chosen)]


def comparison(table: pd.DataFrame, headline: Headline) -> pd.DataFrame:
    """Returns a table of text: a row per label, the best first.

    Columns: mean over clients before and after local training and of the worst tenth,
    the paper's score and its published number where a preset has one, rounds, megabytes
    and seconds. ± is over seeds.

    Args:
      table: of one evaluation per run, from `last` or `best`.
    """
    name, seeds = headline[0], over_seeds(table)
    unit = metrics.label(name)
    rows = {}
    for label, of in table.groupby("label", sort=False):
        row = {
            f"{unit} before": _cell(seeds, label, "pre", name),
            "worst 10 %": _cell(seeds, label, "pre", name, "worst10"),
            f"{unit} after": _cell(seeds, label, "post", name),
        }
        rows[label] = row | _published(seeds, label, of.iloc[0]) | _costs(of)
    result = pd.DataFrame(rows).T.fillna("")
    column = result.columns[0]
    order = result[column].str.extract(r"^(-?[\d.]+)")[0].astype(float)
    result = result.loc[order.sort_values(ascending=headline[1] == "min").index]
    floor = table[table["score"] == metrics.baseline(name)]
    if (
        not floor.empty
        and floor.groupby(["point", "seed"])["macro"].nunique().max() == 1
    ):
        cells = [_floor(floor, point, name) for point in ("pre", "post")]
        result.loc["majority baseline"] = ""
        result.loc["majority baseline", result.columns[[0, 2]]] = cells
    return result.loc[:, (result != "").any()].rename_axis("method")


def _cell(
    seeds: pd.DataFrame, label: Any, point: str, score: str, statistic: str = "macro"
) -> str:
    if (label, point, score) not in seeds.index:
        return ""
    found = seeds.loc[(label, point, score), statistic]
    return metrics.mean_std(score, found["mean"], found["std"])


def _floor(rows: pd.DataFrame, point: str, name: str) -> str:
    values = rows[rows["point"] == point].drop_duplicates("seed")["macro"]
    return metrics.mean_std(name, values.mean(), values.std())


def _published(seeds: pd.DataFrame, label: Any, row: pd.Series) -> dict[str, str]:
    """Returns the paper's number, what was measured of it, and the differences."""
    config = _config(row)
    preset = presets.PRESETS.get(config.get("preset") or "")
    if preset is None or not (preset.published or preset.cells):
        return {}
    headline = preset.headline_of(config["algo"])
    wanted = metrics.split(headline)
    measured = _cell(seeds, label, wanted.point, wanted.score, wanted.statistic)
    return {
        "paper's score": headline,
        "measured": measured,
        "published": presets.published(config) or "",
        "not the paper's": presets.deviations(config),
    }


def _config(row: pd.Series) -> dict[str, Any]:
    """Returns the settings of a row as config.json has them."""
    known = {n: None if pd.isna(x) else x for n, x in row.items()}
    hparams = {
        str(n).removeprefix("hparams."): x
        for n, x in known.items()
        if str(n).startswith("hparams.") and x is not None
    }
    return {str(n): x for n, x in known.items()} | {"hparams": hparams}


def _costs(rows: pd.DataFrame) -> dict[str, str]:
    runs = rows.groupby("run")[["completed", "megabytes", "seconds"]].max()
    rounds = sorted(runs["completed"].unique())
    cells = {
        "rounds": str(rounds[0])
        if len(rounds) == 1
        else f"{rounds[0]} to {rounds[-1]}",
        "MB sent": f"{runs['megabytes'].mean():,.4g}",
        "seconds": number(runs["seconds"].mean()),
    }
    return ({"runs": str(len(runs))} if len(runs) > 1 else {}) | cells


def number(value: float) -> str:
    """Formats a cost with three digits, or all before the point; empty for NaN."""
    if value != value:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def statistics(table: pd.DataFrame, headline: Headline) -> pd.DataFrame:
    """Returns a table of text: every score with its statistics over clients."""
    seeds, rows = over_seeds(table), []
    names = metrics.ordered(table["score"].unique(), headline)
    shown = [name for name in names if not name.endswith("_majority")]
    wanted = [name for name in metrics.TITLES if name != "clients"]
    for label in table["label"].unique():
        for score in shown:
            for point, when in metrics.POINTS.items():
                if (label, point, score) not in seeds.index:
                    continue
                cells = [_cell(seeds, label, point, score, x) for x in wanted]
                floor = _cell(seeds, label, point, metrics.baseline(score))
                rows.append([label, metrics.label(score), when, *cells, floor])
    titles = [metrics.TITLES[name] for name in wanted]
    columns = ["method", "score", "local training", *titles, "majority baseline"]
    return pd.DataFrame(rows, columns=columns).set_index(columns[:3])


def rounds_to(
    table: pd.DataFrame, levels: Sequence[float], headline: str
) -> pd.DataFrame:
    """Returns a table of text: rounds and megabytes until a score was first reached."""
    rows: dict[Any, dict[str, str]] = {}
    for level in levels:
        found = to_target(table, level, headline)
        for label, of in found.groupby("label", sort=False):
            reached = of.dropna(subset="completed")
            all_of_them = len(reached) == len(of)
            means = reached[["completed", "megabytes", "seconds"]].mean()
            cells = [number(x) if all_of_them else "never" for x in means]
            titles = [f"{x} to {level:g}" for x in ("rounds", "MB", "seconds")]
            rows.setdefault(label, {}).update(zip(titles, cells, strict=True))
    return pd.DataFrame(rows).T.rename_axis("method")


def notes(runs: Sequence[Run]) -> list[str]:
    """Returns a sentence per run that is not complete."""
    return [
        f"{run.path}: {run.status} of {run.config['rounds']} rounds."
        for run in runs
        if run.status != "complete"
    ]
