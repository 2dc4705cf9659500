"""Writes docs/results/PAPER.md from experiments/results/*.json.

    python docs/result_pages.py

A file has the `tables` of one preset and `findings`. A table has settings that differ
from the preset's, seeds, rounds, share of the data, command, commit, machine, and a row
per method with {score: {mean, std}} in %; std is over seeds, null for one seed. `best`
and `best_round` are the best round on the test examples. `claims.toml` has the claims
of the papers' abstracts. Published numbers are those of
the preset, chosen with the settings `at`. `also` and `columns` are further scores to
show, `columns` without published numbers. Unknown entries are null.
"""

import json
import re
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import leaderboard  # noqa: E402
from fedjax_pfl.experiment import figures, metrics, presets, significance  # noqa: E402
from fedjax_pfl.experiment.presets import PRESETS  # noqa: E402
from fedjax_pfl.experiment.text import METHODS  # noqa: E402

FOLDER = ROOT / "experiments" / "results"
DOCS = ROOT / "docs" / "results"
IMAGES = ROOT / "docs" / "images"
CLAIM = ["claim", "verdict", "premise", "evidence"]
OTHER = ("task_acc",)  # scores that may not be the published quantity
_NOTE = "<!-- Written by `python docs/result_pages.py`: do not edit. -->"
_INTRO = (
    "Scores are means over clients (`/micro`: over test examples) in %, `pre` before "
    "and "
    "`post` after local training, after the last round; ± is the sample standard "
    "deviation over seeds. A difference is to the published number, of the best round "
    "where "
    "that is given. See [evaluation](../evaluation.md)."
)
_BOARD = (
    "Accuracies in %, means over clients, before and after local training; ± is the "
    "sample standard deviation over five seeds, each with a partition and initial "
    "weights of its own. Each method has eight trials on seed 0, judged by validation "
    "examples (a fifth of the training examples): five learning rates, then three "
    "values of a hyperparameter of its own, or three more rates. Runs are evaluated "
    "every 5 rounds, end when validation accuracy has not improved for 20 rounds, "
    "after at most 100, and are scored where it was highest; rounds in which not all "
    "phases of a method act do not count. pFedHN and MOCHA have rates of their own "
    "in place of the learning rate, MOCHA has a linear model, and the methods with "
    "public images have 200 of the same data set. Privacy-pFedC runs without "
    "encryption. The score of a method is the higher "
    "mean of before and after local training. Ahead of both baselines: the mean "
    "paired difference over seeds to Local and to fine-tuned FedAvg is more than two "
    "standard errors. Ranks are over settings and seeds, with Nemenyi's critical "
    "difference; seeds of one setting share their examples. To reach: MB sent and "
    "received by all clients, and thousand local steps of a client, until the score "
    "first equals that of fine-tuned FedAvg on the same seed (medians; a dash: in "
    "fewer than three seeds). A step is as much arithmetic as one of FedAvg's. "
    "`--preset=leaderboard_SETTING --algo=METHOD --tuned` has the values of a row."
)


def pages() -> dict[str, str]:
    """Returns the pages: {file name: Markdown}."""
    found: dict[str, list[str]] = {}
    for name, preset in PRESETS.items():
        if (FOLDER / f"{name}.json").exists():
            found.setdefault(preset.paper, []).append(name)
    pages = {f"{paper.lower()}.md": _page(paper, of) for paper, of in found.items()}
    return pages | {"leaderboard.md": _leaderboard()}


