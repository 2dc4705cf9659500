"""Presets: one file a paper's tables; a preset is data, and any flag the user gives overrides it."""

from experiments.presets import builtin, pfedc
from experiments.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    "digits": builtin.DIGITS,
    "synthetic": builtin.SYNTHETIC,
    "pfedc_mnist": pfedc.MNIST,
}

DEFAULT_PRESETS = {"digits": "digits", "synthetic": "synthetic"}  # data set -> what it takes when no --preset is given

__all__ = ["DEFAULT_PRESETS", "PRESETS", "Preset"]
