"""Matrices that a method reports, such as coefficients between clients: a file for each
evaluated round."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments import matrix_figures
from experiments.files import write_bytes

FOLDER = "matrices"


def save(path: Path, round: int, server: dict[str, Any]) -> None:
    """Writes what has axes among a round's server metrics to matrices/NAME/00020.npy,
    each file whole or not at all."""
    for name, value in server.items():
        if np.ndim(value):
            folder = path / FOLDER / name
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(
                folder / f"{round:05d}.npy",
                functools.partial(np.save, arr=np.asarray(value)),
            )


def load(path: Path, name: str) -> dict[int, np.ndarray]:
    """{round: matrix} of a run directory, in the order of the rounds."""
    files = {int(file.stem): file for file in (path / FOLDER / name).glob("*.npy")}
    return {round: np.load(files[round]) for round in sorted(files)}


def names(path: Path) -> list[str]:
    """The matrices of a run directory."""
    return sorted(
        folder.name for folder in (path / FOLDER).glob("*") if folder.is_dir()
    )


def draw(path: Path, run: Any) -> list[str]:
    """Draws those of a run, a `runs.Run`, that are of pairs of its clients, into its
    folder figures; their names."""
    task, drawn = run.experiment.task, []
    for name in names(path):
        found = load(path, name)
        if found and all(
            np.shape(matrix) == (task.num_clients,) * 2 for matrix in found.values()
        ):
            (path / "figures").mkdir(exist_ok=True)
            of = run.experiment.network_names
            matrix_figures.draw(
                path / "figures" / name, name, found, of, task.class_counts
            )
            drawn.append(name)
    return drawn


def rewind(path: Path, start: int, wanted: Callable[[int], bool]) -> None:
    """Deletes those of round `start` and later, and of rounds that are not wanted."""
    for file in (path / FOLDER).glob("*/*.npy"):
        if int(file.stem) >= start or not wanted(int(file.stem)):
            file.unlink()
