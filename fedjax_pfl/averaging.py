"""Partial averaging: the family of methods that average some leaves of one model and
keep the others.

FedAvg, FedProx, FedPer, FedRep, FedBN, LG-FedAvg, FedBABU and Local differ in which
leaves are personal, which are trained in which phase, a proximal term, and what is done
before a prediction."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import Numeric

from fedjax_pfl import architectures, evaluation, keys, local_training, losses, trees
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Cohort,
    Metrics,
    Model,
    Own,
    Predictor,
    PyTree,
    Scores,
    State,
    Task,
)

Path = tuple[str, ...]  # of a layer in the variables
BODY_AND_HEAD = ("body", "head")
# what of a model is fine-tuned
FINE_TUNED = {"all": BODY_AND_HEAD, "head": ("head",), "body": ("body",)}


class Phase(NamedTuple):
    """A stretch of local SGD."""

    train: tuple[str, ...] = BODY_AND_HEAD  # the parts that move
    epochs: int | None = None  # None: the task's own local work
    stream: keys.Client | None = None  # None: the client's main key


def params(variables: PyTree) -> PyTree:
    """A model's parameters, without its running statistics."""
    return {part: variables[part] for part in BODY_AND_HEAD}


def predictor(model: Model, variables: PyTree) -> Predictor:
    """The logits of a model with these variables."""
    return lambda x, mask: model.apply(variables, x, mask=mask, train=False)[0]


def beside(model: Model, personal: PyTree, other: PyTree) -> Predictor:
    """The logits [B, C, 2] of a model with a client's personal variables and with
    others, that `score_beside` scores."""
    return lambda x, mask: jnp.stack(
        [predictor(model, w)(x, mask) for w in (personal, other)], axis=-1
    )


def score_beside(
    outputs: Array,
    y: Array,
    mask: Array,
    c: Client,
    *,
    names: tuple[str, ...] = ("global",),
) -> Scores:
    """The scores of the personal logits outputs[..., 0], and under `global_*` (or other
    names) of those that follow."""
    found = evaluation.classification(outputs[..., 0], y, mask, c)
    for i, name in enumerate(names, start=1):
        other = evaluation.accuracies(outputs[..., i], y, mask, c)
        found |= {f"{name}_{key}": pair for key, pair in other.items()}
    return found


def check_linear_head(variables: PyTree, method: str) -> None:
    """Raises InputError unless a model's head is one linear layer."""
    head = variables["head"]
    if set(head) != {"kernel", "bias"} or head["kernel"].ndim != 2:
        raise InputError(
            f"{method} needs a model whose head is one linear layer with a kernel [K, "
            "C] and a bias [C]."
        )


class Split(NamedTuple):
    """Which leaves of the variables are sent to the server and which stay with the
    client, as `bn_stats` has it of running statistics."""

    task: Task
    # per architecture, a tree of Python booleans over the variables: True where it
    # stays
    personal: tuple[PyTree, ...]

    def init(
        self, key: Array, beside: Callable[[PyTree], dict[str, PyTree]] | None = None
    ) -> State:
        """The common start: what the server has, and the clients' rows
        (`architectures.stack`).

        Args:
          beside: variables -> what else a client keeps; a row is then that, and as
            `own` what stays of the variables.

        Raises:
          InputError: what is shared differs between the architectures.
        """
        whole = [model.init(key) for model in self.task.models]
        starts = [self.send(variables, group) for group, variables in enumerate(whole)]
        shapes = [dict(trees.named_shapes(shared)) for shared, _ in starts]
        for group, other in enumerate(shapes):
            for name in {**shapes[0], **other}:
                first, here = (
                    shape.get(name, "missing") for shape in (shapes[0], other)
                )
                if first != here:
                    raise InputError(
                        "What the clients share must be the same in every "
                        f"architecture, but {name} is {first} in the "
                        f"first and {here} in number {group + 1}: take networks of one "
                        "feature width K (`features`), "
                        "or share less."
                    )
        pairs = zip(whole, starts, strict=True)
        rows = iter(
            [
                own if beside is None else {**beside(w), "own": own}
                for w, (_, own) in pairs
            ]
        )
        return State(starts[0][0], architectures.stack(self.task, lambda _: next(rows)))

    def receive(self, server: PyTree, own: PyTree) -> PyTree:
        """The client's variables, of what the server sends and what the client has
        kept."""
        return trees.overlay(own, server)

    def send(self, variables: PyTree, group: int = 0) -> tuple[PyTree, PyTree]:
        """(what is sent, what stays) of the variables, each with None in place of the
        other's leaves; of several architectures what is sent has only what they
        share."""
        own, shared = trees.partition(variables, self.personal[group])
        return (shared if len(self.task.models) == 1 else trees.pruned(shared)), own


