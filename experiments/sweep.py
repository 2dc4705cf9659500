"""Runs several methods, values and seeds in one setting, and prints their table:

    python -m experiments.sweep --algo=local,fedavg,fedcp --seeds=3
    --preset=fedcp_cifar10 --rounds=50

    python -m experiments.sweep --algo=ditto --hparam=lam=0.1,1,10 --lr=0.005,0.01
    --val_fraction=0.2 --select=val/acc

`--algo` and `--seed` are lists, as is almost every setting and hyperparameter that
changes a result: values apart by commas; every combination is run. In text of which a
comma may be a part (--model, a hyperparameter that is text) it is one, and values are
apart by semicolons: --model="mlp;cnn,lenet". --hparam=METHOD:NAME=VALUES is of one of
several methods.

Each run has a directory ROOT/ALGO-WHAT VARIES-seedK (`--root`, by default
runs/PRESET-SETTINGS with the settings that were changed). Runs that differ in seed,
rate and hyperparameters that are numbers share what was compiled, as far as their
arrays have the same shapes. The same command again goes on where it stopped: finished
runs are skipped, interrupted ones resumed. A run that fails does not stop the others;
the exit code is the first failure's. ROOT must not hold runs of other settings. It ends
with a short table and ROOT/comparison.png, .json and .md; with --verbose everything of
each run is said, and the table is that of `experiments.tables`. With --select the
combination of each method with the best mean over seeds on the clients' validation
examples is chosen, and only its test scores are shown.
"""

import sys
from pathlib import Path
from typing import Any

from experiments import closing, entry, flags, grid, main, many, outcome, runs, settings
from fedjax_pfl.errors import InputError

_FLAGS = {
    **grid.FLAGS,
    "seeds": flags.SEEDS,
    "runs_at_once": flags.RUNS_AT_ONCE,
    "root": flags.Flag(str, "where the run directories are"),
    "select": flags.Flag(str, "choose values by a validation score, as val/acc"),
    "verbose": flags.VERBOSE,
    **flags.OF_A_PROCESS,
}


def run(argv: list[str]) -> int:
    """Runs everything that is missing; returns the first exit code that is not 0."""
    parsed = flags.parse(argv, _FLAGS)
    if parsed.get("help"):
        print(f"{__doc__}\n{parsed.usage}")
        return 0
    main.start(parsed)
    return entry.lead(lambda: _swept(parsed), many.GOES_ON)


def _swept(parsed: flags.Parsed) -> int:
    user = parsed.settings()
    root = _root(parsed, user)
    if runs.is_run(root):
        raise InputError(f"--root={root} is the directory of one run: choose another.")
    members = grid.members(user, root, parsed.get("seeds"))  # before anything runs
    by = (
        outcome.rule(parsed.given["select"], members)
        if "select" in parsed.given
        else None
    )
    say = (
        closing.HELD_OUT
        if by
        else closing.ALL
        if parsed.get("verbose")
        else closing.ONE
    )
    failed, ended = many.run(
        members,
        say,
        parsed.get("runs_at_once", "auto"),
        lambda: outcome.begin(members, root, by),
    )
    if not ended:
        outcome.show(members, root, by, bool(parsed.get("verbose")))
    return failed


def _root(parsed: flags.Parsed, user: dict[str, Any]) -> Path:
    named = [
        user.get("preset") or user.get("dataset", "digits"),
        *settings.changes(user),
    ]
    return entry.directory(parsed.get("root") or f"runs/{settings.file_name(named)}")


if __name__ == "__main__":
    entry.begin()
    entry.leave(entry.guarded(lambda: run(sys.argv[1:]), many.GOES_ON))
