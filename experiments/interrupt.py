"""Ctrl-C: the first asks for a stop after the current round, the second ends the
process at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A context that turns signals into a request, seen even while the main thread is
    inside a long computation.

    Python runs a signal handler only between two of its own instructions, a round may
    take minutes: so a thread reads the signals' numbers from a pipe that the
    interpreter fills at once.

    Attributes:
      asked: the number of the first signal since the process entered one, None before.
    """

    # of the class, as signals are the process's: whoever wants to know may ask it
    asked: int | None = None

    def __init__(self, on_first: Callable[[], None], last_words: str):
        self._on_first, self._last_words = on_first, last_words

    def __enter__(self) -> "Interrupt":
        Interrupt.asked = None
        self._main = threading.current_thread() is threading.main_thread()
        if not self._main:  # only the main thread may set handlers
            return self
        self._read, self._write = os.pipe()
        # Windows has it from Python 3.12 on, and does not ask for it
        if hasattr(os, "set_blocking"):
            os.set_blocking(self._write, False)
        self._old = {
            number: signal.signal(number, lambda *_: None) for number in SIGNALS
        }
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._main:
            return
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self._write)  # ends the thread
        self._thread.join()
        os.close(self._read)

    def _watch(self) -> None:
        while numbers := os.read(self._read, 1):
            if numbers[0] not in SIGNALS:
                continue
            if self.asked is not None:
                with contextlib.suppress(OSError):
                    # the bar had hidden the cursor
                    os.write(2, f"\x1b[?25h\n{self._last_words}\n".encode())
                os._exit(128 + numbers[0])
            Interrupt.asked = int(numbers[0])
            self._on_first()
