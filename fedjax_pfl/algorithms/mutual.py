"""Mutual learning: a client's own model and a small one, which all clients exchange,
teach each other.

FML, FedKD and FedAPEN differ in the losses, and in what happens to the small model
after it is averaged.

References: FML, Shen et al., Federated mutual learning (2020); FedKD, Wu et al.,
Communication-efficient federated learning via knowledge distillation (Nature
Communications 2022); FedAPEN, Qin et al., FedAPEN: personalized cross-silo federated
learning with adaptability to statistical heterogeneity (KDD 2023). Authors' code:
wuch15/FedKD.
"""

import functools
from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Interval
from chex import Numeric

from fedjax_pfl import (
    architectures,
    evaluation,
    keys,
    local_training,
    losses,
    traffic,
    trees,
)
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.algorithms.shared_model import (
    Objective,
    Outputs,
    divergence,
    exchanged,
    learn,
    marked,
    start,
)
from fedjax_pfl.averaging import (
    BODY_AND_HEAD,
    from_client,
    predictor,
    score_paired,
)
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Method,
    Metrics,
    Predictor,
    PyTree,
    State,
    Task,
    Update,
)

TINY = 1e-6  # the least sum of two task losses that FedKD divides by
stop = jax.lax.stop_gradient


def predict_own(server: PyTree, row: PyTree, c: Client) -> Predictor:
    """Returns the predictor of the client's own model, which scores FML and FedKD."""
    return predictor(c.model, row["w"])


@register("fml", several_architectures=True, trainings=1)
def fml(
    task: Task,
    *,
    alpha: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    beta: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    clip: Annotated[float, Gt(0)] = 10.0,
) -> Method:
    """FML: each of the two models fits the labels and the other one's predictions.

    Args:
      alpha: weight of the labels for a client's own model (α) in [0, 1]; 0.5 as in the
        authors' code.
      beta: weight of the labels for the small model (β) in [0, 1]; 0.5 as in the
        authors' code.
      clip: largest norm of each model's gradient in (0, inf); 10 as in HtFLlib.

    Note:
      Small models are averaged uniformly, as in the authors' code. The divergences are
      sums over the classes, and each model takes the other's predictions as constants.
      HtFLlib averages over the classes, lets gradients into both, and has α = β = 1.
      The reported loss is the own model's. A client whose network is the small one
      starts with the same weights (the authors draw them independently): until the
      first mean of the small models the two have nothing to teach each other.
    """
    small, objective = exchanged(task), fml_objective(alpha, beta, losses.of(task))

    def client(c, server, row):
        upload, row, value = learn(
            c, c.train, row, server, small, objective, task, clip=clip
        )
        return Update(upload, marked(row), predictor(c.model, row["w"]), value)

    return from_client(
        lambda key: start(key, task, small),
        client,
        predict_own,
        weight=lambda cohort: cohort.trained,
        averages=BODY_AND_HEAD,
    )


def fml_objective(
    alpha: Numeric, beta: Numeric, of: losses.Loss = losses.cross_entropy
) -> Objective:
    """Returns the sum of FML's two losses, and the own model's."""

    def objective(v, own, small, batch):
        def loss(weight, mine, other):
            fit = of(mine, batch.y, batch.mask)
            taught = divergence(stop(other), mine, batch.mask)
            return weight * fit + (1 - weight) * taught

        private, meme = loss(alpha, own.z, small.z), loss(beta, small.z, own.z)
        return private + meme, private

    return objective


@register("fedkd", several_architectures=True, trainings=1)
def fedkd(task: Task) -> Method:
    """FedKD: two models distil predictions and features into each other, with a weight
    that grows as both fit the labels.

    Note:
      As in the authors' code gradients go through everything, the weight 1 / (CE + CE)
      included, and the loss of the features counts twice; the loss of attention maps
      has no counterpart here. Divergences are sums over the classes (means in the code
      libraries). The own loss is reported. A client whose network is the small one
      starts with the same weights. The small model travels whole: the paper's
      compression of its changes to low rank is not built.
    """
    small = exchanged(task)

    objective = functools.partial(fedkd_objective, of=losses.of(task))

    def init(key):
        state, fan_in = start(key, task, small), small.model.num_features

        def draw(model):
            shape, key_map = (model.num_features, fan_in), keys.fold(key, keys.Init.MAP)
            return jax.random.uniform(key_map, shape, jnp.float32, -1, 1) / fan_in**0.5

        rows = {**state.clients, "map": architectures.stack(task, draw)}
        return state._replace(clients=rows)

    def client(c, server, row):
        upload, row, value = learn(
            c, c.train, row, server, small, objective, task, also=("map",)
        )
        predict = predictor(c.model, row["w"])
        return Update(upload, marked(row, ("w", "map")), predict, value)

    return from_client(
        init,
        client,
        predict_own,
        weight=lambda cohort: cohort.trained,
        averages=BODY_AND_HEAD,
    )


