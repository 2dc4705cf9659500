"""CNN-2 to CNN-5 of pFedAFM inside CNN-1: clients of all five train as one
architecture."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.errors import choose
from fedjax_pfl.models.functional import model, num_parameters
from fedjax_pfl.models.nets import AFM, Shape
from fedjax_pfl.types import Array, Model, PyTree


def pad_to_superset(
    name: str, input_shape: Shape, num_classes: int, **options: Any
) -> Model:
    """Makes CNN-k a CNN-1 whose further channels and units are zero.

    The weights are drawn in CNN-k's own shapes, so with its fan-in, and padded. A unit
    whose incoming and outgoing weights are zero has the value 0 and the gradient 0,
    which momentum and weight decay keep: training is CNN-k's, at the cost of CNN-1.
    Noise on the parameters would end that. Methods count what travels as padded;
    `native_size` is what CNN-k has.

    Args:
      name: one of cnn1, cnn2, cnn3, cnn4, cnn5.
      input_shape: (height, width, channels) of an image.
      num_classes: C.
      **options: further arguments of `models.model`.

    Returns:
      A Model, CNN-1's but for `init`: all five have variables of the same shapes.

    Raises:
      InputError: for another name.
    """
    channels, _ = AFM[choose("model", name, AFM)]
    native, whole = (
        model(each, input_shape, num_classes, **options) for each in (name, "cnn1")
    )
    shapes = jax.eval_shape(whole.init, jax.random.key(0))

    def pad(
        path: tuple[jax.tree_util.DictKey, ...], leaf: Array, like: jax.ShapeDtypeStruct
    ) -> Array:
        inner, outer = leaf.shape, like.shape
        # its inputs are pixels x channels
        if [key.key for key in path[-4:]] == ["dense", "layers", "0", "kernel"]:
            inner = (inner[0] // channels, channels, inner[1])
            outer = (inner[0], outer[0] // inner[0], outer[1])
        by = [(0, b - a) for a, b in zip(inner, outer, strict=True)]
        return jnp.pad(leaf.reshape(inner), by).reshape(like.shape)

    def init(key: Array) -> PyTree:
        return jax.tree_util.tree_map_with_path(pad, native.init(key), shapes)

    return whole._replace(init=init)


def native_size(name: str, input_shape: Shape, num_classes: int, **options: Any) -> int:
    """Number of parameters of the model as it is without padding; arguments as
    `models.model`'s."""
    return num_parameters(
        jax.eval_shape(
            model(name, input_shape, num_classes, **options).init, jax.random.key(0)
        )
    )
