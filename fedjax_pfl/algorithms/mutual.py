"""Mutual learning: a client's own model and a small one, which all clients exchange,
teach each other.

FML, FedKD and FedAPEN differ in the losses, and in what happens to the small model
after it is averaged.

References: FML, Shen et al., Federated mutual learning (2020); FedKD, Wu et al.,
Communication-efficient federated learning via knowledge distillation (Nature
Communications 2022); FedAPEN, Qin et al., FedAPEN: personalized cross-silo federated
learning with adaptability to statistical heterogeneity (KDD 2023).
"""

import functools
from collections.abc import Callable
from typing import Annotated, Literal

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
from fedjax_pfl.averaging import BODY_AND_HEAD, predictor, score_beside
from fedjax_pfl.errors import needed
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Cohort,
    Metrics,
    Model,
    Predictor,
    PyTree,
    State,
    Task,
    Traffic,
)

TINY = 1e-6  # the least sum of two task losses that FedKD divides by
stop = jax.lax.stop_gradient


def low_rank(x: Array, energy: Numeric) -> tuple[Array, Array]:
    """A leaf's matrix [m, n], n its last axis, of the least rank r that keeps a share
    `energy` of the squared singular values, and how many scalars are sent: r (m + n +
    1), or whole and unchanged where that is no more."""
    matrix = x.reshape(-1, x.shape[-1])
    u, s, v = jnp.linalg.svd(matrix, full_matrices=False)
    # else it is rounding
    s = jnp.where(s > jnp.finfo(s.dtype).eps * max(matrix.shape) * s[0], s, 0)
    # from the smallest on, so that none is lost beside the sum
    rest = jnp.cumsum(s[::-1] ** 2)[::-1]
    # 1 - energy may round to 1
    kept = (rest > (1 - energy) * rest[0]).at[0].set(s[0] > 0)
    near = jnp.dot(
        u * jnp.where(kept, s, 0)[None], v, precision=jax.lax.Precision.HIGHEST
    )
    count = jnp.sum(kept, dtype=jnp.int32) * (sum(matrix.shape) + 1)
    return jnp.where(count < x.size, near.reshape(x.shape), x), jnp.minimum(
        count, x.size
    )


def compress(new: PyTree, old: PyTree, energy: Numeric) -> tuple[PyTree, Array]:
    """old + (new - old) with each matrix of the change of low rank, and the scalars
    that are sent []."""
    count = jnp.zeros((), jnp.int32)
    leaves, treedef = jax.tree.flatten(new)
    for i, (x, y) in enumerate(zip(leaves, jax.tree.leaves(old), strict=True)):
        change, sent = low_rank(x - y, energy) if x.ndim > 1 else (x - y, x.size)
        leaves[i], count = y + change, count + sent
    return jax.tree.unflatten(treedef, leaves), count


def predict_own(server: PyTree, mine: PyTree, c: Client) -> Predictor:
    """The client's own model, by which FML and FedKD are scored."""
    return predictor(c.model, mine["w"])


@register("fml", several_architectures=True)
def fml(
    task: Task,
    *,
    alpha: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    beta: Annotated[float, Interval(ge=0, le=1)] = 0.5,
    clip: Annotated[float, Gt(0)] = 10.0,
    weights: Literal["uniform", "data"] = "uniform",
) -> Algorithm:
    """FML: each of the two models fits the labels and the other one's predictions.

    Args:
      alpha: weight of the labels for a client's own model (α) in [0, 1]; 0.5 as in the
        authors' code.
      beta: weight of the labels for the small model (β) in [0, 1]; 0.5 as in the
        authors' code.
      clip: largest norm of each model's gradient in (0, inf); 10 as in HtFLlib.
      weights: of the small models, one of uniform (the authors' code), data (training
        examples).

    Note:
      The divergences are sums over the classes, and each model takes the other's
      predictions as given. HtFLlib averages over the classes, lets gradients into both,
      and has α = β = 1. The reported loss is the own model's. A client whose network is
      the small one begins as its twin, drawn by the same key (the authors draw it
      apart): until the first mean of the small models they have nothing to teach each
      other.
    """
    small = exchanged(task)

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array]]:
            objective = fml_objective(alpha, beta)
            upload, mine, value = learn(
                c, c.train, mine, state.server, small, objective, task, clip=clip
            )
            return (
                upload,
                marked(mine),
                value,
                evaluation.post(cohort, c, predictor(c.model, mine["w"])),
            )

        weight = cohort.sizes if weights == "data" else cohort.trained
        theta, (mine, value, post) = cohort.mean(
            client, state.clients, weight=weight, default=state.server
        )
        return State(theta, mine), Metrics(value, post)

    init = lambda key: start(key, task, small)
    return Algorithm(
        init,
        round,
        predict_own,
        evaluation.classification,
        averages=BODY_AND_HEAD,
    )


