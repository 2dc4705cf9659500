"""pFedAFM: clients of any architecture exchange one small extractor and mix its
features with their own, elementwise.

Reference: Yi, Yu, Ren, Wang, Liu & Li, pFedAFM: adaptive feature mixture for data-level
personalization in heterogeneous federated learning on mobile edge devices (2024),
Algorithm 1; see also arXiv 2404.17847.
"""

import functools
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval
from chex import Numeric

from fedjax_pfl import (
    architectures,
    averaging,
    evaluation,
    keys,
    local_training,
    losses,
    optimizers,
    trees,
)
from fedjax_pfl.algorithms import shared_model
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Batch,
    Client,
    Cohort,
    Metrics,
    Model,
    Own,
    Predictor,
    PyTree,
    State,
    Task,
)


def small_model(task: Task) -> Model:
    """The task's shared model; InputError if there is none, its features are not as
    many as the clients', its extractor has no parameters, or it is not for the clients'
    inputs and classes."""
    widths, given = sorted({model.num_features for model in task.models}), task.shared
    if given is None or widths != [given.num_features]:
        raise InputError(
            "pFedAFM needs a small model of all clients (Task.shared) with as many "
            "features as every architecture, but "
            f"{f'it has {given.num_features}' if given else 'it is missing'} and the "
            f"architectures have {widths}: give "
            "all networks one width (--features), and the small model, too."
        )
    if not jax.tree.leaves(jax.eval_shape(given.init, jax.random.key(0))["body"]):
        raise InputError(
            "pFedAFM shares the extractor of the small model, but this one has no "
            "parameters there (as `linear`): give "
            "another (Task.shared, --shared_model)."
        )
    return shared_model.exchanged(task).model


def mixture(alpha: Array, g: Array, G: Array) -> Array:
    """alpha g + (1 - alpha) G of own features g [B, K] and shared ones G [B, K], alpha
    [K] or [1]."""
    return trees.lerp(alpha[None], g, G)


def bounded_sgd(
    lr: Numeric, decay: Numeric, momentum: float = 0.9
) -> optax.GradientTransformation:
    """SGD with momentum and weight decay whose steps end in [0, 1]."""
    inside = optax.stateless(
        lambda step, x: jax.tree.map(lambda s, x: jnp.clip(x + s, 0, 1) - x, step, x)
    )
    return optax.chain(
        optax.add_decayed_weights(decay), optax.sgd(lr, momentum), inside
    )


def random_one(key: Array, cohort: Cohort) -> Array:
    """One of the clients that trained, drawn by their ids alone, [S] bool; none where
    nobody trained."""
    draws = jax.vmap(
        lambda id: jax.random.uniform(jax.random.fold_in(key, id), (), jnp.float32)
    )(cohort.ids)
    return cohort.trained & (draws == jnp.max(draws, where=cohort.trained, initial=-1))


# of the logits [B, C, 3] of mixed features, of own and of shared ones
score = functools.partial(averaging.score_beside, names=("large", "small"))


def upload_split(task: Task, shared: Model) -> averaging.Split:
    """Which leaves of {"w", "theta", "alpha", "stats"} are sent: the extractor theta,
    and its running statistics unless they stay with bn_stats=local."""
    stays = averaging.split(task, variables=shared.bn_mask).personal[0]
    theirs = {
        "theta": {"body": stays["body"]},
        "stats": {"w": True, "theta": stays["stats"]},
    }
    return averaging.Split(task, ({**theirs, "w": True, "alpha": True},))


def features(
    model: Model, v: PyTree, part: str, *args: Any, **options: Any
) -> tuple[Array, PyTree]:
    """The features [B, K] of the extractor `part` of v, and its new running
    statistics."""
    return model.features({**v[part], "stats": v["stats"][part]}, *args, **options)


