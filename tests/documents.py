"""The documents of the repository, cut into code blocks and commands."""

import contextlib
import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]
# whose commands are real but long, or change the repository
TABLES = ["experiments/README.md", "CONTRIBUTING.md"]
_BLOCK = re.compile(
    r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block; `title` is the file that it stands for."""

    language: str
    title: str
    code: str


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str | None = None) -> list[Block]:
    found = [Block(*match) for match in _BLOCK.findall(read(page))]
    return [block for block in found if language in (None, block.language)]


def commands(code: str) -> list[list[str]]:
    """The commands of a bash block, as lists of words without their comments."""
    lines = code.replace("\\\n", " ").splitlines()
    split = [
        shlex.split(part, comments=True)
        for line in lines
        for part in line.split(" && ")
    ]
    return [words for words in split if words]


def module(words: list[str]) -> tuple[str, list[str]] | None:
    """The module of `python -m MODULE ...` and its arguments."""
    return (words[2], words[3:]) if words[:2] == ["python", "-m"] else None


def is_program(block: Block) -> bool:
    """Is it Python that stands by itself, and no excerpt? It has imports."""
    return block.language == "python" and "import" in block.code.split("\n\n")[0]


@contextlib.contextmanager
def files_of(page: str, folder: Path, monkeypatch):
    """Works in a folder that has the files which a page shows."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.code)
    yield
