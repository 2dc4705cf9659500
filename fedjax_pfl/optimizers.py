"""Optimizers for parts of a client's parameters, and for clipped gradients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chex import Numeric

from fedjax_pfl import trees
from fedjax_pfl.types import Array, PyTree


def per_part(
    optimizers: dict[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Returns an optimizer for a dict of parameters that updates each part by its own.

    A mask by name, such as of "head", then holds for every network of a client, and
    each norm is that of one part. `optax.multi_transform` would show each optimizer the
    outer dict.
    """

    def init(params: PyTree) -> PyTree:
        return {name: optimizers[name].init(part) for name, part in params.items()}

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        done = {
            name: optimizers[name].update(part, state[name], params[name])
            for name, part in grads.items()
        }
        steps = {name: step for name, (step, _) in done.items()}
        return steps, {name: new for name, (_, new) in done.items()}

    return optax.GradientTransformation(init, update)


def in_param_types(
    make: Callable[[Numeric], optax.GradientTransformation],
) -> Callable[[Numeric], optax.GradientTransformation]:
    """Returns the optimizer with gradients cast to the types of the parameters.

    A traced weight makes a sum of gradients float32; moments kept by the optimizer
    would then change their type.
    """

    def cast(lr: Numeric) -> optax.GradientTransformation:
        inner = make(lr)

        def update(
            gradient: PyTree, state: PyTree, params: PyTree = None
        ) -> tuple[PyTree, PyTree]:
            if params is not None:
                gradient = optax.tree.cast_like(gradient, params)
            return inner.update(gradient, state, params)

        return optax.GradientTransformation(inner.init, update)

    return cast


def clipped(largest: Numeric) -> optax.GradientTransformation:
    """Scales gradients of any type down to a largest norm, which may be traced."""

    def clip(gradient: PyTree, _: PyTree) -> PyTree:
        # on a CPU much faster than the sum of squares
        norm = jnp.sqrt(optax.tree.vdot(gradient, gradient))
        scaled = optax.tree.scale(jnp.minimum(1, largest / norm), gradient)
        return optax.tree.cast_like(scaled, gradient)

    return optax.stateless(clip)


def without_columns(
    hidden: Array, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns the optimizer with the columns `hidden` [D] of the head masked as 0, so
    that their weight decay enters no norm by which other columns are scaled."""

    def seen(tree: PyTree) -> PyTree:
        head = jax.tree.map(
            lambda x: jnp.where(trees.align(hidden, x.ndim), 0, x), tree["head"]
        )
        return {**tree, "head": head}

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return optimizer.update(seen(grads), state, seen(params))

    return optax.GradientTransformation(
        lambda params: optimizer.init(seen(params)), update
    )


def plain_sgd(
    make: Callable[[Numeric], optax.GradientTransformation], w: PyTree
) -> bool:
    """Returns whether an optimizer's steps are -lr times the gradient, or 0, and depend
    on no earlier step; weight decay that is added to the gradient is part of the loss.

    Args:
      w: zeros with the structure of the parameters.
    """
    with jax.ensure_compile_time_eval():
        optimizer, lr = make(0.5), 0.5
        state = optimizer.init(w)
        if any(np.size(x) for x in jax.tree.leaves(state)):
            return False
        for size in (2.0**-10, 2.0**30):
            gradient = jax.tree.map(lambda x, g=size: x + np.float32(g), w)
            steps, _ = optimizer.update(gradient, state, w)
            if not all(
                np.isin(x, (0, -lr * size)).all() for x in jax.tree.leaves(steps)
            ):
                return False
    return True
