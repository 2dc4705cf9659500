"""Results of runs as pandas frames.

`load` reads one run directory, `frame` makes one tidy table of many: a row per run,
round, point and score, with the settings of the run. The other functions select,
aggregate and format rows of that table. Only `Run.experiment` and what uses it load
data and build networks.
"""

import dataclasses
import functools
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedjax_pfl import clock, evaluation, hyperparameters, local_training, user_code
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.find import find as find_method
from fedjax_pfl.engine.flops import flops_of_step
from fedjax_pfl.engine.parts import BENIGN
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import metrics, presets, standalone, text
from fedjax_pfl.experiment.build import build, rebuilt
from fedjax_pfl.experiment.checkpoints import Checkpoints
from fedjax_pfl.experiment.config import FREE, Config
from fedjax_pfl.experiment.metrics import Headline
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.types import Experiment, NeedsDataError, Trained
from fedjax_pfl.types import RunState
from fedjax_pfl.uploads.privacy import Guarantee

# settings of the data, in which all runs of a comparison are expected to agree
DATA = (
    *("dataset", "data_fraction", "marks", "test_split", "partition", "alpha"),
    *("classes_per_client", "clients", "unseen"),
)
COSTS = {
    "completed": "rounds",
    "megabytes": "MB",
    "seconds": "seconds",
    "simulated": "simulated seconds",
}
FLOOR = "majority baseline"
SELECTION = "selection.json"  # of a sweep, see `selection`
ABOVE = "clients above Local (%)"
# settings that name no run
_SKIPPED = {"algo", "preset", "seed", "eval_every", *FREE}
_COUNTS = ("down", "up", "ints", "public_data")  # traffic in numbers of 4 bytes
_ROUNDING = 1e-6  # scores are float32


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory, as far as it has come.

    Attributes:
      config: settings.
      summary: content of summary.json; empty if there is none yet.
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]

    @functools.cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per round, with the columns of metrics.jsonl."""
        return pd.DataFrame(RunDirectory(self.path).rows("metrics.jsonl"))

    @functools.cached_property
    def scores(self) -> pd.DataFrame:
        """Every client's scores: columns round, point, score, client and value.

        The point `method` has the method's own values, such as mixing weights.
        """
        rows, trained = [], ("post", metrics.OWN)
        for row in RunDirectory(self.path).rows("scores.jsonl"):
            for point in (*metrics.POINTS, metrics.OWN):
                for score, values in row.get(point, {}).items():
                    ids = row["ids"] if point in trained else range(len(values))
                    pairs = zip(ids, values, strict=True)
                    rows += [(row["round"], point, score, *pair) for pair in pairs]
        columns = ["round", "point", "score", "client", "value"]
        return pd.DataFrame(rows, columns=columns).astype({"value": float})

    @functools.cached_property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients that train; of an earlier version none."""
        recorded = RunDirectory(self.path).read("partition.json", {})
        return tuple(recorded.get("clients", ()))

    @functools.cached_property
    def experiment(self) -> Experiment:
        """The experiment of the run; loads its data and builds its networks."""
        return rebuilt(self.path)

    @functools.cached_property
    def checkpoint(self) -> tuple[int, RunState]:
        """The rounds before the best checkpoint of early stopping, else the last, and
        the state after them."""
        return Checkpoints(self.path).latest(self.trained)

    @functools.cached_property
    def trained(self) -> Trained:
        """Task, program and federation of the run, from its files alone.

        Loads the data set where they do not suffice: for a run of an earlier version,
        or a method that reads training examples.
        """
        try:
            return standalone.trained(self.path)
        except NeedsDataError as error:
            return self._loaded(error)

    def _loaded(self, why: InputError) -> Trained:
        """Returns the experiment; InputError with the reason without its data set."""
        try:
            return self.experiment
        except InputError as error:
            raise InputError(
                f"{self.path} predicts with its data set alone, {error} {why}"
            ) from error

    def state(self) -> RunState:
        """Returns the state at the last checkpoint."""
        return self.checkpoint[1]

    def predictor(self, client: int | str) -> Callable[[Any], Any]:
        """Returns one client's model at the last checkpoint: raw rows -> outputs.

        Args:
          client: its number, its name, or "#3" for number 3.
        """
        (t, state), e = self.checkpoint, self.trained
        predict = e.predictor(state, t, client)

        def run(rows: Any) -> Any:
            try:
                return predict(rows)
            except NeedsDataError as error:
                return self._loaded(error).predictor(state, t, client)(rows)

        return run

    @property
    def headline(self) -> Headline:
        """The score that decides, and the better of its values."""
        known = self.summary.get("headline", {"score": "acc", "better": "max"})
        return known["score"], known["better"]

    @property
    def best(self) -> int | None:
        """The round of the checkpoint that early stopping kept; None: the last."""
        return self.summary.get("best", {}).get("round")

    @property
    def status(self) -> str:
        """running, interrupted, diverged or complete."""
        return self.summary.get("status", "running")


