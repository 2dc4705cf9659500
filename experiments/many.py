"""Several runs one after another, each in its own run directory and from where it
stopped."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments import (
    at_once,
    build,
    closing,
    entry,
    gather,
    phases,
    runs,
    schema,
    session,
    settings,
    stopping,
)
from experiments.config import Config
from experiments.files import read_json
from experiments.grid import Member
from experiments.recorded import Layout, is_complete, other_files, own_files
from fedjax_pfl import hyperparameters
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data.federate import ROOM
from fedjax_pfl.engine import checkpoint, multihost
from fedjax_pfl.errors import InputError

_MANY = 100_000  # clients, where a partition of the user's own says how many
GOES_ON = "Interrupted; the same command goes on."


class _Part(NamedTuple):
    """Runs that go on from the same place, which may be trained at once."""

    members: list[Member]
    begun: bool


def run(
    members: Sequence[Member],
    say: int = closing.ONE,
    runs_at_once: str = "auto",
    begin: Callable[[], None] = lambda: None,
) -> tuple[int, bool]:
    """Runs everything that is missing.

    Runs that differ in seed, rate and traced hyperparameters only share what is
    compiled, as far as their arrays have the same shapes, and are laid out as the first
    of them, unless the user says a width.

    Args:
      say: as `session.train_into` takes it.
      runs_at_once: how many of those that share it are trained as one program: a
        number, `all`, or `auto`: all on a single accelerator, else one after another.
      begin: called before the first run, when nothing is refused any more.

    Returns:
      the first exit code that is not 0, and whether the user or a lost process ended it
      before its last run.

    Raises:
      InputError: a directory holds a run of other settings, or `runs_at_once` is no
        such value; nothing was run.
    """
    most = _most(runs_at_once)
    found = [_found(member.path, member.config) for member in members]
    room: dict[str, Sequence[int]] = {}
    like: dict[str, Layout | None] = {}
    begin()
    failed, left = 0, _parts(members, found, most)
    while left:
        part = left.pop(0)
        first = part.members[0]
        print(f"{_named(part.members, members)}:")
        kind = _kind(first.config)
        if kind not in room:
            # it shares nothing with those before
            multihost.run_on_all(multihost.forget)
            with phases.said(entry.errors(), "Loading the data of all seeds"):
                room[kind] = _room(
                    [m.config for m in members if _kind(m.config) == kind]
                )
        given = [_given(member, part.begun) for member in part.members]
        try:
            train = functools.partial(
                session.train_into, given, room[kind], say, like.get(kind)
            )
            code = entry.guarded(train, session.NOTHING)
        except at_once.ApartError as why:
            print(f"One after another: {why}.")
            left = [
                _Part([member], runs.is_run(member.path)) for member in part.members
            ] + left
            continue
        except at_once.TooManyError as why:
            print(f"{why} Half of them at once, then the others.")
            half, begun = (
                len(part.members) // 2,
                all(runs.is_run(member.path) for member in part.members),
            )
            left = [
                _Part(some, begun)
                for some in (part.members[:half], part.members[half:])
            ] + left
            continue
        failed = failed or code
        if code == entry.LOST or code >= entry.INTERRUPTED - 2:
            if len(members) > 1:
                entry.errors().print("The same command goes on with all runs.")
            return code, True
        if code == 0 and kind not in like:
            like[kind] = _layout(first.path)
    return failed, False


def _most(text: str) -> int | None:
    """How many runs are trained at once; None: all."""
    if text not in ("auto", "all") and (not text.isdecimal() or not int(text)):
        raise InputError(
            f"--runs_at_once={text} must be a number from 1 on, all, or auto."
        )
    if jax.process_count() > 1:
        if text not in ("auto", "1"):
            raise InputError(
                f"--runs_at_once={text} is for a single process: leave it out."
            )
        return 1
    if text == "auto":
        return None if jax.default_backend() != "cpu" and jax.device_count() == 1 else 1
    return None if text == "all" else int(text)


def _parts(
    members: Sequence[Member], found: Sequence[tuple[bool, bool]], most: int | None
) -> list[_Part]:
    """What is left to run, in its order; `most` runs in a part, of one kind and from
    the same round on."""
    parts: dict[Any, list[_Part]] = {}
    ordered = list[_Part]()
    for i, (member, (complete, begun)) in enumerate(zip(members, found, strict=True)):
        if complete:
            continue
        steps = (
            checkpoint.steps(member.path / "checkpoints")[-1:]
            if begun and most != 1
            else []
        )
        same = i if most == 1 else (_kind(member.config), begun, *steps)
        known = parts.setdefault(same, [])
        if not known or len(known[-1].members) == most:
            known.append(_Part([], begun))
            ordered.append(known[-1])
        known[-1].members.append(member)
    return ordered


def _named(some: Sequence[Member], members: Sequence[Member]) -> str:
    """Which runs these are."""
    numbers = [members.index(member) + 1 for member in some]
    names = dict.fromkeys(member.label for member in some)
    seeds = dict.fromkeys(str(member.config.seed) for member in some)
    runs, which = (
        ("Run", "seed") if len(some) == 1 else ("Runs", "seed" + "s" * (len(seeds) > 1))
    )
    return (
        f"{runs} {_listed(numbers)} of {len(members)}, {'; '.join(names)}, {which} "
        f"{', '.join(seeds)}"
    )


def _listed(numbers: Sequence[int]) -> str:
    whole = len(numbers) > 2 and list(numbers) == list(
        range(numbers[0], numbers[-1] + 1)
    )
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))


def _given(member: Member, begun: bool) -> session.Given:
    more = _more(member) if begun else {}
    given = {
        name: x for name, x in member.given.items() if not (begun and name == "config")
    }
    return session.Given(more | given, str(member.path), begun)


def _kind(config: Config) -> str:
    """The same text for runs of one compiled program: all but what is an argument of
    it."""
    known = hyperparameters.of(find(config.algo))
    static = {
        name: value
        for name, value in config.hparams.items()
        if value is None or not known[name].traced
    }
    alike = config.replace(seed=0, lr=0.0, lr_decay=0.0, server_lr=None, hparams=static)
    return json.dumps(vars(alike), default=str)


def _room(configs: list[Config]) -> Sequence[int]:
    """So that the seeds of a method have arrays of the same shapes, and share what is
    compiled."""
    seeds = list({config.seed: config for config in configs}.values())
    try:
        return ROOM if len(seeds) == 1 else build.room(seeds)
    except InputError:  # of one seed: the others are to run, and its own run says why
        return ROOM


def _layout(path: Path) -> Layout | None:
    return runs.read_layout(path) if runs.is_run(path) else None


def _found(path: Path, config: Config) -> tuple[bool, bool]:
    """Is the run complete, and is it begun? Raises InputError if it is one of other
    settings."""
    begun, complete = runs.is_run(path), is_complete(path, config)
    if begun:
        settings.check_same(recorded := runs.read_config(path), config, path)
        _check_end(path, recorded, config)
    if complete:  # else the resume looks at it
        _check_files(path, config)
    return complete, begun


def _check_files(path: Path, config: Config) -> None:
    """Raises InputError where a complete run was made by another file of the user's
    own."""
    # a partition's file says how many
    clients = config.clients or runs.read_config(path).clients or _MANY
    known, now = (
        read_json(path / "partition.json", schema.PARTITION),
        own_files(config, clients),
    )
    for what in other_files(known, now):
        raise InputError(
            f"The file of the {what} is not the one that {path} was made with: take "
            "another directory."
        )


def _check_end(path: Path, recorded: Config, config: Config) -> None:
    """Raises InputError where a run has more rounds than it would have by --stop_at and
    --patience as they are now: those of other seeds would have fewer."""
    if stopping.given(recorded) == stopping.given(config):
        return
    run = gather.read(path)
    if (
        end := stopping.first_end(config, run.headline, run.rows)
    ) and end.rounds < run.said["rounds"]:
        raise InputError(
            f"{path} holds a run of {run.said['rounds']} rounds, which would have "
            f"ended after {end.rounds}: "
            f"{end.why}. Take another directory."
        )


def _more(member: Member) -> dict[str, Any]:
    """What a resume needs beside the settings that were given, as it takes all else
    from the run: a later end, that it is to end nowhere before, and the rounds of
    unseen clients."""
    rounds = member.config.rounds
    longer = {"rounds": rounds} if rounds > runs.read_config(member.path).rounds else {}
    other = (
        {"unseen_rounds": member.config.unseen_rounds} if member.config.unseen else {}
    )
    return stopping.given(member.config) | longer | other
