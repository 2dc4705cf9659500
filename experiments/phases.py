"""What a run is doing, said where it takes long and nothing else is seen."""

import contextlib
import threading
from collections.abc import Iterator

from rich.console import Console

PATIENCE = 5.0  # seconds


@contextlib.contextmanager
def said(console: Console, what: str) -> Iterator[None]:
    """Prints `what ...` if the work inside is not done after five seconds."""
    timer = threading.Timer(PATIENCE, console.print, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
