"""A feature width that networks of different architectures share.

Axes: B batch, C classes, L features of the network itself, K features asked for.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from fedjax_pfl.errors import check
from fedjax_pfl.models import checks, layers
from fedjax_pfl.models.nets import Net
from fedjax_pfl.types import Array

WIDTH_BY = ("pool", "linear")


def adaptive_average_pool(h: Array, features: int) -> Array:
    """Averages neighbouring features, as PyTorch's AdaptiveAvgPool1d does: [B, L] ->
    [B, K].

    Output i is the mean of the inputs floor(i L / K) to ceil((i + 1) L / K) - 1; K may
    be larger than L.
    """
    size = h.shape[-1]
    if size % features == 0:
        return h.reshape(len(h), features, -1).mean(-1)
    first = np.arange(features) * size // features
    last = -(-np.arange(1, features + 1) * size // features)  # exclusive
    # [L, K]
    inside = (first <= np.arange(size)[:, None]) & (np.arange(size)[:, None] < last)
    return jnp.dot(
        h,
        jnp.asarray(inside / (last - first), h.dtype),
        precision=lax.Precision.HIGHEST,
    )


class Widened(nnx.Module):
    """A body and a map of its features to K: a linear layer or, where it is None,
    pooling."""

    def __init__(self, body: Any, features: int, project: nnx.Linear | None):
        self.body, self.features, self.project = body, features, project

    def __call__(
        self,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        h = _called(self.body, x, mask=mask, train=train, rngs=rngs)
        return (
            adaptive_average_pool(h, self.features)
            if self.project is None
            else self.project(h)
        )


def _called(body: Any, x: Array, **given: Any) -> Array:
    """A body's features of x, with those of the keyword arguments that it names."""
    accepted = inspect.signature(body.__call__).parameters
    return body(x, **{name: value for name, value in given.items() if name in accepted})


def widened(
    module: Any,
    example: jax.ShapeDtypeStruct,
    num_classes: int,
    features: int,
    by: str,
    rngs: nnx.Rngs,
) -> Net:
    """Gives a network another number of features and a new linear head.

    Args:
      module: has a `body`, [B, *input] -> [B, L]; its head is dropped.
      example: shape and type of a prepared batch of two.
      num_classes: C.
      features: K.
      by: one of
        pool: adaptive average pooling, without parameters, as HtFLlib does;
        linear: a trainable linear layer L -> K without activation.
      rngs: for the initialisation of the new layers, PyTorch's default.

    Returns:
      A Net whose head is one linear layer, kernel [K, C] and bias [C].

    Raises:
      InputError: for less than one feature, or a body that does not return one array.
    """
    check(
        "features",
        features,
        1,
        10**6,
        whole=True,
        why="the head has a row of weights for each",
    )
    checks.called(module.body)
    body = functools.partial(_called, module.body, mask=None, train=False, rngs=None)
    h = checks.output(module, functools.partial(jax.eval_shape, body), example)
    project = layers.linear(h.shape[-1], features, rngs) if by == "linear" else None
    return Net(
        Widened(module.body, features, project),
        layers.linear(features, num_classes, rngs),
    )
