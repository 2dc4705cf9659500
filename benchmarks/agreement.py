"""PFLlib's accuracy beside a run's, on the same clients from the same weights.

    python -m benchmarks.agreement --pfllib=PATH --run=RUN [--markdown]

PATH is a checkout of github.com/TsingZ0/PFLlib, run as it stands (h5py and matplotlib are stood in
for where they are missing; the training loss at an evaluation is left out, and no results are
written), RUN the directory of a run of one of its methods known here, with plain SGD and everybody
in each round. PFLlib gets the run's clients, its initial weights and its settings, and draws
batches of its own, by the run's seed. Compared is the accuracy over all test examples before local
training (`pre`); of FedBABU the body as received under its untrained head, and in the last line the
fine-tuned model. PFLlib always drops a short last batch (--drop_last).
"""

import contextlib
import importlib
import importlib.util
import io
import os
import random
import sys
import tempfile
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from benchmarks import peers, pytorch, recipes, report
from experiments import runs
from fedjax_pfl import keys
from fedjax_pfl.errors import InputError

FLAGS = flags.FLAGS
flags.DEFINE_string("run", None, "the directory of a run")

METHODS = {  # ours -> its module and server
    "local": ("serverlocal", "Local"),
    "fedavg": ("serveravg", "FedAvg"),
    "fedper": ("serverper", "FedPer"),
    "fedbabu": ("serverbabu", "FedBABU"),
    "per_fedavg": ("serverperavg", "PerAvg"),
}
MISSING = ("h5py", "matplotlib", "matplotlib.pyplot")  # what is imported there and not used here
PLAIN = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip": None, "lr_decay": 1.0, "participation": "1"}


class Case(NamedTuple):
    """What a process of its own is to run."""

    run: str
    checkout: str
    folder: str


def check(run: runs.Run) -> None:
    """Raises InputError if PFLlib cannot do the same."""
    config = run.config
    if config.algo not in METHODS:
        raise InputError(f"--run has the method {config.algo}: it must be one of {', '.join(METHODS)}.")
    if config.model not in pytorch.NETS:
        raise InputError(f"--run has the network {config.model}: it must be one of {', '.join(pytorch.NETS)}.")
    for name, value in PLAIN.items():
        if getattr(config, name) != value:
            raise InputError(f"--run has {name}={getattr(config, name)}: for a comparison it must be {value}.")
    if config.epochs is None:
        raise InputError("--run has local work by --steps: for a comparison it must be by --epochs.")


def options(run: runs.Run, net: Any) -> peers.Options:
    """What PFLlib's command line would hand on."""
    config, classes = run.config, run.experiment.dataset.num_classes
    recipe = recipes.RECIPES["pfllib_20"]._replace(classes=classes, clients=len(run.experiment.partition.train_sizes))
    made = peers.options(peers.Case(recipe._replace(batch=config.batch_size, lr=config.lr), config.rounds), net)
    made.algorithm, made.local_epochs, made.eval_gap = config.algo, config.epochs, config.eval_every or config.rounds
    made.fine_tuning_epochs = config.hparams.get("fine_tune_epochs", 0)
    return made


def network(run: runs.Run) -> Any:
    """The run's network in PyTorch, with the weights with which the run began; body and head have
    PFLlib's names."""
    import torch

    e = run.experiment
    shape = e.dataset.x.shape[1:]
    layers = pytorch._network(run.config.model, shape, e.dataset.num_classes)
    start = jax.device_get(e.task.model.init(keys.fold(e.key, keys.Run.INIT)))
    for parameter, value in zip(layers.parameters(), pytorch.parameters(start, shape[-1]), strict=True):
        parameter.data = torch.tensor(np.array(value))
    return torch.nn.Sequential(OrderedDict(base=layers[:-1], head=layers[-1]))


def theirs(case: Case) -> list[float]:
    """The accuracies of PFLlib's evaluations, one after another.

    Raises:
      InputError: PFLlib cannot be run.
    """
    import torch

    run = runs.load(case.run)
    torch.set_num_threads(report.cores())
    for name in MISSING:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            sys.modules[name] = types.ModuleType(name)
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.path.join(case.checkout, "system"))
    peers.write_clients(Path(case.folder), run.experiment.dataset, run.experiment.partition)
    module, name = METHODS[run.config.algo]
    args = options(run, network(run))
    os.chdir(Path(case.folder) / "system")
    with peers.told(), contextlib.redirect_stdout(io.StringIO()):
        server = getattr(importlib.import_module(f"flcore.servers.{module}"), name)(args, 0)
        server.save_results = server.save_global_model = lambda: None
        server.train_metrics = lambda: ([0], [1], [0.0])  # ids, examples, losses: a pass over all data
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(run.config.seed)
        server.train()
    return [float(x) for x in server.rs_test_acc]


def rows(run: runs.Run, found: list[float]) -> list[tuple]:
    """Of the table: round, ours, PFLlib's and the difference, in %."""
    gap = run.config.eval_every or run.config.rounds
    tuned = run.config.algo == "fedbabu"
    ours = {row["round"]: row for row in run.metrics}
    marks = [(f"{i * gap}", i * gap, "pre/untuned_acc_micro" if tuned else "pre/acc_micro") for i in range(len(found))]
    if tuned:
        marks[-1] = (f"{run.config.rounds}, fine-tuned", run.config.rounds, "pre/acc_micro")
    made: list[tuple] = [("rounds", "ours", "PFLlib", "ours - PFLlib")]
    for (label, t, name), their in zip(marks, found, strict=True):
        mine = ours.get(t, {}).get(name)
        shown = [
            None if x is None else f"{round(100 * x, 2) + 0.0:.2f}"
            for x in (mine, their, None if mine is None else mine - their)
        ]
        made.append((label, *shown))
    return made


def main(argv) -> None:
    del argv
    checkout = os.path.abspath(peers.check(FLAGS.pfllib))
    if not FLAGS.run:
        raise InputError("Say which run with --run=DIRECTORY.")
    run = runs.load(FLAGS.run)
    check(run)
    if not run.config.drop_last:
        print("The run keeps short last batches, PFLlib drops them (--drop_last).")
    with tempfile.TemporaryDirectory() as folder:
        (found,) = report.fresh(theirs, [Case(os.path.abspath(FLAGS.run), checkout, folder)])
    print(report.table(rows(run, found)))


if __name__ == "__main__":
    report.run(main)
