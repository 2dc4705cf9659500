"""FedDVA's client update as losses that `local_training.sgd` takes, one for each phase,
and its scores (Algorithm 1).

Variables are {"z": ..., "c": ..., "decoder": ..., "stats": running statistics of each},
with labels also "head".
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from chex import Numeric

from fedjax_pfl import losses
from fedjax_pfl.algorithms.feddva import dva
from fedjax_pfl.models.vae import DualVAE, Gaussian
from fedjax_pfl.types import Array, Batch, Network, PyTree, Scores

PARTS = ("z", "c", "decoder", "head")
HEADS = ("personal", "shared")


class Phase(NamedTuple):
    """One pass over a client's data: the parts that move, and the loss."""

    parts: tuple[str, ...]
    # (variables, batch, key) -> loss [], new stats
    loss: Callable[[PyTree, Batch, Array], tuple[Array, PyTree]]


class Pass(NamedTuple):
    """Posteriors, latents and reconstruction of a batch."""

    z: Gaussian  # q(z|x)
    c: Gaussian  # q(c|x, z)
    latents: Array  # [z; c] [B, d_z + d_c]
    mean: Array  # of p(x|z, c), [B, H, W, C]
    stats: PyTree


def init(nets: DualVAE, key: Array) -> PyTree:
    """Draws the variables of all networks, each from a key of its own."""
    networks = _networks(nets)
    made = {
        name: net.init(jax.random.fold_in(key, i))
        for i, (name, net) in enumerate(networks.items())
    }
    params = {name: variables["params"] for name, variables in made.items()}
    return params | {
        "stats": {name: variables["stats"] for name, variables in made.items()}
    }


def shared_parts(
    nets: DualVAE, head: str = "personal", exchange: str = "encoders"
) -> tuple[str, ...]:
    """Returns the parts that clients exchange: both encoders or that of z, and with
    head="shared" the classifier."""
    encoders = ("z", "c") if exchange == "encoders" else ("z",)
    return (*encoders, "head") if nets.head and head == "shared" else encoders


def forward(
    nets: DualVAE,
    variables: PyTree,
    x: Array,
    mask: Array | None = None,
    key: Array | None = None,
    *,
    train: bool = False,
    detach: bool = False,
) -> Pass:
    """Encodes and decodes images x [B, H, W, C].

    Args:
      key: of one draw of each latent; without it they are the posterior means.
      train: normalises by the batch's statistics and moves the running ones.
      detach: treats z as a constant where it enters the encoder of c.
    """
    stats = dict(variables["stats"])

    def run(name, inputs):
        of_part = {"params": variables[name], "stats": stats[name]}
        out, stats[name] = _networks(nets)[name].apply(
            of_part, inputs, mask=mask, train=train
        )
        return out

    def draw(key, q):
        return q.mean if key is None else dva.sample(key, q)

    key_z, key_c = (None, None) if key is None else jax.random.split(key)
    q_z = run("z", x)
    z = draw(key_z, q_z)
    q_c = run("c", (x, jax.lax.stop_gradient(z) if detach else z))
    latents = jnp.concatenate([z, draw(key_c, q_c)], axis=-1)
    return Pass(q_z, q_c, latents, run("decoder", latents), stats)


def phases(
    nets: DualVAE,
    head: str = "personal",
    *,
    alpha: Numeric = 1.0,
    beta: Numeric = 0.75,
    xi: Numeric = 32.0,
    cls: Numeric = 1.0,
    floor: Numeric = 0.0,
    variant: Literal["code", "paper"] = "paper",
) -> tuple[Phase, Phase]:
    """Makes the two phases of a client's round: the decoder on the reconstruction with
    frozen encoders, then both encoders on the whole loss (Eq. 4) with a frozen decoder.

    Args:
      head: personal (the classifier moves with the decoder) or shared (with the
        encoders); it gets the same draw of [z; c] as the decoder.
      alpha: weight of KL(q(z|x) || N(0, I)), at least 0; 1 in the paper.
      beta: weight of R_c, at least 0; 0.75 in the paper.
      xi: slack of R_c in nats; 8 d_c in the paper.
      cls: weight of the cross entropy in both phases, where there is a classifier.
      floor: of the variances in R_c, as of `dva.mixture_bound`.
      variant: R_c as in the paper (`dva.personal_term`), or that of the released code
        (`dva.gathered_term`) with z a constant for the encoder of c.

    Note:
      The paper's listing prints the weight of R_c with the sign of the log-likelihood,
      which would maximise it; here it is a penalty. Running statistics move in both
      phases, those of frozen networks too.
    """

    code = variant == "code"
    personal = dva.gathered_term if code else dva.personal_term

    def loss(variables, batch, key, encoders):
        out = forward(
            nets, variables, batch.x, batch.mask, key, train=True, detach=code
        )
        value = dva.reconstruction(batch.x, out.mean)
        if encoders:
            value = value + alpha * dva.kl_standard(out.z)
            value = value + beta * personal(out.c, batch.mask, xi, floor)
        total = losses.masked_mean(value, batch.mask)
        if nets.head is not None:
            logits = _logits(nets, variables, out.latents)
            total = total + cls * losses.cross_entropy(logits, batch.y, batch.mask)
        return total, out.stats

    own, common = (("head",) if nets.head and head == kind else () for kind in HEADS)
    first, second = (functools.partial(loss, encoders=x) for x in (False, True))
    return Phase(("decoder", *own), first), Phase(("z", "c", *common), second)


def head_phase(nets: DualVAE) -> Phase:
    """Makes a phase of the classifier alone, on draws of [z; c] by frozen encoders."""

    def loss(variables, batch, key):
        latents = forward(nets, variables, batch.x, batch.mask, key).latents
        logits = _logits(nets, variables, latents)
        value = losses.cross_entropy(logits, batch.y, batch.mask)
        return value, variables["stats"]

    return Phase(("head",), loss)


def outputs(
    nets: DualVAE, variables: PyTree, x: Array, mask: Array | None = None
) -> dict[str, Array]:
    """Returns the terms of each example, see `dva.terms`, at the posterior means:
    {name: [B]}; with a classifier `logits`."""
    out = forward(nets, variables, x, mask)
    terms = dva.terms(x, out.mean, out.z, out.c)
    return (
        terms
        if nets.head is None
        else terms | {"logits": _logits(nets, variables, out.latents)}
    )


def totals(outputs: dict[str, Array], mask: Array) -> Scores:
    """Returns sum and count over the valid rows of every term of `outputs` [B], as a
    method's `score` gives them."""
    terms = {name: values for name, values in outputs.items() if name != "logits"}
    return {
        name: (jnp.sum(jnp.where(mask, values, 0)), jnp.sum(mask))
        for name, values in terms.items()
    }


def _networks(nets: DualVAE) -> dict[str, Network]:
    found = {name: getattr(nets, name) for name in PARTS}
    return {name: net for name, net in found.items() if net is not None}


def _logits(nets: DualVAE, variables: PyTree, latents: Array) -> Array:
    assert nets.head is not None
    return nets.head.apply(
        {"params": variables["head"], "stats": variables["stats"]["head"]}, latents
    )[0]
