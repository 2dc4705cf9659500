"""Partial averaging: the family of methods that average some leaves of one model and
keep the others.

FedAvg, FedProx, FedPer, FedRep, FedBN, LG-FedAvg, FedBABU and Local differ in which
leaves are personal, which are trained in which phase, a proximal term, and what is done
before a prediction."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import Numeric

from fedjax_pfl import architectures, evaluation, keys, local_training, trees
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.models import low_rank
from fedjax_pfl.types import (
    Array,
    Client,
    Method,
    Model,
    Own,
    Predictor,
    PyTree,
    Scores,
    State,
    Task,
    Update,
)

BODY_AND_HEAD = ("body", "head")
# what of a model is fine-tuned
FINE_TUNED = {"all": BODY_AND_HEAD, "head": ("head",), "body": ("body",)}


class Phase(NamedTuple):
    """A stretch of local SGD."""

    train: tuple[str, ...] = BODY_AND_HEAD  # the parts that move
    epochs: int | None = None  # None: the task's own local work
    stream: keys.Client | None = None  # None: the client's main key


def params(variables: PyTree) -> PyTree:
    """Returns a model's parameters, without its running statistics."""
    return {part: variables[part] for part in BODY_AND_HEAD}


def predictor(model: Model, variables: PyTree) -> Predictor:
    """Returns the logits of a model with these variables, as a partial of `logits`."""
    return functools.partial(logits, model, variables)


def logits(model: Model, variables: PyTree, x: Array, mask: Array) -> Array:
    """Returns the logits [B, C] of a model, with the running statistics in use."""
    return model.apply(variables, x, mask=mask, train=False)[0]


def paired(model: Model, personal: PyTree, other: PyTree) -> Predictor:
    """Returns the logits [B, C, 2] of a model with a client's personal variables and
    with others, that `score_paired` scores."""
    return lambda x, mask: jnp.stack(
        [predictor(model, w)(x, mask) for w in (personal, other)], axis=-1
    )


def score_paired(
    outputs: Array,
    y: Array,
    mask: Array,
    c: Client,
    *,
    names: tuple[str, ...] = ("global",),
) -> Scores:
    """Returns the scores of the personal logits outputs[..., 0], and under
    `global_*` (or other names) of those that follow."""
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
    # kept
    personal: tuple[PyTree, ...]

    def init(
        self, key: Array, extra: Callable[[PyTree], dict[str, PyTree]] | None = None
    ) -> State:
        """Returns the common start: what the server has, and the clients' rows
        (`architectures.stack`).

        Args:
          extra: variables -> further state of a client; a row has it, and as
            `own` the variables that are kept.

        Raises:
          InputError: what is shared differs between the architectures.
        """
        whole = [model.init(key) for model in self.task.models]
        starts = [self.send(variables, group) for group, variables in enumerate(whole)]
        first = dict(trees.named_shapes(starts[0][0]))
        for group, (shared, _) in enumerate(starts):
            here = dict(trees.named_shapes(shared))
            for name in {**first, **here}:
                a, b = (shapes.get(name, "missing") for shapes in (first, here))
                if a != b:
                    raise InputError(
                        "What the clients share must be the same in every "
                        f"architecture, but {name} is {a} in the "
                        f"first and {b} in number {group + 1}: take networks of one "
                        "feature width K (`features`), or share less."
                    )
        pairs = zip(whole, starts, strict=True)
        rows = iter(
            [
                own if extra is None else {**extra(w), "own": own}
                for w, (_, own) in pairs
            ]
        )
        return State(starts[0][0], architectures.stack(self.task, lambda _: next(rows)))

    def receive(self, server: PyTree, own: PyTree) -> PyTree:
        """Returns the client's variables, of what the server sends and what the
        client has kept."""
        return trees.overlay(own, server)

    def send(self, variables: PyTree, group: int = 0) -> tuple[PyTree, PyTree]:
        """Computes (what is sent, what is kept) of the variables, each with None in
        place of the other's leaves; of several architectures what is sent has only
        what they share."""
        own, shared = trees.partition(variables, self.personal[group])
        return (shared if len(self.task.models) == 1 else trees.pruned(shared)), own


