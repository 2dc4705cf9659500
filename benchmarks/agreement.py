"""PFLlib's or HtFLlib's accuracy beside a run's, on the same clients from the same
weights.

    python -m benchmarks.agreement --pfllib=PATH --run=RUN [--markdown]
    python -m benchmarks.agreement --pfllib=PATH --algo=local,fedavg [--markdown]
    [--model=lenet] [--data_fraction=0.3] [--lr=0.02] [--rounds=20] [--seeds=0,3,4]
    [--results=FILE] [--corrected=FILE]
    python -m benchmarks.agreement --htfllib=PATH --run=RUN [--shuffled]

PATH is a checkout of github.com/TsingZ0/PFLlib, or of github.com/TsingZ0/HtFLlib where
clients have networks of several architectures (CNN-1 to CNN-5), run as it stands (what
it imports and does not use here is stood in for where it is missing; PFLlib's training
loss and AUC at an evaluation are left out, and no results are written), RUN the
directory of a run of one of its methods known here, with plain SGD, plain means and
everybody in each round. The library gets the run's clients, its initial weights and its
settings, and draws batches of its own, by the run's seed. Compared is the accuracy over
all test examples before local training (`pre`), or the score that `benchmarks.pfllib`
names; of FedBABU the body as received under its untrained head, and in the last line
the fine-tuned model; of FedProto that of the nearest prototype. Both libraries always
drop a short last batch (--drop_last), and HtFLlib's clients take their batches in one
order in all epochs, but with --shuffled.

With --algo both sides run, each in a process of its own with one thread, for each of
the methods (`all`: all of `benchmarks.pfllib`) and seeds: CIFAR-10, 20 clients by
Dirichlet 0.1, batch 10, an evaluation every second round. A score is the mean over the
evaluations of the last ten rounds; the table has means and standard deviations over the
seeds. --results keeps what was found, and a seed of a method that it has does not run
again; without --algo its table is printed, with the differences to a checkout that
`git apply benchmarks/pfllib_corrected.patch` changed, which --corrected keeps.
"""

import contextlib
import functools
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from benchmarks import htfllib, peers, pfllib, pytorch, recipes, report
from fedjax_pfl import keys
from fedjax_pfl.engine.xla import split_cpu
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import results, sweep
from fedjax_pfl.experiment.presets import same
from fedjax_pfl.models.nets import AFM
from fedjax_pfl.types import Model

FLAGS = flags.FLAGS

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
# of HtFLlib: the score, if it is not `acc`
SCORES = {"fedproto": "pre/proto_acc/micro"}
SETTING = ("--preset=fedcp_cifar10", "--drop_last", "--eval_every=2")
RESULTS = "benchmarks/results/agreement.json"
CORRECTED = "benchmarks/results/agreement_corrected.json"
# method -> seed -> side -> scores
Scores = dict[str, dict[str, dict[str, list[float]]]]
LAST = 10  # rounds, over whose evaluations a mean is taken


class Pools(NamedTuple):
    """A process for each library, which runs one method after another."""

    ours: ProcessPoolExecutor
    theirs: ProcessPoolExecutor


@contextlib.contextmanager
def pools() -> Iterator[Pools]:
    """Starts a process with one thread for each library."""
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    start = functools.partial(
        ProcessPoolExecutor, 1, mp_context=spawn, initializer=split_cpu
    )
    with start() as ours, start() as theirs:
        yield Pools(ours, theirs)


class Case(NamedTuple):
    """What a process of its own is to run."""

    run: str
    checkout: str
    folder: str
    shuffled: bool = False  # HtFLlib's batches
    threads: int | None = None  # PFLlib's; None: all cores


def check(run: results.Run, mixed: bool = False) -> None:
    """Raises InputError if PFLlib, or of clients with `mixed` networks HtFLlib, cannot
    do the same."""
    config, methods, nets = (
        run.experiment.config,
        htfllib.SERVERS if mixed else pfllib.METHODS,
        AFM if mixed else pytorch.NETS,
    )
    if config.algo not in methods:
        raise InputError(
            f"--run has the method {config.algo}: it must be one of "
            f"{', '.join(methods)}."
        )
    if set(run.experiment.networks) - set(nets):
        raise InputError(
            f"--run has the network {config.model.name}: it must be one of "
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
    required = {} if mixed else pfllib.METHODS[config.algo].hparams
    for name, value in required.items():
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
    vars(made).update(pfllib.arguments(config))
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
        run.experiment.config.model.name, e.dataset.x.shape[1:], e.dataset.num_classes
    )
    for parameter, value in zip(
        layers.parameters(), weights(run, e.task.model), strict=True
    ):
        parameter.data = torch.tensor(np.array(value, order="C"))
    return torch.nn.Sequential(OrderedDict(base=layers[:-1], head=layers[-1]))


