"""Optimizers of a part of what a client trains: of each model apart, of some columns,
of clipped gradients."""

import jax
import jax.numpy as jnp
import optax
from chex import Numeric

from fedjax_pfl import trees
from fedjax_pfl.types import Array, PyTree


def per_part(
    optimizers: dict[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
    """An optimizer for each part of a dict of parameters, which sees that part alone.

    So a mask by name, such as of "head", holds for every network of a client, and each
    norm is that of one part; `optax.multi_transform` would show each optimizer the
    outer dict.
    """

    def init(params: PyTree) -> PyTree:
        return {name: optimizers[name].init(part) for name, part in params.items()}

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        done = {
            name: optimizers[name].update(part, state[name], params[name])
            for name, part in grads.items()
        }
        return {name: step for name, (step, _) in done.items()}, {
            name: new for name, (_, new) in done.items()
        }

    return optax.GradientTransformation(init, update)


def clipped(largest: Numeric) -> optax.GradientTransformation:
    """Scales gradients of any type down to a largest norm, which may be traced."""

    def clip(gradient: PyTree, _: PyTree) -> PyTree:
        # on a CPU much faster than the sum of squares
        norm = jnp.sqrt(optax.tree.vdot(gradient, gradient))
        return optax.tree.cast_like(
            optax.tree.scale(jnp.minimum(1, largest / norm), gradient), gradient
        )

    return optax.stateless(clip)


def without_columns(
    hidden: Array, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The optimizer to which the columns `hidden` [D] of the head are 0, so that their
    weight decay enters no norm by which the other columns are scaled."""

    def seen(tree: PyTree) -> PyTree:
        return {
            **tree,
            "head": jax.tree.map(
                lambda x: jnp.where(trees.align(hidden, x.ndim), 0, x), tree["head"]
            ),
        }

    init = lambda params: optimizer.init(seen(params))
    update = lambda gradient, state, params: optimizer.update(
        seen(gradient), state, seen(params)
    )
    return optax.GradientTransformation(init, update)
