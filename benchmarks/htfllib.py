"""HtFLlib on pFedAFM's networks: a round of FedProto and of FML for `peers --htfllib`,
and its servers for `agreement`.

PATH is a checkout of github.com/TsingZ0/HtFLlib, of which the servers and clients are
run as they stand, without what they do not need here: torchvision and h5py are stood in
for where they are missing, no results are written. Nothing is written there either: the
clients' models go to a temporary folder, from and to which HtFLlib reads and writes
them in every round. CNN-1 to CNN-5, which it has not, are made here; their features are
500, its head is what it makes.
"""

import contextlib
import functools
import importlib
import io
import os
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import pytorch, recipes
from benchmarks.recipes import Recipe
from benchmarks.runner import Runner
from fedjax_pfl import models, simulate
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.data.federate import federate
from fedjax_pfl.models.nets import AFM

SERVERS = {  # ours -> its module and server
    "local": ("serverlocal", "Local"),
    "lg_fedavg": ("serverlg", "LG_FedAvg"),
    "fedproto": ("serverproto", "FedProto"),
    "fml": ("serverfml", "FML"),
}
# that are timed: a line's name -> ours, its hyperparameters
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedProto": ("fedproto", {}),
    "FML": ("fml", {}),
}
FEATURES = 500


class Case(NamedTuple):
    """What a process of its own is to run; without a checkout it is ours."""

    method: str
    recipe: Recipe
    repeats: int
    checkout: str | None = None
    folder: str = ""
    hparams: dict[str, Any] = {}  # noqa: RUF012  # of our method


class Side(NamedTuple):
    """What one side cost: seconds of a round without evaluation, with that before local
    training, and as evaluated by default, the medians, the parameters of all clients'
    models, and of HtFLlib the seconds of training in a round, the mean, by its clients'
    own count."""

    seconds: float
    before: float
    evaluated: float
    parameters: int
    training: float | None = None