def theirs(case: Case) -> list[float]:
    """The accuracies of PFLlib's evaluations, one after another.

    Raises:
      InputError: PFLlib cannot be run.
    """
    import torch

    run = results.load(case.run)
    pytorch.import_from(case.checkout, case.threads)
    if not (Path(case.folder) / "system").exists():
        e = run.experiment
        peers.write_clients(Path(case.folder), e.dataset, e.partition, save=np.savez)
    method = pfllib.METHODS[run.experiment.config.algo]
    net = network(run)
    args = options(run, net.base if method.body_only else net)
    os.chdir(Path(case.folder) / "system")
    warnings.simplefilter("ignore")  # as its command does
    with pytorch.told("PFLlib"), contextlib.redirect_stdout(io.StringIO()):
        module = importlib.import_module(f"flcore.servers.{method.module}")
        if "sklearn.metrics" in sys.modules:
            sys.modules["sklearn.metrics"].roc_auc_score = lambda *_, **__: 0.0
        server = getattr(module, method.server)(args, 0)
        server.save_results = server.save_global_model = lambda: None
        # FedAS calls it at its end, and PFLlib has no such function
        server.avg_generalization_metrics = lambda: None
        # ids, examples, scores, losses: a pass over all data
        server.train_metrics = lambda: ([0], [1], [0.0], [0.0])
        server.train_metrics_personalized = server.train_metrics
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(run.experiment.config.seed)
        server.train()
    return [float(x) for x in method.read(server)]


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


def pairs(run: results.Run, found: list[float]) -> list[tuple[str, Any, float]]:
    """Returns the label, our score and the library's of each evaluation `found`; None
    where we have no such score, as after training in the last round."""
    config, method = run.experiment.config, None
    if len(set(run.experiment.networks)) == 1:
        method = pfllib.METHODS[config.algo]
    score = method.score if method else SCORES.get(config.algo, "pre/acc/micro")
    lag, gap = method.lag if method else 0, config.eval_every or config.rounds
    ours = run.metrics.set_index("round").to_dict("index")
    marks = [(f"{i * gap}", i * gap, score) for i in range(len(found))]
    if config.algo == "fedbabu":
        marks = [(label, t, "pre/untuned_acc/micro") for label, t, _ in marks]
        marks[-1] = (f"{config.rounds}, fine-tuned", config.rounds, score)
    mine = [ours.get(t - lag, {}).get(name, math.nan) for _, t, name in marks]
    return [
        (label, None if math.isnan(x) else x, their)
        for (label, *_), x, their in zip(marks, mine, found, strict=True)
    ]


def percent(x: float | None) -> str | None:
    return None if x is None else f"{round(100 * x, 2) + 0.0:.2f}"


def rows(run: results.Run, found: list[float], library: str = "PFLlib") -> list[tuple]:
    """Row of the table: round, ours, the library's and the difference, in %."""
    made: list[tuple] = [("rounds", "ours", library, f"ours - {library}")]
    for label, mine, their in pairs(run, found):
        gap = None if mine is None else mine - their
        made.append((label, *map(percent, (mine, their, gap))))
    return made


def ours(argv: list[str]) -> int:
    """Runs one of our methods, and returns its exit code."""
    with contextlib.redirect_stdout(io.StringIO()):
        return sweep.run(argv)


def compare(
    name: str, setting: list[str], checkout: str, folder: str, pools: Pools
) -> dict[str, Any]:
    """Returns the scores of both sides at the evaluations of the last ten rounds, of
    FedBABU those of the fine-tuned models.

    Args:
      folder: for the run, and for PFLlib's files.

    Raises:
      InputError: one of the two cannot be run.
    """
    path = f"{folder}/{name}"
    argv = [
        *setting,
        *pfllib.flags(name, FLAGS.model),
        "--devices=1",
        f"--workdir={path}",
    ]
    if pools.ours.submit(ours, argv).result():
        raise InputError(f"The run of {name} failed.")
    run = results.load(path)
    check(run)
    case = Case(path, checkout, f"{folder}/pfllib", threads=1)
    found = pools.theirs.submit(theirs, case).result()
    both = [pair for pair in pairs(run, found) if pair[1] is not None]
    first = run.config["rounds"] - LAST
    last = [x for x in both if x[0].isdecimal() and int(x[0]) > first]
    _, mine, their = zip(*(both[-1:] if name == "fedbabu" else last), strict=True)
    return {
        "here": [round(float(x), 5) for x in mine],
        "pfllib": [round(x, 5) for x in their],
    }


