"""A round of FedAvg beside PFLlib's, with the same clients and the same network, in one
run.

    python -m benchmarks.peers --pfllib=PATH [--markdown] [--clients=20]
    [--images=60000] [--repeats=3]
    python -m benchmarks.peers --htfllib=PATH [--clients=10]    # likewise the others

PATH is a checkout of github.com/TsingZ0/PFLlib, of which its FedAvg server with its
FedAvgCNN is run as it stands, without results; it needs PyTorch and what else it
imports, h5py and torchvision apart. Nothing is written there. The setting is PFLlib's:
SGD, one local epoch, batch 10, everybody in each round, Dirichlet 0.1 (see
`benchmarks.recipes`); random images of CIFAR-10's shape are written in its format to a
temporary folder, from which its clients read theirs in every round. Both drop a
client's last batch if it is short, so that the steps are the same. First we run, then
PFLlib, then we again, in processes of their own with every core.

`round s` is the median without the first, evaluation apart; PFLlib's is what its server
counts, of which the line below the table has the part that its clients count as
training, without reading their files. Two columns do not compare: PFLlib's evaluation
has the training examples and an AUC in it, and `start s` is PFLlib's with its imports,
ours with the drawing of the images. The rates are of rounds, the memory is the device's
where it says it, on a CPU that of the process, and `speed` is relative to PFLlib's
steps/s. Beside other work PFLlib, whose threads wait for each other at every operation,
is slowed down more than we are.

Known are the versions whose options are one object and whose files are named ID.npz:
those with --privacy (they import opacus, too), those after, and those with --few_shot.
On an accelerator nothing of this was tried.

With --htfllib it is rounds of FedProto and of FML beside HtFLlib's, see
`benchmarks.htfllib`: CNN-1 to CNN-5, on a CPU; below the table what its clients count
as training, without reading files.
"""

import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from benchmarks import htfllib, pytorch, recipes, report
from benchmarks.recipes import RECIPES, Cost, Recipe
from fedjax_pfl import models
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.partition import Partition

FLAGS = flags.FLAGS


class Case(NamedTuple):
    """What a process of its own is to run; without a checkout it is ours."""

    recipe: Recipe
    repeats: int
    checkout: str | None = None
    folder: str = ""
    device: str = "cpu"  # or cuda


class Side(NamedTuple):
    """What one side cost."""

    cost: Cost
    parameters: int  # of its network
    # seconds of a round, the mean, by the clients' own count, where they have one
    training: float | None = None


def write(folder: Path, recipe: Recipe) -> None:
    """The clients' examples of a recipe as PFLlib wants them, see `write_clients`."""
    write_clients(folder, *recipes.partitioned(recipe))


def write_clients(
    folder: Path,
    data: Dataset,
    owned: Partition,
    save: Callable[..., None] = np.savez_compressed,
) -> None:
    """Clients' examples as PFLlib wants them: dataset/NAME/{train,test}/ID.npz, a dict
    of x [n, C, H, W] and y."""
    parts = {
        "train": (owned.train, owned.train_sizes),
        "test": (owned.test, owned.test_sizes),
    }
    for part, (index, sizes) in parts.items():
        place = folder / "dataset" / pytorch.DATASET / part
        place.mkdir(parents=True)
        for client, (rows, size) in enumerate(zip(index, sizes, strict=True)):
            own = rows[:size]
            x = np.asarray(data.prepare(data.x[own])).transpose(0, 3, 1, 2)
            save(
                place / f"{client}.npz",
                data=np.array({"x": x, "y": data.y[own]}, object),
            )
    (folder / "system").mkdir()


def measure(case: Case) -> Side:
    """Times one side in this process, which should be a fresh one.

    Raises:
      InputError: PFLlib cannot be run.
    """
    if case.checkout is not None:
        with pytorch.told("PFLlib"):
            return pfllib(case)
    recipe = case.recipe
    net = models.model(recipe.model, recipe.shape, recipe.classes)
    count = models.num_parameters(jax.eval_shape(net.init, jax.random.key(0)))
    return Side(recipes.measure(recipe, repeats=case.repeats, drop_last=True), count)


