"""Writes one HTML page on runs: `python -m experiments.html RUN ...
[--output=report.html]`.

RUN is a run directory, or the directory of a sweep, which stands for all runs in it.
The page has what `experiments.show` prints, the figures of `experiments.figures` of
several runs, the settings, and every client's last scores in a table that a click on a
heading sorts. It is one file that needs no network and no server. By default it is
report.html in the run directory; of several runs, beside them.
"""

import base64
import html
import io
import string
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments import (
    comparison,
    comparison_figures,
    courses,
    entry,
    flags,
    gather,
    grid,
    phases,
    report,
    scores,
    show,
)
from experiments.drawing import STYLE
from experiments.files import write_text
from experiments.gather import Found
from experiments.plain import plural

_FLAGS = {"output": flags.Flag(str, "the file of the page")}
_TEMPLATE = Path(__file__).with_name("page.html")
_CAPTIONS = {
    "curves": "The headline by round, before and after local training.",
    "clients": "Every client's last score, from the worst client to the best.",
    "costs": "The headline before local training against what it took.",
    "alpha": "The headline after the last round against the Dirichlet concentration: the smaller, the more the clients"
    " differ.",
    "classes_per_client": "The headline after the last round against the classes of each client.",
}


class Cell(NamedTuple):
    """A number in a table, with the value that it is sorted by."""

    text: str
    value: float


def page(runs: Sequence[Found]) -> str:
    """The HTML page of some runs."""
    sections = {
        "Results": _results(runs),
        "Figures": _figures(runs),
        "Scores": _scores(runs),
        "Clients": _clients(runs),
        "Settings": _settings(runs),
        "Runs": _runs(runs),
    }
    methods = ", ".join(dict.fromkeys(gather.names(runs)))
    made = {
        "title": _text(methods if len(methods) <= 80 else f"{len(runs)} runs"),
        "setting": _text(comparison.title(runs).replace("\n", "; ")),
        "links": " ".join(f'<a href="#{name.lower()}">{name}</a>' for name in sections),
        "sections": "\n".join(
            f'<section id="{name.lower()}">\n<h2>{name}</h2>\n{body}\n</section>'
            for name, body in sections.items()
        ),
    }
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(made)


def _text(value: Any) -> str:
    return html.escape(str(value))


def _paragraphs(lines: Iterable[str], kind: str = "") -> str:
    return "\n".join(f"<p{kind}>{_text(line)}</p>" for line in lines)


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    kind: str = "",
    sortable: bool = False,
) -> str:
    """A table of texts and Cells; a column is one of numbers if its cells are, but for
    empty ones."""
    body = [list(row) for row in rows]
    numeric = [
        all(isinstance(row[i], Cell) or row[i] == "" for row in body)
        for i in range(len(head))
    ]

    def cell(value: Any) -> str:
        if isinstance(value, Cell):
            return f'<td class="number" data-value="{value.value:.9g}">{_text(value.text)}</td>'
        long = ' class="long"' if len(str(value)) > 40 else ""
        return f"<td{long}>{_text(value)}</td>"

    kinds = [' class="number"' if is_number else "" for is_number in numeric]
    named = [
        f"<button>{_text(name)}</button>" if sortable else _text(name) for name in head
    ]
    titles = [
        f'<th scope="col"{of}>{name}</th>'
        for name, of in zip(named, kinds, strict=True)
    ]
    lines = "\n".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in body)
    opened = '<table class="sortable">' if sortable else "<table>"
    whole = f"{opened}\n<thead><tr>{''.join(titles)}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>"
    return f'<div class="wide{kind}">{whole}</div>'


def _results(runs: Sequence[Found]) -> str:
    """What `experiments.show` prints first."""
    if len(runs) == 1:
        return _paragraphs(["\n".join(show.ending(runs[0]))], ' class="lines"')
    title, (head, *rows), notes = comparison.content(runs)
    return (
        _paragraphs([title]) + _table(head, rows) + _paragraphs(notes, ' class="quiet"')
    )


def _scores(runs: Sequence[Found]) -> str:
    """All scores of the last round: mean and sample standard deviation over the seeds
    of a method."""
    groups, rows = gather.grouped(runs, gather.labels(runs)), []
    for label, every in groups.items():
        of = comparison.compared(every)
        names = dict.fromkeys(
            name
            for run in of
            for point in report.POINTS
            for name in run.said["scores"].get(point, {})
        )
        for name in scores.ordered(names, every[0].headline):
            for point, when in report.WITH_UNSEEN.items():
                found = [
                    run.said["scores"][point][name]
                    for run in of
                    if name in run.said["scores"].get(point, {})
                ]
                if found:
                    rows.append(
                        [
                            label,
                            name,
                            when,
                            *(
                                _mean(name, [row[x] for row in found])
                                for x in report.STATISTICS
                            ),
                        ]
                    )
    head = [
        "method",
        "score",
        "local training",
        "macro mean",
        "micro mean",
        "std over clients",
        "worst 10 %",
        "best 10 %",
    ]
    shares = "Scores that are shares of examples are in %. " + (
        "± is over seeds." if len(runs) > len(groups) else ""
    )
    return _paragraphs([shares]) + _table(head, rows, " tall", sortable=True)


