"""Networks by name."""

from collections.abc import Callable

from flax import nnx

from fedjax_pfl.models import (
    alexnet,
    cnn_dva,
    mobilenet,
    nets,
    resnet,
    shufflenet,
    text,
    vit,
)

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
    mobilenet.mobilenet_v2,
    vit.vit_small,
    cnn_dva.cnn_dva,
    cnn_dva.cnn_dva_small,
)
# of tokens
TEXT = (text.fasttext, text.gru, text.transformer)
MODELS = {f.__name__: f for f in (*NETS, *LARGE, *TEXT)}
Factory = Callable[..., nnx.Module]  # (input_shape, num_classes, rngs)