def fml_objective(alpha: Numeric, beta: Numeric) -> Objective:
    """FML's two losses."""

    def objective(
        v: PyTree, own: Outputs, small: Outputs, batch: Batch
    ) -> tuple[Array, Array]:
        def loss(weight: Numeric, mine: Array, other: Array) -> Array:
            fit = losses.cross_entropy(mine, batch.y, batch.mask)
            return weight * fit + (1 - weight) * divergence(
                stop(other), mine, batch.mask
            )

        private, meme = loss(alpha, own.z, small.z), loss(beta, small.z, own.z)
        return private + meme, private

    return objective


@register("fedkd", several_architectures=True)
def fedkd(
    task: Task,
    *,
    detach: bool = False,
    reduction: Literal["sum", "mean"] = "sum",
    svd: bool = False,
    energy_start: Annotated[float, Interval(gt=0, le=1)] = 0.95,
    energy_end: Annotated[float, Interval(gt=0, le=1)] = 0.98,
) -> Algorithm:
    """FedKD: two models distil into each other, predictions and features, the more the
    better both fit the labels.

    Args:
      detach: whether each model takes the other's outputs, and the weight, as given,
        true or false.
      reduction: of the predictions' divergence, one of sum, mean (over the classes;
        mean as in the code libraries).
      svd: whether changes of the small model are sent as matrices of low rank, true or
        false.
      energy_start: share of the squared singular values kept, in (0, 1], from which it
        moves to energy_end in equal steps, the first in round 0; 0.95 as in the
        authors' code.
      energy_end: share kept in the last of the task's rounds, in (0, 1]; 0.98 as there.

    Note:
      As in the authors' code gradients go through everything, the weight 1 / (CE + CE)
      included, and the loss of the features counts twice; the loss of attention maps
      has no counterpart here. The own loss is reported. Twins begin as FML's do. With
      svd a matrix that takes no less room so travels whole, and what is cut off a
      change is lost, as in the paper; downloads are counted as if every client had
      received every change before, and without its first copy of the model.
    """
    small = exchanged(task)
    objective = fedkd_objective(
        detach, 1 if reduction == "sum" else 1 / task.num_classes
    )
    rounds = (
        max(1, needed("rounds", task.rounds, "over which the share kept moves"))
        if svd
        else 1
    )

    def init(key: Array) -> State:
        state, fan_in = start(key, task, small), small.model.num_features
        draw: Callable[[Model], Array] = lambda model: jax.random.uniform(
            keys.fold(key, keys.Init.MAP),
            (model.num_features, fan_in),
            jnp.float32,
            minval=-1,
            maxval=1,
        )
        return state._replace(
            clients={
                **state.clients,
                "map": architectures.stack(task, lambda m: draw(m) / fan_in**0.5),
            }
        )

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def squeeze(theta: PyTree) -> tuple[PyTree, Array]:
            passed = jnp.minimum(1, (cohort.round + 1) / rounds)
            energy = energy_start + (energy_end - energy_start) * passed
            return (
                compress(theta, state.server, energy)
                if svd
                else (theta, jnp.int32(trees.size(theta)))
            )

        def client(
            c: Client, mine: PyTree
        ) -> tuple[PyTree, PyTree, Array, dict[str, Array], Array]:
            upload, mine, value = learn(
                c, c.train, mine, state.server, small, objective, task, also=("map",)
            )
            upload, up = squeeze(upload)
            post = evaluation.post(cohort, c, predictor(c.model, mine["w"]))
            return upload, marked(mine, ("w", "map")), value, post, up

        theta, (mine, value, post, up) = cohort.mean(
            client, state.clients, weight=cohort.trained, default=state.server
        )
        theta, down = squeeze(theta)
        scalars: tuple[dict[str, Array], ...] = (
            ({"scalars_up": up}, {"scalars_down": down}) if svd else ()
        )
        return State(theta, mine), Metrics(value, post, *scalars)

    def sent(state: State, cohort: Cohort, metrics: Metrics) -> Traffic:
        up = metrics.clients["scalars_up"]
        return traffic.both_ways(
            cohort, jnp.full_like(up, 1) * metrics.server["scalars_down"], up
        )

    # with svd the server sends a change of low rank, and no server optimizer can update
    # it
    return Algorithm(
        init,
        round,
        predict_own,
        evaluation.classification,
        sent if svd else None,
        averages=() if svd else BODY_AND_HEAD,
    )


