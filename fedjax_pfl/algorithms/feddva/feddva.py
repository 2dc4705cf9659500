"""FedDVA: clients share the encoder of z of a dual variational autoencoder, or both
encoders, and each keeps a decoder of its own.

The latent z is to hold what all clients have in common, c what is a client's own; there
need not be labels.

Reference: Yan & Long, Personalization disentanglement for federated learning (ICME
2023), Algorithm 1; authors' code: pysleepy/FedDVA.
"""

import functools
import math
from typing import Annotated, Any, Literal

import jax
from annotated_types import Ge, Interval

from fedjax_pfl import averaging, evaluation, keys, local_training, trees
from fedjax_pfl.algorithms.feddva import phases as dva_phases
from fedjax_pfl.algorithms.registry import OWN_LOSS, READS_LABELS, ROW_TARGETS, register
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.models import cnn_dva, vae
from fedjax_pfl.types import (
    Array,
    Client,
    Method,
    PyTree,
    Scores,
    State,
    Task,
    Update,
)

# `xi` and `floor` of each variant
DEFAULTS = {"code": (0.5, 0.01), "paper": (8.0, 0.0)}


# a factory is called whenever something is traced, and building takes half a second
@functools.lru_cache(maxsize=8)
def _built(*args: Any, bn_stats: str) -> tuple[vae.DualVAE, PyTree]:
    """Returns the networks, and the shapes of their variables."""
    nets = vae.dual_vae(*args, bn_stats=bn_stats)
    return nets, jax.eval_shape(lambda: dva_phases.init(nets, jax.random.key(0)))


def networks(
    task: Task,
    latent: int = 4,
    personal: int = 4,
    hidden: int = 512,
    head: str = "none",
) -> tuple[vae.DualVAE, PyTree]:
    """Returns the networks for the task's prepared inputs, see `feddva`, and the
    shapes of their variables; nothing of `task.model` is in them."""
    shape = task.prepared.shape[1:]
    classes = None if head == "none" else task.num_classes
    widths = cnn_dva.channels(shape, hidden)
    why = (
        f"each of {len(widths)} convolutions has half the channels of the next, and "
        "the first needs 2"
    )
    check("hidden", hidden, 2 ** len(widths), math.inf, why=why)
    return _built(
        shape, latent, personal, tuple(widths), classes, bn_stats=task.bn_stats
    )


def score(outputs: dict[str, Array], y: Array, mask: Array, c: Client) -> Scores:
    """Returns the terms of `dva.terms`, and with a classifier the scores of its
    logits."""
    terms = dva_phases.totals(outputs, mask)
    return terms | (
        evaluation.classification(outputs["logits"], y, mask, c)
        if "logits" in outputs
        else {}
    )


