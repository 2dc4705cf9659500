"""Presets: one file a paper's tables; a preset is data, and any flag the user gives overrides
it."""

from experiments.presets import builtin, fedcp, feddva, mnfl, pfedafm, pfedc
from experiments.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    "digits": builtin.DIGITS,
    "digits_pathological": builtin.DIGITS_PATHOLOGICAL,
    "synthetic": builtin.SYNTHETIC,
    **pfedc.PFEDC,
    **fedcp.FEDCP,
    **feddva.FEDDVA,
    "mnfl_fashion_mnist": mnfl.FASHION_MNIST,
    "mnfl_cifar10": mnfl.CIFAR10,
    "mnfl_fashion_mnist_ablations": mnfl.FASHION_MNIST_ABLATIONS,
    "mnfl_cifar10_ablations": mnfl.CIFAR10_ABLATIONS,
    "pfedafm_cifar10": pfedafm.CIFAR10,
    "pfedafm_cifar100": pfedafm.CIFAR100,
    "pfedafm_cifar10_same": pfedafm.CIFAR10_SAME,
}

DEFAULT_PRESETS = {"digits": "digits", "synthetic": "synthetic"}  # data set -> what it takes when no --preset is given

__all__ = ["DEFAULT_PRESETS", "PRESETS", "Preset"]
