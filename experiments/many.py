"""Several runs one after another, each in its own run directory and from where it stopped."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import build, closing, entry, phases, runs, schema, session, settings, stopping
from experiments.config import Config
from experiments.files import read_json
from experiments.grid import Member
from experiments.recorded import OWN_FILES, is_complete, own_files
from fedjax_pfl import hyperparameters
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data.federate import ROOM
from fedjax_pfl.engine import multihost
from fedjax_pfl.errors import InputError

_MANY = 100_000  # clients, where a partition of the user's own says how many
GOES_ON = "Interrupted; the same command goes on."


def run(members: Sequence[Member], say: int = closing.ONE) -> tuple[int, bool]:
    """Runs everything that is missing.

    Runs that differ in seed, rate and traced hyperparameters only share what is compiled, as far as
    their arrays have the same shapes, and are laid out as the first of them, unless the user says a
    width.

    Args:
      say: as `session.train_into` takes it.

    Returns:
      the first exit code that is not 0, and whether the user or a lost process ended it before its
      last run.

    Raises:
      InputError: a directory holds a run of other settings; nothing was run.
    """
    found = [multihost.on_first(_found, member.path, member.config) for member in members]
    room: dict[str, Sequence[int]] = {}
    width: dict[str, Any] = {}
    failed = 0
    for i, (member, (complete, begun)) in enumerate(zip(members, found, strict=True)):
        if complete:
            continue
        if multihost.first():
            print(f"Run {i + 1} of {len(members)}, {member.label}, seed {member.config.seed}:")
        kind = _kind(member.config)
        if kind not in room:
            jax.clear_caches()  # it shares nothing with those before
            with phases.said(entry.errors(), "Loading the data of all seeds"):
                room[kind] = _room([m.config for m in members if _kind(m.config) == kind])
        more = multihost.on_first(_more, member) if begun else width.get(kind, {})
        given = {name: x for name, x in member.given.items() if not (begun and name == "config")}
        train = functools.partial(session.train_into, more | given, str(member.path), begun, room[kind], say)
        code = entry.guarded(train, session.NOTHING)
        failed = failed or code
        if code == entry.LOST or code >= entry.INTERRUPTED - 2:
            return code, True
        if code == 0 and kind not in width:
            width[kind] = multihost.on_first(_width, member.path)
    return failed, False


def _kind(config: Config) -> str:
    """The same text for runs of one compiled program: all but what is an argument of it."""
    known = hyperparameters.of(find(config.algo))
    static = {name: value for name, value in config.hparams.items() if value is None or not known[name].traced}
    return json.dumps(
        config.replace(seed=0, lr=0.0, lr_decay=0.0, server_lr=None, hparams=static).asdict(), default=str
    )


def _room(configs: list[Config]) -> Sequence[int]:
    """So that the seeds of a method have arrays of the same shapes, and share what is compiled."""
    seeds = list({config.seed: config for config in configs}.values())
    try:
        return ROOM if len(seeds) == 1 else multihost.everywhere(build.room, seeds)
    except InputError:  # of one seed: the others are to run, and its own run says why
        return ROOM


def _width(path: Path) -> dict[str, str]:
    """The width of a run, as a setting."""
    return {"width": str(runs.read_layout(path).width)} if runs.is_run(path) else {}


def _found(path: Path, config: Config) -> tuple[bool, bool]:
    """Is the run complete, and is it begun? Raises InputError if it is one of other settings."""
    begun, complete = runs.is_run(path), is_complete(path, config)
    if begun:
        settings.check_same(runs.read_config(path), config, path)
    if complete:  # else the resume looks at it
        _check_files(path, config)
    return complete, begun


def _check_files(path: Path, config: Config) -> None:
    """Raises InputError where a complete run was made by another file of the user's own."""
    known, now = read_json(path / "partition.json", schema.PARTITION), own_files(config, config.clients or _MANY)
    for key, (_, what) in OWN_FILES.items():
        if known.get(key) != now.get(key):
            raise InputError(
                f"The file of the {what} is not the one that {path} was made with: take another directory."
            )


def _more(member: Member) -> dict[str, Any]:
    """What a resume needs beside the settings that were given, as it takes all else from the run:
    a later end, and that it is to end nowhere before."""
    rounds = member.config.rounds
    longer = {"rounds": rounds} if rounds > runs.read_config(member.path).rounds else {}
    return stopping.given(member.config) | longer
