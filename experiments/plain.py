"""Text: numbers with their nouns; tables as aligned columns for a terminal, and as
Markdown."""

from collections.abc import Sequence

Rows = Sequence[Sequence[str]]  # the first is the heading


def plural(number: int, noun: str) -> str:
    """A number with its noun, as `1 round` and `12,000 rounds`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def columns(rows: Rows) -> str:
    """Columns, aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def markdown(rows: Rows) -> str:
    """A Markdown table."""
    head, *body = rows
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)
    )