def _mean(name: str, values: Sequence[float]) -> Cell:
    return Cell(
        comparison.mean_std(values, lambda value: scores.shown(name, value)),
        float(np.mean(values)),
    )


def _figures(runs: Sequence[Found]) -> str:
    drawn, notes = comparison_figures.figures(runs)
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "page"}):
        made = [(name, "svg+xml", _svg(figure)) for name, figure in drawn.items()]
    if len(runs) == 1:  # what the run itself and `experiments.figures` drew of it
        files = [
            runs[0].path / "partition.png",
            *sorted((runs[0].path / "figures").glob("*.png")),
        ]
        known = [path for path in files if path.is_file() and path.stem not in drawn]
        made += [(path.stem, "png", path.read_bytes()) for path in known]
    return "\n".join(_figure(*one) for one in made) + _paragraphs(
        notes, ' class="quiet"'
    )


def _svg(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _figure(name: str, kind: str, content: bytes) -> str:
    known, _, where = name.partition("-")
    caption = _CAPTIONS.get(known, name) + (
        f" ({where})" if where and known in _CAPTIONS else ""
    )
    data = base64.b64encode(content).decode()
    image = f'<img alt="{_text(caption)}" src="data:image/{kind};base64,{data}">'
    return f'<figure><div class="wide">{image}</div><figcaption>{_text(caption)}</figcaption></figure>'


def _clients(runs: Sequence[Found]) -> str:
    """Every client's examples and last scores."""
    rows: list[list[Any]] = []
    names = list(dict.fromkeys([*(run.headline[0] for run in runs), "acc_present"]))
    columns = [(name, point) for name in names for point in courses.BEFORE_AND_AFTER]
    for label, run in zip(gather.labels(runs), runs, strict=True):
        known = {name: courses.of_clients(run, name) for name in names}
        sizes = courses.sizes(run)
        count = max(len(of["pre"]) for of in known.values())
        for i in range(count):
            row = [label, Cell(str(run.config.seed), run.config.seed), Cell(str(i), i)]
            row += [
                Cell(str(size[i]), size[i]) if i < len(size) else "" for size in sizes
            ]
            rows.append(
                [
                    *row,
                    *(_score(name, known[name][point], i) for name, point in columns),
                ]
            )
    filled = [i for i in range(5 + len(columns)) if any(row[i] != "" for row in rows)]
    head = ["method", "seed", "client", "train", "test"]
    head += [
        f"{name}{' in %' * scores.is_share(name)} {report.POINTS[point]}"
        for name, point in columns
    ]
    said = "Training and test examples, and the last scores before and after local training; a heading sorts."
    table = _table(
        [head[i] for i in filled],
        ([row[i] for i in filled] for row in rows),
        " tall",
        sortable=True,
    )
    return _paragraphs([said]) + table


def _score(name: str, values: np.ndarray, client: int) -> Cell | str:
    known = client < len(values) and np.isfinite(values[client])
    return (
        Cell(scores.shown(name, values[client]), float(values[client])) if known else ""
    )


def _settings(runs: Sequence[Found]) -> str:
    """The settings that all runs share, then those of each method and what the runs
    differ in."""
    known = [show.settings(run.config, grid.shown) for run in runs]
    names = dict.fromkeys(name for of in known for name in of)
    same = {
        name: known[0].get(name)
        for name in names
        if len({of.get(name) for of in known}) == 1
    }
    shared = [[name, value] for name, value in same.items()]
    other = [name for name in names if name not in same and name != "seed"]
    text = _paragraphs(["Of all runs:"]) * (len(runs) > 1) + _table(
        ["setting", "value"], shared
    )
    if other:
        rows = {tuple(of.get(name, "") for name in other): None for of in known}
        text += _paragraphs(["In which they differ (and the seed):"]) + _table(
            other, rows
        )
    return text


def _runs(runs: Sequence[Found]) -> str:
    """Where each run is and how it stands; and with what they were made."""
    rows, software = [], dict[str, int]()
    for label, run in zip(gather.labels(runs), runs, strict=True):
        seconds, made = run.said.get("seconds", {}), show.versions(run)
        times = [
            Cell(f"{seconds[x]:,.1f}", seconds[x]) if x in seconds else ""
            for x in ("train", "compile")
        ]
        rows.append(
            [
                run.path,
                label,
                Cell(str(run.config.seed), run.config.seed),
                run.status,
                *times,
            ]
        )
        said = (
            ", ".join(f"{name} {value}" for name, value in made.items())
            or "not recorded"
        )
        software[said] = software.get(said, 0) + 1
    head = ["directory", "method", "seed", "ended", "seconds", "of compilation"]
    of = [
        f"Software and device{f' of {n} runs' * (len(software) > 1)}: {text}."
        for text, n in software.items()
    ]
    return _table(head, rows, sortable=True) + _paragraphs(of, ' class="quiet"')


def main(argv: list[str]) -> str:
    """Writes the page on the runs of a command line, and says where."""
    parsed = flags.parse(argv, _FLAGS, words=True)
    paths = gather.directories(parsed.words)
    output = gather.output(parsed.get("output"), paths, "report.html")
    with phases.said(entry.errors(), "Reading the runs and drawing their figures"):
        text = page([gather.read(path) for path in paths])
        with gather.writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            write_text(output, text)
    return f"{output}: {plural(len(paths), 'run')}, {len(text) / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(entry.enter(main, __doc__))
