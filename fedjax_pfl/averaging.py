"""Partial averaging: the family of methods that average some leaves of one model and keep the others.

FedAvg, FedProx, FedPer, FedRep, FedBN, LG-FedAvg, FedBABU and Local differ in which leaves are personal, which are
trained in which phase, a proximal pull, and what is done before a prediction.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl import evaluate, local, losses, traffic, trees
from fedjax_pfl.types import Algorithm, Array, Client, Predictor, PyTree, Scores, State, Task

BOTH = ("body", "head")
HEAD_PHASE, FINE_TUNE = 11, 12  # streams beside a client's main one


FINE_TUNED = {"all": BOTH, "head": ("head",), "body": ("body",)}  # what of a model is fine-tuned


class Phase(NamedTuple):
    """A stretch of local SGD."""

    train: tuple[str, ...] = BOTH  # the parts that move
    epochs: int | None = None  # None: the task's own local work
    stream: int | None = None  # None: the client's main key


def predictor(task: Task, variables: PyTree) -> Predictor:
    """The logits of the task's model with these variables."""
    return lambda x, mask: task.model.apply(variables, x, mask=mask, train=False)[0]


def beside(personal: Predictor, other: Predictor) -> Predictor:
    """The logits [B, C, 2] of a client's personal predictor and of another one, that `score_beside` scores."""
    return lambda x, mask: jnp.stack([personal(x, mask), other(x, mask)], axis=-1)


def score_beside(outputs: Array, y: Array, mask: Array, c: Client, *, name: str = "global") -> Scores:
    """The scores of the personal logits outputs[..., 0], and under `global_*` (or another name) of outputs[..., 1]."""
    mine, other = (evaluate.classification(outputs[..., i], y, mask, c) for i in range(2))
    return mine | {f"{name}_{score}": pair for score, pair in other.items()}


def personal_mask(task: Task, personal: tuple[str, ...] = (), *, norms: bool = False) -> PyTree:
    """Which leaves of the model's variables stay with the client, as a tree of Python booleans.

    Batch-norm moments stay where the body stays, and with `norms` every leaf of a batch-norm module does; with
    bn_stats=local they are personal in any case.
    """
    mask = trees.parts(task.model.norms, (*personal, *(("stats",) if "body" in personal else ())))
    if norms:
        mask = jax.tree.map(lambda a, b: a or b, mask, task.model.norms)
    if task.bn_stats == "local":
        mask["stats"] = jax.tree.map(lambda _: True, mask["stats"])
    return mask


def partial_averaging(
    task: Task,
    *,
    personal: PyTree,
    fixed: tuple[str, ...] = (),
    phases: tuple[Phase, ...] = (Phase(),),
    mu: float | Array = 0.0,
    fine_tune: Phase | None = None,
    untuned: bool = False,
) -> Algorithm:
    """Averages the shared leaves of the model over the round's clients, weighted by their training examples.

    Args:
      personal: a tree of booleans over the variables, True where a leaf stays with its client.
      fixed: parts that never move and never travel (FedBABU's head).
      phases: local training, one stretch after another, each with a fresh optimizer; the loss is the last one's.
      mu: weight of the proximal term mu/2 ||w - w^t||^2 over all trained leaves.
      fine_tune: what a client does with the model before it predicts; discarded afterwards.
      untuned: whether `pre` also scores the model before that, as `untuned_*`.
    """
    loss = losses.classification(task.model)
    moving = jax.tree.map(lambda _, on: on, personal, trees.parts(personal, tuple({*BOTH, "stats"} - {*fixed})))
    travels = jax.tree.map(lambda mine, moves: moves and not mine, personal, moving)

    def init(key: Array) -> State:
        own, shared = trees.partition(task.model.init(key), personal)
        return State(shared, trees.replicate(own, task.num_clients))

    def train(key: Array, c: Client, variables: PyTree, phase: Phase, extra=None) -> tuple[PyTree, Array]:
        key = key if phase.stream is None else jax.random.fold_in(key, phase.stream)
        return local.sgd(key, c.train, loss, variables, task, train=phase.train, epochs=phase.epochs, extra=extra)

    def round(key: Array, state: State, cohort) -> tuple[State, PyTree]:
        def client(c: Client, own: PyTree):
            variables = received = trees.merge(own, state.server)
            value = jnp.zeros(())
            for phase in phases:
                pull = trees.pull({name: received[name] for name in phase.train}, mu) if not _is_zero(mu) else None
                variables, value = train(c.key, c, variables, phase, pull)
            post = evaluate.post(cohort, c, predictor(task, variables))
            return trees.partition(variables, travels)[0], trees.partition(variables, personal)[0], value, post

        last = trees.partition(state.server, travels)[0]
        mean, (own, value, post) = cohort.mean(client, state.clients, weight=cohort.sizes, empty=last)
        return State(trees.merge(mean, state.server), own), {"loss": value, "post": post}

    def predict(server: PyTree, own: PyTree, c: Client) -> Predictor:
        variables = received = trees.merge(own, server)
        if fine_tune is not None and fine_tune.epochs != 0:
            variables, _ = train(c.key, c, variables, fine_tune)
        tuned = predictor(task, variables)
        return beside(tuned, predictor(task, received)) if untuned else tuned

    def sent(state: State, cohort, metrics: PyTree):
        return traffic.both_ways(
            cohort, trees.partition(jax.eval_shape(task.model.init, jax.random.key(0)), travels)[0]
        )

    score = functools.partial(score_beside, name="untuned") if untuned else evaluate.classification
    return Algorithm(init, round, predict, score, sent)


def _is_zero(x: float | Array) -> bool:
    return isinstance(x, int | float) and x == 0
