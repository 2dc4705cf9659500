"""FedMA: averages layer by layer, after reordering each client's neurons so that those
of one kind stand in one place.

Reference: Wang, Yurochkin, Sun, Papailiopoulos & Khazaeni, Federated learning with
matched averaging (ICLR 2020), Algorithm 1; authors' code: IBM/FedMA. pFedMA is FedMA
whose global model is fine-tuned, in the tables of the pFedC paper.
"""

import itertools
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval

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
    layers,
    mask,
    match,
    neurons,
    permute,
)
from fedjax_pfl.algorithms.registry import ONE_RATE, register
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Cohort,
    Metrics,
    PyTree,
    State,
    Task,
)


def average(
    cohort: Cohort, models: PyTree, server: PyTree, here: PyTree, weight: Array
) -> PyTree:
    """Averages the leaves `here` of the clients' models; the server's where nobody has
    a weight."""
    mine, last = (trees.partition(tree, here)[0] for tree in (models, server))

    def upload(c, w):
        return (w,)

    mean, *_ = cohort.mean(upload, mine, weight=weight, default=last, phase=None)
    return mean


def class_weights(cohort: Cohort) -> Array:
    """Returns n_i(c) [S, C], and one for every client with examples where no client of
    the round has the class."""
    held = jnp.any(cohort.class_counts > 0, axis=0)
    return jnp.where(held[None], cohort.class_counts, cohort.sizes[:, None] > 0)


def reorder(
    key: Array, group: Group, models: PyTree, cohort: Cohort, sweeps: int
) -> PyTree:
    """Puts the neurons of this group of the models [S] in the order of the global ones
    that they match."""

    def turns(id):
        return jax.random.bits(jax.random.fold_in(key, id), (sweeps,), jnp.uint32)

    def permuted(c, w, order):
        return permute(w, group, order)

    rows = cohort.replicated(jax.vmap(lambda w: neurons(w, group))(models))
    priority = jax.vmap(turns)(cohort.ids)
    order = match(rows, cohort.ids, cohort.sizes, priority)  # [S, width]
    moving, rest = trees.partition(models, mask(models, group.tensors + group.readers))
    return trees.merge(cohort.map(permuted, moving, order, phase=None), rest)


def retrain(
    c: Client, w: PyTree, frozen: PyTree, task: Task, epochs: int | None
) -> PyTree:
    """Trains the client's variables with the leaves `frozen` as they are, for some
    epochs or the task's local work."""
    held, moving = trees.partition(averaging.params(w), averaging.params(frozen))
    loss, optimizer = losses.classification(task.model, task), task.optimizer

    def objective(v, batch, key):
        return loss({**trees.merge(v["moving"], held), "stats": v["stats"]}, batch, key)

    def separate(lr):
        return optimizers.per_part({"moving": optimizer(lr)})

    sgd = local_training.bind(task._replace(optimizer=separate), objective)
    v = {"moving": moving, "stats": w["stats"]}
    v, _ = sgd(c, v, train=("moving",), epochs=epochs)
    # The server has frozen layers' running statistics already.
    return {**trees.merge(v["moving"], held), "stats": v["stats"]}


class Matching(NamedTuple):
    """How the neurons of a layer are matched and averaged, and what is trained after
    it.

    Args:
      retrain_epochs: E_r in [-1, 10000] after each layer; -1 is the task's local work,
        as the authors have E_r = E.
      matching: one of distance (least squares to the mean), identity (neurons keep
        their positions: an ablation).
      weights: of the classifier, one of classes (n_i(c) for class c, the paper),
        uniform.
      sweeps: in [1, 1000] over the clients in each matching, fewer if one changes
        nothing; 5 as in the authors' code.
    """

    retrain_epochs: Annotated[int, Interval(ge=-1, le=10_000)] = -1
    matching: Literal["distance", "identity"] = "distance"
    weights: Literal["classes", "uniform"] = "classes"
    sweeps: Annotated[int, Interval(ge=1, le=1000)] = 5


@register("fedma", targets=True, excludes={"lr": ONE_RATE})
@hyperparameters.shared(Matching)
def fedma(task: Task, *, on: Matching) -> Algorithm:
    """Trains, then layer by layer matches the clients' neurons, averages them, freezes
    the layer and retrains the rest.

    Note:
      A round is one pass over the L layers, 2L messages. A stage of a residual network
      is one layer of the pass: all that is added shares a permutation, matched by the
      sum of the costs of what writes to it, and each block has one more (the authors'
      code has no residual networks). Not built: growing widths, and with them the
      paper's new neurons and its γ, and the prior of BBP-MAP. At a fixed width all
      neurons are matched equally often, so the gains of BBP-MAP rank the assignments as
      squared distances do. As a round's clients
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
    hidden, split = layers(shapes), averaging.split(task)
    sgd, matched = local_training.bind(task), on.matching == "distance"
    epochs = None if on.retrain_epochs == -1 else on.retrain_epochs

    def averaged(paths):
        def sent(chosen, mine):
            return chosen and not mine

        return jax.tree.map(sent, mask(shapes, paths), split.personal[0])

    def round(key, state, cohort):
        def client(c, own):
            w, value = sgd(c, split.receive(state.server, own))
            post = evaluation.post(cohort, c, averaging.predictor(task.model, w))
            return w, value, post

        models, value, post = cohort.map(client, state.clients)
        server, turns = state.server, itertools.count()
        done: tuple[tuple[str, ...], ...] = ()
        for n, layer in enumerate(hidden):
            # The permutations of the layer's neurons.
            for group in layer.turns if matched else ():
                draw = jax.random.fold_in(key, next(turns))
                models = reorder(draw, group, models, cohort, on.sweeps)
            # The mean of the weights that are in one position.
            here = averaged(layer.tensors)
            mean = average(cohort, models, server, here, cohort.trained)
            server = trees.merge(mean, server)
            done += layer.tensors
            # The clients take the layer over, freeze it, and train the layers above.
            if on.retrain_epochs != 0:
                frozen = averaged(done)
                received = trees.partition(server, frozen)[0]

                def again(c, w, x=received, frozen=frozen):
                    return retrain(c, trees.merge(x, w), frozen, task, epochs)

                models = cohort.map(again, models, phase=n + 1)
        # The classifier is averaged by the classes that the clients have.
        here = trees.parts(shapes, ("head",))
        weight = class_weights(cohort) if on.weights == "classes" else cohort.trained
        head = average(cohort, models, server, here, weight)
        own = split.send(models)[1]
        return State(trees.merge(head, server), own), Metrics(value, post)

    def predict(server, own, c):
        return averaging.predictor(task.model, split.receive(server, own))

    def sent(state, cohort, metrics):
        whole = traffic.both_ways(cohort, state.server)
        widths = [group.width for layer in hidden for group in layer.groups]
        return whole._replace(
            ints=(sum(widths) if matched else 0) * cohort.active,
            messages=whole.messages * (len(hidden) + 1),
        )

    # The server of unseen clients does not change, so its neurons keep their order.
    alone = ""
    if matched and any(jax.tree.leaves(split.personal[0])):
        alone = (
            "what they keep of the model would follow neurons that the server does not "
            "reorder"
        )
    score = evaluation.classification
    return Algorithm(split.init, round, predict, score, sent, no_unseen=alone)


@register("pfedma", targets=True, excludes={"lr": ONE_RATE})
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
