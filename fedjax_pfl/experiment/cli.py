"""Commands: `fedjax-pfl run|sweep|report|plot|export|predict|reconstruct`.

Exit codes: 0 done; 1 a crash; 2 wrong input, and nothing was compiled; 3 the training
diverged; 4 a file cannot be written; 128 + n stopped by signal n (130: Ctrl-C).
"""

import contextvars
import functools
import importlib
import inspect
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags, logging

from fedjax_pfl import hyperparameters, user_code
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.data.loading import DATASETS
from fedjax_pfl.data.partitioners import PARTITIONS
from fedjax_pfl.engine import distributed, xla
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import text
from fedjax_pfl.experiment.config import HELP, SECTIONS, SETTINGS
from fedjax_pfl.experiment.presets import PRESETS
from fedjax_pfl.models import MODELS

BAD_INPUT, UNWRITABLE, INTERRUPTED = 2, 4, 130
# A command's function takes the arguments and returns the exit code.
COMMANDS = {
    "run": "sweep:run",
    "sweep": "sweep:sweep",
    "report": "report:main",
    "plot": "figures:main",
    "export": "export:main",
    "predict": "predict:main",
    "reconstruct": "reconstruct:main",
}
_DEFINE: dict[Any, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
    list: flags.DEFINE_multi_string,
}


class Flag(NamedTuple):
    """A flag of one command."""

    kind: Any  # str, int, float, bool, or list for a flag that may be repeated
    help: str
    default: Any = None  # shown in the help only


SETTING_FLAGS = {
    name: Flag(known.kind, HELP[name], known.default)
    for name, known in SETTINGS.items()
} | {
    "hparam": Flag(list, "hyperparameter of the method, as NAME=VALUE"),
    "config": Flag(str, "config.json of a run, whose settings other flags override"),
}
PROCESS_FLAGS = {
    "coordinator": Flag(str, "HOST:PORT of process 0 of several, or auto (SLURM, TPU)"),
    "num_processes": Flag(int, "number of processes, all with the same command"),
    "process_id": Flag(int, "index of this process; 0 writes the run directory"),
}


# of commands that read directories, see `isolated`
TRUST = {"trust": Flag(bool, "import FILE.py of a directory that came from elsewhere")}


class Parsed(NamedTuple):
    """A parsed command line."""

    given: dict[str, Any]  # values of the flags that were given
    words: list[str]  # arguments that are no flags

    def settings(self) -> dict[str, Any]:
        """Returns the settings that were given, for `config.resolve`."""
        known = {n: x for n, x in self.given.items() if n in {*SETTINGS, "config"}}
        pairs = [pair.partition("=") for pair in self.given.get("hparam", [])]
        if wrong := [name for name, equals, _ in pairs if not equals]:
            raise InputError(f"--hparam={wrong[0]} must be NAME=VALUE.")
        return known | {"hparams": {name: value for name, _, value in pairs}}


def parse(argv: Sequence[str], known: Mapping[str, Flag], usage: str = "") -> Parsed:
    """Parses a command line without the program's name; --help prints and exits.

    Raises:
      InputError: an unknown flag, or a value of another kind.
    """
    values = flags.FlagValues()  # type: ignore[no-untyped-call]
    for name, flag in {**known, "help": Flag(bool, "show this help")}.items():
        _DEFINE[flag.kind](name, None, flag.help, flag_values=values)
    try:
        words = values(["", *argv])[1:]
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        hint = text.hint("flag", name, known)
        if any(name in hyperparameters.of(factory) for factory in ALGORITHMS.values()):
            hint = f" Did you mean --hparam={name}=VALUE?"
        raise InputError(f"Unknown flag --{name}.{hint} --help lists all.") from None
    except (flags.Error, ValueError) as error:
        several = " Lists of values are for `sweep`." if "," in str(error) else ""
        raise InputError(f"{error}.{several}") from None
    if values["help"].value:
        print(f"{usage}\n{flags_by_section(known)}")
        raise SystemExit(0)
    found = {name: values[name].value for name in known}
    return Parsed({name: x for name, x in found.items() if x is not None}, words)


