"""Tables of numbers."""

from . import Case

CASES: list[Case] = []