def split(
    task: Task,
    personal: tuple[str, ...] = (),
    *,
    batch_norm: bool = False,
    variables: PyTree = None,
) -> Split:
    """Divides a model's variables into what is sent and what stays with the client.

    Running statistics stay where the body stays, and with bn_stats=local in any case.

    Args:
      personal: the parts that stay, of body, head, stats.
      batch_norm: whether every leaf of a batch-norm module stays, too.
      variables: a dict with a part "stats" that is divided in place of the model's
        variables.
    """
    stay = {
        *personal,
        *(("stats",) if "body" in personal or task.bn_stats == "local" else ()),
    }
    wholes = (
        [variables]
        if variables is not None
        else [model.bn_mask for model in task.models]
    )
    masks = [trees.parts(whole, tuple(stay)) for whole in wholes]
    if batch_norm:
        masks = [
            jax.tree.map(lambda a, b: a or b, *pair)
            for pair in zip(masks, wholes, strict=True)
        ]
    return Split(task, tuple(masks))


def split_layers(task: Task, shared: Callable[[Model], Sequence[Path]]) -> Split:
    """Divides a model's variables by layers: those that `shared` names of an
    architecture are sent.

    A batch norm's running statistics go with its parameters, unless bn_stats=local.

    Args:
      shared: model -> paths of layers, such as ("body", "convs", "0").
    """

    def mask(model: Model) -> PyTree:
        paths = set(shared(model))

        def stays(path: tuple[jax.tree_util.DictKey, ...], _: bool) -> bool:
            part, *inside, _name = (key.key for key in path)
            if part == "stats":
                return task.bn_stats == "local" or ("body", *inside) not in paths
            return (part, *inside) not in paths

        return jax.tree_util.tree_map_with_path(stays, model.bn_mask)

    return Split(task, tuple(map(mask, task.models)))


def partial_averaging(
    task: Task,
    split: Split,
    *,
    fixed: tuple[str, ...] = (),
    phases: tuple[Phase, ...] = (Phase(),),
    mu: Numeric | None = None,
    fine_tune: Phase | None = None,
    untuned: bool = False,
    one_architecture: bool = True,
) -> Algorithm:
    """Averages the shared leaves of the model over the round's clients, weighted by
    their training examples.

    Args:
      split: which leaves are shared.
      fixed: parts that never move and never travel (FedBABU's head).
      phases: local training, one stretch after another, each with a fresh optimizer;
        the loss is the last one's.
      mu: weight of the proximal term mu/2 ||w - w^t||^2 over all trained leaves; None:
        without.
      fine_tune: what a client does with the model before it predicts; discarded
        afterwards.
      untuned: whether `pre` also scores the model before that, as `untuned_*`.
      one_architecture: see `types.Algorithm`.
    """

    def moving(shared: PyTree) -> PyTree:
        return {name: part for name, part in shared.items() if name not in fixed}

    def train(
        key: Array,
        c: Client,
        variables: PyTree,
        phase: Phase,
        extra: Callable[[PyTree], PyTree] | None = None,
    ) -> tuple[PyTree, Array]:
        key = key if phase.stream is None else keys.fold(key, phase.stream)
        loss = losses.classification(c.model)
        return local_training.sgd(
            key,
            c.train,
            loss,
            variables,
            task,
            train=phase.train,
            epochs=phase.epochs,
            extra=extra,
        )

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, own: PyTree
        ) -> tuple[PyTree, Own, Array, dict[str, Array]]:
            variables = received = split.receive(state.server, own)
            value = jnp.zeros(())
            for phase in phases:
                extra = (
                    None
                    if mu is None
                    else trees.proximal(
                        {name: received[name] for name in phase.train}, mu
                    )
                )
                variables, value = train(c.key, c, variables, phase, extra)
            post = evaluation.post(cohort, c, predictor(c.model, variables))
            shared, own = split.send(variables, c.architecture)
            return moving(shared), Own(own), value, post

        last = moving(state.server)
        mean, (own, value, post) = cohort.mean(
            client, state.clients, weight=cohort.sizes, default=last
        )
        return State(state.server | mean, own), Metrics(value, post)

    def predict(server: PyTree, own: PyTree, c: Client) -> Predictor:
        variables = received = split.receive(server, own)
        if fine_tune is not None and fine_tune.epochs != 0:
            variables, _ = train(c.key, c, variables, fine_tune)
        return (
            beside(c.model, variables, received)
            if untuned
            else predictor(c.model, variables)
        )

    score = (
        functools.partial(score_beside, names=("untuned",))
        if untuned
        else evaluation.classification
    )
    averages = tuple(
        part
        for part in BODY_AND_HEAD
        if part not in fixed and not all(jax.tree.leaves(split.personal[0][part]))
    )
    return Algorithm(
        split.init,
        round,
        predict,
        score,
        one_architecture=one_architecture,
        averages=averages,
    )
