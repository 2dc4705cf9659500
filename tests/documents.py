"""Code blocks and commands of the documents."""

import contextlib
import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# docs/results and docs/reference.md are generated
PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
PAGES = [*(p for p in PAGES if p != "docs/reference.md"), "docs/methods/index.md"]
_BLOCK = re.compile(
    r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block; `title` is the name of its file."""

    language: str
    title: str
    code: str


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str | None = None) -> list[Block]:
    found = [Block(*match) for match in _BLOCK.findall(read(page))]
    return [block for block in found if language in (None, block.language)]


def commands(code: str) -> list[list[str]]:
    """Returns the commands of a bash block, as lists of words without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    split = [
        shlex.split(part, comments=True)
        for line in lines
        for part in line.split(" && ")
    ]
    return [words for words in split if words]


def module(words: list[str]) -> tuple[str, list[str]] | None:
    """Returns the module of `python -m MODULE ...` and its arguments."""
    return (words[2], words[3:]) if words[:2] == ["python", "-m"] else None


def is_program(block: Block) -> bool:
    """Returns whether a block is a program, with imports, and no excerpt."""
    return block.language == "python" and "import" in block.code.split("\n\n")[0]


@contextlib.contextmanager
def files_of(page: str, folder: Path, monkeypatch):
    """Works in a folder with the files that a page shows."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.code)
    yield
