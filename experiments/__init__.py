"""The command lines. Importing JAX takes seconds, in which Ctrl-C would end `python -m`
with a page of text."""

import os
import signal
import sys


def _leave(number: int, _frame: object) -> None:
    os.write(2, b"\nInterrupted before the first round: nothing to resume.\n")
    os._exit(128 + number)


if sys.argv[0] == "-m":  # until `entry.begin`
    signal.signal(signal.SIGINT, _leave)
