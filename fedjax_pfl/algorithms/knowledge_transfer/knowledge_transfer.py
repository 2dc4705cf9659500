"""Knowledge transfer: clients of any architectures exchange predictions on public
examples and learn from a mixture.

References: FedMD, Li & Wang, FedMD: heterogenous federated learning via model
distillation (2019); KT-pFL, Zhang et al., Parameterized knowledge transfer for
personalized federated learning (NeurIPS 2021), whose baselines Sim-pFD and TopK-pFD
are, and of which MNFL is a variant. Authors' code: cugzj/KT-pFL.
"""

import functools
import math
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Interval

from fedjax_pfl import (
    aggregate,
    architectures,
    evaluation,
    hyperparameters,
    keys,
    local_training,
    traffic,
    trees,
)
from fedjax_pfl.algorithms import public_data
from fedjax_pfl.algorithms.knowledge_transfer import mixtures
from fedjax_pfl.algorithms.knowledge_transfer.mixtures import (
    Asked,
    Rule,
    nearest,
    similar,
    slope,
    uniform,
)
from fedjax_pfl.algorithms.registry import ROW_TARGETS, register
from fedjax_pfl.averaging import predictor
from fedjax_pfl.types import (
    Algorithm,
    Metrics,
    Own,
    State,
    Task,
)


class Exchange(NamedTuple):
    """How predictions are exchanged and learnt from, whatever the coefficients.

    Args:
      public_size: public examples per round in [1, inf), at most the pool; 3000 as in
        KT-pFL (FedMD's authors: 5000).
      public_batch: their batch size in [1, inf); 256 as in both papers.
      passes: over them in each round (R), in [0, 10000]; 1 as in both papers.
      public_lr: learning rate on them (η2) in [0, inf); default the task's.
      temperature: of the softmax, in (0, inf); 1, as the papers give none.
      order: one of paper (KT-pFL's: private training comes first), code (last, and
        predictions first: as KT-pFL's code and FedMD's authors do).
      warmup_epochs: private epochs in [0, 10000] before round 0 with order=code; 1 as
        there.
      reduction: of the KL divergence, one of batchmean, mean (over the classes, too, as
        in KT-pFL's code).
      public_at: where the public examples are, one of clients (who are sent their ids),
        server (and are sent with them in each round: counted as `public_data`).
    """

    public_size: Annotated[int, Ge(1)] = 3000
    public_batch: Annotated[int, Ge(1)] = 256
    passes: Annotated[int, Interval(ge=0, le=10_000)] = 1
    public_lr: Annotated[float, Ge(0)] | None = None
    temperature: Annotated[float, Gt(0)] = 1.0
    order: Literal["paper", "code"] = "paper"
    warmup_epochs: Annotated[int, Interval(ge=0, le=10_000)] = 1
    reduction: Literal["batchmean", "mean"] = "batchmean"
    public_at: Literal["clients", "server"] = "clients"


TRANSFER = keys.Client.TRANSFER


