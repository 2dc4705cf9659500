"""pFedAFM: clients of any architecture exchange one small extractor and mix its
features with their own, elementwise.

Reference: Yi, Yu, Ren, Wang, Liu & Li, pFedAFM: adaptive feature mixture for data-level
personalization in heterogeneous federated learning on mobile edge devices (2024),
Algorithm 1; see also arXiv 2404.17847; authors' code: LipingYi/pFedAFM.
"""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Interval
from chex import Numeric

from fedjax_pfl import (
    architectures,
    averaging,
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
    Array,
    Method,
    Model,
    Own,
    Predictor,
    PyTree,
    State,
    Task,
    Update,
)


def small_model(task: Task) -> Model:
    """Returns the task's shared model; raises InputError if there is none, its features
    are not as many as the clients', or it is not for their inputs and classes."""
    widths, given = sorted({model.num_features for model in task.models}), task.shared
    if given is None or widths != [given.num_features]:
        raise InputError(
            "pFedAFM needs a small model of all clients (Task.shared) with as many "
            "features as every architecture, but "
            f"{f'it has {given.num_features}' if given else 'it is missing'} and the "
            f"architectures have {widths}: give "
            "all networks one width (--features), and the small model, too."
        )
    return shared_model.exchanged(task).model


def mixture(alpha: Array, g: Array, G: Array) -> Array:
    """Computes alpha g + (1 - alpha) G of own features g [B, K] and shared ones G
    [B, K], alpha [K] or [1]."""
    return trees.lerp(alpha[None], g, G)


def bounded_sgd(
    lr: Numeric, decay: Numeric, momentum: float = 0.9
) -> optax.GradientTransformation:
    """Makes SGD with momentum and weight decay whose steps end in [0, 1]."""
    inside = optax.stateless(
        lambda step, x: jax.tree.map(lambda s, x: jnp.clip(x + s, 0, 1) - x, step, x)
    )
    return optax.chain(
        optax.add_decayed_weights(decay), optax.sgd(lr, momentum), inside
    )


# of the logits [B, C, 3] of mixed features, of own and of shared ones
score = functools.partial(averaging.score_paired, names=("large", "small"))


def upload_split(task: Task, shared: Model) -> averaging.Split:
    """Returns the split of {"w", "theta", "alpha", "stats"}: the extractor theta is
    sent, and its running statistics unless they stay with bn_stats=local."""
    kept = averaging.split(task, variables=shared.bn_mask).personal[0]
    theirs = {
        "theta": {"body": kept["body"]},
        "stats": {"w": True, "theta": kept["stats"]},
    }
    return averaging.Split(task, ({**theirs, "w": True, "alpha": True},))


def features(
    model: Model, v: PyTree, part: str, *args: Any, **options: Any
) -> tuple[Array, PyTree]:
    """Returns the features [B, K] of the extractor `part` of v, and its new running
    statistics."""
    return model.features({**v[part], "stats": v["stats"][part]}, *args, **options)


def objective(
    model: Model,
    shared: Model,
    moving: tuple[str, ...],
    of: losses.Loss = losses.cross_entropy,
) -> local_training.Loss:
    """Returns the loss of the head on mixed features, or on those of theta
    alone where only that is `moving`."""

    def loss(v, batch, key):
        given = {"mask": batch.mask, "train": "theta" in moving}
        separate = keys.fold(key, keys.Loss.SHARED)
        r, theirs = features(shared, v, "theta", batch.x, **given, key=separate)
        stats = {**v["stats"], "theta": theirs}
        if "w" in moving:
            given = {"mask": batch.mask, "train": True, "key": key}
            g, stats["w"] = features(model, v, "w", batch.x, **given)
            r = mixture(v["alpha"], g, r)
        z = model.head(v["w"]["head"], r)
        return of(z, batch.y, batch.mask), stats

    return loss


