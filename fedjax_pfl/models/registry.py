"""The networks that have a name."""

from fedjax_pfl.models.nets import cnn, cnn_dropout, cnn_same, lenet, lenet_bn, lenet_valid, linear, mlp
from fedjax_pfl.models.resnet import resnet18, resnet18_50, resnet18_gn, resnet18_imagenet

NETS = (linear, mlp, lenet, lenet_valid, lenet_bn, cnn, cnn_same, cnn_dropout)
RESNETS = (resnet18, resnet18_gn, resnet18_50, resnet18_imagenet)
MODELS = {f.__name__: f for f in (*NETS, *RESNETS)}
