"""Trains one method on one federation: `python -m experiments.main --algo=pfedc`.

Over several processes the same command starts each, with --coordinator=HOST:PORT
--num_processes=N --process_id=I, or --coordinator=auto where JAX finds these by itself;
the settings are those of process 0, which alone reads and writes the run directory.
Every host needs the data.

Exit codes: 0 done; 2 something in the command is wrong (nothing was compiled); 3 the
training diverged; 4 a file could not be written; 5 another process was lost; 128 + n
stopped by signal n (130: Ctrl-C). What was written is kept, and --resume continues it.
"""

import logging
import sys

from experiments import (
    closing,
    describe,
    entry,
    flags,
    many,
    phases,
    seeds,
    session,
    values,
)
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import multihost, xla
from fedjax_pfl.errors import InputError

_FLAGS = {
    **flags.OF_A_RUN,
    "workdir": flags.Flag(
        str,
        "the run directory (default: runs/ALGO-DATASET-PARTITION-seedK and what you "
        "changed)",
    ),
    "resume": flags.Flag(
        bool,
        "continue the run in the run directory; settings not given are the recorded "
        "ones",
        False,
    ),
    **flags.OF_A_PROCESS,
    "list": flags.Flag(
        bool, "list methods, data sets, partitions, models and presets", False
    ),
    "describe": flags.Flag(
        str, "describe a method, a preset, or a part of your own, FILE.py:NAME"
    ),
    "seeds": flags.SEEDS,
    "runs_at_once": flags.RUNS_AT_ONCE,
    "verbose": flags.VERBOSE,
}


def run(argv: list[str]) -> int:
    """Runs a command line (without the program's name) and returns its exit code; every
    failure is one sentence."""

    def command() -> int:
        parsed = flags.parse(argv, _FLAGS)
        if text := _information(parsed):
            print(text)
            return 0
        start(parsed)
        return entry.lead(lambda: _trained(parsed), session.NOTHING)

    return entry.guarded(command, session.NOTHING)


def _trained(parsed: flags.Parsed) -> int:
    if (
        "," in (algo := parsed.get("algo", ""))
        and not set(algo.split(",")) - ALGORITHMS.keys()
    ):
        raise InputError(
            f"--algo={algo} names several methods{values.if_several(algo)}."
        )
    verbose, several = bool(parsed.get("verbose")), parsed.get("seeds", 1)
    if several != 1:
        return entry.guarded(lambda: seeds.run(several, parsed, verbose), many.GOES_ON)
    say = closing.ALL if verbose else closing.SHORT
    given = session.Given(
        parsed.settings(), parsed.get("workdir"), parsed.get("resume", False)
    )
    return session.train_into([given], say=say)


def start(parsed: flags.Parsed) -> None:
    """Prepares messages, and JAX for this machine, and joins the other processes,
    before JAX looks for devices."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    xla.split_cpu()
    xla.keep_compilations()
    coordinator, count, number = (parsed.get(name) for name in flags.OF_A_PROCESS)
    if coordinator is None:  # else JAX must not have started
        entry.check_platform()
    with phases.said(entry.errors(), "Waiting for the other processes"):
        multihost.connect(coordinator, count, number)


def _information(parsed: flags.Parsed) -> str | None:
    if parsed.get("help"):
        return f"{__doc__}\n{parsed.usage}"
    if parsed.get("list"):
        return describe.listing(parsed.settings())
    return (
        describe.describe(parsed.given["describe"]) if parsed.get("describe") else None
    )


def main() -> None:
    """The entry point."""
    entry.begin()
    entry.leave(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
