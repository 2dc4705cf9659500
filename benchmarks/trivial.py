"""Scores of predictors that ignore their input, from a partition's class counts.

    python -m benchmarks.trivial --preset=pfedc_cifar100_tasks --alpha=0.1 class single

The words are task maps of pFedC. Nothing is trained. `no` always answers no to the
question whether a label is in the group of a task. `majority` answers the most frequent
class of the client in the group, given the group. Both are means over the tasks that a
client holds, then over clients, in %.
"""

import sys
from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedjax_pfl.algorithms.pfedc.task_maps import branches
from fedjax_pfl.data.partition import class_counts
from fedjax_pfl.experiment import cli, config, results
from fedjax_pfl.experiment.build import prepare

SEEDS = (0, 1, 2)


def scores(of: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Returns the scores of both predictors.

    Args:
      of: [C] task of each class.
      counts: [N, C] examples of each class at each client.
    """
    member = np.arange(of.max() + 1)[:, None] == of  # [T, C]
    in_task = counts @ member.T  # [N, T]
    held = in_task > 0
    size = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    most = np.stack([counts[:, group].max(axis=1) for group in member], axis=1)
    values = {"no": 1 - in_task / size, "majority": most / np.maximum(in_task, 1)}
    some = held.any(axis=1)
    return {
        name: 100 * np.mean((x * held).sum(axis=1)[some] / held.sum(axis=1)[some])
        for name, x in values.items()
    }


def table(given: dict[str, object], maps: Sequence[str]) -> pd.DataFrame:
    """Returns mean and standard deviation over seeds, a row per task map."""
    rows = []
    for seed in SEEDS:
        settings = config.resolve(given | {"seed": seed})
        data = prepare(settings.data, settings.partition, settings.model, seed)
        counts = class_counts(data.everybody, data.dataset)
        for name in maps:
            of = branches(data.dataset, name).of  # type: ignore[arg-type]  # needs the classes
            rows.append({"tasks": name} | scores(of, counts))
    found = pd.DataFrame(rows).groupby("tasks", sort=False).agg(["mean", "std"])
    return found.round(2)


def main() -> None:
    """Prints the table of the command line's setting."""
    parsed = cli.parse(sys.argv[1:], cli.SETTING_FLAGS, __doc__ or "")
    maps = parsed.words or ["class"]
    print(results.render(table({"algo": "pfedc"} | parsed.settings(), maps)))


if __name__ == "__main__":
    main()
