"""FedMA: averages layer by layer, after reordering each client's neurons so that those
of one kind stand in one place.

Reference: Wang, Yurochkin, Sun, Papailiopoulos & Khazaeni, Federated learning with
matched averaging (ICLR 2020), Algorithm 1. pFedMA is FedMA whose global model is
fine-tuned, in the tables of the pFedC paper.
"""

import itertools
import math
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Gt, Interval

from fedjax_pfl import (
    averaging,
    evaluation,
    hyperparameters,
    local_training,
    losses,
    optimizers,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.fedma.matching import (
    Group,
    Path,
    layers,
    mask,
    match,
    neurons,
    permute,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Cohort,
    Metrics,
    Predictor,
    PyTree,
    State,
    Task,
    Traffic,
)


def average(
    cohort: Cohort, models: PyTree, server: PyTree, here: PyTree, weight: Array
) -> PyTree:
    """The mean over the clients of the leaves `here` of their models, the server's
    where nobody has a weight."""
    mine, last = (trees.partition(tree, here)[0] for tree in (models, server))
    return cohort.mean(
        lambda c, w: (w,), mine, weight=weight, default=last, phase=None
    )[0]


def posterior(
    mean: PyTree,
    rows: PyTree,
    count: Array,
    sigma: Any,
    sigma0: Any,
    mu0: Any,
    mu0_bias: Any,
) -> PyTree:
    """Computes, for `count` rows N(g, sigma^2) of this mean, the posterior mean of g
    under
    the prior N(mu0, sigma0^2).

    Args:
      rows: Python booleans: which leaves are rows; the others stay.
    """
    # times sigma^2: only their ratio matters
    seen, prior = count, (sigma / sigma0) ** 2

    def shrunk(path: tuple[jax.tree_util.DictKey, ...], chosen: bool, x: Any) -> Any:
        mu = mu0_bias if path[-1].key == "bias" else mu0
        return (
            jnp.where(count > 0, (seen * x + prior * mu) / (seen + prior), x).astype(
                x.dtype
            )
            if chosen
            else x
        )

    return jax.tree_util.tree_map_with_path(shrunk, rows, mean)


def class_weights(cohort: Cohort) -> Array:
    """n_i(c) [S, C], and one for every client with examples where no client of the
    round holds the class."""
    held = jnp.any(cohort.class_counts > 0, axis=0)
    return jnp.where(held[None], cohort.class_counts, cohort.sizes[:, None] > 0)


def reorder(
    key: Array, group: Group, models: PyTree, cohort: Cohort, sweeps: int
) -> PyTree:
    """The models [S] with the neurons of this group in the order of the global ones
    that they match."""
    rows = cohort.replicated(jax.vmap(lambda w: neurons(w, group))(models))
    turns = jax.vmap(
        lambda id: jax.random.bits(jax.random.fold_in(key, id), (sweeps,), jnp.uint32)
    )(cohort.ids)
    order = match(rows, cohort.ids, cohort.sizes, turns)  # [S, width]
    moving, rest = trees.partition(models, mask(models, group.tensors + group.readers))
    return trees.merge(
        cohort.map(
            lambda c, w, order: permute(w, group, order), moving, order, phase=None
        ),
        rest,
    )


def retrain(
    c: Client, w: PyTree, frozen: PyTree, task: Task, epochs: int | None
) -> PyTree:
    """The client's variables after training with the leaves `frozen` as they are; None:
    the task's local work."""
    held, moving = trees.partition(averaging.params(w), averaging.params(frozen))
    loss, optimizer = losses.classification(task.model), task.optimizer

    def objective(v: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        return loss({**trees.merge(v["moving"], held), "stats": v["stats"]}, batch, key)

    v = {"moving": moving, "stats": w["stats"]}
    task = task._replace(
        optimizer=lambda lr: optimizers.per_part({"moving": optimizer(lr)})
    )
    v, _ = local_training.sgd(
        c.key, c.train, objective, v, task, train=("moving",), epochs=epochs
    )
    # the server has frozen layers' running statistics already
    return {**trees.merge(v["moving"], held), "stats": v["stats"]}


class Matching(NamedTuple):
    """How the neurons of a layer are matched and averaged, and what is trained after
    it.

    Args:
      retrain_epochs: E_r in [-1, 10000] after each layer; -1 is the task's local work,
        as the authors have E_r = E.
      matching: one of distance (least squares to the mean), bbp (the same, and the mean
        is drawn to a prior as in the paper's BBP-MAP), identity (neurons stay where
        they are: an ablation).
      weights: of the classifier, one of classes (n_i(c) for class c, the paper),
        uniform.
      sweeps: in [1, 1000] over the clients in each matching, fewer if one changes
        nothing; 5 as in the authors' code.
      sigma: deviation (σ) in (0, inf) of a client's rows around the global one, of bbp;
        1 as in the authors' code.
      sigma0: deviation (σ0) in (0, inf) of the prior, of bbp; 1 as in the authors'
        code.
      mu0: mean (μ0) in (-inf, inf) of the prior of a weight, of bbp; 0 as in the
        authors' code.
      mu0_bias: the same of a bias, in (-inf, inf); 0.1 as in the authors' code.
    """

    retrain_epochs: Annotated[int, Interval(ge=-1, le=10_000)] = -1
    matching: Literal["distance", "bbp", "identity"] = "distance"
    weights: Literal["classes", "uniform"] = "classes"
    sweeps: Annotated[int, Interval(ge=1, le=1000)] = 5
    sigma: Annotated[float, Gt(0)] = 1.0
    sigma0: Annotated[float, Gt(0)] = 1.0
    mu0: Annotated[float, Interval(gt=-math.inf, lt=math.inf)] = 0.0
    mu0_bias: Annotated[float, Interval(gt=-math.inf, lt=math.inf)] = 0.1


@register("fedma")
@hyperparameters.shared(Matching)
def fedma(task: Task, *, on: Matching) -> Algorithm:
    """Trains, then layer by layer matches the clients' neurons, averages them, freezes
    the layer and retrains the rest.

    Note:
      A round is one pass over the L layers, 2L messages. A stage of a residual network
      is one layer of the pass: all that is added shares a permutation, matched by the
      sum of the costs of what writes to it, and each block has one more (the authors'
      code has no residual networks). Not built: growing widths, and with them the
      paper's new neurons and its γ. At a fixed width all neurons are matched equally
      often, so the gains of BBP-MAP rank the assignments as squared distances do, and
      bbp differs by its prior only, which shrinks the rows of J clients by J / (J + 1),
      and not the running statistics of a batch norm after them. As a round's clients
      start from one model, their neurons seldom change positions: identity shows what
      matching adds to averaging layer by layer. Hidden layers are averaged uniformly
      over the clients with examples. The model a round starts from is not in the
      traffic (a client that was absent needs it). Batch norms follow their convolution
      and freeze with it; with bn_stats=local an absent client's running statistics stay
      in the order of its last round. All models of a round are held between the layers:
      memory grows with its clients. Loss and `post` are of the first local training,
      before any layer is frozen. A `transform` of uploads is of each layer's, and not
      of the rows by which its neurons are matched.
    """
    shapes = jax.eval_shape(task.model.init, jax.random.key(0))
    hidden, split, loss = (
        layers(shapes),
        averaging.split(task),
        losses.classification(task.model),
    )
    epochs = None if on.retrain_epochs == -1 else on.retrain_epochs

    def averaged(paths: tuple[Path, ...]) -> PyTree:
        return jax.tree.map(
            lambda chosen, mine: chosen and not mine,
            mask(shapes, paths),
            split.personal[0],
        )

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(c: Client, own: PyTree) -> tuple[PyTree, Array, dict[str, Array]]:
            w, value = local_training.sgd(
                c.key, c.train, loss, split.receive(state.server, own), task
            )
            return (
                w,
                value,
                evaluation.post(cohort, c, averaging.predictor(task.model, w)),
            )

        models, value, post = cohort.map(client, state.clients)
        server = state.server
        done: tuple[Path, ...] = ()
        turns = itertools.count()
        for n, layer in enumerate(hidden):
            # the permutations of the layer's neurons, and the mean of what they put in
            # one position
            for group in layer.turns if on.matching != "identity" else ():
                models = reorder(
                    jax.random.fold_in(key, next(turns)),
                    group,
                    models,
                    cohort,
                    on.sweeps,
                )
            mean = average(
                cohort, models, server, averaged(layer.tensors), cohort.trained
            )
            if on.matching == "bbp":
                rows = averaged(
                    tuple(row for group in layer.groups for row in group.rows)
                )
                mean = posterior(
                    mean,
                    rows,
                    jnp.sum(cohort.trained),
                    on.sigma,
                    on.sigma0,
                    on.mu0,
                    on.mu0_bias,
                )
            server = trees.merge(mean, server)
            done += layer.tensors
            # the clients take the layer over, freeze it, and train the layers above
            if on.retrain_epochs != 0:
                frozen = averaged(done)
                received = trees.partition(server, frozen)[0]
                again = lambda c, w, x=received, frozen=frozen: retrain(
                    c, trees.merge(x, w), frozen, task, epochs
                )
                models = cohort.map(again, models, phase=n + 1)
        # the classifier is averaged by the classes that the clients hold
        weight = class_weights(cohort) if on.weights == "classes" else cohort.trained
        head = average(cohort, models, server, trees.parts(shapes, ("head",)), weight)
        return State(trees.merge(head, server), split.send(models)[1]), Metrics(
            value, post
        )

    def predict(server: PyTree, own: PyTree, c: Client) -> Predictor:
        return averaging.predictor(task.model, split.receive(server, own))

    def sent(state: State, cohort: Cohort, metrics: Metrics) -> Traffic:
        whole = traffic.both_ways(cohort, state.server)
        widths = (
            [group.width for layer in hidden for group in layer.groups]
            if on.matching != "identity"
            else []
        )
        return whole._replace(
            ints=sum(widths) * cohort.active,
            messages=whole.messages * (len(hidden) + 1),
        )

    # the server of unseen clients does not change, so its neurons keep their order
    moved = on.matching != "identity" and any(jax.tree.leaves(split.personal[0]))
    alone = (
        "what they keep of the model would follow neurons that the server does not "
        "reorder"
        if moved
        else ""
    )
    return Algorithm(
        split.init, round, predict, evaluation.classification, sent, no_unseen=alone
    )


@register("pfedma")
@hyperparameters.shared(Matching)
def pfedma(
    task: Task,
    *,
    on: Matching,
    fine_tune_epochs: Annotated[int, Interval(ge=0, le=10_000)] | None = None,
    fine_tune: Literal["all", "head", "body"] = "all",
) -> Algorithm:
    """FedMA whose global model each client fine-tunes before it predicts; the
    fine-tuned copy is discarded.

    Args:
      fine_tune_epochs: E_ft in [0, 10000]; default max(E, 5), as no paper gives a
        value.
      fine_tune: what of the model moves then, one of all, head, body.

    Note:
      Training is FedMA's: see there for what is not built.
    """
    epochs = max(task.epochs or 0, 5) if fine_tune_epochs is None else fine_tune_epochs
    tuned = averaging.Phase(averaging.FINE_TUNED[fine_tune], epochs)
    averaged = averaging.partial_averaging(task, averaging.split(task), fine_tune=tuned)
    return fedma(task, **on._asdict())._replace(predict=averaged.predict)
