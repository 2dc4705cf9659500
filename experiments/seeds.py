"""One setting with several seeds, one after another: `experiments.main` with
--seeds."""

from experiments import closing, entry, flags, grid, many, outcome, runs, settings
from experiments.grid import Member
from fedjax_pfl.errors import InputError


def run(seeds: int, parsed: flags.Parsed, verbose: bool) -> int:
    """Runs what is missing of the seeds, prints mean and sample standard deviation, and
    returns the first exit code that is not 0.

    Args:
      parsed: a command line of `main`; its --workdir is the directory of the runs'
        directories.

    Raises:
      InputError: a seed is out of range, or a directory holds a run of other settings.
    """
    user = parsed.settings()
    if parsed.get("resume"):
        raise InputError(
            f"--resume continues one run; with --seeds={seeds} the same command goes "
            "on by itself: leave --resume out."
        )
    numbers = grid.counted([settings.resolve(user).seed], seeds)
    given = [user | {"seed": seed} for seed in numbers]
    configs = [settings.resolve(one) for one in given]
    root = entry.directory(
        parsed.get("workdir") or settings.default_workdir(user, configs[0], seeds=True)
    )
    if runs.is_run(root):
        raise InputError(
            f"The directory of --seeds={seeds}, {root}, is that of one run: choose "
            "another --workdir."
        )
    members = [
        Member(one, c, {}, root / f"seed{c.seed}")
        for one, c in zip(given, configs, strict=True)
    ]
    at_once = parsed.get("runs_at_once", "auto")
    failed, ended = many.run(members, closing.ALL if verbose else closing.ONE, at_once)
    if not ended:
        outcome.show(members, root, verbose=verbose)
    return failed
