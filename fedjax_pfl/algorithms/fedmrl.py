"""FedMRL: a small shared model and the client's own one fuse their features; the shared
head reads the first of the fused features, the own head all.

Reference: Yi et al., Federated model heterogeneous Matryoshka representation learning
(NeurIPS 2024); authors' code: LipingYi/FedMRL.
"""

import functools

import jax.numpy as jnp
from flax import nnx

from fedjax_pfl import (
    architectures,
    averaging,
    keys,
    local_training,
    losses,
    models,
    optimizers,
)
from fedjax_pfl.algorithms import shared_model
from fedjax_pfl.algorithms.registry import register
from fedjax_pfl.averaging import params
from fedjax_pfl.errors import InputError
from fedjax_pfl.models import layers
from fedjax_pfl.types import Method, Model, Own, State, Task, Update

PARTS = ("own", "small", "projector")


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    PROJECTOR = 50, "the projectors"


@register("fedmrl", several_architectures=True, trainings=1)
def fedmrl(task: Task) -> Method:
    """Minimises CE(g(r), y) + CE(g_s(r[:K_s]), y), r = P [h_s, h] + b the projection of
    the shared model's features h_s [B, K_s] and the own ones h [B, K].

    The shared model is averaged; the client keeps its own model and the projector.

    Note:
      Both losses have the weight 1, as in the paper. The shared model (Task.shared)
      must not have more features than a client's own. HtFLlib averages uniformly; here,
      as in the paper, the weights are the training examples. The authors' script refers
      to one small model for all clients, so its mean is the last client's. `acc` scores
      g(r) and `small_acc` g_s.
    """
    small = shared_model.exchanged(task)
    shared, narrow = small.model, small.model.num_features
    widest = min(model.num_features for model in task.models)
    if narrow > widest:
        raise InputError(
            f"The task's `shared` model has {narrow} features and a client's own only "
            f"{widest}: FedMRL needs a narrower shared model."
        )

    def projector(width):
        return models.network(
            lambda rngs: nnx.Sequential(layers.linear(narrow + width, width, rngs))
        )

    def init(key):
        state = shared_model.start(key, task, small)

        def project(model: Model):
            draw = keys.fold(key, Start.PROJECTOR)
            return projector(model.num_features).init(draw)["params"]

        rows = state.clients | {"projector": architectures.stack(task, project)}
        return State(state.server, rows)

    def logits(c, v, x, mask, train=False, key=None):
        # The logits of both heads, and the new statistics.
        draws = {"own": key, "small": None}
        if key is not None:
            draws["small"] = keys.fold(key, keys.Loss.SHARED)
        h, stats = {}, {}
        for name, model in (("own", c.model), ("small", shared)):
            w = {**v[name], "stats": v["stats"][name]}
            h[name], stats[name] = model.features(
                w, x, mask=mask, train=train, key=draws[name]
            )
        both = jnp.concatenate([h["small"], h["own"]], axis=1)
        theta = {"params": v["projector"], "stats": {}}
        r, _ = projector(c.model.num_features).apply(theta, both)
        z = c.model.head(v["own"]["head"], r)
        return z, shared.head(v["small"]["head"], r[:, :narrow]), stats

    # Each model has its own optimizer.
    def separate(lr):
        return optimizers.per_part(dict.fromkeys(PARTS, task.optimizer(lr)))

    sgd = local_training.bind(task._replace(optimizer=separate))

    def receive(server, row):
        theta = small.split.receive(server, row["kept"])
        stats = {"own": row["w"]["stats"], "small": theta["stats"]}
        own = {"own": params(row["w"]), "projector": row["projector"]}
        return own | {"small": params(theta), "stats": stats}

    def predictor(c, v):
        return lambda x, mask: jnp.stack(logits(c, v, x, mask)[:2], axis=-1)

    def client(c, server, row):
        def loss(v, batch, key):
            z, z_small, stats = logits(c, v, batch.x, batch.mask, True, key)
            value = losses.of(task)(z, batch.y, batch.mask)
            return value + losses.of(task)(z_small, batch.y, batch.mask), stats

        v, value = sgd(c, receive(server, row), loss=loss, train=PARTS)
        w, theta = ({**v[n], "stats": v["stats"][n]} for n in ("own", "small"))
        upload, kept = small.split.send(theta)
        row = {"w": Own(w), "kept": kept, "projector": Own(v["projector"])}
        return Update(upload, row, predictor(c, v), value)

    def predict(server, row, c):
        return predictor(c, receive(server, row))

    return averaging.from_client(
        init,
        client,
        predict,
        score=functools.partial(averaging.score_paired, names=("small",)),
        averages=averaging.BODY_AND_HEAD,
    )