def load(path: str | Path) -> Run:
    """Reads a run directory; InputError if a file cannot be read."""
    directory = RunDirectory(path)
    return Run(directory.path, directory.config.flat(), directory.summary)


def find(paths: Iterable[str | Path], every: bool = False) -> list[Run]:
    """Loads run directories, and those inside the directories of sweeps.

    Args:
      every: also those of a sweep that its selection.json does not name.

    Raises:
      InputError: a path is neither, or there is none.
    """
    folders = [Path(path).expanduser() for path in paths]
    if not folders:
        raise InputError("Name run directories, or the directory of a sweep.")
    found: list[Run] = []
    for folder in folders:
        names = sorted(file.parent.name for file in folder.glob("*/config.json"))
        if (folder / SELECTION).is_file() and not every:
            chosen = RunDirectory(folder).read(SELECTION)["chosen"]
            names = [name for each in chosen for name in each["runs"]]
        found += [load(folder / name) for name in names or ["."]]
    return found


def frame(runs: Iterable[str | Path | Run]) -> pd.DataFrame:
    """Returns one tidy table of runs: a row per run, round, point and score.

    Columns: run (path), label (method and settings in which the runs differ), status,
    round, completed (rounds of training before the score was taken), megabytes, seconds
    and simulated seconds until then, uploaded (megabytes that clients sent, integers
    and ciphertexts whole), examples and first_examples (processed by clients until
    then, and of them in the first round), point, score, the statistics over clients
    (macro, micro, std, worst10 and best10 by what is better, clients), better ("max" or
    "min"), and every setting; hyperparameters as hparams.NAME.
    """
    loaded = [run if isinstance(run, Run) else load(run) for run in runs]
    parts = [part for run in loaded if not (part := _tidy(run)).empty]
    if not parts:
        raise InputError("The runs have no evaluated round yet.")
    table = pd.concat(parts, ignore_index=True)
    return table.assign(label=table["run"].map(labels(loaded)))


def _tidy(run: Run) -> pd.DataFrame:
    rows = run.metrics.rename(columns={"loss": "train/loss"})
    columns = [x for x in rows if x.split("/")[0] in metrics.POINTS]
    if not columns:
        return pd.DataFrame()
    wide = rows.set_index("round")[columns].astype(float)
    names = ["point", "score", "statistic"]
    wide.columns = pd.MultiIndex.from_tuples(map(metrics.split, columns), names=names)
    long = wide.stack(["point", "score"], future_stack=True)
    long = long.reindex(columns=evaluation.STATISTICS).dropna(subset="macro")
    long = long.reset_index().rename_axis(columns=None)
    lower = [metrics.better(name, run.headline) == "min" for name in long["score"]]
    ends = ["worst10", "best10"]  # in the rows the lowest and the highest tenth
    long.loc[lower, ends] = long.loc[lower, ends[::-1]].to_numpy()
    long["better"] = np.where(lower, "min", "max")
    after, late = _spent(run), long["point"].isin(metrics.AFTER)
    before = after.shift(fill_value=0)
    before.loc[:, after.isna().all()] = np.nan
    spent = before.loc[long["round"]].set_axis(long.index)
    spent[late] = after.loc[long.loc[late, "round"]].set_axis(long.index[late])
    own = {"run": str(run.path), "status": run.status} | settings(run.config)
    return pd.concat([long, spent], axis=1).assign(**own)


