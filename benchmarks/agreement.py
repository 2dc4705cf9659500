"""PFLlib's or HtFLlib's accuracy beside a run's, on the same clients from the same
weights.

    python -m benchmarks.agreement --pfllib=PATH --run=RUN [--markdown]
    python -m benchmarks.agreement --htfllib=PATH --run=RUN [--shuffled]

PATH is a checkout of github.com/TsingZ0/PFLlib, or of github.com/TsingZ0/HtFLlib where
clients have networks of several architectures (CNN-1 to CNN-5), run as it stands (what
it imports and does not use here is stood in for where it is missing; PFLlib's training
loss at an evaluation is left out, and no results are written), RUN the directory of a
run of one of its methods known here, with plain SGD, plain means and everybody in each
round. The library gets the run's clients, its initial weights and its settings, and
draws batches of its own, by the run's seed. Compared is the accuracy over all test
examples before local training (`pre`); of FedBABU the body as received under its
untrained head, and in the last line the fine-tuned model; of FedProto that of the
nearest prototype. Both libraries always drop a short last batch (--drop_last), and
HtFLlib's clients take their batches in one order in all epochs, but with --shuffled.
"""

import contextlib
import importlib
import io
import os
import random
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from benchmarks import htfllib, peers, pytorch, recipes, report
from fedjax_pfl import keys
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import results
from fedjax_pfl.experiment.presets import same
from fedjax_pfl.models.nets import AFM
from fedjax_pfl.types import Model

FLAGS = flags.FLAGS

METHODS = {  # ours -> PFLlib's module and server
    "local": ("serverlocal", "Local"),
    "fedavg": ("serveravg", "FedAvg"),
    "fedper": ("serverper", "FedPer"),
    "fedbabu": ("serverbabu", "FedBABU"),
    "per_fedavg": ("serverperavg", "PerAvg"),
}
PLAIN = {
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip": None,
    "lr_decay": 1.0,
    "participation": "1",
}
PLAIN |= {
    "server_optimizer": None,
    "compute_dtype": "float32",
    "features": None,
    "unseen": 0.0,
}
# PFLlib's
HPARAMS = {
    "per_fedavg": {"alpha": None, "beta": None},
    "fedbabu": {"fine_tune": "all"},
}
# what the libraries call the accuracy, if it is not `acc`
SCORES = {"fedbabu": "untuned_acc", "fedproto": "proto_acc"}


class Case(NamedTuple):
    """What a process of its own is to run."""

    run: str
    checkout: str
    folder: str
    shuffled: bool = False  # HtFLlib's batches


def check(run: results.Run, mixed: bool = False) -> None:
    """Raises InputError if PFLlib, or of clients with `mixed` networks HtFLlib, cannot
    do the same."""
    config, methods, nets = (
        run.experiment.config,
        htfllib.SERVERS if mixed else METHODS,
        AFM if mixed else pytorch.NETS,
    )
    if config.algo not in methods:
        raise InputError(
            f"--run has the method {config.algo}: it must be one of "
            f"{', '.join(methods)}."
        )
    if set(run.experiment.networks) - set(nets):
        raise InputError(
            f"--run has the network {config.model}: it must be one of "
            f"{', '.join(nets)}."
        )
    if mixed and (shape := run.experiment.dataset.x.shape[1:]) != (32, 32, 3):
        raise InputError(
            f"--run has examples of shape {shape}: for a comparison they must be "
            "images of 32x32x3."
        )
    for name, value in PLAIN.items():
        if not same(name, found := getattr(config, name), value):
            raise InputError(
                f"--run has {name}={found}: for a comparison it must be {value}."
            )
    for name, value in HPARAMS.get(config.algo, {}).items():
        if (found := config.hparams[name]) != value:
            raise InputError(
                f"--run has hparam={name}={found}: for a comparison it must be {value}."
            )
    if config.epochs is None:
        raise InputError(
            "--run has local work by --steps: for a comparison it must be by --epochs."
        )


def options(run: results.Run, net: Any) -> pytorch.Options:
    """What PFLlib's command line would hand on."""
    config, classes = run.experiment.config, run.experiment.dataset.num_classes
    recipe = recipes.RECIPES["pfllib_20"]._replace(
        classes=classes, clients=len(run.experiment.partition.train_sizes)
    )
    made = peers.options(
        peers.Case(
            recipe._replace(batch=config.batch_size, lr=config.lr), config.rounds
        ),
        net,
    )
    made.algorithm, made.local_epochs, made.eval_gap = (
        config.algo,
        config.epochs,
        config.eval_every or config.rounds,
    )
    made.fine_tuning_epochs = config.hparams.get("fine_tune_epochs", 0)
    return made


def weights(run: results.Run, model: Model) -> list[np.ndarray]:
    """The parameters with which a network of the run began, as PyTorch has them."""
    e = run.experiment
    start = jax.device_get(model.init(keys.fold(e.key, keys.Run.INIT)))
    return pytorch.parameters(start, e.dataset.x.shape[-1])


