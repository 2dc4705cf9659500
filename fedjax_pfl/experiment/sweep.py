"""Runs one experiment, or several seeds, methods and values.

    fedjax-pfl run --algo=pfedc --seeds=3
    fedjax-pfl sweep --algo=local,ditto --hparam=ditto:lam=0.1,1 --lr=0.01,0.1 --seeds=3
    fedjax-pfl sweep --algo=ditto --lr=0.01,0.1 --val_fraction=0.2 --select=val/acc

A sweep runs all combinations. Values are separated by commas, and by semicolons where
one may have a comma in it (--model="mlp;cnn,lenet"). The same command continues where
it stopped. Runs that differ in their seed and numeric values only can be one compiled
program (--runs_at_once). With --select, validation scores choose among the values of
each method, and only the test scores of the chosen ones are shown.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_pfl import hyperparameters, user_code
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data import federate
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import cli, config as settings, metrics, results
from fedjax_pfl.experiment.build import room
from fedjax_pfl.experiment.config import FREE, SETTINGS, Config
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.train import complete, execute, run as run_one

# settings that are text without commas
_NAMES = ("algo", "dataset", "partition", "participation", "optimizer", "bn_stats")
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
    "describe": cli.Flag(str, "describe a method or a preset"),
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

    name: str
    config: Config
    path: Path


def run(argv: Sequence[str]) -> int:
    """Runs the command `run` and returns its exit code."""
    parsed = cli.parse(argv, RUN_FLAGS, __doc__ or "")
    given, user = parsed.given, parsed.settings()
    if given.get("list") or given.get("describe"):
        print(cli.describe(given["describe"]) if "describe" in given else cli.listing())
        return 0
    cli.start(given)
    if given.get("seeds", 1) == 1:
        return run_one(user, given.get("workdir"), given.get("resume", False))
    config = settings.resolve(user)
    name = settings.run_name(user, config, "seeds")
    root = Path(given.get("workdir") or f"runs/{name}").expanduser()
    seeds = range(config.seed, config.seed + given["seeds"])
    found = [
        Member(f"seed{seed}", config.replace(seed=seed), root / f"seed{seed}")
        for seed in seeds
    ]
    return run_all(found, given.get("runs_at_once", "auto"))


def sweep(argv: Sequence[str]) -> int:
    """Runs the command `sweep` and returns its exit code."""
    parsed = cli.parse(argv, SWEEP_FLAGS, __doc__ or "")
    given, user = parsed.given, parsed.settings()
    name = [
        user.get("preset") or user.get("dataset", "digits"),
        *settings.changes(user),
    ]
    root = Path(given.get("root") or f"runs/{settings.file_name(name)}").expanduser()
    found, by = members(user, root, given.get("seeds")), given.get("select")
    if by and not (by.startswith("val/") and all(m.config.val_fraction for m in found)):
        raise InputError("--select needs a validation score, val/NAME, --val_fraction.")
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
    axes = {name: _values(name, x) for name, x in given.items() if name in SETTINGS}
    algos, first = axes.pop("algo", [""]), axes.pop("seed", [0])
    seeded = [first[0] + i for i in range(seeds)] if seeds else first
    found = []
    for algo in algos:
        own = dict(axes)
        for name, text in given["hparams"].items():
            method, _, plain = name.rpartition(":")
            if not method or method == algo:
                own[f"hparam:{plain}"] = _hparam_values(algo, plain, text)
        for values in itertools.product(*own.values()):
            user = dict(zip(own, values, strict=True))
            several = [name for name in own if len(own[name]) > 1]
            words = [f"{x.removeprefix('hparam:')}={user[x]}" for x in several]
            user["hparams"] = {
                name.removeprefix("hparam:"): user.pop(name)
                for name in own
                if name.startswith("hparam:")
            }
            for seed in seeded:
                config = settings.resolve(user | {"algo": algo, "seed": seed})
                name = settings.file_name(
                    [user_code.short(algo), *words, f"seed{seed}"]
                )
                found.append(Member(name, config, root / name))
    if len({member.path for member in found}) < len(found):
        raise InputError("Two runs would have the same directory: list a value once.")
    return found


def _values(name: str, text: Any) -> list[Any]:
    """Returns the values of a setting."""
    kind = SETTINGS[name].kind
    if isinstance(text, bool):
        return [text]
    named = kind is not str or bool(SETTINGS[name].choices) or name in _NAMES
    parts = _split(text, named)
    if len(parts) > 1 and name in {*FREE, "preset"}:
        raise InputError(f"--{name}={text}: a sweep takes one value of it.")
    return [settings.parse(kind, name, part) for part in parts]


def _hparam_values(algo: str, name: str, text: str) -> list[Any]:
    known = hyperparameters.of(find(algo)).get(name)
    named = known is not None and (known.kind is not str or bool(known.choices))
    return [settings.typed(find(algo), {name: x})[name] for x in _split(text, named)]


def _split(text: str, commas: bool) -> list[str]:
    return text.split("," if commas and ";" not in text else ";")


def run_all(
    found: Sequence[Member], at_once: str = "auto", by: str | None = None
) -> int:
    """Runs what is missing, prints a table and returns the first exit code but 0.

    Args:
      at_once: runs of one program: a number, "all" or "auto".
      by: validation score that chooses among the values of a method.
    """
    codes, left = [0], _groups(found, at_once)
    rooms: dict[str, Sequence[int]] = {}
    while left:
        group = left.pop(0)
        kind = _kind(group[0].config)
        if kind not in rooms:
            same = [x.config for x in found if _kind(x.config) == kind]
            rooms[kind] = room(same) if len(same) > 1 else federate.ROOM
        print(f"{', '.join(member.name for member in group)}:", flush=True)
        try:
            codes.append(_run(group, rooms[kind], by))
        except InputError as error:
            print(error, file=sys.stderr)
            codes += [cli.BAD_INPUT] if len(group) == 1 else []
            left = [[member] for member in group if len(group) > 1] + left
        if codes[-1] >= 128:
            return codes[-1]
    done = [x.path for x in found if complete(RunDirectory(x.path), x.config)]
    if done and jax.process_index() == 0:
        show(done, by)
    return next(filter(None, codes), 0)


def _run(group: Sequence[Member], rows: Sequence[int], by: str | None) -> int:
    directories = [RunDirectory(member.path) for member in group]
    configs = []
    for member, directory in zip(group, directories, strict=True):
        wanted = {n: x for n, x in vars(member.config).items() if n != "clients" or x}
        begun = directory.begun
        configs.append(
            settings.resumed(directory.config, wanted) if begun else member.config
        )

    def line(directory: RunDirectory) -> str:
        name = results.load(directory.path).headline[0]
        columns = [by] if by else [f"pre/{name}", f"post/{name}"]
        parts = [f"{x} {directory.summary['scores'].get(x):.4f}" for x in columns]
        return f"  {', '.join(parts)}"

    return execute(directories, configs, rows, line, progress=by is None)


def _groups(found: Sequence[Member], at_once: str) -> list[list[Member]]:
    """Returns the runs that are one program, those of one kind and round."""
    if at_once not in ("auto", "all"):
        most = settings.parse(int, "runs_at_once", at_once)
    else:
        one = jax.default_backend() != "cpu" and jax.device_count() == 1
        most = len(found) if one or at_once == "all" else 1
    groups: dict[Any, list[list[Member]]] = {}
    for member in found:
        c, directory = member.config, RunDirectory(member.path)
        if complete(directory, c):
            continue
        alone = most == 1 or c.patience or c.client_memory == "host"
        key = member.path if alone else (_kind(c), directory.summary.get("rounds", 0))
        parts = groups.setdefault(key, [[]])
        parts += [[]] if len(parts[-1]) == most else []
        parts[-1].append(member)
    return [part for parts in groups.values() for part in parts]


def _kind(config: Config) -> str:
    """Returns equal texts for runs that differ in arguments of one compiled program."""
    known = hyperparameters.of(find(config.algo))
    static = {
        name: x
        for name, x in config.hparams.items()
        if x is None or not known[name].traced
    }
    alike = config.replace(seed=0, lr=0.0, lr_decay=1.0, server_lr=None, hparams=static)
    return json.dumps(vars(alike), default=str)


def show(paths: Iterable[Path], by: str | None) -> None:
    """Prints the comparison of finished runs; with `by` of the chosen ones only."""
    runs = [results.load(path) for path in paths]
    table, headline = results.last(results.frame(runs)), runs[0].headline
    if by:
        point, score, _ = metrics.split(by)
        seeds = results.over_seeds(table).xs((point, score), level=("point", "score"))
        means = seeds["macro", "mean"]
        print(f"\n{by}, over seeds:\n{seeds['macro'].to_string()}")
        algos = table.drop_duplicates("label").set_index("label")["algo"]
        sign = 1 if metrics.better(score, headline) == "max" else -1
        chosen = (sign * means).groupby(algos.reindex(means.index)).idxmax()
        print(f"Chosen: {'; '.join(chosen)}.")
        table = table[table["label"].isin(chosen)]
        runs = [run for run in runs if str(run.path) in set(table["run"])]
    print(f"\n{results.comparison(runs, table).to_string()}")
