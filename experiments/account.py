"""What an experiment consists of and costs, in words and in numbers; nothing is
compiled."""

import functools

from absl import logging

from experiments import networks
from experiments.build import Experiment
from experiments.config import OWN_NETWORKS
from experiments.plain import plural
from experiments.targets import Flops
from fedjax_pfl import trees
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.engine.flops import flops_of_step


def flops(experiment: Experiment) -> Flops | None:
    """Counted in the traces of the first round and of a later one, for each example
    that the settings ask for, see `engine.flops`; None if they cannot be counted."""
    if "flops" not in experiment.made:
        plain, config = experiment.in_form(experiment.task, "matmul"), experiment.config
        try:
            count = functools.partial(
                flops_of_step,
                find(config.algo),
                plain,
                experiment.federation,
                config.hparams,
            )
            experiment.made["flops"] = Flops(
                *(count(round=index) / plain.batch_size for index in (0, 1))
            )
        except Exception as error:
            # another version of JAX may write another trace; a run does not depend on
            # it
            logging.warning(
                "Floating-point operations are not counted (%s: %s).",
                type(error).__name__,
                error,
            )
            experiment.made["flops"] = None
    return experiment.made["flops"]


def own_parameters(experiment: Experiment) -> int:
    """Parameters of one client's networks, of a method in OWN_NETWORKS."""
    state = experiment.state_shapes()
    own = trees.size(
        {name: part for name, part in state.clients.items() if name != "stats"}
    )
    return trees.size(state.server) + own // experiment.task.num_clients


def describe(experiment: Experiment) -> str:
    """One line: what is going to run."""
    c, n = experiment.config, experiment.examples
    names, _ = networks.architectures(c.model, len(experiment.everybody.train))
    sizes = [f"{networks.num_parameters(model):,}" for model in experiment.task.models]
    nets = ", ".join(
        f"{name} with {size} parameters"
        for name, size in zip(names, sizes, strict=True)
    )
    if c.algo in OWN_NETWORKS:
        nets = f"own networks with {own_parameters(experiment):,} parameters"
    marked = " with marks" if experiment.marks else ""
    clients = plural(experiment.task.num_clients, "client")
    clients += f" and {len(experiment.unseen.ids)} unseen" if experiment.unseen else ""
    server = (
        f"; at the server {c.server_optimizer}, lr {c.server_lr:g}"
        if c.server_optimizer
        else ""
    )
    how = "" if c.optimizer == "sgd" else f"{c.optimizer}, "
    done = (
        plural(c.epochs or 0, "epoch") if c.steps is None else plural(c.steps, "step")
    )
    moved = experiment.partition.moved
    assigned = (
        f"{c.partition}; {moved} examples moved to clients below the minimum"
        if moved
        else c.partition
    )
    part = (
        f" ({n['available']:,} of its {n['of']:,} examples)"
        if n["available"] < n["of"]
        else ""
    )
    return (
        f"{c.algo} on {c.dataset}{marked}{part}: {clients} ({assigned}), {nets}, "
        f"{plural(c.rounds, 'round')} of {done}, batch {c.batch_size}, {how}lr "
        f"{c.lr:g}{server}"
    )
