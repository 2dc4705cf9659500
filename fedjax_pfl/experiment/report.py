"""Tables of runs: `fedjax-pfl report RUN ... [--format=html]`.

RUN is a run directory, or the directory of a sweep. Methods are compared by the mean
over clients after the last round, with the sample standard deviation over seeds; a
single method is shown with all its scores. Of a sweep with --select the chosen runs are
shown. latex is a tabular alone; html is one page with figures, every client's scores
and sortable tables.
"""

import base64
import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup

from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.experiment import (
    cli,
    figures,
    metrics,
    results,
    selection,
    significance,
)
from fedjax_pfl.experiment.cli import Flag
from fedjax_pfl.experiment.config import SETTINGS, Config, check_partners
from fedjax_pfl.experiment.results import Run
from fedjax_pfl.experiment.run_directory import RunDirectory

_TEMPLATE = Path(__file__).with_name("report.html")
FORMATS = ("markdown", "latex", "csv", "html")
CLOCK = ("speeds", "bandwidths")
OVER_CLIENTS = "Scores over clients"
TESTS = ("wilcoxon", "friedman")
# settings of the first lines of a page
HEAD = {
    "Data": ("dataset", "data_fraction", "shift", "marks", "augment", "public"),
    "Partition": ("partition", "alpha", "classes_per_client", "test_split"),
    "Clients": ("clients", "participation", "unseen", "malicious"),
    "Model": ("model", "adapt", "base", "init_from"),
    "Seeds": ("seed",),
}
# of these also the defaults are shown
_ALWAYS = ("alpha", "classes_per_client", *(names[0] for names in HEAD.values()))
FLAGS = {
    "format": Flag(str, f"one of {', '.join(FORMATS)}", "markdown"),
    "all": Flag(bool, "validation scores of all runs of a sweep with --select"),
    "columns": Flag(str, "columns to show, by words of their titles: before,worst"),
    "test": Flag(str, f"test of the differences, one of {', '.join(TESTS)}"),
    "target": Flag(str, "scores whose first round is shown, as 0.8,0.9"),
    "score": Flag(
        str, "POINT/SCORE of --target, --test (default: the headline before training)"
    ),
    "best": Flag(str, "POINT/SCORE whose best round replaces the last, as val/acc"),
    "cost": Flag(bool, "count floating-point operations; the data must be available"),
    "speeds": Flag(str, "examples per second of clients, as in run: simulated time"),
    "bandwidths": Flag(str, "Mbit/s of clients both ways, as in run"),
    "output": Flag(str, "file to write instead of printing"),
    **cli.TRUST,
}


def tables(
    runs: Sequence[Run],
    levels: Sequence[float] = (),
    score: str | None = None,
    best: str | None = None,
    cost: bool = False,
    test: str | None = None,
    columns: str = "",
) -> dict[str, pd.DataFrame]:
    """Returns tables of text by title; the arguments are those of the flags."""
    table, headline = results.frame(runs), runs[0].headline
    rows = shown_rows(runs, table, best)
    when = f"the round with the best {best}" if best else "the last round"
    if not best and any(run.best is not None for run in runs):
        when = "the best round"
    shown, wanted = results.comparison(runs, rows, cost), score or f"pre/{headline[0]}"
    tested: dict[str, pd.DataFrame] = {}
    if test is not None:
        tested, p = significance.tables(runs, wanted, choose("test", test, TESTS))
        shown = shown.assign(p=shown.index.map(p).fillna("")) if p else shown
    chosen = _chosen(shown, columns)
    if "p" in shown:  # a test that was asked for is shown with any columns
        chosen = chosen.assign(p=shown["p"])
    found = {f"{metrics.label(headline[0])} after {when}": chosen}
    if table["label"].nunique() == 1:
        found[OVER_CLIENTS] = results.statistics(rows, headline)
    if levels:
        found[f"First reached: {wanted}"] = results.rounds_to(table, levels, wanted)
    return found | tested


def shown_rows(
    runs: Sequence[Run], table: pd.DataFrame, best: str | None = None
) -> pd.DataFrame:
    """Returns the rows of the evaluation of each run that a report shows."""
    return results.best(table, best) if best else results.final(runs, table)


def _chosen(table: pd.DataFrame, words: str) -> pd.DataFrame:
    """Returns the columns whose titles have one of some words; none: all."""
    kept = []
    for word in filter(None, words.split(",")):
        found = [x for x in table if word.strip().lower() in x.lower()]
        if not found:
            raise InputError(f"--columns: no {word!r} among {', '.join(table)}.")
        kept += found
    return table[list(dict.fromkeys(kept))] if kept else table


def head(runs: Sequence[Run]) -> dict[str, str]:
    """Returns data, partition, clients, model and seeds of runs, each as a line."""
    lines = {}
    for title, (first, *more) in HEAD.items():
        parts = {name: _values(runs, name) for name in (first, *more)}
        known = [f"{name}={x}" for name, x in parts.items() if x and name in more]
        lines[title] = "; ".join([parts[first], *known])
    return lines