def network(run: results.Run) -> Any:
    """The run's network in PyTorch, with the weights with which the run began; body and
    head have PFLlib's names."""
    import torch

    e = run.experiment
    layers = pytorch._network(
        run.experiment.config.model, e.dataset.x.shape[1:], e.dataset.num_classes
    )
    for parameter, value in zip(
        layers.parameters(), weights(run, e.task.model), strict=True
    ):
        parameter.data = torch.tensor(np.array(value))
    return torch.nn.Sequential(OrderedDict(base=layers[:-1], head=layers[-1]))


def theirs(case: Case) -> list[float]:
    """The accuracies of PFLlib's evaluations, one after another.

    Raises:
      InputError: PFLlib cannot be run.
    """
    import torch

    run = results.load(case.run)
    pytorch.import_from(case.checkout)
    peers.write_clients(
        Path(case.folder), run.experiment.dataset, run.experiment.partition
    )
    module, name = METHODS[run.experiment.config.algo]
    args = options(run, network(run))
    os.chdir(Path(case.folder) / "system")
    with pytorch.told("PFLlib"), contextlib.redirect_stdout(io.StringIO()):
        server = getattr(importlib.import_module(f"flcore.servers.{module}"), name)(
            args, 0
        )
        server.save_results = server.save_global_model = lambda: None
        # ids, examples, losses: a pass over all data
        server.train_metrics = lambda: ([0], [1], [0.0])
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(run.experiment.config.seed)
        server.train()
    return [float(x) for x in server.rs_test_acc]


def theirs_mixed(case: Case) -> list[float]:
    """The accuracies of HtFLlib's evaluations, one after another.

    Raises:
      InputError: HtFLlib cannot be run.
    """
    import torch

    run = results.load(case.run)
    config, e = run.experiment.config, run.experiment
    peers.write_clients(Path(case.folder), e.dataset, e.partition)
    own, shared = [weights(run, model) for model in e.task.models], e.task.shared
    with pytorch.told("HtFLlib"), contextlib.redirect_stdout(io.StringIO()):
        server_class = htfllib.loaded(config.algo, case.checkout, case.folder)
        htfllib.begin_with(
            [own[g] for g in e.task.architecture],
            weights(run, shared) if shared else [],
        )
        if case.shuffled:
            htfllib.shuffled()
        server = server_class(mixed_options(run), 0)
        server.save_results = lambda: None
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(config.seed)
        server.train()
    return [float(x) for x in server.rs_test_acc]


def mixed_options(run: results.Run) -> pytorch.Options:
    """What HtFLlib's command line would hand on."""
    config, e = run.experiment.config, run.experiment
    recipe = recipes.RECIPES["pfllib_20"]._replace(
        classes=e.dataset.num_classes, clients=len(e.task.sizes)
    )
    recipe = recipe._replace(batch=config.batch_size, lr=config.lr)
    made = htfllib.options(htfllib.Case(config.algo, recipe, config.rounds))
    text = lambda name: "network({}, {})".format(*AFM[name])
    made.models = [text(name) for name in e.networks]
    shared = [
        name
        for name, g in zip(e.networks, e.task.architecture, strict=True)
        if e.task.models[g] is e.task.shared
    ]
    made.global_model = text(config.shared_model or (*shared, e.networks[0])[0])
    made.local_epochs, made.eval_gap = config.epochs, config.eval_every or config.rounds
    for name, value in {"lamda": config.hparams.get("lam"), **config.hparams}.items():
        if value is not None and hasattr(made, name):
            setattr(made, name, value)
    return made


def rows(run: results.Run, found: list[float], library: str = "PFLlib") -> list[tuple]:
    """Of the table: round, ours, the library's and the difference, in %."""
    config = run.experiment.config
    gap = config.eval_every or config.rounds
    tuned = config.algo == "fedbabu"
    ours = run.metrics.set_index("round").to_dict("index")
    score = f"pre/{SCORES.get(config.algo, 'acc')}_micro"
    marks = [(f"{i * gap}", i * gap, score) for i in range(len(found))]
    if tuned:
        marks[-1] = (
            f"{config.rounds}, fine-tuned",
            config.rounds,
            "pre/acc_micro",
        )
    made: list[tuple] = [("rounds", "ours", library, f"ours - {library}")]
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
    mixed = bool(FLAGS.htfllib)
    library = "HtFLlib" if mixed else "PFLlib"
    checkout = os.path.abspath(pytorch.check(FLAGS.htfllib or FLAGS.pfllib, library))
    if not FLAGS.run:
        raise InputError("Say which run with --run=DIRECTORY.")
    run = results.load(FLAGS.run)
    check(run, mixed)
    if not run.experiment.config.drop_last:
        print(f"The run keeps short last batches, {library} drops them (--drop_last).")
    with tempfile.TemporaryDirectory() as folder:
        case = Case(os.path.abspath(FLAGS.run), checkout, folder, FLAGS.shuffled)
        (found,) = report.fresh(theirs_mixed if mixed else theirs, [case])
    print(report.table(rows(run, found, library)))


if __name__ == "__main__":
    flags.DEFINE_string("pfllib", None, "a checkout of PFLlib")
    flags.DEFINE_string("htfllib", None, "a checkout of HtFLlib")
    flags.DEFINE_string("run", None, "the directory of a run")
    flags.DEFINE_bool("shuffled", False, "HtFLlib's clients shuffle their batches")
    report.run(main)
