"""Several run directories, read for a table or a figure: without their data, and
whatever came of them."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from experiments import published, recorded, report, schema, scores
from experiments.config import ENDS, FREE, SETTINGS, Config, without_effect
from experiments.entry import directory
from experiments.files import Row, Rows, read_derived
from experiments.plain import plural
from experiments.scores import ACCURACY, Headline
from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError

T = TypeVar("T")
K = TypeVar("K")
# What a comparison is about: runs that differ in one of these have figures of their
# own.
DATA = (
    "dataset",
    "data_fraction",
    "marks",
    "test_split",
    "partition",
    "alpha",
    "classes_per_client",
    "clients",
    "unseen",
)


# in the directory of a sweep
BESIDE = (
    "comparison.json",
    "comparison.md",
    "comparison.png",
    "report.html",
    "figures",
)


class Found(NamedTuple):
    """A run directory as far as it goes."""

    path: Path
    config: Config
    # as summary.json, of the rows that are there; without `seconds` where none are
    # recorded, else these are of the first `timed` rounds
    said: Row

    @property
    def headline(self) -> Headline:
        """The score that decides, and the better of its values."""
        return self.said["headline"]["score"], self.said["headline"]["better"]

    def value(self, point: str, score: str, statistic: str = "macro") -> float | None:
        """A statistic of a score after the last round; None where the run has none."""
        return self.said["scores"].get(point, {}).get(score, {}).get(statistic)

    @property
    def rows(self) -> Rows:
        """The rows of the metrics, read from the disk whenever they are asked for."""
        return Rows(self.path / "metrics.jsonl")

    @property
    def timed(self) -> int:
        """The rounds whose seconds are recorded."""
        return self.said["timed" if "timed" in self.said else "rounds"]

    @property
    def complete(self) -> bool:
        """Has it all its rounds?"""
        return self.said["status"] == "complete"

    @property
    def status(self) -> str:
        """How it stands in words, as `interrupted after 12 rounds`."""
        status, rounds = self.said["status"], self.said["rounds"]
        return (
            f"{'running or killed' if status == 'running' else status} after "
            f"{plural(rounds, 'round')}"
        )


def directories(words: Iterable[str]) -> list[Path]:
    """The run directories that a command line names, each once: itself, or those in the
    directory of a sweep; what else is BESIDE them is left out. Of a sweep with --select
    they are the runs that were chosen: the test scores of the others would invite a
    choice by them.

    Raises:
      InputError: one of the words is neither, or there is none, or a sweep has not
        chosen yet.
    """
    found: list[Path] = []
    for word in words:
        path = directory(word)
        if path.name in BESIDE and path.exists():
            continue
        inside = [path] if recorded.is_run(path) else _chosen(path)
        if inside is None:
            # nothing where it cannot be read
            _, folders, _ = next(os.walk(path), ("", [], []))
            inside = sorted(
                filter(recorded.is_run, map(path.joinpath, folders)), key=_natural
            )
        if not inside:
            raise InputError(
                f"{path} is not a run directory, nor one of a sweep: it has no "
                "config.json, and no folder that has one."
            )
        found += inside
    if not found:
        raise InputError(
            "Name the run directories, or the directory of a sweep: --help says how."
        )
    return list({os.path.realpath(path): path for path in found}.values())


def selection(root: Path) -> Row | None:
    """What comparison.json says of a sweep with --select; None of any other
    directory."""
    said = read_derived(root / "comparison.json", schema.Object({}))
    return said if "select" in said else None


def _chosen(root: Path) -> list[Path] | None:
    """The runs that a sweep with --select chose; None of any other directory."""
    if (said := selection(root)) is None:
        return None
    names = [
        name for line in said["lines"] if line.get("chosen") for name in line["runs"]
    ]
    if not names:
        raise InputError(
            f"{root} is of a sweep with --select={said['select']['score']} that has "
            "chosen nothing yet. What it "
            "chooses is shown when it has ended (the same command goes on with it), a "
            "single run by its own directory."
        )
    return [root / name for name in names]


def output(text: str | None, paths: Sequence[Path], name: str) -> Path:
    """Where a command writes that reads runs: as --output says; by default in the run
    directory, of several runs beside them."""
    beside = (
        paths[0]
        if len(paths) == 1
        else Path(os.path.commonpath([os.path.abspath(path.parent) for path in paths]))
    )
    return directory(text) if text else beside / name


@contextlib.contextmanager
def writing(path: Path, flag: str = "--output") -> Iterator[None]:
    """Turns what goes wrong while a file or folder is written into one sentence."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error}): choose another "
            f"{flag}."
        ) from error


