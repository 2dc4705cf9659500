"""The minimum-norm point of a convex hull of gradients, from their Gram matrix
(Désidéri 2012; Sener & Koltun 2018)."""

import jax
import jax.numpy as jnp

from fedjax_pfl.types import Array

MAX_ITERATIONS = 250
TOLERANCE = 1e-5  # relative duality gap at which the solver stops


def gap(gram: Array, mask: Array, alpha: Array) -> Array:
    """Computes the duality gap alpha^T M alpha - min_{t in A} (M alpha)_t >= 0; 0 at
    the optimum, []."""
    slope = gram @ alpha
    return alpha @ slope - jnp.min(jnp.where(mask, slope, jnp.inf))


def fista(gram: Array, mask: Array) -> Array:
    """Minimises ||sum_t alpha_t D_t||^2 over the simplex on `mask` by accelerated
    gradient.

    Args:
      gram: [T, T], <D_s, D_t>; entries off `mask` are ignored.
      mask: [T] bool, the active set A.

    Returns:
      alpha [T] on the simplex, 0 off A (all 0 if A is empty); it stops at a relative
      duality gap of 1e-5 or after 250 iterations.

    Note:
      The minimiser is that of x^T M x / 2 - sum x over x >= 0, normalised. There the
      variables can be scaled so that M has a unit diagonal: gradients whose norms
      differ by orders of magnitude, as those of learnt and unlearnt tasks do, then do
      not slow it down. Momentum restarts as in O'Donoghue & Candès (2015).
    """
    gram = jnp.where(mask[:, None] & mask[None, :], gram, 0)
    # The minimiser does not depend on the scale; float32 does.
    gram = gram / jnp.maximum(jnp.max(jnp.abs(gram)), jnp.finfo(gram.dtype).tiny)
    d = jnp.diag(gram)
    s = jnp.where(d > 0, jnp.sqrt(jnp.where(d > 0, d, 1)), 1)
    scaled = gram / (s[:, None] * s[None, :])
    rate = 1 / jnp.maximum(jnp.linalg.norm(scaled), 1)
    linear = jnp.where(mask, jnp.min(jnp.where(mask, s, jnp.inf)) / s, 0)

    def simplex(beta):
        total = jnp.sum(beta / s)
        scaled = beta / s / jnp.where(total > 0, total, 1)
        return jnp.where(total > 0, scaled, uniform(mask, gram.dtype))

    def unsolved(loop):
        alpha = simplex(loop[1])
        wide = gap(gram, mask, alpha) > TOLERANCE * (alpha @ gram @ alpha)
        return wide & (loop[0] < MAX_ITERATIONS)

    def improve(loop):
        i, beta, ahead, t = loop
        new = jnp.maximum(ahead - rate * (scaled @ ahead - linear), 0)
        t_new = (1 + jnp.sqrt(1 + 4 * t * t)) / 2
        restart = jnp.sum((ahead - new) * (new - beta)) > 0
        t_new = jnp.where(restart, 1.0, t_new)
        momentum = jnp.where(restart, 0.0, (t - 1) / t_new)
        return i + 1, new, new + momentum * (new - beta), t_new

    loop = (jnp.int32(0), linear, linear, jnp.ones((), gram.dtype))
    loop = jax.lax.while_loop(unsolved, improve, loop)
    zero = mask & (d <= 0)  # such a gradient is the minimum by itself, and has no scale
    return jnp.where(jnp.any(zero), uniform(zero, gram.dtype), simplex(loop[1]))


def uniform(mask: Array, dtype: jnp.dtype) -> Array:
    """Returns equal weights [T] on the simplex over `mask` [T]; all 0 if it is
    empty."""
    return mask.astype(dtype) / jnp.maximum(jnp.sum(mask), 1)
