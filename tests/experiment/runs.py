"""Small runs in a temporary directory."""

from fedjax_pfl.experiment import cli, sweep

SMALL = [
    "--clients=5",
    "--partition=pathological",
    "--data_fraction=0.2",
    "--model=linear",
    "--epochs=1",
    "--width=4",
    "--devices=1",
]


def run(*argv, command=sweep.run):
    """Returns the exit code of a command line."""
    return cli.guarded(lambda: command(list(argv)))


def rows(path):
    """Returns the bytes of the files that a resume must reproduce."""
    return [(path / f"{x}.jsonl").read_bytes() for x in ("metrics", "scores")]
