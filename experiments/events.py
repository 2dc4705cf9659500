"""Event files for TensorBoard beside the rows of a run (--tensorboard)."""

import contextlib
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments import report
from experiments.config import Config
from experiments.files import Row
from fedjax_pfl.errors import InputError

_WRITER = "tensorboard.summary.writer.event_file_writer"


def check(config: Config) -> Config:
    """The settings; InputError if they ask for event files and the library is
    missing."""
    if config.tensorboard:
        try:
            importlib.import_module(_WRITER)
        except ImportError as error:
            raise InputError(
                f"--tensorboard needs the package tensorboard ({error}): pip install "
                "'fedjax_pfl[tensorboard]', or "
                "turn it off (--tensorboard=false)."
            ) from None
    return config


def scalars(row: Row) -> dict[str, float]:
    """What event files hold of a row: the loss, and every score's mean over clients at
    each point."""
    names = [
        "loss",
        *(
            f"{point}/{name}"
            for point in report.WITH_UNSEEN
            for name in report.score_names([row])
        ),
    ]
    return {name: row[name] for name in names if row.get(name) is not None}


@contextlib.contextmanager
def written(
    path: Path, rows: Iterable[Row], wanted: bool, say: Callable[[str], Any]
) -> Iterator[Callable[[Row], Row]]:
    """Gives a function that adds a row to the event files of a run directory and
    returns it.

    Event files of before are deleted and the rows so far are written anew: so each
    round is there once, also where a run was killed after its last checkpoint. What
    fails is said once, then nothing more is written; the run goes on.

    Args:
      rows: those that are there, read if wanted.
      say: takes the sentence on a failure.
    """
    writers: list[Any] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:
            # of a library, and of another thread: a run does not depend on it
            writers.clear()
            say(
                f"No event files for TensorBoard from here on ({error}); the run goes "
                "on."
            )

    def begin() -> None:
        for file in path.glob("events.out.tfevents.*"):
            file.unlink()
        writers.append(
            importlib.import_module(_WRITER).EventFileWriter(str(path), flush_secs=5)
        )
        for row in rows:
            writers[0].add_event(_event(row))

    def add(row: Row) -> Row:
        if writers:
            guarded(lambda: writers[0].add_event(_event(row)))
        return row

    if wanted:
        guarded(begin)
    try:
        yield add
    finally:
        if writers:
            guarded(writers[0].close)


def _event(row: Row) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=name, simple_value=value)
        for name, value in scalars(row).items()
    ]
    return Event(
        wall_time=time.time(), step=row["round"], summary=Summary(value=values)
    )
