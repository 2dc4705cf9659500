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
import sys
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.leaderboard import OWN_RATES  # noqa: E402
from fedjax_pfl.experiment import metrics, presets  # noqa: E402
from fedjax_pfl.experiment.presets import PRESETS  # noqa: E402
from fedjax_pfl.experiment.text import METHODS  # noqa: E402

FOLDER = ROOT / "experiments" / "results"
DOCS = ROOT / "docs" / "results"
BOARD = FOLDER / "leaderboard.json"
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
    "Accuracies in %, means over clients after the last round, before and after local "
    "training; ± is the sample standard deviation over seeds. Each method has the "
    "learning rate that was best on validation examples (a fifth of the training "
    "examples, seed 0), among those of 0.3, 0.1, 0.03, 0.01 and 0.003 at which no "
    "seed diverged; its other hyperparameters are its defaults. pFedHN and MOCHA have "
    "rates of their own, which were not tuned. pFedHN takes 50 local steps in a "
    "round, where most others take about 10, and pFedMe takes 5 on each batch. MOCHA "
    "has a linear model, FedL2G a warm-up of one round, CFL `first=5`. FedDF "
    "(also fine-tuned), FedMD, MNFL for several architectures, Sim-pFD and TopK-pFD "
    "have public examples: 200 of the digits, else 1,000 of Fashion-MNIST, CIFAR-100 "
    "or MNIST. CIFAR-10 is a subset of 14,000 images here, of which the clients have "
    "a fifth. Other runs shared the machine while the seconds were measured. Rows are "
    "ordered by the better of both accuracies. `--tuned` takes the learning rate of "
    "this table. The settings are presets: `digits`, `leaderboard_mnist`, "
    "`leaderboard_cifar10` and `leaderboard_fashion_mnist`."
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
    """Returns the page of `leaderboard.json`: a table per setting."""
    board = json.loads(BOARD.read_text())
    parts = ["# Leaderboard", _NOTE, _BOARD, *board.pop("findings", [])]
    parts += _stale(board)
    for setting, rows in board.items():
        shown = {name: x for name, x in rows.items() if "reason" not in x}
        order = sorted(shown, key=lambda name: -_higher(shown[name]))
        cells = [
            {"method": f"`{name}`" + " †" * ("stale" in shown[name])}
            | _cells(shown[name])
            for name in order
        ]
        for name, cell in zip(order, cells, strict=True):
            cell["lr"] = "-" if name in OWN_RATES else cell["lr"]
        text = pd.DataFrame(cells).to_markdown(index=False, disable_numparse=True)
        text = re.sub(r" {2,}", " ", re.sub("-{4,}", "---", text))
        command = f"python -m benchmarks.leaderboard --setting={setting}"
        parts += [f"## {setting}", text, f"```bash\n{command}\n```"]
        absent = {name: x["reason"] for name, x in rows.items() if "reason" in x}
        parts += ["\n".join(f"* `{name}`: {why}" for name, why in absent.items())]
    return "\n\n".join(filter(None, parts)) + "\n"


def _stale(board: dict[str, dict[str, Any]]) -> list[str]:
    """Returns what has changed in the methods since their rows were measured."""
    rows = [pair for setting in board.values() for pair in setting.items()]
    changes = {name: row["stale"] for name, row in rows if "stale" in row}
    if not changes:
        return []
    lines = [f"* `{name}`: {change}" for name, change in sorted(changes.items())]
    return [
        "Rows with † are of an earlier version of the method, and count above as "
        "measured. Since then:",
        "\n".join(lines),
    ]


def _higher(row: dict[str, Any]) -> float:
    """Returns the better accuracy of before and after local training."""
    return max(row["before"][0], row["after"][0])


def _cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{x[0]:.2f} ± {x[1]:.2f}" if isinstance(x, list) else f"{x:g}"
        for name, x in row.items()
        if name != "stale"
    }


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
    text = shown.to_markdown(index=False, disable_numparse=True)
    return [
        "## Claims of the abstract",
        re.sub(r" {2,}", " ", re.sub("-{4,}", "---", text)),
    ]


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
    text = shown.to_markdown(index=False, disable_numparse=True)
    parts = [title, re.sub(r" {2,}", " ", re.sub("-{4,}", "---", text))]
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


if __name__ == "__main__":
    main()