def objective(
    model: Model, shared: Model, moving: tuple[str, ...]
) -> local_training.Loss:
    """The cross entropy of the head on mixed features, or on those of theta alone where
    only that is `moving`."""

    def loss(v: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        apart = keys.fold(key, keys.Loss.SHARED)
        r, theirs = features(
            shared,
            v,
            "theta",
            batch.x,
            mask=batch.mask,
            train="theta" in moving,
            key=apart,
        )
        stats = {**v["stats"], "theta": theirs}
        if "w" in moving:
            g, stats["w"] = features(
                model, v, "w", batch.x, mask=batch.mask, train=True, key=key
            )
            r = mixture(v["alpha"], g, r)
        return losses.cross_entropy(
            model.head(v["w"]["head"], r), batch.y, batch.mask
        ), stats

    return loss


def predictor(model: Model, shared: Model, v: PyTree) -> Predictor:
    """The logits [B, C, 3] of the head on mixed, own and shared features, which `score`
    scores."""

    def predict(x: Array, mask: Array) -> Array:
        g, G = (
            features(m, v, part, x, mask=mask)[0]
            for m, part in ((model, "w"), (shared, "theta"))
        )
        return jnp.stack(
            [model.head(v["w"]["head"], r) for r in (mixture(v["alpha"], g, G), g, G)],
            axis=-1,
        )

    return predict


@register("pfedafm", several_architectures=True)
def pfedafm(
    task: Task,
    *,
    training: Literal["iterative", "end_to_end"] = "iterative",
    mix: Literal["vector", "scalar"] = "vector",
    alpha: Annotated[float, Interval(ge=0, le=1)] = 1.0,
    lr_alpha: Annotated[float, Ge(0)] = 0.01,
    wd_alpha: Annotated[float, Ge(0)] = 1e-3,
    aggregation: Literal["mean", "relay"] = "mean",
) -> Algorithm:
    """Trains model and mixing vector on mixed features, then the shared extractor alone
    under the trained head.

    Args:
      training: one of iterative (the paper's two phases), end_to_end (one loss of all
        at once, the ablation).
      mix: what is learned, one of vector (a weight for each feature, the paper), scalar
        (one for all).
      alpha: the first weight (α) of the client's own features in [0, 1]; 1 as in the
        authors' code, purely local.
      lr_alpha: the step size of α in [0, inf); 0.01 as in the authors' code for several
        architectures (0.1 for one; paper 0.001 to 1); 0 freezes it.
      wd_alpha: the weight decay of α in [0, inf); 0.001 as in the authors' code, which
        draws it to 0.
      aggregation: of the extractors, one of mean (the paper), relay (the last of a
        random order, as in effect in the authors' code).

    Note:
      After each step α is clipped to [0, 1], as in the authors' code. Both phases are
      the task's local work with its optimizer. The frozen extractor uses its running
      statistics and no dropout. `large_acc` and `small_acc` score the head on the
      client's own features and on the shared ones alone. In the authors' code one α and
      the optimizers' momentum pass from client to client; here each client has its own,
      α's SGD with momentum 0.9. Loss and `post` are of the first phase, after which the
      extractor of iterative training is still as received.
    """
    shared = small_model(task)
    phases = (
        [("w", "alpha", "theta")]
        if training == "end_to_end"
        else [("w", "alpha"), ("theta",)]
    )
    split = upload_split(task, shared)

    # each part clips its own gradient
    def optimizer(lr: Numeric) -> optax.GradientTransformation:
        each = {
            "w": task.optimizer(lr),
            "theta": task.optimizer(lr),
            "alpha": bounded_sgd(lr_alpha, wd_alpha),
        }
        return optimizers.per_part(each)

    def train(
        c: Client, key: Array, v: PyTree, moving: tuple[str, ...]
    ) -> tuple[PyTree, Array]:
        loss = objective(c.model, shared, moving)
        return local_training.sgd(
            key, c.train, loss, v, task._replace(optimizer=optimizer), train=moving
        )

    def init(key: Array) -> State:
        theta = shared.init(keys.fold(key, keys.Init.EXTRACTOR))
        first = jnp.full(
            shared.num_features if mix == "vector" else 1, alpha, jnp.float32
        )

        def start(model: Model) -> tuple[PyTree, PyTree]:
            w = model.init(key)
            stats = {"w": w.pop("stats"), "theta": theta["stats"]}
            return split.send(
                {
                    "w": w,
                    "theta": {"body": theta["body"]},
                    "alpha": first,
                    "stats": stats,
                }
            )

        return State(
            start(task.models[0])[0],
            architectures.stack(task, lambda model: start(model)[1]),
        )

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def client(
            c: Client, own: PyTree
        ) -> tuple[PyTree, Own, Array, dict[str, Array], Array]:
            # model and mixing vector, on mixed features
            v, value = train(c, c.key, split.receive(state.server, own), phases[0])
            post = evaluation.post(cohort, c, predictor(c.model, shared, v), score)
            # the extractor, under the trained head
            if phases[1:]:
                v, _ = train(c, keys.fold(c.key, keys.Client.EXTRACTOR), v, phases[1])
            upload, own = split.send(v)
            return upload, Own(own), value, post, jnp.mean(v["alpha"])

        # the server averages the extractors
        weight = random_one(key, cohort) if aggregation == "relay" else cohort.sizes
        server, (own, value, post, mean) = cohort.mean(
            client, state.clients, weight=weight, default=state.server
        )
        return State(server, own), Metrics(value, post, {"alpha": mean})

    def predict(server: PyTree, own: PyTree, c: Client) -> Predictor:
        return predictor(c.model, shared, split.receive(server, own))

    averages = ("theta",) if aggregation == "mean" else ()
    return Algorithm(init, round, predict, score, averages=averages)
