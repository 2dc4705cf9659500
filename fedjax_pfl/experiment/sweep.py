"""Runs one experiment, or several seeds, methods and values.

    fedjax-pfl run --algo=pfedc --seeds=3
    fedjax-pfl sweep --algo=local,ditto --hparam=ditto:lam=0.1,1 --lr=0.01,0.1 --seeds=3
    fedjax-pfl sweep --algo=ditto --lr=0.01,0.1 --val_fraction=0.2 --select=val/acc

A sweep runs all combinations. Values are separated by commas, and by semicolons where
one may have a comma in it (--model="mlp;cnn,lenet"). The same command continues where
it stopped. Runs that differ in their seed and numeric values only can be one compiled
program (--runs_at_once). With --select, validation scores choose among the values of
each method. selection.json names the chosen runs, and only their test scores are shown.
"""

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_pfl import hyperparameters, user_code
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.algorithms.registry import unread
from fedjax_pfl.data import federate
from fedjax_pfl.data.sources import table
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.evaluation import GENERATED, HEADLINES, METRICS, PERPLEXITY
from fedjax_pfl.experiment import (
    cli,
    config as settings,
    groups,
    metrics,
    results,
    selection,
    text,
)
from fedjax_pfl.experiment.build import room
from fedjax_pfl.experiment.config import FREE, SETTINGS, Config
from fedjax_pfl.experiment.groups import NAMES
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.train import complete, execute, run as run_one

# settings that are text without commas
_NAMES = (
    *("algo", "dataset", "partition", "participation", "unseen", "optimizer"),
    "bn_stats",
)
_AT_ONCE = {
    "seeds": cli.Flag(int, "number of runs, with this seed and the next ones"),
    "runs_at_once": cli.Flag(
        str, "runs trained as one program: a number, all or auto (all on a GPU)"
    ),
}
RUN_FLAGS = {
    **cli.SETTING_FLAGS,
    **cli.PROCESS_FLAGS,
    **_AT_ONCE,
    "workdir": cli.Flag(str, "run directory (default: named by the settings)"),
    "resume": cli.Flag(bool, "continue the run in the run directory"),
    "list": cli.Flag(bool, "list methods, data sets, partitions, networks, presets"),
    "describe": cli.Flag(str, "describe a method, a preset or table:PATH"),
}
_TEXT = {
    name: flag if flag.kind in (bool, list) else flag._replace(kind=str)
    for name, flag in cli.SETTING_FLAGS.items()
}
SWEEP_FLAGS = {
    **_TEXT,
    **cli.PROCESS_FLAGS,
    **_AT_ONCE,
    "root": cli.Flag(str, "directory of the run directories"),
    "select": cli.Flag(str, "choose values by a validation score, as val/acc"),
}


class Member(NamedTuple):
    """One run of several."""

    config: Config
    directory: RunDirectory


def run(argv: Sequence[str]) -> int:
    """Runs the command `run` and returns its exit code."""
    parsed = cli.parse(argv, RUN_FLAGS, __doc__ or "")
    given, user = parsed.given, parsed.settings()
    if given.get("list") or given.get("describe"):
        cli.show(_described(given) if "describe" in given else cli.listing())
        return 0
    cli.start(given)
    if given.get("seeds", 1) == 1:
        return run_one(user, given.get("workdir"), given.get("resume", False))
    config = settings.resolve(user)
    name = settings.run_name(user, config, "seeds")
    root = Path(given.get("workdir", f"runs/{name}"))
    found = [
        Member(config.replace(seed=seed), RunDirectory(root / f"seed{seed}"))
        for seed in range(config.seed, config.seed + given["seeds"])
    ]
    return run_all(found, given.get("runs_at_once", "auto"))


def _described(given: Mapping[str, Any]) -> str:
    """Returns the text of --describe, of a table with the options of a run."""
    name = given["describe"]
    if not name.startswith("table:"):
        return cli.describe(name)
    owner = groups.Partition(rule=given.get("partition", "")).column
    path = name.removeprefix("table:")
    return table.describe(path, given.get("categories"), owner)


def sweep(argv: Sequence[str]) -> int:
    """Runs the command `sweep` and returns its exit code."""
    argv = ["--select=" if x == "--select" else x for x in argv]
    parsed = cli.parse(argv, SWEEP_FLAGS, __doc__ or "")
    given, user, by = parsed.given, parsed.settings(), parsed.given.get("select")
    name = user.get("preset") or user.get("dataset", "digits")
    name = settings.file_name([name, *settings.changes(user)])
    root = Path(given.get("root", f"runs/{name}"))
    found = members(user, root, given.get("seeds"))
    if by and not by.startswith("val/"):
        raise InputError(f"--select={by} must be a validation score, as val/acc.")
    score = (by or "").removeprefix("val/")
    if score in GENERATED:
        raise InputError(f"--select={by} must be of a score of every round.")
    known = [member.config.evaluation.scores for member in found]
    # f1 is also the score of several labels
    asked = {*METRICS, PERPLEXITY} - {name for name, _ in HEADLINES.values()}
    if score in asked and not all(score in x for x in known):
        raise InputError(f"--select={by} needs --metrics={score}.")
    if by is not None and not all(member.config.val_fraction for member in found):
        raise InputError("--select needs --val_fraction.")
    cli.start(given)
    return run_all(found, given.get("runs_at_once", "auto"), by)


