"""Makes the pages of the site that have another source: one per method, the measured
tables, the modules.

A hook of MkDocs (`mkdocs.yml`): nothing that it writes is kept in the repository.
"""

import functools
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # experiments is used from a checkout

from experiments import active, config, describe  # noqa: E402
from experiments.presets import PRESETS  # noqa: E402
from fedjax_pfl.algorithms import ALGORITHMS  # noqa: E402

MODULES = {  # what a user imports, by topic
    "A run as functions": ["simulate", "types", "hyperparameters", "errors"],
    "For a method's author": [
        "averaging",
        "server_optimizer",
        "local_training",
        "losses",
        "evaluation",
        "aggregate",
        "traffic",
        "trees",
        "architectures",
        "keys",
        "testing",
    ],
    "Data": ["data.datasets", "data.partitioners", "data.federate"],
    "Networks": ["models.nnx_model", "models.nets", "models.resnet"],
    "Privacy": ["privacy.encryption"],
}
ELSEWHERE = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "experiments/README.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{
        str(p.relative_to(ROOT)): f"measured/{p.name}"
        for p in sorted((ROOT / "benchmarks/results").glob("*.md"))
    },
}
_ROW = re.compile(r"^\| `(\w+)` \|(.*)\|$", re.MULTILINE)
_PAPER = re.compile(r"\[([^\]]+)\]\((https[^)]+)\)((?:,? `\w+`)+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the generated pages to the navigation."""
    for entry in config.nav:
        ((title, pages),) = entry.items()
        if title == "Methods":
            pages += [
                {f"{name} ({display(name)})": f"methods/{name}.md"}
                for name in ALGORITHMS
            ]
        elif title == "Measured":
            pages += [
                page for page in ELSEWHERE.values() if page.startswith("measured/")
            ]
        elif title == "API":
            pages += [
                {topic: [{f"{m}": f"api/{m}.md"} for m in modules]}
                for topic, modules in MODULES.items()
            ]
    changes = [
        page
        for page in ELSEWHERE.values()
        if page in ("changelog.md", "contributing.md")
    ]
    config.nav.append({"Project": [page for page in changes if page in _present()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages themselves."""
    made = {page: (ROOT / file).read_text() for page, file in _present().items()}
    made |= {f"methods/{name}.md": method(name) for name in ALGORITHMS}
    made |= {
        f"api/{module}.md": _module(module)
        for modules in MODULES.values()
        for module in modules
    }
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(
    markdown: str, page: object, config: MkDocsConfig, files: Files
) -> str:
    """Fills in the listings, and points links to files of the repository at their
    pages."""
    for name, listing in LISTINGS.items():
        markdown = markdown.replace(f"<!-- {name} -->", listing())
    return _links(markdown, page.file.src_uri)  # type: ignore[attr-defined]


def _present() -> dict[str, str]:
    """The pages that stand elsewhere in the repository: page -> file."""
    return {page: file for file, page in ELSEWHERE.items() if (ROOT / file).is_file()}


def _links(markdown: str, page: str) -> str:
    """Points relative links at pages: they are written for the repository, where the
    file of a page lies elsewhere."""
    file = _present().get(page, f"docs/{page}")

    def target(match: re.Match) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        absolute = (ROOT / file).parent.joinpath(path).resolve()
        if not absolute.exists() or not absolute.is_relative_to(ROOT):
            return match[0]  # a page that is made, or a mistake, which MkDocs will find
        found = str(absolute.relative_to(ROOT))
        to = ELSEWHERE.get(found, found.removeprefix("docs/"))
        if to == found and not found.startswith("docs/"):
            return text  # it has no page
        return f"[{text}]({'../' * page.count('/')}{to}{anchor})"

    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)", target, markdown)


@functools.cache
def _rows() -> dict[str, list[str]]:
    """The table of methods: name -> cells."""
    table = (ROOT / "docs/methods/index.md").read_text()
    return {
        name: [cell.strip() for cell in rest.split("|")]
        for name, rest in _ROW.findall(table)
    }


@functools.cache
def papers() -> dict[str, str]:
    """The link to each method's paper, as the README has it."""
    found = _PAPER.findall((ROOT / "README.md").read_text())
    return {
        name: link for _, link, names in found for name in re.findall(r"`(\w+)`", names)
    }


def display(name: str) -> str:
    """A method's name in tables."""
    return re.split(r",| \(|: ", _rows()[name][0])[0]


def method(name: str) -> str:
    """The page of a method."""
    factory = ALGORITHMS[name]
    doc, module = inspect.getdoc(factory) or "", inspect.getmodule(factory)
    title, file, travels, keeps, time, architectures = _rows()[name]
    about = inspect.getdoc(module) or ""
    paper = f" [The paper]({papers()[name]})." if name in papers() else ""
    parts = [
        f"# {title}",
        f"`--algo={name}`; the code: `fedjax_pfl/algorithms/{file.strip('`')}`.{paper}",
    ]
    parts += ["## Idea", _prose(about)]
    parts += ["## Algorithm", _prose(doc.split("\n\n")[0]), _source(factory)]
    parts += ["## Hyperparameters", _hyperparameters(factory)]
    if note := describe.sections(doc).get("Note"):
        parts += ["## What differs from the paper, and what to know", _prose(note)]
    acts = [f"* {_prose(line)}" for line in active.lines(name)]
    where = (
        f"Measured by `python -m experiments.active {name}`: "
        f"{_prose(active.where(name))}."
    )
    parts += [
        "## Which of its parts have an effect at the defaults",
        where,
        "\n".join(acts),
    ]
    cost = {"-": "not measured"}.get(time, f"{time} times FedAvg's ([how](index.md))")
    sent = (
        f"Each way: {travels}. A client keeps: {keeps}. Clients' architectures: "
        f"{architectures}."
    )
    parts += ["## What travels", sent]
    parts += [
        f"Time of a round: {cost}.",
        "## What was measured",
        _measured(name),
        _published(name),
    ]
    parts += [
        "## Run it",
        f"```bash\npython -m experiments.main --describe={name}\n```",
    ]
    return "\n\n".join(part for part in parts if part)


def _prose(text: str) -> str:
    """A docstring as Markdown: what it sets between brackets, bars and stars is
    text."""
    return re.sub(r"(?<!`)([*|<\[\]])(?!`)", r"\\\1", textwrap.dedent(text))


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;")


def _source(factory: object) -> str:
    """The code of a method, folded away."""
    code = inspect.getsource(inspect.unwrap(factory))  # type: ignore[arg-type]
    code = re.sub(r'\n    """.*?"""\n', "\n", code, count=1, flags=re.DOTALL)
    return (
        '??? example "The code"\n    ```python\n'
        + textwrap.indent(code.rstrip(), "    ")
        + "\n    ```"
    )


def _hyperparameters(factory: object) -> str:
    rows = describe.hyperparameters(factory)  # type: ignore[arg-type]
    if not rows:
        return "None."
    lines = [
        f"| `{n}` | `{_cell(r['default'])}` | {_cell(r['type'])} | {_cell(r['text'])} |"
        for n, r in rows.items()
    ]
    return "\n".join(
        ["| name | default | values | meaning |", "|---|---|---|---|", *lines]
    )


class _Table(NamedTuple):
    """A table of the measured tables, and where it stands."""

    heading: str
    caption: str  # the paragraph before it, if it is short
    head: str
    rule: str
    rows: tuple[str, ...]


@functools.cache
def _tables() -> tuple[_Table, ...]:
    """Every table of the measured tables."""
    found, heading, paragraphs = [], "", []
    for block in re.split(r"\n{2,}", (ROOT / "experiments/README.md").read_text()):
        lines = block.splitlines()
        if block.startswith("#"):
            heading, paragraphs = lines[0].lstrip("# "), []
        elif block.startswith("|"):
            caption = paragraphs[-1] if paragraphs and len(paragraphs[-1]) < 100 else ""
            found.append(_Table(heading, caption, *lines[:2], tuple(lines[2:])))
        else:
            paragraphs.append(" ".join(lines))
    return tuple(found)


def _measured(name: str) -> str:
    """The rows of the measured tables that are of a method, and the sections that are
    about it."""
    parts, shown, of = (
        [],
        set(),
        re.compile(rf"(?:`{name}`|{re.escape(display(name))})(?=$|[,( ])"),
    )
    for table in _tables():
        rows = [
            row
            for row in table.rows
            if any(of.match(cell.strip()) for cell in row.strip("|").split("|")[:2])
        ]
        if rows:
            shown.add(table.heading)
            caption = f", {table.caption}" if table.caption else ":"
            parts.append(
                "\n".join(
                    [
                        f"From {_section(table.heading)}{caption}",
                        "",
                        table.head,
                        table.rule,
                        *rows,
                    ]
                )
            )
    headings = re.findall(
        r"^##+ (.*)$", (ROOT / "experiments/README.md").read_text(), re.MULTILINE
    )
    about = [
        h
        for h in headings
        if re.search(rf"\b{re.escape(display(name))}\b", h) and h not in shown
    ]
    parts += [f"See also: {', '.join(map(_section, about))}."] if about else []
    return "\n\n".join(parts) or (
        "Nothing but the tests; [the measured tables](../results.md) have other "
        "methods."
    )


def _section(heading: str) -> str:
    return f"[{heading}](../results.md#{_anchor(heading)})"


def _anchor(heading: str) -> str:
    from markdown.extensions.toc import slugify

    return slugify(re.sub(r"`", "", heading), "-")


def _published(name: str) -> str:
    """The papers' numbers that the presets hold."""
    known = {
        preset: found for preset, found in PRESETS.items() if name in found.published
    }
    lines = [
        f"| `{p}` | {found.published[name]} | `{found.headline_of(name)}` |"
        for p, found in known.items()
    ]
    if not lines:
        return ""
    return "\n".join(
        [
            "Published, for comparison:",
            "",
            "| preset | paper, % | compare |",
            "|---|---|---|",
            *lines,
        ]
    )


def _module(name: str) -> str:
    return f"# `fedjax_pfl.{name}`\n\n::: fedjax_pfl.{name}\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def _named(title: str) -> str:
    """A section of `--list` as a table."""
    section = describe.named()[title]
    return _table(
        ["name", "what it is"], [[f"`{name}`", text] for name, text in section.items()]
    )


def _settings() -> str:
    rows = [
        [f"`--{n}`", config.HELP[n], str(config.SETTINGS[n].default)]
        for n in config.SETTINGS
    ]
    return _table(["flag", "meaning", "default"], rows)


LISTINGS = {
    "list: data sets": lambda: _named("Data sets (--dataset)"),
    "list: partitions": lambda: _named("Partitions (--partition)"),
    "list: models": lambda: _named("Models (--model)"),
    "list: presets": lambda: _named("Presets (--preset)"),
    "list: settings": _settings,
}
