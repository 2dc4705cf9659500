"""The matrices A and B of LoRA in the variables of an adapted model.

A is [..., I, r] (a convolution's has leading axes), B [r, O], and a layer adds the
product A B, times the scale of the adaptation, to its kernel.
"""

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from fedjax_pfl import aggregate, keys, trees
from fedjax_pfl.errors import InputError
from fedjax_pfl.models.adapted import A, B, Path
from fedjax_pfl.types import Array, Cohort, Model, PyTree


class Start(keys.Stream):
    """Streams below the key of the initial state."""

    RANKS = 50, "the clients' ranks"


def rank(model: Model, method: str) -> int:
    """Returns the rank r of a model's LoRA.

    Raises:
      InputError: the body is not LoRA alone; the message names the method.
    """
    body = jax.eval_shape(model.init, jax.random.key(0))["body"]
    flat = traverse_util.flatten_dict(body)
    ranks = {x.shape[-1] for path, x in flat.items() if A in path}
    others = [path for path in flat if A not in path and path[-1] != B]
    if len(ranks) != 1 or others:
        raise InputError(
            f"{method} needs a model whose body is LoRA alone: models.adapted(..., "
            "models.lora(rank), ...), --adapt=lora:RANK."
        )
    return ranks.pop()


def ranks(key: Array, least: int, most: int, count: int) -> Array:
    """Draws the ranks [count] of clients from `least` to `most`, both included; all are
    `most` where that is smaller than `least`."""
    draw, low = keys.fold(key, Start.RANKS), min(least, most)
    return jax.random.randint(draw, (count,), low, most + 1, jnp.int32)


def masked(body: PyTree, keep: Array) -> PyTree:
    """Sets the columns of A and the rows of B to zero where not `keep` [r]."""
    flat = traverse_util.flatten_dict(body)
    return traverse_util.unflatten_dict(
        {
            path: jnp.where(
                trees.align(keep, x.ndim) if A in path else trees.expand(keep, x.ndim),
                x,
                0,
            )
            for path, x in flat.items()
        }
    )


def without_product(body: PyTree) -> PyTree:
    """Sets B to zero."""
    flat = traverse_util.flatten_dict(body)
    new = {p: x if A in p else jnp.zeros_like(x) for p, x in flat.items()}
    return traverse_util.unflatten_dict(new)


def factors(body: PyTree) -> dict[Path, tuple[Array, Array]]:
    """Returns A [..., I, r] and B [r, O] of every layer by its path."""
    flat = traverse_util.flatten_dict(body)
    found = {path[: path.index(A)]: x for path, x in flat.items() if A in path}
    return {layer: (a, flat[(*layer, B)]) for layer, a in found.items()}


def product(a: Array, b: Array) -> Array:
    """Computes A B [..., I, O] in float32."""
    exact = {"precision": "highest", "preferred_element_type": jnp.float32}
    return jnp.tensordot(a, b, axes=1, **exact)


def shared(personal: PyTree) -> bool:
    """Returns whether a body has A and B, and none of its leaves is personal."""
    flat = traverse_util.flatten_dict(personal)
    has = [any(name in path for path in flat) for name in (A, B)]
    return all(has) and not any(flat.values())


def products(body: PyTree) -> PyTree:
    """Computes A B of every layer, as a tree with the names of kernels."""
    pairs = factors(body).items()
    flat = {(*layer, "kernel"): product(*pair) for layer, pair in pairs}
    return traverse_util.unflatten_dict(flat)


def stacked(bodies: PyTree, shares: Array) -> PyTree:
    """Stacks the A and B of S clients to one body of rank S r, whose products are the
    weighted means of the clients' products.

    A = [p_1 A_1, ..., p_S A_S] and B = [B_1; ...; B_S].

    Args:
      bodies: A [S, ..., I, r] and B [S, r, O] of every layer.
      shares: p [S], not negative; a client of share 0 may have any A and B.
    """
    weighed = jax.vmap(aggregate.weigh)
    columns = traverse_util.flatten_dict(weighed(shares, bodies))
    rows = weighed((shares > 0).astype(shares.dtype), bodies)
    flat = traverse_util.flatten_dict(rows)
    for path, x in columns.items():
        if A in path:
            x = jnp.moveaxis(x, 0, -2)
            flat[path] = x.reshape(*x.shape[:-2], -1)
        else:
            flat[path] = flat[path].reshape(-1, x.shape[-1])
    return traverse_util.unflatten_dict(flat)


def averaging_error(bodies: PyTree, weight: Array, cohort: Cohort) -> Array:
    """Computes ||M - mean(A) mean(B)|| / ||M||, M = mean(A B), in the Frobenius norm
    over all layers, []; 0 where M is 0.

    Args:
      bodies: A [S, ..., I, r] and B [S, r, O] of every layer.
      weight: of the mean, [S].
    """
    order = jnp.argsort(cohort.ids)
    shares = aggregate.shares(weight, cohort.active)[order]
    bodies = trees.gather(cohort.replicated(bodies), order)
    weighed = jax.vmap(aggregate.weigh)(shares, bodies)
    mean = jax.tree.map(lambda x: jnp.sum(x, axis=0), weighed)
    exact = products(stacked(bodies, shares))
    norm = optax.tree.norm(exact)
    error = optax.tree.norm(optax.tree.sub(exact, products(mean)))
    return jnp.where(norm > 0, error / jnp.where(norm > 0, norm, 1), 0)
