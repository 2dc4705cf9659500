"""Runs several methods and seeds in one setting, and prints their table:

    python -m experiments.sweep --algo=local,fedavg,fedcp --seed=0,1 --preset=fedcp_cifar10
    --rounds=50

`--algo` and `--seed` are lists; every other flag is passed on to `experiments.main`. Each run has a
directory ROOT/ALGO-seedK (`--root`, by default runs/PRESET-SETTINGS with the settings that were
changed). Seeds of a method share what was compiled, as far as their arrays have the same shapes.
The same command again goes on where it stopped: finished runs are skipped, interrupted ones
resumed. A run that fails does not stop the others; the exit code is the first failure's. ROOT must
not hold runs of other settings. It ends with a short table and ROOT/comparison.png; with --verbose
everything of each run is said, and the table is that of `experiments.tables`.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import build, closing, comparison, entry, flags, main, phases, runs, schema, settings, tables
from experiments.config import Config
from experiments.files import read_derived
from experiments.values import number
from fedjax_pfl.data.federate import ROOM
from fedjax_pfl.engine import multihost
from fedjax_pfl.errors import InputError

_FLAGS = {
    **flags.OF_A_RUN,
    "algo": flags.Flag(str, "the methods, apart by commas"),
    "seed": flags.Flag(str, "the seeds, apart by commas", "0"),
    "root": flags.Flag(str, "where the run directories are"),
    "verbose": flags.VERBOSE,
    **flags.OF_A_PROCESS,
}


def is_complete(path: Path, rounds: int) -> bool:
    """Has this run directory all its rounds?"""
    content = read_derived(path / "summary.json", schema.SUMMARY)
    return bool(content) and content["status"] == "complete" and content["rounds"] >= rounds


def run(argv: list[str]) -> int:
    """Runs everything that is missing; returns the first exit code that is not 0."""
    parsed = flags.parse(argv, _FLAGS)
    if parsed.get("help"):
        print(f"{__doc__}\n{parsed.usage}")
        return 0
    algos, seeds = (_listed(name, parsed.get(name, "0" if name == "seed" else "")) for name in ("algo", "seed"))
    main.start(parsed)
    say = closing.ALL if parsed.get("verbose") else closing.ONE
    user = parsed.settings()
    own = [user | {"algo": algo, "seed": _seed(seed)} for algo in algos for seed in seeds]
    configs = [settings.resolve(one) for one in own]  # before anything runs
    root = _root(parsed, user)
    paths = [root / f"{config.algo}-seed{config.seed}" for config in configs]
    found = [multihost.on_first(_found, path, config) for path, config in zip(paths, configs, strict=True)]
    room: dict[str, Sequence[int]] = {}
    width: dict[str, Any] = {}  # of a method's first run: the others are laid out as it, unless the user says a width
    failed, finished = 0, []
    for config, given, path, (complete, begun) in zip(configs, own, paths, found, strict=True):
        algo = config.algo
        if not complete:
            if algo not in room:
                jax.clear_caches()  # a method shares nothing with the one before
                with phases.said(entry.errors(), "Loading the data of all seeds"):
                    room[algo] = _room([c for c in configs if c.algo == algo])
            more = {} if begun else width.get(algo, {})
            train = functools.partial(main.train_into, more | given, str(path), begun, room[algo], say)
            code = entry.guarded(train, main.NOTHING)
            failed = failed or code
            if code == entry.LOST or code >= entry.INTERRUPTED - 2:
                return code
            if code == 0:
                width[algo] = multihost.on_first(_width, path)
        if multihost.on_first((path / "summary.json").exists):
            finished.append(path)
    if finished and multihost.first():
        print(tables.table(finished) if parsed.get("verbose") else comparison.table(finished))
        print(f"Picture: {comparison.draw(finished, root)}")
    return failed


def _listed(name: str, text: str) -> list[str]:
    """The methods or seeds of a sweep."""
    listed = text.split(",")
    if twice := [x for x in listed if listed.count(x) > 1]:
        raise InputError(f"--{name}={text} lists {twice[0]} twice: each run has one directory.")
    return listed


def _seed(text: str) -> int:
    return number(int, "--seed", text)


def _root(parsed: flags.Parsed, user: dict[str, Any]) -> Path:
    named = [user.get("preset") or user.get("dataset", "digits"), *settings.changes(user)]
    return entry.directory(parsed.get("root") or f"runs/{settings.file_name(named)}")


def _room(configs: list[Config]) -> Sequence[int]:
    """So that the seeds of a method have arrays of the same shapes, and share what is compiled."""
    try:
        return ROOM if len(configs) == 1 else multihost.everywhere(build.room, configs)
    except InputError:  # of one seed: the others are to run, and its own run says why
        return ROOM


def _width(path: Path) -> dict[str, str]:
    """The width of a run, as a setting."""
    return {"width": str(runs.read_layout(path).width)} if runs.is_run(path) else {}


def _found(path: Path, config: Config) -> tuple[bool, bool]:
    """Is the run complete, and is it begun? Raises InputError if it is one of other settings."""
    begun = runs.is_run(path)
    if begun:
        settings.check_same(runs.read_config(path), config, path)
    return is_complete(path, config.rounds), begun


if __name__ == "__main__":
    entry.begin()
    entry.leave(entry.guarded(lambda: run(sys.argv[1:]), "Interrupted; the same command goes on."))