def transfer(task: Task, rule: Rule, on: Exchange) -> Algorithm:
    """Returns the round that the methods of this family share, which differ in their
    coefficients (KT-pFL, Algorithm 1).

    Private training, predictions, their mixture, training on it; with order=code the
    predictions come first and the private training last. A client without training
    examples neither teaches nor learns.
    """
    n, size = task.num_clients, public_data.count(task, on.public_size)
    numbers = math.prod(task.public.shape[1:])  # type: ignore[union-attr]  # `count` has checked it
    lr = task.lr if on.public_lr is None else on.public_lr
    distance = functools.partial(
        mixtures.distance, temperature=on.temperature, reduction=on.reduction
    )
    public_task = task._replace(
        lr=lr, batch_size=on.public_batch, drop_last=False, augment=None
    )
    sgd, learn_public = local_training.bind(task), local_training.bind(public_task)

    def init(key):
        server = {}
        if rule.start is not None:
            server["coefficients"] = jnp.full((n, n), rule.start, jnp.float32)
        return State(server, architectures.stack(task, lambda model: model.init(key)))

    def predictions(c, w, index):
        data = public_data.subset(c.public, index, c.train.size > 0)
        z = public_data.logits(c.model, w, data, task.num_classes, on.public_batch)
        return jax.nn.softmax(z / on.temperature)

    def distil(c, w, index, target):
        data = public_data.subset(c.public, index, c.train.size > 0)
        loss, stream = public_data.distillation(c.model, target, distance), TRANSFER
        return learn_public(c, w, loss=loss, data=data, stream=stream, epochs=on.passes)

    def round(key, state, cohort):
        index = public_data.draw(key, task, on.public_size)
        first, start = on.order == "paper", cohort.round == 0

        # Private training, and the model's predictions for the round's public examples.
        def teach(c, w):
            value = jnp.zeros(())
            if first:
                w, value = sgd(c, w)
            elif on.warmup_epochs:
                epochs = jnp.where(start, on.warmup_epochs, 0)
                w, _ = sgd(c, w, stream=keys.Client.WARM_UP, epochs=epochs)
            return Own(w), predictions(c, w, index), value

        # The private training has the key of phase 0, as in other methods.
        w, outputs, value = cohort.map(teach, state.clients, phase=0 if first else 1)
        given = public_data.gathered(cohort, outputs)
        # Without a memory, those of clients out of the round are not known.
        a = jnp.full((n, n), jnp.nan, jnp.float32)
        if rule.start is not None:
            a = state.server["coefficients"]

        # The coefficients of the student's mixture, and training on it.
        def learn(c, w, outputs, value):
            share = jnp.float32(c.train.size) / jnp.maximum(1, cohort.total)
            row, own = a[c.id][given.ids], given.ids == c.id
            used, kept = rule.coefficients(Asked(row, own, outputs, given, share))
            weight = public_data.normalised(used, given.here)
            w, gap = distil(c, w, index, public_data.mean(weight, given))
            if not first:
                w, value = sgd(c, w)
            post = evaluation.post(cohort, c, predictor(c.model, w))
            # The round's clients have their coefficients in the row, [N].
            at = jnp.where(given.here, given.ids, n + jnp.arange(len(given.ids)))
            row = a[c.id].at[at].set(kept, mode="drop")
            return Own(w), row, value, gap, post

        w, rows, value, gap, post = cohort.map(
            learn, w, outputs, value, phase=1 if first else 0
        )
        a = trees.scatter(a, cohort.ids, rows, cohort.trained)
        metrics = Metrics(value, post, {"transfer_loss": gap}, {"coefficients": a})
        return State({} if rule.start is None else {"coefficients": a}, w), metrics

    def predict(server, w, c):
        return predictor(c.model, w)

    def sent(state, cohort, metrics):
        # Down the ids of the examples, up the predictions, down their mixture.
        part = cohort.trained.astype(jnp.int32)
        both = size * task.num_classes * part
        whole = traffic.both_ways(cohort, both, both)
        whole = whole._replace(ints=size * part, messages=3 * part)
        if on.public_at == "clients":
            return whole
        return whole._replace(public_data=size * numbers * part)

    alone = (
        "its clients learn from each other's predictions within a round, of which the "
        "server keeps none"
    )
    return Algorithm(
        init,
        round,
        predict,
        evaluation.classification,
        sent,
        no_unseen=alone,
    )