def fedkd_objective(
    v: PyTree,
    own: Outputs,
    small: Outputs,
    batch: Batch,
    of: losses.Loss = losses.cross_entropy,
) -> tuple[Array, Array]:
    """Returns the sum of FedKD's two losses, and the own model's."""
    fit = lambda z: of(z, batch.y, batch.mask)
    teacher, student = fit(own.z), fit(small.z)
    weight = 1 / jnp.maximum(teacher + student, TINY)
    mapped = jnp.dot(small.h, v["map"].T)

    def from_other(z, h, other_z, other_h):
        gap = losses.masked_mean(jnp.mean((h - other_h) ** 2, axis=1), batch.mask)
        return weight * (divergence(other_z, z, batch.mask) + gap)

    teacher += from_other(own.z, own.h, small.z, mapped)
    student += from_other(small.z, mapped, own.z, own.h)
    return teacher + student, teacher


def mixed(lam: Numeric, own: Array, small: Array) -> Array:
    """Computes lam own + (1 - lam) small, of logits [B, C]."""
    # so that equal logits give lam no gradient at all
    return small + lam * (own - small)


def fedapen_objective(lam: Array, of: losses.Loss = losses.cross_entropy) -> Objective:
    """Returns the sum of FedAPEN's two losses, and the own model's: the labels, the
    other model's predictions, and the labels by the ensemble."""

    def objective(v, own, small, batch):
        fit = lambda z: of(z, batch.y, batch.mask)

        def loss(mine, other):
            return fit(mine) + divergence(stop(other), mine, batch.mask)

        private = loss(own.z, small.z) + fit(mixed(lam, own.z, stop(small.z)))
        shared = loss(small.z, own.z) + fit(mixed(lam, stop(own.z), small.z))
        return private + shared, private

    return objective


# of the logits [B, C, 4] of the ensemble, its parts and their sum
ensemble_scores = functools.partial(score_paired, names=("own", "shared", "equal"))


@register("fedapen", several_architectures=True)
def fedapen(
    task: Task,
    *,
    lam: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    lam_lr: Annotated[float, Ge(0)] = 0.001,
    lam_epochs: Annotated[int, Interval(ge=0, le=10_000)] = 10,
    held_out: Annotated[float, Interval(ge=0, le=1)] = 0.05,
) -> Algorithm:
    """FedAPEN: the two models predict together, in a mixture that each client learns
    from examples held out.

    Args:
      lam: the first weight of the own model's logits (λ) in [0, 1]; 0.5 as in the
        paper.
      lam_lr: step size of the weight in [0, inf); 0.001 as in the authors' code.
      lam_epochs: its epochs over the held-out examples per round, in [0, 10000]; 10 as
        in the authors' code; 0 is the ablation FedEN.
      held_out: share of a client's examples that the weight is learned from, at least
        one, in [0, 1]; 0.05 as in the paper.

    Note:
      The rate of the models is constant (the paper decays it, to no effect in its
      code). The weight is learned with the averaged small model, also where only some
      clients take part. A client with a single example keeps its weight. `acc` is the
      ensemble's, `own_acc`, `shared_acc` and `equal_acc` are of the own model, the
      small one and both alike. The own loss is reported. Weights start as every model's
      here, not from the paper's Kaiming-normal; twins begin as FML's do. Where only
      some clients take part, each receives the small model twice a round, of which the
      traffic counts one.
    """
    small = exchanged(task)
    local_training.check_left(task, held_out)

    def both(server, row, c):
        theta = small.split.receive(server, row["kept"])
        return predictor(c.model, row["w"]), predictor(small.model, theta)

    def predict(server, row, c):
        def run(x, mask):
            own, shared = (f(x, mask) for f in both(server, row, c))
            weights = (row["lam"], 1, 0, 0.5)
            return jnp.stack([mixed(lam, own, shared) for lam in weights], axis=-1)

        return run

    def init(key):
        state = start(key, task, small)
        first = trees.replicate(jnp.asarray(lam, jnp.float32), task.num_clients)
        return state._replace(clients={**state.clients, "lam": first})

    def round(key, state, cohort):
        # The two models are trained on the examples that are not held out.
        def client(c, row):
            data, _ = local_training.holdout(c.train, held_out)
            objective = fedapen_objective(row["lam"], losses.of(task))
            upload, row, value = learn(
                c, data, row, state.server, small, objective, task
            )
            return upload, marked(row), value

        # The weight is learned from the others, with the averaged small model.
        def adapt(c, row):
            own, shared = both(theta, row, c)

            def step(key, lam, batch):
                z = own(batch.x, batch.mask), shared(batch.x, batch.mask)
                fit = lambda lam: losses.of(task)(mixed(lam, *z), batch.y, batch.mask)
                return jnp.clip(lam - lam_lr * jax.grad(fit)(lam), 0, 1), ()

            _, data = local_training.holdout(c.train, held_out)
            batch, lam = task.batch_size, row["lam"]
            learned, _, _ = local_training.steps(
                c.key, data, step, lam, batch_size=batch, epochs=lam_epochs
            )
            predictor = predict(theta, {**row, "lam": learned}, c)
            return learned, evaluation.post(cohort, c, predictor, ensemble_scores)

        theta, (rows, value) = cohort.mean(
            client, state.clients, weight=cohort.trained, default=state.server
        )
        learned, post = cohort.map(adapt, rows, phase=1)
        state = State(theta, {**rows, "lam": learned})
        return state, Metrics(value, post, {"lam": learned})

    def sent(state, cohort, metrics):
        return traffic.both_ways(cohort, state.server)

    return Algorithm(init, round, predict, ensemble_scores, sent)