def _spent(run: Run) -> pd.DataFrame:
    """Returns what was spent until the end of each round, indexed by round."""
    names = [f"traffic/{name}" for name in _COUNTS]
    more = ["participants", "traffic/encrypted", "work/examples"]
    rows = run.metrics.set_index("round").reindex(columns=[*names, *more]).fillna(0)
    spent, rounds = run.summary.get("seconds", {}), run.summary.get("rounds")
    seconds = spent.get("train", np.nan) / (rounds or np.nan)
    table = pd.DataFrame({"completed": (rows["participants"] > 0).astype(int)})
    down = 4 * rows[["traffic/down", "traffic/public_data"]].sum(axis=1) / 1e6
    table["megabytes"] = (4 * rows[names].sum(axis=1) + rows["traffic/encrypted"]) / 1e6
    table["uploaded"] = table["megabytes"] - down
    table["seconds"] = table["completed"] * seconds
    clock = simulated(run)
    table["simulated"] = np.nan if clock is None else clock.reindex(table.index)
    table["examples"] = rows["work/examples"]
    return table.cumsum().assign(first_examples=rows["work/examples"].iloc[0])


def simulated(run: Run) -> pd.Series | None:
    """Returns the simulated seconds of each round by the run's speeds and bandwidths;
    None without them.

    A synchronous round ends with its slowest participant, which takes the planned local
    work and sends a participant's mean traffic.
    """
    rows = run.metrics.set_index("round")
    if metrics.CLOCK in rows:
        return rows[metrics.CLOCK].fillna(0)
    given = run.config.get("speeds"), run.config.get("bandwidths")
    if given == (None, None):
        return None
    directory = RunDirectory(run.path)
    sizes = np.load(run.path / "partition.npz")["train_sizes"]
    trained = np.delete(
        np.arange(len(sizes)), directory.read("partition.json")["unseen"]
    )
    speeds = clock.clients(*given, len(sizes), run.config["seed"])
    speeds = clock.Clients(*(None if x is None else x[trained] for x in speeds))
    plan: Any = types.SimpleNamespace(**run.config, work=None)
    _, examples = local_training.planned(plan, sizes[trained])
    counts = rows.reindex(columns=[f"traffic/{name}" for name in _COUNTS]).sum(axis=1)
    sent = 4 * counts + rows.get("traffic/encrypted", 0)
    found = dict.fromkeys(rows.index, 0.0)
    for row in directory.rows("scores.jsonl"):
        if ids := row.get("ids"):
            each = sent[row["round"]] / len(ids)
            found[row["round"]] = clock.seconds(speeds, examples, each)[ids].max()
    return pd.Series(found).where(rows["participants"] > 0, 0)


