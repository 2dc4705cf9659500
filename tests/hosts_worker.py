"""One of the processes of test_hosts.py: `hosts_worker.py HOST:PORT I N OUT WHAT`, in a
directory of its own; what it does is "runs" or "more".

Writes the exit codes and what the library returned to OUT, a file.
"""

import os
import signal
import sys
import time

import jax
import numpy as np
import toy

from experiments import main
from fedjax_pfl import simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.engine import multihost

ONE = [
    "--data_fraction=0.2",
    "--clients=5",
    "--width=1",
    "--epochs=1",
    "--model=linear",
    "--participation=0.6",
]
UNSEEN = ["--algo=pfedc", *ONE, "--clients=6", "--rounds=3", "--unseen=0.2"]


def library(method: str, devices: int) -> list[np.ndarray]:
    """The last state and the last round's metrics of a run from Python, whatever the
    devices are."""
    program = simulate.program(
        ALGORITHMS[method], toy.method_task(method), devices=devices
    )
    *_, last, closing = simulate.rounds(
        program, jax.random.key(3), toy.federation(), rounds=2
    )
    return jax.tree.leaves(
        (
            multihost.fetch(program.unplace(closing.state)),
            last.metrics.loss,
            closing.pre,
        )
    )


def interrupted(*args, **options):
    """`simulate.rounds`, with a signal in the second round."""
    for result in rounds(*args, **options):
        if result.round == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # until it has been seen
        yield result


if __name__ == "__main__":
    coordinator, process, count, out, what = sys.argv[1:]
    join = [
        f"--coordinator={coordinator}",
        f"--process_id={process}",
        f"--num_processes={count}",
    ]
    small = [*ONE, "--clients=4"]
    commands = {
        # a directory that process 0 alone has
        "resumed": ["--resume", "--workdir=half", "--devices=all"],
        # so is this file
        "lacking": ["--algo=fedavg", *small, "--dataset=npz:data.npz"],
        "other": ["--algo=fedavg", *small, "--dataset=npz:both.npz"],  # which differs
        "odd": ["--algo=fedavg", *ONE, "--devices=3"],
        "ditto": ["--algo=ditto", *ONE, "--rounds=4", "--workdir=ditto"],
    }
    if what == "more":
        # process 0 tries the widths
        commands = {"pfedc": [*UNSEEN, "--width=auto", "--workdir=pfedc"]}
    codes, rounds = {}, simulate.rounds
    for name, command in commands.items():
        simulate.rounds = interrupted if name == "ditto" and process == "1" else rounds
        codes[name] = main.run([*command, *join])
    simulate.rounds = rounds
    leaves = library("fedma", jax.device_count()) if what == "more" else []
    np.savez(
        out,
        codes=list(codes.values()),
        **{f"leaf{i:03}": x for i, x in enumerate(leaves)},
    )
