"""Presets: one file a paper's tables; a preset is data, and any flag the user gives overrides
it."""

from experiments.presets import builtin, fedcp, feddva, pfedc
from experiments.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    "digits": builtin.DIGITS,
    "digits_pathological": builtin.DIGITS_PATHOLOGICAL,
    "synthetic": builtin.SYNTHETIC,
    **pfedc.PFEDC,
    "fedcp_cifar10": fedcp.CIFAR10,
    "fedcp_cifar100": fedcp.CIFAR100,
    **feddva.FEDDVA,
}

DEFAULT_PRESETS = {"digits": "digits", "synthetic": "synthetic"}  # data set -> what it takes when no --preset is given

__all__ = ["DEFAULT_PRESETS", "PRESETS", "Preset"]