def fedkd_objective(detach: bool, scale: float) -> Objective:
    """FedKD's losses; the divergence of predictions is multiplied by `scale`."""
    given: Callable[[Array], Array] = stop if detach else lambda x: x

    def objective(
        v: PyTree, own: Outputs, small: Outputs, batch: Batch
    ) -> tuple[Array, Array]:
        teacher, student = (
            losses.cross_entropy(out.z, batch.y, batch.mask) for out in (own, small)
        )
        weight = given(1 / jnp.maximum(teacher + student, TINY))
        mapped = jnp.dot(small.h, v["map"].T)

        def from_other(z: Array, h: Array, other_z: Array, other_h: Array) -> Array:
            gap = losses.masked_mean(
                jnp.mean((h - given(other_h)) ** 2, axis=1), batch.mask
            )
            return weight * (scale * divergence(given(other_z), z, batch.mask) + gap)

        teacher += from_other(own.z, own.h, small.z, mapped)
        student += from_other(small.z, mapped, own.z, own.h)
        return teacher + student, teacher

    return objective


def mixed(lam: Numeric, own: Array, small: Array) -> Array:
    """lam own + (1 - lam) small, of logits [B, C]."""
    # so that equal logits give lam no gradient at all
    return small + lam * (own - small)


def fedapen_objective(lam: Array) -> Objective:
    """FedAPEN's two losses: the labels, the other's predictions, and the labels by the
    ensemble."""

    def objective(
        v: PyTree, own: Outputs, small: Outputs, batch: Batch
    ) -> tuple[Array, Array]:
        fit: Callable[[Array], Array] = lambda z: losses.cross_entropy(
            z, batch.y, batch.mask
        )
        private = (
            fit(own.z)
            + divergence(stop(small.z), own.z, batch.mask)
            + fit(mixed(lam, own.z, stop(small.z)))
        )
        shared = (
            fit(small.z)
            + divergence(stop(own.z), small.z, batch.mask)
            + fit(mixed(lam, stop(own.z), small.z))
        )
        return private + shared, private

    return objective


# of the logits [B, C, 4] of the ensemble, its parts and their sum
ensemble_scores = functools.partial(score_beside, names=("own", "shared", "equal"))


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

    def both(server: PyTree, mine: PyTree, c: Client) -> tuple[Predictor, Predictor]:
        theta = small.split.receive(server, mine["kept"])
        return predictor(c.model, mine["w"]), predictor(small.model, theta)

    def predict(server: PyTree, mine: PyTree, c: Client) -> Predictor:
        def run(x: Array, mask: Array) -> Array:
            own, shared = (f(x, mask) for f in both(server, mine, c))
            return jnp.stack(
                [mixed(lam, own, shared) for lam in (mine["lam"], 1, 0, 0.5)], axis=-1
            )

        return run

    def init(key: Array) -> State:
        state = start(key, task, small)
        first = trees.replicate(jnp.asarray(lam, jnp.float32), task.num_clients)
        return state._replace(clients={**state.clients, "lam": first})

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(c: Client, mine: PyTree) -> tuple[PyTree, PyTree, Array]:
            data, _ = local_training.holdout(c.train, held_out)
            upload, mine, value = learn(
                c, data, mine, state.server, small, fedapen_objective(mine["lam"]), task
            )
            return upload, marked(mine), value

        def adapt(c: Client, mine: PyTree) -> tuple[Array, dict[str, Array]]:
            own, shared = both(theta, mine, c)

            def step(key: Array, lam: Array, batch: Batch) -> tuple[Array, tuple[()]]:
                z = own(batch.x, batch.mask), shared(batch.x, batch.mask)
                slope = jax.grad(
                    lambda lam: losses.cross_entropy(
                        mixed(lam, *z), batch.y, batch.mask
                    )
                )(lam)
                return jnp.clip(lam - lam_lr * slope, 0, 1), ()

            _, data = local_training.holdout(c.train, held_out)
            learned, _, _ = local_training.steps(
                c.key,
                data,
                step,
                mine["lam"],
                batch_size=task.batch_size,
                epochs=lam_epochs,
            )
            return learned, evaluation.post(
                cohort, c, predict(theta, {**mine, "lam": learned}, c), ensemble_scores
            )

        theta, (mine, value) = cohort.mean(
            client, state.clients, weight=cohort.trained, default=state.server
        )
        learned, post = cohort.map(adapt, mine, phase=1)
        return State(theta, {**mine, "lam": learned}), Metrics(
            value, post, {"lam": learned}
        )

    return Algorithm(init, round, predict, ensemble_scores)
