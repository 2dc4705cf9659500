"""Scores finished runs task by task, whatever their method, at the last checkpoint,
before local training:

    python -m experiments.within --tasks=consecutive:10 RUN ...

pFedC's `task_acc` tells the model which group of classes an example is of. This asks
the same of any run's model, so that methods, and runs of pFedC with other tasks, are
compared on one question: for each client the accuracy within each group of which it
holds a class, the group given; in %, means over clients, and of the personal model
where a method scores two. `baseline` is what the client's majority class of each group
scores; `acc_groups` is over the classes of the client's groups, the group not given.
"""

import functools
import sys
from pathlib import Path

import jax
import numpy as np

from experiments import entry, flags, gather, phases, plain, runs
from fedjax_pfl import server_optimizer, simulate
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.algorithms.pfedc import class_groups, task_maps
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Algorithm, Array, Client, Scores

COLUMNS = {
    "within": "task_acc",
    "baseline": "task_acc_majority",
    "acc_groups": "acc_groups",
    "acc": "acc",
}


def scores(workdir: Path, name: str) -> dict[str, np.ndarray]:
    """Every client's scores by the task map `name` (see `task_maps.branches`): {score:
    [N]}.

    Raises:
      InputError: the run cannot be read, or the map has a task of one class: a yes or
        no, which most methods lack.
    """
    run = runs.load(workdir)
    task, config = run.experiment.task, run.config
    branches = task_maps.branches(task, name)
    if branches.binary.any():
        raise InputError(
            f"--tasks={name} has a task of a single class, which has nothing to choose "
            "within it."
        )
    factory = find(config.algo)

    def score(z: Array, y: Array, mask: Array, c: Client) -> Scores:
        return class_groups.scores(branches, runs.first(z), y, mask, c)

    @functools.wraps(factory)
    def scored(*args, **hparams) -> Algorithm:
        return factory(*args, **hparams)._replace(score=score)

    program = simulate.program(scored, task, config.hparams, lr_decay=config.lr_decay)
    state = run.state._replace(server=server_optimizer.plain(run.state.server))
    placed = program.place(state)
    arguments = (
        run.experiment.key,
        program.traced,
        run.experiment.federation,
        placed,
        np.int32(run.round),
    )
    return jax.device_get(jax.jit(program.evaluate)(*arguments))


def main(argv: list[str]) -> str:
    """The Markdown table of a command line."""
    parsed = flags.parse(
        argv,
        {"tasks": flags.Flag(str, "a task map, see `task_maps.branches`")},
        words=True,
    )
    if (tasks := parsed.get("tasks")) is None:
        raise InputError(
            "Give a task map and runs: python -m experiments.within "
            "--tasks=consecutive:10 RUN ..."
        )
    paths = gather.directories(parsed.words)
    entry.check_platform()
    rows = [["run", *COLUMNS]]
    for path in paths:
        try:
            with phases.said(entry.errors(), f"Scoring {path}"):
                found = scores(path, tasks)
        except InputError as error:
            if path == paths[-1] and len(rows) == 1:
                raise
            entry.errors().print(f"{path} is left out: {error}")
            continue
        rows.append(
            [
                str(path),
                *(
                    f"{100 * np.nanmean(found[score]):.2f}"
                    for score in COLUMNS.values()
                ),
            ]
        )
    return plain.markdown(rows)


if __name__ == "__main__":
    sys.exit(entry.enter(main, __doc__))