def timed(run: Run, clock: dict[str, str]) -> Run:
    """Returns the run with other speeds or bandwidths in its settings.

    Raises:
      InputError: the run is asynchronous, and depends on its own.
    """
    if run.config.get("asynchronous") is not None:
        raise InputError(f"{run.path} is asynchronous and has its own speeds.")
    return dataclasses.replace(run, config=run.config | clock)


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run as values of cells."""
    flat = {name: x for name, x in config.items() if name != "hparams"}
    flat |= {f"hparams.{name}": x for name, x in config["hparams"].items()}
    return {n: x if np.isscalar(x) or x is None else str(x) for n, x in flat.items()}


def labels(runs: Sequence[Run], of: str = "both") -> dict[str, str]:
    """Names runs by their method and the settings in which they differ: {path: name}.

    Runs that differ in their seed only have the same name. A setting of the data counts
    where any two runs differ, another where two runs of the method do.

    Args:
      of: "method" leaves out the settings of the data, "data" the method.
    """
    known, table = _settings(runs)
    result = {}
    for path, own in known.items():
        parts = {"method": user_code.short(own["algo"])}
        same = table[table["algo"] == own["algo"]]
        for name in (x for x in own if x not in _SKIPPED and own[x] is not None):
            if (table if name in DATA else same)[name].nunique(dropna=False) > 1:
                parts[name] = f"{name.removeprefix('hparams.')}={own[name]}"
        if of != "both":
            parts = {n: x for n, x in parts.items() if (n in DATA) == (of == "data")}
        result[path] = ", ".join(parts.values())
    return result


def _settings(runs: Sequence[Run]) -> tuple[dict[str, dict[str, Any]], pd.DataFrame]:
    """Returns settings {path: {name: value}}, and a table of them as text."""
    usual = settings(Config().flat())
    known = {str(run.path): usual | settings(run.config) for run in runs}
    # pandas would take None in a column of text as no value
    texts = {path: {n: str(x) for n, x in own.items()} for path, own in known.items()}
    return known, pd.DataFrame(texts).T


def own_settings(runs: Sequence[Run]) -> dict[str, str]:
    """Returns what `labels` leaves out, {path: text}: settings that one method has
    throughout and another one has not, and hyperparameters that are no default."""
    (known, table), result = _settings(runs), {}
    skipped = {*_SKIPPED, *DATA, "rounds", "tuned"}
    for path, own in known.items():
        same, parts = table[table["algo"] == own["algo"]], []
        factory = ALGORITHMS.get(own["algo"])
        usual = hyperparameters.defaults(factory) if factory else {}
        for name in (x for x in own if x not in skipped and own[x] is not None):
            plain = name.removeprefix("hparams.")
            differs = table[name].nunique() > 1
            if plain != name:
                differs = plain in usual and str(usual[plain]) != str(own[name])
            if differs and same[name].nunique() == 1:
                parts.append(f"{plain}={own[name]}")
        result[path] = ", ".join(parts)
    return result


def last(table: pd.DataFrame, rounds: Mapping[str, int] | None = None) -> pd.DataFrame:
    """Returns the rows of each run's last evaluation, for every point and score.

    Args:
      rounds: {path: the last round to read} of runs; held-out clients have one row.
    """
    keys = ["run", "point", "score"]
    latest = table["run"].map(rounds or {}).fillna(np.inf)
    away = table["point"].str.startswith("unseen")
    table = table[(table["round"] <= latest) | away]
    return table.loc[table.groupby(keys, sort=False)["completed"].idxmax()]


def final(runs: Sequence[Run], table: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns the rows that a report shows: of the round that early stopping kept, else
    of the last evaluation."""
    kept = {str(run.path): run.best for run in runs if run.best is not None}
    return last(frame(runs) if table is None else table, kept)


def benign(table: pd.DataFrame, score: str) -> pd.DataFrame:
    """Returns rows with a score of benign clients in place of that of all clients, for
    runs with malicious ones."""
    own = BENIGN + score
    attacked = table["run"].isin(table.loc[table["score"] == own, "run"])
    kept = table[~attacked | (table["score"] != score)]
    return kept.assign(score=kept["score"].replace(own, score))


def last_scores(run: Run, score: str) -> pd.DataFrame:
    """Returns each client's value of a score in the round of `final`: columns pre and
    post, rows by client."""
    rows = run.scores[run.scores["point"].isin(["pre", "post"])]
    rows = benign(rows.assign(run=""), score)
    rows = rows[rows["score"] == score]
    rows = rows if run.best is None else rows[rows["round"] <= run.best]
    found = rows.groupby(["client", "point"])["value"].last().unstack()
    return found.reindex(columns=["pre", "post"])


def at(table: pd.DataFrame, headline: str) -> tuple[pd.DataFrame, pd.Series, int]:
    """Returns the rows of POINT/SCORE, of benign clients where there are malicious
    ones, its values, and 1 if more is better, else -1.

    Raises:
      InputError: there are none.
    """
    point, score, statistic = metrics.split(headline)
    table = benign(table, score)
    rows = table[(table["point"] == point) & (table["score"] == score)]
    if rows.empty:
        raise InputError(f"No run has the score {headline}.")
    return rows, rows[statistic], 1 if rows["better"].iloc[0] == "max" else -1


