"""Work beside the rounds, done as often as it takes a small part of the time."""

import time
from collections.abc import Callable
from typing import Any

SHARE = 0.05  # of the time


class Pace:
    """Calls a function when it is due: at once, then after twenty times what it took."""

    def __init__(self, work: Callable[..., Any]):
        self._work, self._due = work, 0.0

    def __call__(self, *args: Any) -> None:
        begin = time.perf_counter()
        if begin >= self._due:
            self._work(*args)
            end = time.perf_counter()
            self._due = end + (end - begin) * (1 / SHARE - 1)