def network(channels: int, units: int) -> Any:
    """One of pFedAFM's networks in PyTorch, its last layer named `fc` as HtFLlib wants
    it, which replaces that one."""
    from torch import nn

    convs = (
        nn.Conv2d(3, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, channels, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    dense = (
        nn.Linear(25 * channels, units),
        nn.ReLU(),
        nn.Linear(units, FEATURES),
        nn.ReLU(),
    )
    return nn.Sequential(
        OrderedDict(
            body=nn.Sequential(*convs, nn.Flatten(), *dense), fc=nn.Linear(FEATURES, 1)
        )
    )


def measure(case: Case) -> Side:
    """Times one side in this process, which should be a fresh one.

    Raises:
      InputError: HtFLlib cannot be run.
    """
    if case.checkout is None:
        return ours(case)
    with pytorch.told("HtFLlib"):
        return theirs(case)


def ours(case: Case) -> Side:
    """Times our rounds; by default an evaluated one scores the test examples before and
    after local training."""
    recipe = case.recipe
    data, owned = recipes.partitioned(recipe)
    f = federate(data, owned)
    nets = [models.model(name, recipe.shape, recipe.classes) for name in AFM]
    fields = {
        "lr": recipe.lr,
        "batch_size": recipe.batch,
        "epochs": 1,
        "rounds": 1,
        "drop_last": True,
    }
    fields["shared"] = nets[-1]
    task = simulate.task(data, f.class_counts, nets, **fields)
    method = functools.partial(ALGORITHMS[case.method], **case.hparams)
    run = Runner(method, task, f, 1, jax.device_count())
    run(), run(evaluated=True)
    sizes = [
        models.num_parameters(jax.eval_shape(net.init, jax.random.key(0)))
        for net in nets
    ]
    kinds: tuple[dict[str, bool], ...] = ({}, {"before": True}, {"evaluated": True})
    seconds = [
        statistics.median(run(**kind) for _ in range(case.repeats)) for kind in kinds
    ]
    return Side(*seconds, sum(sizes[i] for i in task.architecture))


def theirs(case: Case) -> Side:
    """Times HtFLlib's server, whose working directory is the temporary folder; an
    evaluated round, its default, scores the test examples before local training."""
    import torch

    server_class = loaded(case.method, case.checkout, case.folder)
    with contextlib.redirect_stdout(io.StringIO()):
        server = server_class(options(case), 0)
        server.save_results = lambda: None
        server.train()
        plain, server.Budget, server.eval_gap = server.Budget[1:], [], 1
        server.train()
    model = lambda client: torch.load(
        os.path.join(client.save_folder_name, f"{client.role}_model.pt")
    )
    count = lambda client: sum(x.numel() for x in model(client).parameters())
    evaluated, parameters = (
        statistics.median(server.Budget[1:]),
        sum(map(count, server.clients)),
    )
    return Side(
        statistics.median(plain),
        evaluated,
        evaluated,
        parameters,
        pytorch.training(server.clients),
    )


def loaded(method: str, checkout: str | None, folder: str) -> Any:
    """The class of HtFLlib's server for a method, and the temporary folder as working
    directory."""
    import torch

    pytorch.import_from(str(checkout))
    # it saves whole models
    torch.load = functools.partial(torch.load, weights_only=False)
    os.chdir(Path(folder) / "system")
    module, name = SERVERS[method]
    nets = importlib.import_module("flcore.trainmodel.models")
    nets.network = network  # type: ignore[attr-defined]  # where it evaluates the texts of `models`
    return getattr(importlib.import_module(f"flcore.servers.{module}"), name)


def begin_with(weights: Sequence[list[np.ndarray]], shared: list[np.ndarray]) -> None:
    """Lets each client's model, and the one that all exchange, begin with these
    parameters, as `pytorch.parameters` has them."""
    import torch

    split = importlib.import_module("flcore.trainmodel.models").BaseHeadSplit
    made = split.__init__

    def begun(
        self: Any,
        args: Any,
        cid: int = 0,
        feature_dim: int | None = None,
        is_global: bool = False,
    ) -> None:
        made(self, args, cid, feature_dim, is_global)
        for parameter, value in zip(
            self.parameters(), shared if is_global else weights[cid], strict=True
        ):
            parameter.data = torch.tensor(np.array(value))

    split.__init__ = begun


def shuffled() -> None:
    """Lets the clients shuffle their training batches, which come in one order in all
    epochs."""
    import torch

    base = importlib.import_module("flcore.clients.clientbase")
    base.DataLoader = lambda data, size, drop_last, shuffle: (
        torch.utils.data.DataLoader(data, size, drop_last=drop_last, shuffle=drop_last)
    )  # type: ignore[attr-defined]  # it drops a short last batch in training only


def options(case: Case) -> pytorch.Options:
    """What HtFLlib's command line would hand on."""
    nets = [f"network({channels}, {units})" for channels, units in AFM.values()]
    given = pytorch.options(case.recipe, case.repeats, "cpu") | {
        "algorithm": case.method,
        "models_folder_name": "",
    }
    given |= {"models": nets, "global_model": nets[-1], "feature_dim": FEATURES}
    return pytorch.Options(**given, lamda=1.0, alpha=0.5, beta=0.5)


def rows(found: dict[str, list[Side]]) -> list[tuple]:
    """Of the table; {method: ours, HtFLlib's, ours again}."""
    header = (
        "method",
        "evaluated",
        "ours s",
        "HtFLlib s",
        "ours again s",
        "HtFLlib / ours",
        "parameters",
    )
    made: list[tuple] = [header]
    for method, sides in found.items():
        same = (
            "the same"
            if len({side.parameters for side in sides}) == 1
            else "NOT the same"
        )
        for evaluated, of in (
            ("no", "seconds"),
            ("before training", "before"),
            ("by default", "evaluated"),
        ):
            first, other, again = (getattr(side, of) for side in sides)
            made.append(
                (
                    method,
                    evaluated,
                    first,
                    other,
                    again,
                    2 * other / (first + again),
                    same,
                )
            )
    return made