def spread(values: list[float]) -> str:
    """Returns the mean and the standard deviation of values, in %."""
    deviation = f" ± {percent(stdev(values))}" if len(values) > 1 else ""
    return f"{percent(fmean(values))}{deviation}"


def difference(seeds: dict[str, dict[str, list[float]]]) -> str:
    """Returns the spread over seeds of our mean score less PFLlib's."""
    pairs = seeds.values()
    return spread([fmean(x["here"]) - fmean(x["pfllib"]) for x in pairs])


def summary(found: Scores, corrected: Scores) -> list[tuple]:
    """Row of the table: method, score, PFLlib's, ours, the difference, and that to the
    corrected copy; means and standard deviations over seeds, in %."""
    columns = "method", "score", "PFLlib", "here", "difference", "corrected copy"
    made: list[tuple] = [(*columns, "what differs")]
    for name, method in pfllib.METHODS.items():
        if name in found:
            seeds = found[name]
            sides = (
                spread([fmean(x[side]) for x in seeds.values()])
                for side in ("pfllib", "here")
            )
            other = difference(corrected[name]) if name in corrected else ""
            numbers = (*sides, difference(seeds), other)
            made.append((name, method.score, *numbers, method.differs))
    return made


def several(
    names: list[str],
    seeds: list[str],
    setting: list[str],
    checkout: str,
    path: Path,
) -> Scores:
    """Compares methods with those of the seeds that a file does not have, adds them to
    it, and returns all that it has.

    Raises:
      InputError: the file has another setting.
    """
    stored = _stored(path) or {"setting": setting, "methods": {}}
    if names and stored["setting"] != setting:
        raise InputError(f"{path} has another setting: give another --results.")
    known = stored["methods"]
    with tempfile.TemporaryDirectory() as folder, pools() as both:
        for seed, name in itertools.product(seeds, names):
            if seed in known.get(name, {}):
                continue
            given = [*setting, f"--seed={seed}"]
            try:
                found = compare(name, given, checkout, f"{folder}/{seed}", both)
            # the libraries' own failures are some of the others
            except (InputError, RuntimeError, ValueError, LookupError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            known.setdefault(name, {})[seed] = found
            path.write_text(_lines(stored))
    return known


def _stored(path: Path) -> dict[str, Any]:
    """Returns what a file keeps, nothing if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _lines(stored: dict[str, Any]) -> str:
    """Returns results as JSON with a line per method and seed."""
    parts = []
    for name, seeds in stored["methods"].items():
        lines = [f'   "{seed}": {json.dumps(x)}' for seed, x in seeds.items()]
        parts.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
    setting, methods = json.dumps(stored["setting"]), ",\n".join(parts)
    return f'{{\n "setting": {setting},\n "methods": {{\n{methods}\n }}\n}}\n'


def main(argv) -> None:
    del argv
    path, names = Path(FLAGS.results), FLAGS.algo
    names = list(pfllib.METHODS) if names == ["all"] else names
    if path.exists() and not (FLAGS.pfllib or FLAGS.htfllib or FLAGS.run):
        kept = (_stored(Path(x)).get("methods", {}) for x in (path, FLAGS.corrected))
        return print(report.table(summary(*kept)))
    mixed = bool(FLAGS.htfllib)
    library = "HtFLlib" if mixed else "PFLlib"
    checkout = os.path.abspath(pytorch.check(FLAGS.htfllib or FLAGS.pfllib, library))
    if FLAGS.algo:
        unknown = set(names) - set(pfllib.METHODS)
        if unknown:
            raise InputError(f"PFLlib's table does not have {sorted(unknown)}.")
        chosen = ("model", "data_fraction", "rounds", "lr")
        setting = [*SETTING, *(f"--{x}={FLAGS[x].value}" for x in chosen)]
        found = several(names, FLAGS.seeds, setting, checkout, path)
        return print(report.table(summary(found, {})))
    if not FLAGS.run:
        raise InputError("Give the run's directory, --run, or methods, --algo.")
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
    flags.DEFINE_list("algo", [], "methods that both libraries run, or `all`")
    flags.DEFINE_string("model", "lenet", "with --algo: network")
    flags.DEFINE_float("data_fraction", 1.0, "with --algo: part of the examples")
    flags.DEFINE_float("lr", 0.02, "with --algo: learning rate")
    flags.DEFINE_integer("rounds", 20, "with --algo: rounds", lower_bound=1)
    flags.DEFINE_list("seeds", ["0"], "with --algo: seeds")
    flags.DEFINE_string("results", RESULTS, "with --algo: where scores are kept")
    flags.DEFINE_string("corrected", CORRECTED, "those of a corrected copy, to print")
    flags.DEFINE_bool("shuffled", False, "HtFLlib's clients shuffle their batches")
    report.run(main)
