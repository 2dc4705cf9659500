"""The networks that have a name, and those of a user's own."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from fedjax_pfl import own
from fedjax_pfl.errors import choose
from fedjax_pfl.models.alexnet import alexnet
from fedjax_pfl.models.nets import (
    cnn,
    cnn1,
    cnn2,
    cnn3,
    cnn4,
    cnn5,
    cnn_dropout,
    cnn_same,
    lenet,
    lenet_bn,
    lenet_valid,
    linear,
    mlp,
)
from fedjax_pfl.models.resnet import resnet18, resnet18_50, resnet18_gn, resnet18_imagenet
from fedjax_pfl.models.shufflenet import shufflenet
from fedjax_pfl.models.strided import cnn_dva, cnn_dva_small

NETS = (linear, mlp, lenet, lenet_valid, lenet_bn, cnn, cnn_same, cnn_dropout, cnn1, cnn2, cnn3, cnn4, cnn5)
LARGE = (resnet18, resnet18_gn, resnet18_50, resnet18_imagenet, alexnet, shufflenet, cnn_dva, cnn_dva_small)
MODELS = {f.__name__: f for f in (*NETS, *LARGE)}
Factory = Callable[[tuple[int, ...], int, nnx.Rngs], nnx.Module]


def find(name: str) -> Factory:
    """The factory of a network.

    Args:
      name: in MODELS, or FILE.py:NAME, or package.module:NAME.

    Raises:
      InputError: there is none.
    """
    if not own.named(name):
        return MODELS[choose("model", name, MODELS)]
    own.load("model", name)

    def build(input_shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs) -> Any:
        return own.call("model", name, input_shape=input_shape, num_classes=num_classes, rngs=rngs)

    return build
