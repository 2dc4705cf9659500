"""FedDVA's client update as losses that `local_training.sgd` takes, one for each phase,
and its scores (Algorithm 1).

Variables are {"z": ..., "c": ..., "decoder": ..., "stats": running statistics of each},
with labels also "head".
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import Numeric

from fedjax_pfl import losses
from fedjax_pfl.algorithms.feddva import dva
from fedjax_pfl.errors import choose
from fedjax_pfl.models.vae import DualVAE, Gaussian
from fedjax_pfl.types import Array, Batch, Network, PyTree, Scores

MODES = ("paper", "code")
PARTS = ("z", "c", "decoder", "head")
HEADS = ("personal", "shared")


class Phase(NamedTuple):
    """One pass over a client's data: the parts that move, and the loss."""

    parts: tuple[str, ...]
    # (variables, batch, key) -> loss [], new stats
    loss: Callable[[PyTree, Batch, Array], tuple[Array, PyTree]]


class Pass(NamedTuple):
    """What the networks say of a batch."""

    z: Gaussian  # q(z|x)
    c: Gaussian | None  # q(c|x, z); None where c is drawn from its prior
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
    """The parts that clients exchange: both encoders or that of z, and with
    head="shared" the classifier."""
    encoders = (
        ("z", "c")
        if choose("exchange", exchange, ("encoders", "z")) == "encoders"
        else ("z",)
    )
    return (
        (*encoders, "head")
        if nets.head and choose("head", head, HEADS) == "shared"
        else encoders
    )


def forward(
    nets: DualVAE,
    variables: PyTree,
    x: Array,
    mask: Array | None = None,
    key: Array | None = None,
    *,
    train: bool = False,
    prior_c: bool = False,
) -> Pass:
    """Encodes and decodes images x [B, H, W, C].

    Args:
      key: of one draw of each latent; without it they are the posterior means.
      train: normalises by the batch's statistics and moves the running ones.
      prior_c: takes N(0, I) in place of q(c|x, z), whose encoder is left out.
    """
    stats = dict(variables["stats"])

    def run(name: str, inputs: PyTree) -> PyTree:
        of_part = {"params": variables[name], "stats": stats[name]}
        out, stats[name] = _networks(nets)[name].apply(
            of_part, inputs, mask=mask, train=train
        )
        return out

    def draw(key: Array | None, q: Gaussian) -> Array:
        return q.mean if key is None else dva.sample(key, q)

    key_z, key_c = (None, None) if key is None else jax.random.split(key)
    q_z = run("z", x)
    z = draw(key_z, q_z)
    q_c = None if prior_c else run("c", (x, z))
    prior = Gaussian(*[jnp.zeros((len(x), nets.personal), z.dtype)] * 2)
    latents = jnp.concatenate([z, draw(key_c, prior if q_c is None else q_c)], axis=-1)
    return Pass(q_z, q_c, latents, run("decoder", latents), stats)


def phases(
    nets: DualVAE,
    mode: str = "paper",
    head: str = "personal",
    *,
    alpha: Numeric = 1.0,
    beta: Numeric = 0.75,
    xi: Numeric = 32.0,
    cls: Numeric = 1.0,
    regulariser: str = "paper_max",
    reconstruction: str = "gaussian",
    detach: bool = True,
) -> tuple[Phase, ...]:
    """Makes the phases of a client's round, in their order.

    Args:
      mode: one of paper: the decoder on the reconstruction with frozen encoders, then
        both encoders on the whole loss (Eq. 4) with
          a frozen decoder;
        code: the released code's three: the decoder with c ~ N(0, I); the encoder of z
          on reconstruction and KL, again with c ~ N(0, I); the encoder of c together
          with the decoder on reconstruction and R_c.
      head: a personal classifier moves with the decoder, a shared one with the
        encoders; it sees the same draw of [z; c] as the decoder.
      alpha: weight of KL(q(z|x) || N(0, I)), at least 0; 1 in paper and code.
      beta: weight of R_c, at least 0; 0.75 in the paper, 1 in the code.
      xi: slack of R_c in nats; 8 d_c in the paper.
      cls: weight of the cross entropy in every phase, where there is a classifier.
      regulariser: see `dva.personal_term`.
      reconstruction: see `dva.reconstruction`.
      detach: see `dva.mixture_bound`.

    Raises:
      InputError: for an unknown mode, head, regulariser or reconstruction.

    Note:
      The paper's listing prints the weight of R_c with the sign of the log-likelihood,
      which would maximise it; here it is a penalty. Running statistics move in every
      phase, those of frozen networks too.
    """
    choose("mode", mode, MODES)
    choose("head", head, HEADS)
    choose("regulariser", regulariser, dva.REGULARISERS)
    choose("reconstruction", reconstruction, dva.RECONSTRUCTIONS)

    def phase(
        *parts: str, with_z: bool = False, with_c: bool = False, prior_c: bool = False
    ) -> Phase:
        def loss(variables: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
            out = forward(
                nets, variables, batch.x, batch.mask, key, train=True, prior_c=prior_c
            )
            value = dva.reconstruction(batch.x, out.mean, reconstruction)
            if with_z:
                value = value + alpha * dva.kl_standard(out.z)
            if with_c and out.c is not None:
                value = value + beta * dva.personal_term(
                    out.c, batch.mask, xi, regulariser, detach
                )
            total = losses.masked_mean(value, batch.mask)
            if nets.head is not None:
                total = total + cls * losses.cross_entropy(
                    _logits(nets, variables, out.latents), batch.y, batch.mask
                )
            return total, out.stats

        return Phase(parts, loss)

    own, common = (("head",) if nets.head and head == kind else () for kind in HEADS)
    if mode == "paper":
        return phase("decoder", *own), phase(
            "z", "c", *common, with_z=True, with_c=True
        )
    first, second = (
        phase("decoder", *own, prior_c=True),
        phase("z", *common, with_z=True, prior_c=True),
    )
    return first, second, phase("c", "decoder", *own, *common, with_c=True)


def outputs(
    nets: DualVAE, variables: PyTree, x: Array, mask: Array | None = None
) -> dict[str, Array]:
    """The terms of each example, see `dva.terms`, at the posterior means: {name: [B]};
    with a classifier `logits`."""
    out = forward(nets, variables, x, mask)
    assert out.c is not None
    terms = dva.terms(x, out.mean, out.z, out.c)
    return (
        terms
        if nets.head is None
        else terms | {"logits": _logits(nets, variables, out.latents)}
    )


def totals(outputs: dict[str, Array], mask: Array) -> Scores:
    """Sum and count over the valid rows of every term of `outputs` [B], as a method's
    `score` gives them."""
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
