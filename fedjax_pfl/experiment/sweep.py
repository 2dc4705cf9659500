"""Runs one experiment, or one per seed.

The same command continues a run with --resume.
"""

from collections.abc import Sequence

from fedjax_pfl.experiment import cli
from fedjax_pfl.experiment.train import run as run_one

RUN_FLAGS = {
    **cli.SETTING_FLAGS,
    **cli.PROCESS_FLAGS,
    "workdir": cli.Flag(str, "run directory (default: named by the settings)"),
    "resume": cli.Flag(bool, "continue the run in the run directory", False),
    "list": cli.Flag(bool, "list methods, data sets, partitions, networks, presets"),
    "describe": cli.Flag(str, "describe a method or a preset"),
}


def run(argv: Sequence[str]) -> int:
    """Runs the command `run` and returns its exit code."""
    parsed = cli.parse(argv, RUN_FLAGS, __doc__ or "")
    given = parsed.given
    if given.get("list") or given.get("describe"):
        print(cli.describe(given["describe"]) if "describe" in given else cli.listing())
        return 0
    cli.start(given)
    resume = given.get("resume", False)
    return run_one(parsed.settings(), given.get("workdir"), resume)