def pfllib(case: Case) -> Side:
    """Times PFLlib's server, whose working directory is the temporary folder."""
    import torch

    pytorch.import_from(str(case.checkout))
    os.chdir(Path(case.folder) / "system")
    begin = time.perf_counter()
    from flcore.servers.serveravg import FedAvg  # type: ignore
    from flcore.trainmodel.models import FedAvgCNN  # type: ignore

    recipe, on_cpu = case.recipe, case.device == "cpu"
    net = FedAvgCNN(
        in_features=recipe.shape[-1], num_classes=recipe.classes, dim=1600
    ).to(case.device)
    with contextlib.redirect_stdout(io.StringIO()):
        server = FedAvg(options(case, net), 0)
        server.save_results = server.save_global_model = lambda: None
        start = time.perf_counter() - begin
        server.train()
        begin = time.perf_counter()
        server.evaluate()
        evaluation = time.perf_counter() - begin
    times = server.Budget[1:]  # the first has an evaluation in it
    steps = sum(client.train_samples // recipe.batch for client in server.clients)
    peak = report.process_peak() if on_cpu else torch.cuda.max_memory_allocated()
    layout = f"{torch.get_num_threads()} threads" if on_cpu else case.device
    cost = Cost(
        layout,
        start,
        0,
        statistics.median(times),
        evaluation,
        steps,
        steps * recipe.batch,
        peak,
    )
    return Side(
        cost, sum(x.numel() for x in net.parameters()), pytorch.training(server.clients)
    )


def options(case: Case, net: Any) -> pytorch.Options:
    """The options that FedAvg's server and clients read in the versions that are
    known."""
    given = pytorch.options(case.recipe, case.repeats, case.device) | {
        "model": net,
        "algorithm": "FedAvg",
    }
    given |= {
        "learning_rate_decay_gamma": 0.99,
        "dp_sigma": 0.0,
        "dlg_gap": 100,
        "batch_num_per_client": 2,
    }
    given |= dict.fromkeys(("learning_rate_decay", "dlg_eval", "privacy"), False)
    given |= dict.fromkeys(
        ("num_new_clients", "fine_tuning_epoch", "fine_tuning_epoch_new"), 0
    )
    return pytorch.Options(**given)


def compare(recipe: Recipe, repeats: int, checkout: str) -> list[Side]:
    """Ours, PFLlib's and ours again."""
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), recipe)
        ours, theirs = (
            Case(recipe, repeats),
            Case(recipe, repeats, checkout, folder, device),
        )
        return list(report.fresh(measure, (ours, theirs, ours)))


def rows(costs: list[Cost], recipe: Recipe, peak: float) -> list[tuple]:
    """Of the table."""
    flops = models.flops(recipe.model, recipe.shape, recipe.classes, recipe.batch)
    rates = [
        report.rates(cost.steps, cost.samples, cost.round, flops, peak)
        for cost in costs
    ]
    header = (
        "",
        "layout",
        "round s",
        "evaluation s",
        *report.RATES,
        "speed",
        "start s",
        "compile s",
        "GiB",
    )
    found: list[tuple] = [header]
    for name, cost, own in zip(
        ("ours", "PFLlib", "ours again"), costs, rates, strict=True
    ):
        last = (
            own[0] / rates[1][0],
            cost.start,
            cost.compile or None,
            cost.peak / 2**30,
        )
        found.append((name, cost.layout, cost.round, cost.evaluation, *own, *last))
    return found


def beside_htfllib(recipe: Recipe) -> None:
    """Prints the table of both methods; each side runs in a process of its own."""
    checkout, found = pytorch.check(FLAGS.htfllib, "HtFLlib"), {}
    print(report.machine("torch"))
    print(
        f"medians of {FLAGS.repeats}; {recipe.clients} clients of CNN-1 to CNN-5, "
        f"{recipe.images} images\n"
    )
    for name, (method, hparams) in htfllib.METHODS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), recipe)
            ours = htfllib.Case(method, recipe, FLAGS.repeats, hparams=hparams)
            theirs = ours._replace(checkout=checkout, folder=folder)
            found[name] = list(report.fresh(htfllib.measure, (ours, theirs, ours)))
    print(report.table(htfllib.rows(found)))
    counted = ", ".join(
        f"{name} {theirs.training:.3g} s" for name, (_, theirs, _) in found.items()
    )
    print(f"\ntraining, by the count of HtFLlib's clients, of a round: {counted}")


def main(argv) -> None:
    del argv
    recipe = RECIPES["pfllib_20"]
    clients, images = (
        FLAGS.clients or (10 if FLAGS.htfllib else 20),
        FLAGS.images or recipe.images,
    )
    if FLAGS.htfllib:
        return beside_htfllib(
            recipe._replace(clients=clients, cohort=clients, images=images, lr=0.01)
        )
    checkout = pytorch.check(FLAGS.pfllib, "PFLlib")
    recipe, peak = (
        recipe._replace(clients=clients, cohort=clients, images=images),
        report.matmul_peak(),
    )
    print(report.machine("torch"))
    print(
        f"matmul peak {peak:.0f} GFLOP/s; medians of {FLAGS.repeats}; {clients} "
        f"clients, {images} images\n"
    )
    sides = compare(recipe, FLAGS.repeats, checkout)
    print(report.table(rows([side.cost for side in sides], recipe, peak)))
    ours, theirs, _ = sides
    same = (
        "the same"
        if ours.parameters == theirs.parameters
        else "NOT the same: the rates cannot be compared"
    )
    print(
        f"\nparameters: {ours.parameters:,} and PFLlib's {theirs.parameters:,}, {same}"
    )
    print(
        f"training, by the count of PFLlib's clients: {theirs.training:.3g} s of its "
        "round"
    )
    print(f"matmul peak at the end {report.matmul_peak():.0f} GFLOP/s")


if __name__ == "__main__":
    flags.DEFINE_string("pfllib", None, "a checkout of PFLlib")
    flags.DEFINE_string("htfllib", None, "a checkout of HtFLlib")
    flags.DEFINE_integer(
        "clients",
        None,
        "all of them in each round (default: 20, beside HtFLlib 10)",
        lower_bound=1,
    )
    flags.DEFINE_integer("images", None, "fewer images in all")
    flags.DEFINE_integer(
        "repeats", 3, "rounds that a median is taken of", lower_bound=1
    )
    report.run(main)