def split(
    task: Task,
    personal: tuple[str, ...] = (),
    *,
    batch_norm: bool = False,
    variables: PyTree = None,
) -> Split:
    """Divides a model's variables into what is sent and what the client keeps.

    Running statistics are kept where the body is, and with bn_stats=local in any case.

    Args:
      personal: the parts that stay, of body, head, stats.
      batch_norm: whether every leaf of a batch-norm module is kept, too.
      variables: a dict with a part "stats" that is divided in place of the model's
        variables.

    Raises:
      InputError: `personal` has another part.
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
    for part in personal:
        choose("part of a model", part, wholes[0])
    masks = [trees.parts(whole, tuple(stay)) for whole in wholes]
    if batch_norm:
        masks = [
            jax.tree.map(lambda a, b: a or b, *pair)
            for pair in zip(masks, wholes, strict=True)
        ]
    return Split(task, tuple(masks))


def from_client(
    init: Callable[[Array], State],
    client: Callable[..., Update],
    predict: Callable[[PyTree, PyTree, Client], Predictor],
    *,
    score: evaluation.Score = evaluation.classification,
    **fields: Any,
) -> Method:
    """Makes a method whose round is one weighted mean over the clients.

    Args:
      init: key -> State.
      client: (client, State.server, its row of State.clients) -> Update.
      predict: (State.server, row, client) -> Predictor, before local training.
      score: of the predictors' outputs, also of `post`.
      fields: further fields of `Method`, such as `weight`, `default` and `update`.

    Raises:
      InputError: a field is unknown.
    """
    if "server_update" in fields:
        raise InputError(
            "`server_update` is now `update`: (key, server, mean, mass) -> server."
        )
    for name in fields:
        choose("field of a Method", name, Method._fields)
    return Method(init, client, predict, score, **fields)


def partial_averaging(
    task: Task,
    split: Split,
    *,
    fixed: tuple[str, ...] = (),
    phases: tuple[Phase, ...] = (Phase(),),
    mu: Numeric | None = None,
    fine_tune: Phase | None = None,
    untuned: bool = False,
) -> Method:
    """Averages the shared leaves of the model over the round's clients, weighted by
    their training examples.

    Args:
      split: which leaves are shared.
      fixed: parts that are never trained nor sent (FedBABU's head).
      phases: local training, one phase after another, each with a fresh optimizer; the
        loss is the last one's.
      mu: weight of the proximal term mu/2 ||w - w^t||^2 over all trained leaves; None:
        without.
      fine_tune: trains the model before a prediction; discarded afterwards.
      untuned: `pre` also scores the model before fine-tuning, as `untuned_*`.
    """
    sgd = local_training.bind(task)
    watched = evaluation.LORA_ERROR in task.metrics and "body" not in fixed
    watched = watched and len(task.models) == 1
    watched = watched and low_rank.shared(split.personal[0]["body"])

    def moving(shared):
        return {name: part for name, part in shared.items() if name not in fixed}

    def train(c, variables, phase, extra=None):
        epochs, stream = phase.epochs, phase.stream
        return sgd(
            c, variables, train=phase.train, epochs=epochs, stream=stream, extra=extra
        )

    def client(c, server, own):
        variables = received = split.receive(server, own)
        value = jnp.zeros(())
        for phase in phases:
            extra = None
            if mu is not None:
                anchor = {name: received[name] for name in phase.train}
                extra = trees.proximal(anchor, mu)
            variables, value = train(c, variables, phase, extra)
        shared, own = split.send(variables, c.architecture)
        predict = predictor(c.model, variables)
        sent = variables["body"] if watched else ()
        return Update(moving(shared), Own(own), predict, value, sent=sent)

    def observe(sent, cohort):
        error = low_rank.averaging_error(sent, cohort.sizes, cohort)
        return {evaluation.LORA_ERROR: error}

    def predict(server, own, c):
        variables = received = split.receive(server, own)
        if fine_tune is not None and fine_tune.epochs != 0:
            variables, _ = train(c, variables, fine_tune)
        if untuned:
            return paired(c.model, variables, received)
        return predictor(c.model, variables)

    averages = tuple(
        part
        for part in BODY_AND_HEAD
        if part not in fixed and not all(jax.tree.leaves(split.personal[0][part]))
    )
    made = from_client(
        split.init,
        client,
        predict,
        default=moving,
        update=lambda key, server, mean, mass: server | mean,
        observe=observe if watched else None,
        averages=averages,
    )
    if untuned:
        score = functools.partial(score_paired, names=("untuned",))
        return made._replace(score=score, post=made.score)
    return made