def predictor(model: Model, shared: Model, v: PyTree) -> Predictor:
    """Returns the logits [B, C, 3] of the head on mixed, own and shared features,
    which `score` scores."""

    def predict(x, mask):
        g, G = (
            features(m, v, part, x, mask=mask)[0]
            for m, part in ((model, "w"), (shared, "theta"))
        )
        return jnp.stack(
            [model.head(v["w"]["head"], r) for r in (mixture(v["alpha"], g, G), g, G)],
            axis=-1,
        )

    return predict


@register("pfedafm", several_architectures=True, targets=True, trainings=2)
def pfedafm(
    task: Task,
    *,
    iterative: bool = True,
    alpha: Annotated[float, Interval(ge=0, le=1)] = 1.0,
    lr_alpha: Annotated[float, Ge(0)] = 1.0,
    wd_alpha: Annotated[float, Ge(0)] = 1e-3,
) -> Method:
    """Trains model and mixing vector on mixed features, then the shared extractor alone
    under the trained head.

    Args:
      iterative: true or false; the paper's two phases, or one loss of all parts at
        once, the ablation of its Figure 9.
      alpha: the first weight (α) of the client's own features in [0, 1]; 1 as in the
        authors' code, purely local.
      lr_alpha: the step size of α in [0, inf); 1, the largest of the paper's (0.001 to
        1); 0 freezes it. The authors' code has 0.01 for several architectures and 0.1
        for one.
      wd_alpha: the weight decay of α in [0, inf); 0.001 as in the authors' code, which
        draws it to 0.

    Note:
      After each step α is clipped to [0, 1], as in the authors' code. Both phases are
      the task's local work with its optimizer. The frozen extractor uses its running
      statistics and no dropout. `large_acc` and `small_acc` score the head on the
      client's own features and on the shared ones alone. In the authors' code one α and
      the optimizers' momentum pass from client to client, so that α takes N times as
      many steps, and in effect the last extractor replaces their mean. Here each client
      has its own, α's SGD with momentum 0.9, and needs a larger step size: with 0.01 α
      hardly leaves its start. Loss and `post` are of the first phase, after which the
      extractor of iterative training is still as received.
    """
    shared = small_model(task)
    split, phases = upload_split(task, shared), [("w", "alpha"), ("theta",)]
    if not iterative:
        phases = [("w", "alpha", "theta")]

    # Each part clips its own gradient.
    def optimizer(lr):
        alpha = bounded_sgd(lr_alpha, wd_alpha)
        both = task.optimizer(lr)
        return optimizers.per_part({"w": both, "theta": both, "alpha": alpha})

    sgd = local_training.bind(task._replace(optimizer=optimizer))

    def init(key):
        theta = shared.init(keys.fold(key, keys.Init.EXTRACTOR))
        first = jnp.full(shared.num_features, alpha, jnp.float32)

        def start(model):
            w = model.init(key)
            stats = {"w": w.pop("stats"), "theta": theta["stats"]}
            v = {"w": w, "theta": {"body": theta["body"]}, "alpha": first}
            return split.send({**v, "stats": stats})

        rows = architectures.stack(task, lambda model: start(model)[1])
        return State(start(task.models[0])[0], rows)

    kind = losses.of(task)

    def client(c, server, own):
        # Model and mixing vector are trained on mixed features.
        v, loss = (
            split.receive(server, own),
            objective(c.model, shared, phases[0], kind),
        )
        v, value = sgd(c, v, loss=loss, train=phases[0])
        predict = predictor(c.model, shared, v)
        # The extractor is trained under the trained head.
        if iterative:
            loss = objective(c.model, shared, phases[1], kind)
            stream = keys.Client.EXTRACTOR
            v, _ = sgd(c, v, loss=loss, train=phases[1], stream=stream)
        upload, own = split.send(v)
        return Update(upload, Own(own), predict, value, {"alpha": jnp.mean(v["alpha"])})

    def predict(server, own, c):
        return predictor(c.model, shared, split.receive(server, own))

    averages = ("theta",)
    return averaging.from_client(init, client, predict, score=score, averages=averages)
