"""The networks that have a name, and those of a user's own."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from fedjax_pfl import user_code
from fedjax_pfl.errors import choose
from fedjax_pfl.models import alexnet, checks, nets, resnet, shufflenet, strided

NETS = (
    nets.linear,
    nets.mlp,
    nets.lenet,
    nets.lenet_valid,
    nets.lenet_bn,
    nets.cnn,
    nets.cnn_same,
    nets.cnn_dropout,
    *nets.AFM_NETS,
)
LARGE = (
    resnet.resnet18,
    resnet.resnet18_gn,
    resnet.resnet18_50,
    resnet.resnet18_imagenet,
    alexnet.alexnet,
    shufflenet.shufflenet,
    strided.cnn_dva,
    strided.cnn_dva_small,
)
MODELS = {f.__name__: f for f in (*NETS, *LARGE)}
Factory = Callable[[tuple[int, ...], int, nnx.Rngs], nnx.Module]


def find(name: str) -> Factory:
    """The factory of a network.

    Args:
      name: in MODELS, or FILE.py:NAME, or package.module:NAME.

    Raises:
      InputError: there is none.
    """
    if not user_code.named(name):
        return MODELS[choose("model", name, MODELS)]
    checks.no_module(user_code.load("model", name))

    def build(input_shape: tuple[int, ...], num_classes: int, rngs: nnx.Rngs) -> Any:
        return user_code.call(
            "model", name, input_shape=input_shape, num_classes=num_classes, rngs=rngs
        )

    return build
