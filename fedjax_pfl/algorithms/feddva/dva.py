"""Terms of FedDVA's dual variational autoencoder: Gaussian divergences, its
regularisers, reconstruction errors.

Axes: B batch, d dimensions of a latent. All terms are sums over dimensions or pixels
for each example, in nats.
"""

import jax
import jax.numpy as jnp
from chex import Numeric
from jax import lax

from fedjax_pfl.models.vae import Gaussian
from fedjax_pfl.types import Array


def sample(key: Array, q: Gaussian) -> Array:
    """Draws mean + exp(log_var / 2) * eps, eps ~ N(0, I): [B, d], differentiable in
    q."""
    return q.mean + jnp.exp(q.log_var / 2) * jax.random.normal(
        key, q.mean.shape, q.mean.dtype
    )


def kl(p: Gaussian, q: Gaussian) -> Array:
    """Computes KL(p || q) of each example (FedDVA, Eq. 24), [B]."""
    square, ratio = (p.mean - q.mean) ** 2, p.log_var - q.log_var
    return 0.5 * jnp.sum(
        square * jnp.exp(-q.log_var) + jnp.exp(ratio) - 1 - ratio, axis=-1
    )


def kl_standard(q: Gaussian) -> Array:
    """Computes KL(q || N(0, I)) of each example (FedDVA, Eq. 6), [B]."""
    return kl(q, jax.tree.map(jnp.zeros_like, q))


def mixture_bound(q: Gaussian, mask: Array, floor: Numeric = 0.0) -> Array:
    """Computes an upper bound of KL(q_i || the batch's mixture), the mean over j of
    KL(q_i || q_j) (FedDVA, Eq. 26), [B].

    Args:
      q: of each example, i and j; the pair i = j counts and adds 0.
      mask: [B] bool, the examples over which j runs.
      floor: added to the variances of q_j in the denominators; 0.01 in the released
        code. With it the value of the pair i = j may be negative.

    Note:
      The mixture is a constant in the gradient, as in the released code. Four means
      over j take O(B d), since the sum over pairs factorises. They are centred, as the
      bound does not depend on the batch's mean, but its rounding does.
    """
    centre = lax.stop_gradient(_mean(q.mean, mask))
    q = q._replace(mean=q.mean - centre)
    other = lax.stop_gradient(q)
    precision = jnp.exp(-other.log_var)
    precision = precision / (1 + floor * precision)  # 1 / (variance + floor)
    parts = (
        precision,
        other.mean * precision,
        other.mean**2 * precision,
        other.log_var,
    )
    p, pm, pmm, log_var = (_mean(part, mask) for part in parts)
    total = (
        (q.mean**2 + jnp.exp(q.log_var)) * p
        - 2 * q.mean * pm
        + pmm
        - q.log_var
        + log_var
        - 1
    )
    return 0.5 * jnp.sum(total, axis=-1)


def personal_term(q: Gaussian, mask: Array, xi: Numeric, floor: Numeric = 0.0) -> Array:
    """Computes the regulariser R_c of the personal latent for each example: the larger
    of KL(q || N(0, I)) and xi + `mixture_bound` (FedDVA, Eq. 7), [B].

    Args:
      q: q(c|x, z).
      mask: [B] bool, the valid examples.
      xi: slack in nats; 8 d_c in the paper.
      floor: as of `mixture_bound`.
    """
    divergence = kl_standard(q)
    return divergence + jax.nn.relu(xi + mixture_bound(q, mask, floor) - divergence)


def gathered_term(q: Gaussian, mask: Array, xi: Numeric, floor: Numeric = 0.0) -> Array:
    """Computes the regulariser R_c of the released code for each example, [B].

    KL(q || N(m, I)), m the mean of the batch's posterior means, plus
    relu(xi + `mixture_bound` - KL(q || N(0, I))). While the second part is positive it
    moves the batch away from the origin. m is a constant in the gradient.

    Args:
      q: q(c|x, z).
      mask: [B] bool, the valid examples.
      xi: slack in nats; 0.5 in its notebooks, for one dimension.
      floor: as of `mixture_bound`.
    """
    centre = lax.stop_gradient(_mean(q.mean, mask))
    near = kl_standard(q._replace(mean=q.mean - centre))
    missing = xi + mixture_bound(q, mask, floor) - kl_standard(q)
    return near + jax.nn.relu(missing)


def reconstruction(x: Array, mean: Array) -> Array:
    """Computes half the squared error of images, the negative log-likelihood of a
    Gaussian of unit variance without its constant, [B].

    Args:
      x: [B, ...].
      mean: the decoder's, of the same shape.
    """
    return jnp.sum(0.5 * (x - mean) ** 2, axis=tuple(range(1, x.ndim)))


def terms(x: Array, mean: Array, z: Gaussian, c: Gaussian) -> dict[str, Array]:
    """Returns the scores of each example: {name: [B]}.

    `reconstruction` (half the squared error), `kl_z` and `kl_c` (to N(0, I)), lower
    being better, and their negative sum `elbo`: the evidence lower bound without the
    constant log(2 pi) / 2 a pixel, higher being better.
    """
    parts = {
        "reconstruction": reconstruction(x, mean),
        "kl_z": kl_standard(z),
        "kl_c": kl_standard(c),
    }
    return parts | {"elbo": -(parts["reconstruction"] + parts["kl_z"] + parts["kl_c"])}


def _mean(values: Array, mask: Array) -> Array:
    """Computes the mean of values [B, d] over the rows where `mask` [B] holds, [1,
    d]; 0 without one."""
    weight = mask[:, None].astype(values.dtype)
    total = jnp.where(mask[:, None], values, 0).sum(axis=0, keepdims=True)
    return total / jnp.maximum(weight.sum(axis=0, keepdims=True), 1)
