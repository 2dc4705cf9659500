"""The networks that have a name, and those of a user's own."""

from collections.abc import Callable

from flax import nnx

from fedjax_pfl.models import alexnet, cnn_dva, nets, resnet, shufflenet

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
    cnn_dva.cnn_dva,
    cnn_dva.cnn_dva_small,
)
MODELS = {f.__name__: f for f in (*NETS, *LARGE)}
Factory = Callable[[tuple[int, ...], int, nnx.Rngs], nnx.Module]