def members(given: Mapping[str, Any], root: Path, seeds: int | None) -> list[Member]:
    """Returns a run for every combination of values, seeds last.

    Args:
      given: settings as text, `hparams` as {NAME or METHOD:NAME: text}.
      root: directory of the run directories.
      seeds: number of seeds, counted from the given one.

    Raises:
      InputError: a value is wrong, or two runs would have the same directory.
    """
    axes = {name: _values(name, x) for name, x in given.items() if name != "hparams"}
    algos, first = axes.pop("algo", [""]), axes.pop("seed", ["0"])
    if seeds:
        first = [str(int(first[0]) + i) for i in range(seeds)]
    names = dict.fromkeys([*algos, *map(user_code.short, algos)])
    for method in (name.rpartition(":")[0] for name in given["hparams"]):
        choose("method of --hparam", method, names) if method else None
    found, read = dict[str, Member](), set[str]()
    for algo in algos:
        read_by_others = set().union(*(axes.keys() - unread(x) for x in algos))
        skipped = unread(algo) & read_by_others
        own = {name: values for name, values in axes.items() if name not in skipped}
        for name, x in given["hparams"].items():
            method, _, plain = name.rpartition(":")
            if method in ("", algo, user_code.short(algo)):
                known = hyperparameters.of(find(algo)).get(plain)
                own[f"hparam.{plain}"] = _split(x, known)
        swept = {name for name in own if len(own[name]) > 1}
        for values in itertools.product(*own.values(), first):
            user = dict(zip([*own, "seed"], values, strict=True)) | {"algo": algo}
            idle = _idle(user, swept)
            if any(user[name] != own[name][0] for name in idle):
                continue  # the run with the first value is the same
            user = {name: x for name, x in user.items() if name not in idle}
            read |= user.keys()
            several = [name for name in own if name in swept and name in user]
            words = [f"{x.removeprefix('hparam.')}={user[x]}" for x in several]
            name = settings.file_name(
                [user_code.short(algo), *words, f"seed{user['seed']}"]
            )
            if name in found:
                raise InputError(f"Two runs would be {name}: list each value once.")
            chosen = [x for x in own if x.startswith("hparam.")]
            user["hparams"] = {x.removeprefix("hparam."): user.pop(x) for x in chosen}
            found[name] = Member(settings.resolve(user), RunDirectory(root / name))
    if unused := sorted(axes.keys() - read):
        raise InputError(f"--{unused[0]} has no effect with any of these values.")
    return list(found.values())


def _idle(user: Mapping[str, Any], swept: Collection[str]) -> set[str]:
    """Returns the settings that a value of another one, of a sweep, makes idle: alpha
    of the partition iid among others."""

    def idle(flag: str) -> bool:
        return not all(
            need.met(hyperparameters.from_text(SETTINGS[need.flag], user[need.flag]))
            for need in settings.NEEDS[flag]
            if need.flag in swept
        )

    return {flag for flag in user if flag in SETTINGS and idle(flag)}


def _values(name: str, value: Any) -> list[Any]:
    """Returns the values of a setting."""
    if name == "config" or isinstance(value, bool):
        return [value]
    names = name in _NAMES and not value.startswith(("domains:", NAMES))
    found = _split(value, SETTINGS[name], names)
    if len(found) > 1 and name in {*FREE, "preset"}:
        raise InputError(f"--{name}={value}: a sweep takes one value.")
    return found


def _split(
    text: str, known: hyperparameters.Hyperparameter | None, names: bool = False
) -> list[str]:
    """Returns the values of an argument, separated by commas if none can have one.

    Args:
      names: the values are names without commas.
    """
    plain = known is not None and (known.kind is not str or bool(known.choices))
    return text.split("," if (plain or names) and ";" not in text else ";")