@register(
    "feddva", excludes={"loss": OWN_LOSS, "mix": READS_LABELS, "positions": ROW_TARGETS}
)
def feddva(
    task: Task,
    *,
    latent: Annotated[int, Interval(ge=1, le=1_000_000)] = 4,
    personal: Annotated[int, Interval(ge=1, le=1_000_000)] = 4,
    hidden: Annotated[int, Ge(4)] = 512,
    alpha: Annotated[float, Ge(0)] = 1.0,
    beta: Annotated[float, Ge(0)] = 0.75,
    xi: Annotated[float, Ge(0)] | None = None,
    head: Literal["none", "personal", "shared"] = "none",
    cls: Annotated[float, Ge(0)] = 10_000.0,
    head_epochs: Annotated[int, Interval(ge=0, le=10_000)] = 0,
    head_lr: Annotated[float, Ge(0)] | None = None,
    floor: Annotated[float, Ge(0)] | None = None,
    variant: Literal["code", "paper"] = "code",
    exchange: Literal["z", "encoders"] = "z",
) -> Method:
    """Trains the decoder with frozen encoders, then the encoders with a frozen decoder;
    averages the encoder of z, or both.

    Args:
      latent: d_z, dimensions of what is common, in [1, 1000000]; 4 in the paper, 8
        where it classifies.
      personal: d_c, dimensions of what is a client's own, in [1, 1000000], likewise.
      hidden: channels in [4, inf) of the last convolution, each before it having half,
        the first at least 2 (so 16 for 28 and 32 pixels a side): 512 as published (64
        to 512 for 28 and 32 pixels a side, 32 to 512 for 64), 128 a network of a
        sixteenth.
      alpha: weight of KL(q(z|x) || N(0, I)) (α) in [0, inf); 1 in the paper.
      beta: weight of the personal regulariser R_c (β) in [0, inf); 0.75 in the paper, 1
        in its code.
      xi: slack of R_c in [0, inf), in nats for each dimension of c; default 8 with
        variant=paper (ξ = 8 d_c), 0.5 with variant=code, as in its notebooks.
      head: a classifier of [z; c], one of none, personal (kept by its client),
        shared.
      cls: weight of its cross entropy in [0, inf); 10000, as neither the paper nor its
        code gives one: the reconstruction is a sum over all pixels.
      head_epochs: epochs in [0, 10000] of the classifier alone, with frozen encoders,
        after both phases; 0 as in the paper.
      head_lr: its learning rate in [0, inf) in these epochs; default the task's.
      floor: added to the variances in the denominators of R_c's divergence, in [0,
        inf); default 0 with variant=paper, 0.01 with variant=code.
      variant: of R_c, one of code (a divergence from the batch's own mean and a hinge,
        `dva.gathered_term`, and z is a constant for the encoder of c), paper (Eq. 7 as
        printed).
      exchange: what clients share, one of z (the encoder of c is kept by its client),
        encoders (both, as in Algorithm 1 and in the released code).

    Raises:
      InputError: inputs that are not square images with a side of 2^k - 4, 2^k - 2 or
        2^k pixels, k >= 3 (28, 30, 32; 60, 62, 64), or a value out of range.

    Note:
      Eq. 7 as printed, a maximum, is constant while c is a constant near the prior, so
      that c holds nothing. Hence variant=code. As in the paper there are two phases.
      The released code has three, with c drawn from its prior in the first two, and a
      focal reconstruction. The batch's mixture is a constant in R_c's gradient, as in
      the code. Each phase is the task's whole local work with a fresh optimizer; the
      paper's is Adam with rate 0.001. The server weights encoders by training examples
      (the paper's sum over all clients, of losses that are sums over examples, counts
      sizes twice). Running statistics always stay with their client, as in the code.
      Scores are taken at the posterior means; `loss` is the encoders'. No term asks c
      to differ between clients: a client's decoder knows its client, R_c binds examples
      of one client only. With a shared encoder of c, c separates clients by accident: a
      linear probe finds the client of an image in 8 % (chance 5). Hence exchange=z,
      which departs from both.
    """
    nets, start = networks(task, latent, personal, hidden, head)
    owner = "personal" if head == "none" else head
    usual_xi, usual_floor = DEFAULTS[variant]
    xi = usual_xi if xi is None else xi
    floor = usual_floor if floor is None else floor
    weights = {"alpha": alpha, "beta": beta, "xi": xi * personal, "cls": cls}
    decoder, encoders = dva_phases.phases(
        nets, owner, **weights, floor=floor, variant=variant
    )
    alone = dva_phases.head_phase(nets)
    if head_epochs and head == "none":
        raise InputError("`head_epochs` needs a classifier: head=personal or shared.")
    stay = tuple(set(start) - set(dva_phases.shared_parts(nets, owner, exchange)))
    split = averaging.split(task, stay, variables=start)
    sgd = local_training.bind(task)
    rate = task.lr if head_lr is None else head_lr
    learn = local_training.bind(task._replace(lr=rate), alone.loss)

    def init(key):
        shared, own = split.send(dva_phases.init(nets, key))
        return State(shared, trees.replicate(own, task.num_clients))

    def predictor(variables):
        return lambda x, mask: dva_phases.outputs(nets, variables, x, mask)

    def client(c, server, own):
        w = split.receive(server, own)
        # The decoder with frozen encoders.
        w, first = sgd(c, w, loss=decoder.loss, train=decoder.parts)
        # The encoders with a frozen decoder.
        stream = keys.Client.SECOND_PHASE
        w, value = sgd(c, w, loss=encoders.loss, train=encoders.parts, stream=stream)
        seen = {"loss_decoder": first}
        # The classifier alone.
        if head_epochs:
            stream, epochs = keys.Client.HEAD_PHASE, head_epochs
            w, last = learn(c, w, train=alone.parts, stream=stream, epochs=epochs)
            seen["loss_head"] = last
        upload, own = split.send(w)
        return Update(upload, own, predictor(w), value, seen)

    def predict(server, own, c):
        return predictor(split.receive(server, own))

    averages = tuple(part for part in start if part not in (*stay, "stats"))
    headline = ("elbo" if head == "none" else "acc", "max")
    return averaging.from_client(
        init, client, predict, score=score, headline=headline, averages=averages
    )
