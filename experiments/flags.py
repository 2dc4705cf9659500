"""Command lines read into values: one parser for all of them, which answers what it
cannot read in one sentence."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from absl import flags

from experiments.config import HELP, SETTINGS
from experiments.values import NOUN, if_several
from fedjax_pfl.errors import InputError, nearest


class Flag(NamedTuple):
    """One flag of a command line."""

    # str, int, float, bool, or list: texts, one for each time that it is given
    kind: type
    help: str
    default: Any = None  # only shown


OF_A_RUN = {
    **{
        name: Flag(
            known.kind, HELP[name], None if known.default == "" else known.default
        )
        for name, known in SETTINGS.items()
    },
    "hparam": Flag(list, "a hyperparameter of the method: name=value"),
    "config": Flag(
        str,
        "a run's config.json, whose settings are taken where no flag says another "
        "value",
    ),
}
SEEDS = Flag(
    int,
    "so many runs, of this seed and the next ones; each has its own run directory",
    1,
)
RUNS_AT_ONCE = Flag(
    str,
    "how many runs that differ in seed and numeric hyperparameters are trained as one "
    "program: a number, all, or auto "
    "(all on a single accelerator, else one after another)",
    "auto",
)
VERBOSE = Flag(bool, "say everything: all rounds, all tables", False)
OF_A_PROCESS = {
    "coordinator": Flag(
        str,
        "of several processes: HOST:PORT where process 0 listens, or auto (SLURM, "
        "TPU, ...)",
    ),
    "num_processes": Flag(int, "the number of processes, each with the same command"),
    "process_id": Flag(
        int, "which of them this is: 0 to N-1; 0 writes the run directory and talks"
    ),
}

# flags of another command: the flag that this one has instead, and what is said of it
_ELSEWHERE = {
    "workdir": ("root", "the runs of a sweep are in the folder that --root names; "),
    "resume": ("root", "the same command goes on with a sweep; "),
    "root": ("workdir", "the run directory is --workdir; "),
    "select": ("workdir", "experiments.sweep has it; "),
}

_DEFINE: dict[type, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
    list: flags.DEFINE_multi_string,
}


class Parsed(NamedTuple):
    """A command line that was read."""

    given: dict[str, Any]  # the flags that were given, by name
    words: list[str]  # what is no flag
    usage: str  # the help of all flags

    def get(self, name: str, default: Any = None) -> Any:
        """A flag's value; `default` where it was not given."""
        return self.given.get(name, default)

    def settings(self) -> dict[str, Any]:
        """The settings of a run that were given, hyperparameters as {"hparams": {name:
        text}}, and the file of others as "config"."""
        hparams = dict(map(_name_value, self.get("hparam", [])))
        known = (*SETTINGS, "config")
        return {name: value for name, value in self.given.items() if name in known} | {
            "hparams": hparams
        }


def parse(
    argv: Iterable[str], known: Mapping[str, Flag], words: bool = False
) -> Parsed:
    """Reads a command line (without the program's name).

    Args:
      known: its flags by name; --help is always among them.
      words: may it have arguments that are no flags?

    Raises:
      InputError: a flag is unknown or its value of another kind, or there is an
        argument where none may be.
    """
    values, known = (
        flags.FlagValues(),
        {**known, "help": Flag(bool, "show this help", False)},
    )
    for name, flag in known.items():
        shown = "" if flag.default is None else f" (default: {flag.default})"
        _DEFINE[flag.kind](name, None, flag.help + shown, flag_values=values)
    try:
        extra = values(["", *argv])[1:]
    except flags.IllegalFlagValueError as error:
        raise _illegal(str(error), known) from None
    except flags.UnrecognizedFlagError as error:
        near = nearest(error.flagname, values)
        instead, hint = _ELSEWHERE.get(error.flagname, ("", ""))
        if instead not in known:
            hint = f"did you mean --{near}? " if near else ""
        raise InputError(
            f"Unknown flag --{error.flagname}: {hint}--help shows them all."
        ) from None
    except (flags.Error, ValueError) as error:  # the latter: a value where none may be
        raise InputError(f"{error}: --help shows all flags.") from None
    if extra and not words:
        raise InputError(
            f"Unexpected argument {extra[0]!r}: write settings as --name=value."
        )
    given = {
        name: values[name].value for name in known if values[name].value is not None
    }
    return Parsed(given, extra, values.get_help())


def _illegal(message: str, known: Mapping[str, Flag]) -> InputError:
    found = re.match(r"flag --(\w+)=(.*?): ", message, re.DOTALL)
    if not found or found[1] not in known:
        return InputError(message)
    kind = known[found[1]].kind
    # of which a sweep takes one, too
    more = if_several(found[2]) if found[1] in SETTINGS and kind is not bool else ""
    return InputError(f"--{found[1]}={found[2]} must be {NOUN[kind]}{more}.")


def _name_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--hparam={text}: write it as --hparam name=value.")
    return name, value
