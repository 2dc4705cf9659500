"""Folders of images."""

from . import Case

CASES: list[Case] = []
