"""Tables of the documentation that are generated from the code.

    python docs/tables.py    # writes the tables of the pages in PAGES

A table is between two comments `<!-- NAME -->`.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # run from a checkout

from fedjax_pfl.data.datasets import DATASETS  # noqa: E402
from fedjax_pfl.data.partitioners import PARTITIONS  # noqa: E402
from fedjax_pfl.models import MODELS  # noqa: E402

PAGES = ("data.md",)


def table(title: str, rows: Mapping[str, str]) -> str:
    """Formats a table of names and texts."""
    lines = [f"| {title} | |", "|---|---|"]
    for name, text in rows.items():
        cell = text.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{name}` | {cell} |")
    return "\n".join(lines)


def networks() -> dict[str, str]:
    """Returns the first paragraph of the docstring of every network."""
    docs = {name: inspect.getdoc(make) or "" for name, make in MODELS.items()}
    return {name: " ".join(doc.split("\n\n")[0].split()) for name, doc in docs.items()}


TABLES: dict[str, Callable[[], str]] = {
    "data sets": lambda: table("`--dataset`", DATASETS),
    "partitions": lambda: table("`--partition`", PARTITIONS),
    "networks": lambda: table("`--model`", networks()),
}


def filled(text: str) -> str:
    """Returns a page with its tables generated anew."""
    for name, make in TABLES.items():
        mark = f"<!-- {name} -->"
        block = re.compile(f"{mark}.*?{mark}", re.DOTALL)
        new = f"{mark}\n\n{make()}\n\n{mark}"
        text = block.sub(lambda _, new=new: new, text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for page in PAGES:
        path = DOCS / page
        path.write_text(filled(path.read_text()))