def _leaderboard() -> str:
    """Returns the page of `leaderboard.json`: the ranks and a table per setting."""
    board = leaderboard.board()
    complete = leaderboard.complete(board)
    parts = ["# Leaderboard", _NOTE, _BOARD]
    known = tomllib.loads(leaderboard.FINDINGS.read_text())
    parts.append("\n".join(f"* {x}" for x in known["findings"]))
    if len(complete) > 1:
        found = leaderboard.ranks(complete)
        parts += [
            "## Ranks",
            f"Friedman's test over {found.settings} settings and seeds: p = "
            f"{found.p:.2g}; mean ranks that differ by {found.difference:.1f} or more "
            f"differ at the level of {100 * significance.LEVEL:.0f} %.",
            _markdown(_overview(complete, found)),
            "![Mean ranks](../images/leaderboard-ranks.png)",
        ]
    for setting in leaderboard.SETTINGS:
        rows, every = board.get(setting, {}), len(leaderboard.ALGORITHMS)
        if 2 * len(rows) < every:
            continue
        preset = leaderboard.SETTINGS[setting]
        command = f"python -m benchmarks.leaderboard --setting={setting}"
        absent = {name: x["reason"] for name, x in rows.items() if "reason" in x}
        parts += [
            f"## {setting}",
            f"{PRESETS[preset].description}; {len(rows)} of {every} methods.",
            _markdown(pd.DataFrame(_rows(rows))),
            f"```bash\n{command}\n```",
            "\n".join(f"* `{name}`: {why}" for name, why in absent.items()),
        ]
    if missing := sorted(leaderboard.SETTINGS.keys() - complete.keys()):
        parts.append(f"Not measured for all methods: {', '.join(missing)}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown(table: pd.DataFrame) -> str:
    text = table.to_markdown(index=False, disable_numparse=True)
    return re.sub(r" {2,}", " ", re.sub("-{4,}", "---", text))


def _overview(
    complete: dict[str, dict[str, Any]], found: significance.Ranks
) -> pd.DataFrame:
    """Returns mean ranks, scores in each setting, and where a method is ahead."""
    means = leaderboard.scores(complete).groupby("setting", sort=False).mean()
    ahead = {setting: leaderboard.ahead(rows) for setting, rows in complete.items()}
    return pd.DataFrame(
        {"method": f"`{name}`", "mean rank": f"{rank:.1f}"}
        | {setting: f"{means.loc[setting, name]:.1f}" for setting in complete}
        | {"ahead of both": ", ".join(x for x in complete if name in ahead[x]) or "-"}
        for name, rank in found.means.items()
    )


def _rows(rows: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the cells of a setting, the best method first."""
    shown = {name: x for name, x in rows.items() if "reason" not in x}
    order = sorted(shown, key=lambda name: -leaderboard.score(shown[name]))
    return [{"method": f"`{name}`"} | _cells(shown[name]) for name in order]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    values = {"lr": row["lr"]} | row["hparams"]
    tuned = ", ".join(f"{n}={x}" for n, x in values.items() if x is not None)
    columns = {"before": "before", "after": "after"}
    columns |= {f"{name}, worst tenth": f"{name}10" for name in columns}
    spread = {
        title: f"{statistics.fmean(row[name]):.1f} ± {statistics.stdev(row[name]):.1f}"
        for title, name in columns.items()
    }
    reach = {name: _reached(row[name]) for name in ("MB to reach", "steps to reach")}
    rounds = f"{statistics.median(row['rounds']):.0f}"
    return {"tuned": tuned, "rounds": rounds} | spread | reach


def _reached(values: list[float | None]) -> str:
    """Returns the median of what was spent; "-" if most seeds never reached it."""
    spent = sorted(float("inf") if x is None else x for x in values)
    median = statistics.median(spent)
    return "-" if median == float("inf") else f"{median:.3g}"


def _page(paper: str, names: list[str]) -> str:
    known = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in names}
    parts = [f"# Results: {paper}", _NOTE, _INTRO]
    protocols = dict.fromkeys(PRESETS[name].protocol for name in names)
    parts += _claims(paper)
    parts += [f"Protocol of the paper: {text}" for text in protocols if text]
    for name, content in known.items():
        for table in content["tables"]:
            parts += _section(name, table)
    findings = [f"* {x}" for content in known.values() for x in content["findings"]]
    parts += ["## Findings", "\n".join(findings)] if findings else []
    return "\n\n".join(parts) + "\n"


def _claims(paper: str) -> list[str]:
    """Returns the paper's claims as a heading and a table, or nothing."""
    rows = tomllib.loads((FOLDER / "claims.toml").read_text()).get(paper)
    if not rows:
        return []
    cells = pd.DataFrame([{x: row.get(x, "") for x in CLAIM} for row in rows])
    shown = cells.loc[:, (cells != "").any()]
    return ["## Claims of the abstract", _markdown(shown)]


def _section(name: str, table: dict[str, Any]) -> list[str]:
    """Returns a heading, a table, a figure, the command, and the circumstances."""
    seeds, share = len(table["seeds"]), table["share"]
    size = f"{seeds} seeds" if seeds > 1 else "one seed"
    part = f"{100 * share:.3g} % of" if share < 1 else "all"
    rounds = f" {table['rounds']} rounds," if table["rounds"] else ""  # none: untrained
    title = f"## {table['table']} ({size},{rounds} {part} examples)"
    rows, columns = table["rows"], table.get("columns")
    if columns and "baseline" in table:
        rows = [*rows, {"label": "majority baseline", "scores": table["baseline"]}]
    cells = pd.DataFrame(
        {"method": _label(row)}
        | (_published(name, table, row) if not columns else {})
        | {
            f"`{x}`": _text(table, row["scores"].get(x))
            for x in columns or table["also"]
        }
        for row in rows
    )
    about = ""
    if "reduced or changed" in cells and cells["reduced or changed"].nunique() == 1:
        about = f"The paper's setting, {cells.pop('reduced or changed').iloc[0]}. "
    shown = cells.loc[:, (cells != "").any()]
    parts = [title, _markdown(shown)]
    if image := table.get("image"):
        parts.append(f"![{table['table']}](../images/{image})")
    machine, commit = (table[x] or "not recorded" for x in ("machine", "commit"))
    about += f"Preset `{name}`. Machine: {machine}. Commit: {commit}. "
    parts.append(f"```bash\n{table['command']}\n```")
    return [*parts, (about + table.get("note", "")).strip()]


def _published(name: str, table: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    """Returns the published and the measured cells of a method."""
    preset, algo, at = PRESETS[name], row["method"], table.get("at", {})
    headline = preset.headline_of(algo)
    config = preset.settings_of(algo) | table["settings"] | row.get("settings", {})
    hparams = preset.hparams.get(algo, {}) | row.get("hparams", {})
    config |= {"preset": name, "algo": algo, "hparams": hparams}
    published = row.get("published") or presets.published(config | at) or ""
    score = row["scores"].get(headline, {})
    value = score.get("best", score.get("mean"))
    number = re.fullmatch(r"([\d.]+)(?: ± [\d.]+)?", published)
    point, plain, _ = metrics.split(headline)
    floor = row["scores"].get(f"{point}/{metrics.baseline(plain)}")
    best = f"{value:.2f} ({score['best_round']})" if "best" in score else ""
    known = number and value and plain not in OTHER
    difference = f"{value - float(number[1]) + 0:+.1f}" if known else ""
    return {
        "score": f"`{headline}`",
        "published": published,
        "measured": _text(table, score),
        "best round": best,
        "difference": difference.replace("-0.0", "+0.0"),
        "majority baseline": _text(table, floor or table["baseline"].get(headline)),
        "reduced or changed": presets.deviations(config, {"data_fraction": 1.0}, at),
    }


def _label(row: dict[str, Any]) -> str:
    """Returns a row's name: its own, or the method's and its hyperparameters."""
    parts = [f"`{name}={value}`" for name, value in row.get("hparams", {}).items()]
    known = METHODS.get(row.get("method", ""), "")
    return row.get("label") or ", ".join([known, *parts])


def _text(table: dict[str, Any], score: dict[str, Any] | None) -> str:
    found = [score.get("mean"), score.get("std")] if score else []
    texts = [f"{x:{table.get('format', '.2f')}}" for x in found if x is not None]
    return " ± ".join(texts)


def main() -> None:
    """Writes the pages."""
    DOCS.mkdir(exist_ok=True)
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    complete = leaderboard.complete(leaderboard.board())
    if len(complete) > 1:
        figure = figures.ranks(leaderboard.ranks(complete), "settings and seeds")
        figure.savefig(IMAGES / "leaderboard-ranks.png", dpi=100)


if __name__ == "__main__":
    main()