@register(
    "mnfl_het",
    several_architectures=True,
    excludes={"mix": ROW_TARGETS, "positions": ROW_TARGETS},
)
@hyperparameters.shared(Exchange)
def mnfl_het(
    task: Task,
    *,
    on: Exchange,
    coef_lr: Annotated[float, Ge(0)] = 0.01,
    rho: Annotated[float, Ge(0)] = 0.7,
    lam: Annotated[float, Ge(0)] | None = None,
    coef_steps: Annotated[int, Interval(ge=0, le=10_000)] = 1,
) -> Algorithm:
    """FedMD whose mixtures t_n = sum_m A[n,m] s_m have learned coefficients, rows of a
    simplex (KT-pFL, Eq. 7).

    Args:
      coef_lr: step size of the coefficients (η3) in [0, inf); 0.01 as in the paper's
        ablations, 0 freezes A at 1/N.
      rho: weight of the penalty ||A - 1/N||^2 (ρ) in [0, inf); 0.7, the value of most
        of the authors' settings.
      lam: weight of the coefficients' loss KL(t_n || s_n) (λ) in [0, inf), multiplied
        by the client's share of all training examples; default N, which gives a client
        of mean size weight 1. The paper gives none.
      coef_steps: steps of the coefficients per round, in [0, 10000]; 1 as in the paper.

    Note:
      The projection to the simplex is ours: without it the rows' sums drift. Of a
      round's clients the block of rows and columns moves, normalised in their mixtures,
      and each row keeps what it weighs there. With order=code a mixture has the
      coefficients after their step. Eq. 7 as printed takes the gradient at the models
      after the training on public examples, which would need a second upload. Here it
      is taken at the predictions of the round, as in the authors' code. The penalty is
      stepped implicitly, which equals its gradient step to first order and is stable
      for every rho.

      With lam=1 the share divides a step by N, and this is close to FedMD. The authors'
      code has no share and chooses the step size from the gradient. As in FedMD `pre`
      scores the model after its local training and the public examples: to be compared
      with FedAvg's `post`.
    """

    mean = 1 / task.num_clients
    weight = task.num_clients if lam is None else lam

    def learned(asked):
        here = asked.given.here

        def step(_, row):
            mass = jnp.maximum(jnp.sum(jnp.where(here, row, 0)), public_data.TINY)
            change = slope(public_data.normalised(row, here), asked)
            gradient = weight * asked.share * change / mass
            return aggregate.descend(row, gradient, here, coef_lr, rho, mean)

        kept = jax.lax.fori_loop(0, coef_steps, step, asked.row)
        return kept if on.order == "code" else asked.row, kept

    return transfer(task, Rule(learned, mean), on)


@register(
    "fedmd",
    several_architectures=True,
    excludes={"mix": ROW_TARGETS, "positions": ROW_TARGETS},
)
@hyperparameters.shared(Exchange)
def fedmd(
    task: Task,
    *,
    on: Exchange,
) -> Algorithm:
    """Trains each client's own model on its examples, then on the mean prediction of
    all for public examples.

    Note:
      Softmax outputs for the private classes are averaged, and learnt by KL divergence,
      as KT-pFL runs it. The authors average logits, learnt by absolute error, and first
      train on the labels of the public examples. `post` scores are of the model at the
      end of the round: with order=paper after the training on public examples. The loss
      is that of the private training, `transfer_loss` that on the public examples.
    """
    return transfer(task, Rule(uniform), on)


@register(
    "sim_pfd",
    several_architectures=True,
    excludes={"mix": ROW_TARGETS, "positions": ROW_TARGETS},
)
@hyperparameters.shared(Exchange)
def sim_pfd(task: Task, *, on: Exchange) -> Algorithm:
    """FedMD whose clients weigh each other's predictions by their cosine with their own
    (Sim-pFD)."""
    return transfer(task, Rule(similar), on)


@register(
    "topk_pfd",
    several_architectures=True,
    excludes={"mix": ROW_TARGETS, "positions": ROW_TARGETS},
)
@hyperparameters.shared(Exchange)
def topk_pfd(
    task: Task,
    *,
    on: Exchange,
    neighbours: Annotated[int, Ge(1)] = 5,
) -> Algorithm:
    """FedMD among the K clients whose predictions are the most similar, each with its
    own (TopK-pFD).

    Args:
      neighbours: K in [1, inf), itself included; 5 as in KT-pFL (its code takes half of
        the clients).
    """
    rule = Rule(functools.partial(nearest, neighbours=neighbours))
    return transfer(task, rule, on)
