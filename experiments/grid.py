"""Grids: settings and hyperparameters that are given several values, and every
combination of them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import flags, settings
from experiments.config import ENDS, FREE, SETTINGS, Config
from experiments.values import number, typed_all
from fedjax_pfl import hyperparameters, user_code
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.errors import InputError, check, choose

# settings that are text, but of no value that has a comma in it
_NAMES = (
    *("algo", "preset", "dataset", "partition", "participation"),
    *("optimizer", "server_optimizer", "bn_stats", "compute_dtype"),
)
_PATHS = ("dataset", "partition")  # or that of a file, which may
FLAGS = {  # those of a run, as text that may be several values
    name: flag if flag.kind in (bool, list) else flag._replace(kind=str)
    for name, flag in flags.OF_A_RUN.items()
} | {
    "algo": flags.Flag(str, "the methods, apart by commas"),
    "seed": flags.Flag(str, "the seeds, apart by commas", "0"),
}


class Member(NamedTuple):
    """One run of a sweep."""

    given: dict[str, Any]  # its settings as `flags.Parsed.settings` has them
    config: Config
    # the settings and hyperparameters with several values -> its own, as text
    varied: dict[str, str]
    path: Path  # its directory

    @property
    def label(self) -> str:
        """What it is called beside the others: its method, and what varies."""
        return ", ".join(
            [
                user_code.short(self.config.algo),
                *(f"{name}={text}" for name, text in self.varied.items()),
            ]
        )


def members(
    given: Mapping[str, Any], root: Path, seeds: int | None = None
) -> list[Member]:
    """Every combination of a command line, seeds last.

    Args:
      given: as `flags.Parsed.settings` of `FLAGS`.
      root: where the run directories are.
      seeds: --seeds, counted from the one --seed.

    Raises:
      InputError: a value is none, or listed twice, or it cannot be said where one ends;
        or a run cannot have these settings.
    """
    base = {"config": given["config"]} if given.get("config") else {}
    of_file = settings.resolve(base) if base else None
    start = (
        {"algo": of_file.algo, "seed": str(of_file.seed)}
        if of_file
        else {"algo": "", "seed": "0"}
    )
    axes = _settings(start | {name: x for name, x in given.items() if name in SETTINGS})
    if seeds is not None:
        axes["seed"] = counted(axes["seed"], seeds)
    found = []
    for algo in axes["algo"]:
        settings_of = {
            name: values
            for name, values in axes.items()
            if name not in ("algo", "seed")
        }
        hparams = _hparams(algo, axes["algo"], given["hparams"])
        for chosen in _product(settings_of):
            for numbers in _product(hparams):
                varied = {
                    n: shown(x) for n, x in chosen.items() if len(settings_of[n]) > 1
                }
                several = [n for n in numbers if len(hparams[n]) > 1]
                varied |= {
                    f"hparam.{n}" if n in varied else n: shown(numbers[n])
                    for n in several
                }
                for seed in axes["seed"]:
                    user = base | {"algo": algo} | chosen | {"seed": seed}
                    user |= {"hparams": {n: str(x) for n, x in numbers.items()}}
                    config = settings.resolve(user)
                    hyperparameters.check(find(algo), config.hparams)
                    name = [
                        user_code.short(algo),
                        *(f"{n}={text}" for n, text in varied.items()),
                        f"seed{seed}",
                    ]
                    found.append(
                        Member(user, config, varied, root / settings.file_name(name))
                    )
    _check_apart(found)
    return found


def counted(first: Sequence[int], seeds: int) -> list[int]:
    """The seeds of --seeds=K, K of them from the one --seed on."""
    if len(first) > 1:
        raise InputError(
            f"--seeds={seeds} counts from one --seed, and {len(first)} are listed: "
            "give one of the two."
        )
    check("seeds", seeds, 1, 10_000)
    return [first[0] + i for i in range(seeds)]


def shown(value: Any) -> str:
    """A value in the name of a run; a number in as few digits as it takes."""
    if not isinstance(value, float):
        return str(value)
    text = f"{value:g}"
    return text if float(text) == value else str(value)


def _product(axes: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _settings(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each setting."""
    found = {}
    for name, text in given.items():
        known, flag = SETTINGS[name], f"--{name}"
        if isinstance(text, bool):
            found[name] = [text]
            continue
        names = known.kind is not str or bool(known.choices) or name in _NAMES
        parts = (
            [text] if name in FREE and known.kind is str else _parts(flag, text, names)
        )
        if name in _PATHS and len(parts) > 1 and ":" in text and ";" not in text:
            raise InputError(
                f"{flag}={text}: the comma may be of a file's name, or stand between "
                "two values; put values apart by "
                "semicolons, and take files whose names have no comma."
            )
        values = [
            part if known.kind is str else number(known.kind, flag, part, text)
            for part in parts
        ]
        if len(values) > 1 and name in FREE:
            other = (
                "a run may go on with another: make a sweep of each, in a --root of "
                "its own"
            )
            why = other if name in ENDS else "it changes no result: give one"
            raise InputError(f"{flag}={text} lists {len(values)} values, but {why}.")
        if len(values) > 1 and name == "preset":
            raise InputError(
                f"{flag}={text} lists {len(values)} settings of papers: make a sweep "
                "of each."
            )
        found[name] = _once(flag, text, values)
    return found


def _hparams(
    algo: str, algos: Sequence[str], given: Mapping[str, str]
) -> dict[str, list[Any]]:
    """The values of each hyperparameter of one of the methods."""
    texts = {}
    for name, text in given.items():
        whose, colon, plain = name.rpartition(":")
        if colon:
            choose("method of --hparam", whose, algos)
        if not colon or whose == algo:
            texts[plain] = text
    factory = find(algo) if algo and texts else None
    if factory is None:
        return {}
    known, found = hyperparameters.of(factory), {}
    for name, text in texts.items():
        flag = f"--hparam={name}"
        whole = name not in known or (
            known[name].kind is str and not known[name].choices
        )
        parts = _parts(flag, text, not whole)
        # which says if there is none of that name
        typed = [typed_all(factory, {name: part})[name] for part in parts]
        found[name] = _once(flag, text, parts if whole else typed)
    return found


def _parts(flag: str, text: str, names: bool) -> list[str]:
    """The values of a text: apart by semicolons; by commas, too, if it has no semicolon
    and no value has a comma in it (`names`)."""
    parts = text.split(";" if ";" in text or not names else ",")
    if "" in parts and len(parts) > 1:
        raise InputError(
            f"{flag}={text} has a value that is empty: write values as {flag}=A,B."
        )
    return parts


def _once(flag: str, text: str, values: list[Any]) -> list[Any]:
    if twice := [x for x in values if values.count(x) > 1]:
        raise InputError(
            f"{flag}={text} lists {shown(twice[0])} twice: each run has one directory."
        )
    return values


def _check_apart(found: Sequence[Member]) -> None:
    """Raises InputError if two runs would have one directory."""
    seen: dict[Path, Member] = {}
    for member in found:
        other = seen.setdefault(member.path, member)
        if other is not member:
            raise InputError(
                f"Two runs would have the directory {member.path}, as names are "
                f"shortened: {other.given} and "
                f"{member.given}; make two sweeps of them."
            )
