"""A small model that all clients exchange, each of which trains it together with its
own model of any architecture."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
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
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Batch, Client, Data, Model, Own, PyTree, State, Task


class Small(NamedTuple):
    """The model that all clients exchange."""

    model: Model
    split: averaging.Split  # which of its leaves are sent


class Outputs(NamedTuple):
    """Features and logits of a batch."""

    h: Array  # [B, K]
    z: Array  # [B, C] logits


# (trained rows, outputs of the own model, of the small one, batch) -> (what is
# minimised [], what is reported [])
Objective = Callable[[PyTree, Outputs, Outputs, Batch], tuple[Array, Array]]


def exchanged(task: Task) -> Small:
    """Returns the task's shared model.

    Raises:
      InputError: there is none, or it does not take the clients' inputs or has not
        their classes.
    """
    if (model := task.shared) is None:
        raise InputError(
            "This method exchanges a small model that every client has: give the task "
            "one as `shared`."
        )
    x = task.prepared
    try:
        logits = jax.eval_shape(
            lambda x: model.apply(model.init(jax.random.key(0)), x)[0], x
        )
    except (TypeError, ValueError):
        raise InputError(
            "The task's `shared` model does not take inputs of shape "
            f"{list(x.shape[1:])}."
        ) from None
    if logits.shape[1] != task.num_classes:
        raise InputError(
            f"The task's `shared` model has {logits.shape[1]} classes instead of "
            f"{task.num_classes}."
        )
    # one for all clients
    return Small(model, averaging.split(task._replace(models=(model,))))


def start(key: Array, task: Task, small: Small) -> State:
    """Returns the state that all methods here have: the small model, each client's
    own model, and what it keeps of the small one."""
    shared, kept = small.split.send(small.model.init(key))
    own = architectures.stack(task, lambda model: model.init(key))
    return State(shared, {"w": own, "kept": trees.replicate(kept, task.num_clients)})


def learn(
    c: Client,
    data: Data,
    mine: PyTree,
    server: PyTree,
    small: Small,
    objective: Objective,
    task: Task,
    *,
    also: tuple[str, ...] = (),
    clip: Numeric | None = None,
) -> tuple[PyTree, PyTree, Array]:
    """Trains a client's own model mine["w"] and the small model, as received, together
    on the same batches.

    Each has its own optimizer, so that nothing but the objective joins them.

    Args:
      server: what was sent of the small model.
      also: further rows of the client that are trained.
      clip: the largest norm of the gradient of each; None: any.

    Returns:
      (what is sent of the small model, the client's new rows, the mean of what the
      objective reports []).
    """
    models = {
        "own": (c.model, mine["w"]),
        "small": (small.model, small.split.receive(server, mine["kept"])),
    }

    def loss(v, batch, key):
        out, stats = {}, {}
        draws = {"own": key, "small": keys.fold(key, keys.Loss.SHARED)}
        for name, (model, _) in models.items():
            w = {**v[name], "stats": v["stats"][name]}
            h, stats[name] = model.features(
                w, batch.x, mask=batch.mask, train=True, key=draws[name]
            )
            out[name] = Outputs(h, model.head(w["head"], h))
        value, reported = objective(v.get("rows", {}), out["own"], out["small"], batch)
        return value, stats, reported

    def separate(lr):
        one = task.optimizer(lr)
        if clip is not None:
            one = optax.chain(optimizers.clipped(clip), one)
        return optimizers.per_part(dict.fromkeys(parts, one))

    v = {name: averaging.params(w) for name, (_, w) in models.items()}
    v |= {"rows": {name: mine[name] for name in also}} if also else {}
    parts, v["stats"] = tuple(v), {name: w["stats"] for name, (_, w) in models.items()}
    sgd = local_training.bind(task._replace(optimizer=separate), loss)
    v, (_, value) = sgd(c, v, data=data, train=parts, has_aux=True)
    w, theta = ({**v[name], "stats": v["stats"][name]} for name in models)
    upload, kept = small.split.send(theta)
    return upload, {**mine, **v.get("rows", {}), "w": w, "kept": kept}, value


def marked(mine: PyTree, names: tuple[str, ...] = ("w",)) -> PyTree:
    """Returns a client's rows, those marked `Own` whose structure is its
    architecture's."""
    return {name: Own(x) if name in names else x for name, x in mine.items()}


def divergence(target: Array, z: Array, mask: Array) -> Array:
    """Computes the mean KL(softmax(target) || softmax(z)) of logits [B, C] over the
    valid rows, []."""
    log_p, log_q = jax.nn.log_softmax(target), jax.nn.log_softmax(z)
    return losses.masked_mean(
        optax.losses.kl_divergence_with_log_targets(log_q, log_p), mask
    )
