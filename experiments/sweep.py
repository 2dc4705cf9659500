"""Runs several methods and seeds in one setting, and prints their table:

    python -m experiments.sweep --algo=local,fedavg,fedcp --seed=0,1 --preset=fedcp_cifar10 --rounds=50

`--algo` and `--seed` are lists; every other flag is passed on to `experiments.main`. Each run has a directory
ROOT/ALGO-seedK (`--root`, by default runs/PRESET-SETTINGS with the settings that were changed). Seeds of a method share
what was compiled, as far as their arrays have the same shapes. The same command again goes on where it stopped:
finished runs are skipped, interrupted ones resumed. A run that fails does not stop the others; the exit code is the
first failure's. ROOT must not hold runs of other settings.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import build, entry, main, runs, schema, settings, tables
from experiments.files import read_derived
from fedjax_pfl.data.federate import ROOM
from fedjax_pfl.engine import multihost
from fedjax_pfl.errors import InputError


def split(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """The sweep's own flags, and those of every run."""
    own = {"algo": "", "seed": "0", "root": ""}
    rest = []
    for word in argv:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and equals and name in own:
            own[name] = value
        else:
            rest.append(word)
    return own, rest


def is_complete(path: Path, rounds: int) -> bool:
    """Has this run directory all its rounds?"""
    content = read_derived(path / "summary.json", schema.SUMMARY)
    return bool(content) and content["status"] == "complete" and content["rounds"] >= rounds


def run(argv: list[str]) -> int:
    """Runs everything that is missing; returns the first exit code that is not 0."""
    own, rest = split(argv)
    flags = settings.parse(rest)
    if flags.help:
        print(f"{__doc__}\n{flags.get_help()}")
        return 0
    _check_single(own)
    main.start(flags)
    user = settings.given(flags)
    named = [user.get("preset") or user.get("dataset", "digits"), *settings.changes(user)]
    root = entry.directory(own["root"] or f"runs/{settings.file_name(named)}")
    jobs = [(algo, seed) for algo in own["algo"].split(",") for seed in own["seed"].split(",")]
    configs = [settings.resolve(settings.given(settings.parse([*rest, *_flags(*job)]))) for job in jobs]  # before any
    paths = [root / f"{algo}-seed{seed}" for algo, seed in jobs]
    found = [multihost.on_first(_found, path, config) for path, config in zip(paths, configs, strict=True)]
    room: dict[str, Sequence[int]] = {}
    laid: dict[str, list[str]] = {}
    failed, finished = 0, []
    for (algo, seed), path, (complete, begun) in zip(jobs, paths, found, strict=True):
        if not complete:
            if algo not in room:
                jax.clear_caches()  # a method shares nothing with the one before
                room[algo] = _room([c for c in configs if c["algo"] == algo])
            more = ["--resume"] if begun else laid.get(algo, [])
            code = main.run([*more, *rest, *_flags(algo, seed), f"--workdir={path}"], room[algo])
            failed = failed or code
            if code == main.LOST or code >= main.INTERRUPTED - 2:
                return code
            if code == 0:
                laid[algo] = multihost.on_first(_layout, path)
        if multihost.on_first((path / "summary.json").exists):
            finished.append(path)
    if finished and multihost.first():
        print(tables.table(finished))
    return failed


def _check_single(own: dict[str, str]) -> None:
    for name in ("algo", "seed"):
        listed = own[name].split(",")
        if twice := [x for x in listed if listed.count(x) > 1]:
            raise InputError(f"--{name}={own[name]} lists {twice[0]} twice: each run has one directory.")


def _room(configs: list[dict]) -> Sequence[int]:
    """So that the seeds of a method have arrays of the same shapes, and share what is compiled."""
    try:
        return ROOM if len(configs) == 1 else multihost.everywhere(build.room, configs)
    except InputError:  # of one seed: the others are to run, and its own run says why
        return ROOM


def _layout(path: Path) -> list[str]:
    """So that the other seeds are laid out as this one, whatever else their clients' sizes would suggest; what the user
    says stands behind it and counts."""
    return [f"--width={runs.read_layout(path)['width']}"] if runs.is_run(path) else []


def _found(path: Path, config: dict[str, Any]) -> tuple[bool, bool]:
    """Is the run complete, and is it begun? Raises InputError if it is one of other settings."""
    begun = runs.is_run(path)
    if begun:
        settings.check_same(runs.read_config(path), config, path)
    return is_complete(path, config["rounds"]), begun


def _flags(algo: str, seed: str) -> list[str]:
    return [f"--algo={algo}", f"--seed={seed}"]


def _main() -> int:
    entry.begin()
    try:
        return run(sys.argv[1:])
    except InputError as error:
        print(error, file=sys.stderr)
        return entry.BAD_INPUT
    except multihost.UnreachableError as error:
        print(error, file=sys.stderr)
        return entry.LOST
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on.", file=sys.stderr)
        return entry.INTERRUPTED


if __name__ == "__main__":
    main.leave(_main())