def isolated(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Returns a command that imports unknown code with --trust alone."""

    @functools.wraps(main)
    def run(argv: Sequence[str]) -> int:
        context = contextvars.copy_context()
        words = [x.lstrip("-").partition("=") for x in argv if x.startswith("-")]
        known = {"notrust": "false"}
        values = ["false"]  # as absl reads them, the last counts
        for name, _, value in words:
            if name in ("trust", "notrust"):
                values.append(value or known.get(name, "true"))
        trusted = values[-1].lower() in ("true", "t", "1")
        context.run(user_code.ONLY_KNOWN.set, not trusted)
        return context.run(main, argv)

    return run


def flags_by_section(known: Mapping[str, Flag]) -> str:
    """Returns the help of flags: those of the command, then the settings by section."""
    settings = {name for names in SECTIONS.values() for name in names}
    own = [name for name in known if name not in settings]
    (first, common), *others = SECTIONS.items()  # those that are used most
    sections = [(first, common), ("This command", own), *others]
    lines = []
    for title, names in sections:
        lines += [f"\n{title}:"] if any(name in known for name in names) else []
        for name in (x for x in names if x in known):
            flag = known[name]
            shown = "" if flag.default in (None, "") else f" (default: {flag.default})"
            head = f"  --[no]{name}" if flag.kind is bool else f"  --{name}"
            body = textwrap.wrap(flag.help + shown, 78)
            lines += [head, *(f"      {line}" for line in body)]
    return "\n".join(lines)


def start(given: Mapping[str, Any]) -> None:
    """Prepares JAX for this machine and joins the other processes of a run."""
    xla.split_cpu()
    xla.keep_compilations()
    coordinator, *processes = (given.get(name) for name in PROCESS_FLAGS)
    if coordinator is not None:
        address = None if coordinator == "auto" else coordinator
        distributed.connect(address, *processes)


def listing() -> str:
    """Returns all names to choose from, with a line each."""
    kinds: dict[str, Mapping[str, Any]] = {
        "Methods (--algo)": ALGORITHMS,
        "Data sets (--dataset)": DATASETS,
        "Partitions (--partition)": PARTITIONS,
        "Networks (--model)": MODELS,
        "Presets (--preset)": PRESETS,
    }
    lines = []
    for title, known in kinds.items():
        lines += [title, *(f"  {n:<28} {text.summary(x)}" for n, x in known.items())]
    return "\n".join(lines)


def describe(name: str) -> str:
    """Returns a method's docstring and hyperparameters, or a preset's flags."""
    if name in PRESETS:
        preset = PRESETS[name]
        given = " ".join(f"--{flag}={x}" for flag, x in preset.settings.items())
        return f"{preset.description}\n{given}\n{preset.protocol}"
    factory = find(text.choose("method or preset", name, [*ALGORITHMS, *PRESETS]))
    known = hyperparameters.defaults(factory).items()
    docs = [inspect.getdoc(x) or "" for x in (inspect.getmodule(factory), factory)]
    return "\n\n".join([*docs, " ".join(f"--hparam={n}={x}" for n, x in known)])


def show(text: str) -> None:
    """Prints a text, quietly where nobody reads on, as with `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def guarded(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; expected errors are one message."""
    try:
        return command()
    except InputError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f"Cannot read or write: {error}", file=sys.stderr)
        return UNWRITABLE
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def main(command: str | None = None) -> None:
    """Runs a command, by default the first word of the command line, and exits."""
    argv = sys.argv[1:]
    if command is None:
        if not argv or argv[0] not in COMMANDS:
            print(f"{__doc__}\nfedjax-pfl COMMAND --help lists the flags of a command.")
            sys.exit(0 if argv in (["--help"], ["-h"]) else BAD_INPUT)
        command = argv.pop(0)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.set_verbosity(logging.WARNING)
    module, _, name = COMMANDS[command].partition(":")
    function = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    code = guarded(lambda: function(argv))
    if code == INTERRUPTED:  # JAX may crash at the exit of an interrupted compilation
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