def run_all(
    found: Sequence[Member], at_once: str = "auto", by: str | None = None
) -> int:
    """Runs what is missing, prints a table and returns the first exit code but 0.

    Args:
      at_once: runs of one program: a number, "all" or "auto".
      by: validation score that chooses among the values of a method; "": val/ and the
        headline.

    Raises:
      InputError: a directory holds a run of other settings; nothing was run.
    """

    found = [Member(_resumed(member), member.directory) for member in found]
    codes, left = [0], _groups(found, at_once)
    line = _Progress(len(found), sum(map(len, left)), by)
    rooms: dict[str, Sequence[int]] = {}
    unknown = by is not None and jax.process_index() == 0
    while left:
        group = left.pop(0)
        kind = _kind(group[0].config)
        same = [x.config for x in found if _kind(x.config) == kind]
        if kind not in rooms:
            rooms[kind] = room(same) if len(same) > 1 else federate.ROOM
        try:
            configs, directories = zip(*group, strict=True)
            codes.append(execute(directories, configs, rooms[kind], line))
        except InputError as error:
            print(error, file=sys.stderr)
            codes += [cli.BAD_INPUT] if len(group) == 1 else []
            left = [[member] for member in group if len(group) > 1] + left
        unknown = unknown and not _known(found, by)
        if codes[-1] >= 128:
            return codes[-1]
    done = [results.load(x.path) for config, x in found if complete(x, config)]
    if done and jax.process_index() == 0:
        show(done, by)
    return next(filter(None, codes), 0)


def _known(found: Sequence[Member], by: str | None) -> bool:
    """Returns whether a run is finished; raises InputError if it has no score to choose
    by, before the others train."""
    done = [results.load(x.path) for config, x in found if complete(x, config)]
    if done:
        results.at(results.final(done), by or f"val/{done[0].headline[0]}")
    return bool(done)


class _Progress:
    """The line about a finished run: its number, the time left, its scores."""

    def __init__(self, runs: int, left: int, by: str | None):
        self._runs, self._left, self._todo, self._by = runs, left, left, by
        self._begin = time.monotonic()

    def __call__(self, directory: RunDirectory) -> str:
        run, self._left = results.load(directory.path), self._left - 1
        name = run.headline[0]
        shown = [f"pre/{name}", f"post/{name}"]
        if self._by is not None:
            shown = [self._by or f"val/{name}"]
        scores = []
        for x in shown:
            with contextlib.suppress(InputError):
                (value,) = results.at(results.final([run]), x)[1]
                scores.append(f"{x} {metrics.quantity(x, value)}")
        spent = time.monotonic() - self._begin
        left = self._left * spent / (self._todo - self._left)
        time_left = f", {text.duration(left)} left" * bool(self._left)
        number = f"run {self._runs - self._left} of {self._runs}{time_left}"
        return f"{number}: {directory.path.name}: {', '.join(scores)}"


def _resumed(member: Member) -> Config:
    """Returns the settings to go on with; InputError if the run is another one."""
    config, directory = member
    wanted = {n: x for n, x in config.flat().items() if n != "clients" or x}
    return settings.resumed(directory.config, wanted) if directory.begun else config


def _groups(found: Sequence[Member], at_once: str) -> list[list[Member]]:
    """Returns the runs that are one program, those of one kind and round."""
    one = jax.default_backend() != "cpu" and jax.device_count() == 1
    most = len(found) if at_once == "all" or (one and at_once == "auto") else 1
    if at_once not in ("auto", "all"):
        most = hyperparameters.parse(int, "runs_at_once", at_once)
    groups: dict[Any, list[Member]] = {}
    for i, (c, directory) in enumerate(found):
        alone = most == 1 or c.patience or c.asynchronous or c.client_memory == "host"
        key = i if alone else (_kind(c), directory.summary.get("rounds", 0))
        if not complete(directory, c):
            groups.setdefault(key, []).append(found[i])
    return [x[i : i + most] for x in groups.values() for i in range(0, len(x), most)]


def _kind(config: Config) -> str:
    """Returns equal texts for runs that differ in arguments of one compiled program."""
    known = hyperparameters.of(find(config.algo))
    static = {
        n: x for n, x in config.hparams.items() if x is None or not known[n].traced
    }
    alike = config.replace(seed=0, lr=0.0, lr_decay=1.0, server_lr=None, hparams=static)
    return json.dumps(alike.flat(), default=str)


def show(runs: Sequence[results.Run], by: str | None) -> None:
    """Prints the comparison of finished runs; with `by` of the chosen ones only, whose
    names are written to selection.json."""
    root, name = runs[0].path.parent, runs[0].headline[0]
    if by is not None:
        content = selection.write(root, selection.choose(runs, by or f"val/{name}"))
        print(f"\n{selection.grid(runs, content).to_string()}")
        print(*selection.sentences(content), sep="\n")
        runs = results.find([root])
    print(f"\n{results.comparison(runs, results.final(runs)).to_string()}")
    print(f"All results: fedjax-pfl report {root} [--format=html]")