def _values(runs: Sequence[Run], name: str) -> str:
    """Returns the values of a setting where it acts, without its default."""
    found = []
    for run in runs:
        value, default = run.config[name], SETTINGS[name].default
        if value is None or (value == default and name not in _ALWAYS):
            continue
        with contextlib.suppress(InputError):  # it lacks a setting that it needs
            check_partners(Config(**run.config), name)
            found.append(str(value))
    return ", ".join(dict.fromkeys(found))


def page(
    runs: Sequence[Run], found: dict[str, pd.DataFrame], rows: pd.DataFrame
) -> str:
    """Returns one HTML page without links to other files.

    Args:
      rows: as of `shown_rows`.
    """
    name, names = runs[0].headline[0], results.labels(runs)
    parts: dict[str, list[pd.DataFrame]] = {}
    for run in runs:
        own = results.last_scores(run, name).rename(index=dict(enumerate(run.clients)))
        parts.setdefault(names[str(run.path)], []).append(own)
    # a client is a row of the federation, other seeds may give it other examples
    scores = {
        label: pd.concat(of).groupby(level=0, sort=False).mean()
        for label, of in parts.items()
    }
    clients = pd.concat(scores, names=["method", "client"])
    clients = clients.rename(columns=metrics.POINTS)
    settings = pd.DataFrame({str(run.path): run.config for run in runs}).map(str)
    settings = settings.rename_axis("setting")
    equal = settings.nunique(axis=1) == 1
    shown = found | {
        OVER_CLIENTS: results.statistics(rows, runs[0].headline),
        "Clients": clients.map(lambda value: metrics.text(name, value)),
        "Settings": settings[equal].iloc[:, :1].set_axis(["value"], axis=1),
        "Settings that differ": settings[~equal].T.rename_axis("run"),
    }
    drawn = {}
    for title, figure in figures.figures(runs).items():
        figure.savefig(file := io.BytesIO(), format="svg")
        drawn[title] = base64.b64encode(file.getvalue()).decode()
    template = jinja2.Template(_TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
    with pd.option_context("display.max_colwidth", None):
        html = {t: results.render(x, "html") for t, x in shown.items() if x.size}
    return template.render(
        title="; ".join(dict.fromkeys(names.values())),
        head=head(runs),
        tables={title: Markup(table) for title, table in html.items()},
        figures=drawn,
    )


@cli.isolated
def main(argv: Sequence[str]) -> int:
    """Prints or writes the tables of a command line."""
    given, words = cli.parse(argv, FLAGS, __doc__ or "")
    style = choose("format", given.get("format", "markdown"), FORMATS)
    if "score" in given and not {"target", "test"} & {*given}:
        raise InputError("--score needs --target or --test.")
    try:
        levels = [float(x) for x in given.get("target", "").split(",") if x]
    except ValueError:
        raise InputError("--target must be numbers, as 0.8,0.9.") from None
    if given.get("all"):
        others = {*given} - {"all", "format", "output", "trust"}
        if others or style == "html":
            wrong = sorted(others)[0] if others else "format=html"
            raise InputError(f"--all does not go with --{wrong}.")
        return _written(_grid(words, style), given.get("output"))
    runs = results.find(words)
    clock = {name: x for name, x in given.items() if name in CLOCK}
    runs = [results.timed(run, clock) for run in runs] if clock else runs
    names = ("score", "best", "cost", "test", "columns")
    found = tables(runs, levels, **{x: given[x] for x in names if x in given})
    texts = [f"{title}\n\n{results.render(x, style)}" for title, x in found.items()]
    known = (RunDirectory(root).read(results.SELECTION, {}) for root in words)
    chosen = [
        x for content in filter(None, known) for x in selection.sentences(content)
    ]
    out = "\n\n".join([*texts, *results.notes(runs), *chosen])
    rows = shown_rows(runs, results.frame(runs), given.get("best"))
    if style == "latex":
        out = _tabulars(runs, found)
    if style == "csv":
        over = results.over_seeds(rows)
        out = over.set_axis(map("_".join, over.columns), axis=1).to_csv()
    if style == "html":
        out = page(runs, found, rows)
        given["output"] = given.get("output", "report.html")
    return _written(out, given.get("output"))


def _tabulars(runs: Sequence[Run], found: dict[str, pd.DataFrame]) -> str:
    """Returns tables as LaTeX, those of ranks with their test as a comment."""
    both, data = results.labels(runs), results.labels(runs, "data")
    of, parts = {both[path]: data[path] for path in both}, []
    for title, table in found.items():
        if not title.startswith((OVER_CLIENTS, significance.WILCOXON)):
            comment = f"\n% {title}" if title.startswith(significance.RANKS) else ""
            parts.append(results.latex(table, runs[0].headline[1], of) + comment)
    return "\n\n".join(parts)


def _written(text: str, file: str | None) -> int:
    """Prints a text, or writes a file and prints its name; returns the exit code."""
    if file is not None:
        Path(file).write_text(text, encoding="utf-8")
    cli.show(text if file is None else file)
    return 0


def _grid(roots: Sequence[str], style: str) -> str:
    """Returns the validation scores of all values of sweeps with --select."""
    parts = []
    for root in roots:
        content = RunDirectory(root).read(results.SELECTION)
        table = selection.grid(results.find([root], every=True), content)
        parts += [results.render(table, style), *selection.sentences(content)]
    return "\n\n".join(parts)