def best(table: pd.DataFrame, by: str = "val/acc") -> pd.DataFrame:
    """Returns each run's rows of the first round with its best score.

    Args:
      by: POINT/SCORE. Any point but val chooses on test examples and is optimistic.
    """
    rows, values, sign = at(table, by)
    chosen = (sign * values).groupby(rows["run"]).idxmax()
    return last(table, rows.loc[chosen].set_index("run")["round"].to_dict())


def over_seeds(rows: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Returns mean and sample standard deviation over the runs of a label.

    Args:
      rows: of a tidy frame.
      by: further columns to group by, such as completed.

    Returns:
      rows label, point, score and `by`; columns (statistic, "mean" or "std"), and
      ("run", "count"). The statistics are over clients, mean and std over seeds.
    """
    groups = rows.groupby(["label", "point", "score", *by], sort=False)
    values = [*metrics.TITLES, "megabytes", "seconds"]
    table = groups[values].agg(["mean", "std"])
    table["run", "count"] = groups["run"].nunique()
    return table


def to_target(table: pd.DataFrame, level: float, headline: str) -> pd.DataFrame:
    """Returns when each run first reached a score.

    Args:
      level: of an accuracy its share, such as 0.9.
      headline: POINT/SCORE; `post/acc/micro` asks for the mean over examples.

    Returns:
      a row per run: label, completed, megabytes and seconds, NaN if the level was never
      reached.
    """
    rows, values, sign = at(table, headline)
    reached = rows[sign * (values - level) >= -_ROUNDING * abs(level)]
    first = reached.drop_duplicates("run").set_index("run")
    return table.groupby("run")[["label"]].first().join(first[list(COSTS)])


def rounds_to(
    table: pd.DataFrame, levels: Iterable[float], headline: str
) -> pd.DataFrame:
    """Returns a table of text: mean rounds, megabytes and seconds to some scores."""
    columns = {}
    costs = {x: title for x, title in COSTS.items() if table[x].notna().any()}
    goal = functools.partial(metrics.quantity, metrics.split(headline)[1])
    for level in levels:
        groups = to_target(table, level, headline).groupby("label", sort=False)
        for cost, title in costs.items():
            means = groups[cost].agg(lambda x: x.mean(skipna=False))
            columns[f"{title} to {goal(level)}"] = means.map(number)
    return pd.DataFrame(columns).replace("", "never").rename_axis("method")


def number(value: float) -> str:
    """Formats a cost with three digits, or all before the point; empty for NaN."""
    if value != value:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def comparison(
    runs: Sequence[Run], rows: pd.DataFrame, cost: bool = False
) -> pd.DataFrame:
    """Returns a table of text: a row per label, the best before local training first.

    Columns: mean over clients before and after local training and of the worst tenth,
    the share of clients above Local where there is a run of Local, settings by which
    methods differ, the paper's score
    and its published number where a preset has one, rounds, megabytes and seconds. ± is
    over seeds.

    Args:
      rows: of one evaluation per run, from `last` or `best`.
      cost: also counts the operations of local training, see `flops`.
    """
    (name, better), known = runs[0].headline, {str(run.path): run for run in runs}
    unit = metrics.label(name)
    if (rows["score"] == BENIGN + name).any():
        unit, rows = f"{unit} of benign clients", benign(rows, name)
    floor = rows[rows["score"] == metrics.baseline(name)]
    if floor.groupby(["point", "seed"])["macro"].nunique().max() == 1:
        floor = floor.drop_duplicates(["point", "seed"])
        rows = pd.concat([rows, floor.assign(label=FLOOR, score=name)])
    seeds = over_seeds(rows)
    shown = {
        f"{unit} before": ("pre", "macro"),
        "worst 10 %": ("pre", "worst10"),
        f"{unit} after": ("post", "macro"),
    }
    cells, means, above, own = {}, {}, above_local(runs), own_settings(runs)
    for label, of in rows.groupby("label", sort=False):
        found = {t: cell(seeds, label, p, name, x) for t, (p, x) in shown.items()}
        if label != FLOOR:
            run = known[of["run"].iloc[0]]
            gains = [above[path] for path in of["run"].unique() if path in above]
            found[ABOVE] = metrics.text("acc", float(np.mean(gains))) if gains else ""
            found["settings"] = own[str(run.path)]
            found |= _published(seeds, label, run) | _totals(of, run, cost)
            found |= _lora_error([known[path] for path in of["run"].unique()])
        cells[label] = found
        scored = of[of["score"] == name]
        before = scored[scored["point"] == "pre"]
        means[label] = (scored if before.empty else before)["macro"].mean()
    order = sorted(cells, key=means.__getitem__, reverse=better == "max")
    result = pd.DataFrame(cells).T.loc[order].fillna("")
    return result.loc[:, (result != "").any()].rename_axis("method")


def above_local(runs: Sequence[Run]) -> dict[str, float]:
    """Returns the share of clients that score above Local, {path: share}.

    Compared are the headline's last values after local training, with the run of
    `local` of the same data and seed; runs without one are left out.
    """
    local, others, found = {}, [], {}
    for run in runs:
        data = tuple(run.config.get(name) for name in (*DATA, "seed"))
        scores = last_scores(run, run.headline[0])["post"]
        if run.config["algo"] == "local":
            local[data] = scores
        else:
            others.append((run, data, scores))
    for run, data, scores in others:
        if data in local:
            gain = (scores - local[data]).dropna()
            better = gain > 0 if run.headline[1] == "max" else gain < 0
            found[str(run.path)] = float(better.mean())
    return found


def cell(
    seeds: pd.DataFrame, label: Any, point: str, score: str, statistic: str = "macro"
) -> str:
    """Formats a statistic of `over_seeds`; empty if there is none."""
    if (label, point, score) not in seeds.index:
        return ""
    found = seeds.loc[(label, point, score), statistic]
    return metrics.mean_std(score, found["mean"], found["std"])


def _published(seeds: pd.DataFrame, label: Any, run: Run) -> dict[str, str]:
    """Returns the published number, the measured one, and the differences."""
    preset = presets.PRESETS.get(run.config.get("preset") or "")
    if preset is None or not (preset.published or preset.cells):
        return {}
    algo, defaults = run.config["algo"], Config().flat()
    compared = {name: x for name, x in defaults.items() if name not in FREE}
    if not user_code.named(algo):
        compared["hparams"] = hyperparameters.defaults(find_method(algo))
    headline = preset.headline_of(algo)
    return {
        "paper's score": headline,
        "measured": cell(seeds, label, *metrics.split(headline)),
        "published": presets.published(run.config) or "",
        "not the paper's": presets.deviations(run.config, compared),
    }


def guarantee(config: Mapping[str, Any], rounds: pd.DataFrame) -> Guarantee:
    """Returns the differential privacy of all rounds of a run with --dp.

    Args:
      config: as of `Run`.
      rounds: `Run.metrics`.
    """
    known = rounds.reindex(columns=["epsilon", "delta"]).max()
    # metrics.jsonl has null for infinity
    epsilon = math.inf if math.isnan(known["epsilon"]) else float(known["epsilon"])
    unit, sampling = "clients", config.get("dp_sampling", "fixed")
    if config["dp"] == "example":
        unit, sampling = "examples", "poisson"
    return Guarantee(unit, epsilon, float(known["delta"]), sampling)


def _totals(rows: pd.DataFrame, run: Run, cost: bool) -> dict[str, str]:
    """Returns what the runs of a label took; rounds of several as their range."""
    spent = rows.groupby("run")[[*COSTS, "examples", "first_examples"]].max()
    ends = dict.fromkeys((spent["completed"].min(), spent["completed"].max()))
    means = spent.mean()
    cells = {"runs": str(len(spent)) if len(spent) > 1 else ""}
    cells |= {title: number(means[name]) for name, title in COSTS.items()}
    cells["rounds"] = " to ".join(map(str, ends))
    if "epsilon" in run.metrics:
        cells["privacy"] = str(guarantee(run.config, run.metrics))
    if cost:
        first, later = flops(run)
        total = means["examples"] * later + means["first_examples"] * (first - later)
        cells["TFLOP"] = number(total / 1e12)
    return cells


def _lora_error(runs: Iterable[Run]) -> dict[str, str]:
    """Returns the mean over rounds and runs of `low_rank.averaging_error`."""
    name = evaluation.LORA_ERROR
    found = [run.metrics[name].mean() for run in runs if name in run.metrics]
    return {"LoRA averaging error": number(float(np.mean(found)))} if found else {}


def flops(run: Run) -> tuple[float, float]:
    """Returns operations of local training per example: of the first round, and later.

    Matrix products count 2 per multiply-add. The run's data must be available.
    """
    e = run.experiment
    factory = find_method(e.config.algo)
    plain = build(e.config.replace(conv="matmul")).task
    given = factory, plain, e.federation, e.config.hparams
    count = functools.partial(flops_of_step, *given)
    return count(round=0) / plain.batch_size, count(round=1) / plain.batch_size


def statistics(table: pd.DataFrame, headline: Headline) -> pd.DataFrame:
    """Returns a table of text: every score with its statistics over clients."""
    seeds = over_seeds(table)
    order = [*metrics.ordered(table["score"], headline), *metrics.POINTS]
    keys = sorted(seeds.index, key=lambda x: (order.index(x[2]), order.index(x[1])))
    rows = {}
    for label, point, score in keys:
        cells = {
            t: cell(seeds, label, point, score, x) for x, t in metrics.TITLES.items()
        }
        cells[FLOOR] = cell(seeds, label, point, metrics.baseline(score))
        if not score.endswith("_majority"):
            rows[label, metrics.label(score), metrics.POINTS[point]] = cells
    return pd.DataFrame(rows).T.rename_axis(["method", "score", "local training"])


def render(table: pd.DataFrame, style: str = "markdown") -> str:
    """Formats a table of text as markdown, latex, csv or html."""
    flat = table.reset_index().rename_axis(columns=None)
    if style == "markdown":
        return flat.to_markdown(index=False, disable_numparse=True)
    if style == "latex":
        return latex(table)
    return flat.to_csv(index=False) if style == "csv" else flat.to_html(index=False)


def latex(
    table: pd.DataFrame, better: str = "max", data: Mapping[str, str] | None = None
) -> str:
    """Returns a tabular with the papers' names of methods and the best scores in bold,
    without seconds.

    Args:
      data: {row: setting of the data}; the best is of a setting.
    """
    shown = table.drop(columns=[x for x in table if "seconds" in x])
    rows = shown.drop(index=FLOOR, errors="ignore")
    setting = [(data or {}).get(str(name), "") for name in rows.index]
    for column in shown if len(rows) > 1 else ():
        if column.endswith((" before", " after", "worst 10 %")):
            values = rows[column].str.extract(r"(-?[\d.]+)")[0].astype(float)
            best = values.index[values == values.groupby(setting).transform(better)]
            shown.loc[best, column] = "BEST" + shown.loc[best, column]
    names = [text.proper(str(name)) for name in shown.index]
    flat = shown.set_axis(names).rename_axis("method").reset_index()
    made = flat.to_latex(index=False, escape=True).replace("±", r"$\pm$").rstrip()
    return re.sub(r"BEST(.*?) (?=[&\\])", r"\\textbf{\1} ", made)


def notes(runs: Sequence[Run]) -> list[str]:
    """Returns a sentence per run that is not complete or stopped early, and per run
    whose last scores are of NaN logits."""
    found = [f"{x.path}: {x.status}." for x in runs if x.status != "complete"]
    for run in runs:
        if (best := run.summary.get("best")) is not None:
            why = f"{run.summary['stopped']}. " if "stopped" in run.summary else ""
            rounds = text.plural(best["round"], "round")
            score = metrics.quantity(best["watch"], best["value"]) or "undefined"
            scores = f"Scores are after {rounds}: {best['watch']} {score}."
            found.append(f"{run.path}: {why}{scores}")
        rows = run.metrics.reindex(columns=["pre/nan_rows", "pre/nan_rows/clients"])
        mean, clients = rows.iloc[-1].astype(float) if len(rows) else (np.nan, 0)
        if mean == mean:
            found.append(
                f"{run.path}: {mean * clients:,.0f} test rows of {clients:,.0f} "
                "clients have NaN logits, and their scores are NaN."
            )
    return found