def _natural(path: Path) -> tuple[str, int, str]:
    """So that seed10 comes after seed9."""
    stem = path.name.rstrip("0123456789")
    return stem, int(path.name[len(stem) :] or 0), path.name


def read(path: Path) -> Found:
    """Reads what a run has: its summary if it is complete, else the rows so far."""
    config, said = (
        recorded.read_config(path),
        read_derived(path / "summary.json", schema.SUMMARY),
    )
    if recorded.is_complete(path, config):
        return Found(path, config, said)
    rows = Rows(path / "metrics.jsonl")
    name = (report.score_names(rows) or ACCURACY)[0]  # where there is no summary yet
    known = said.get("headline", {"score": name, "better": scores.better(name)})
    rounds, status = sum("loss" in row for row in rows), said.get("status", "running")
    # of a run that goes on for more rounds
    status = "running" if status == "complete" else status
    now = {
        "status": status,
        "rounds": rounds,
        "timed": said.get("timed", said.get("rounds", rounds)),
    }
    return Found(
        path,
        config,
        said | now | report.summary(rows, (known["score"], known["better"])),
    )


def labels(runs: Sequence[Found]) -> list[str]:
    """What each run is called beside the others: its method, and the settings in which
    runs of this method, or the data of all, differ; runs that differ in the seed only
    are called the same."""
    return [
        ", ".join([name, *data])
        for name, data in zip(names(runs), settings(runs), strict=True)
    ]


def names(runs: Sequence[Found]) -> list[str]:
    """As `labels`, without the data."""
    said = []
    for run in runs:
        same = [other.config for other in runs if other.config.algo == run.config.algo]
        algo = user_code.short(run.config.algo)
        if any(
            user_code.short(other.config.algo) == algo
            and other.config.algo != run.config.algo
            for other in runs
        ):
            algo = run.config.algo
        said.append(
            ", ".join(
                [algo, *_differing(run.config, same, _OWN), *_hparams(run.config, same)]
            )
        )
    return said


_APART = (*DATA, "algo", "seed", "preset")
_OWN = [
    name
    for name in SETTINGS
    if (name not in FREE or name in ENDS) and name not in _APART
]


def unlike(runs: Sequence[Found]) -> list[str]:
    """A sentence on every setting that differs between methods and stands in no name of
    `names`."""
    said = []
    for name in _OWN:
        values = [setting(run.config, name) for run in runs]
        known, of_methods = (
            grouped(runs, values),
            grouped(values, [run.config.algo for run in runs]).values(),
        )
        if len(known) > 1 and any(len(set(of)) == 1 for of in of_methods):
            whose = {
                value: dict.fromkeys(user_code.short(run.config.algo) for run in of)
                for value, of in known.items()
            }
            text = {
                value: "not set" if value is None else _apart(value, known)
                for value in whose
            }
            parts = [
                f"{text[value]} ({', '.join(methods)})"
                for value, methods in whose.items()
            ]
            said.append(f"Not all have the same {name}: {'; '.join(parts)}.")
    return said


def settings(runs: Sequence[Found], without: str = "") -> list[list[str]]:
    """Of each run the settings of its data in which the runs differ, as `alpha=0.1`;
    one of them may be left out."""
    names = [name for name in DATA if name != without]
    return [
        _differing(run.config, [other.config for other in runs], names) for run in runs
    ]


def setting(config: Config, name: str) -> Any:
    """A setting of a run; None of one that has no effect there."""
    off = without_effect(config).keys() | (
        {"stop_at"} if (config.stop_at or "none").lower() == "none" else set()
    )
    return None if name in off else getattr(config, name)


def _differing(
    config: Config, others: Sequence[Config], names: Iterable[str]
) -> list[str]:
    values = [
        (name, setting(config, name), [setting(other, name) for other in others])
        for name in names
    ]
    return [
        f"{name}={_apart(x, known)}"
        for name, x, known in values
        if x is not None and any(other != x for other in known)
    ]


def _hparams(config: Config, others: Sequence[Config]) -> list[str]:
    values = [
        (name, x, [other.hparams.get(name) for other in others])
        for name, x in config.hparams.items()
    ]
    return [
        f"{published.hparam(name)}={_apart(x, known)}"
        for name, x, known in values
        if any(other != x for other in known)
    ]


def _apart(value: Any, known: Iterable[Any]) -> str:
    """A value as text that none of the other known ones has: short if it can be."""
    text = published.shown(value)
    return (
        text
        if all(published.shown(other) != text for other in known if other != value)
        else str(value)
    )


def grouped(things: Sequence[T], keys: Sequence[K]) -> dict[K, list[T]]:
    """The things by their key, in the order in which the keys come first."""
    found: dict[K, list[T]] = {}
    for thing, key in zip(things, keys, strict=True):
        found.setdefault(key, []).append(thing)
    return found
