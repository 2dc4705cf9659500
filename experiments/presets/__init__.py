"""Presets: one file a paper's tables; a preset is data, and any flag the user gives
overrides it."""

from experiments.presets import builtin, fedcp, feddva, mnfl, pfedafm, pfedc
from experiments.presets.preset import Preset

PRESETS: dict[str, Preset] = {
    **builtin.BUILTIN,
    **pfedc.PFEDC,
    **fedcp.FEDCP,
    **feddva.FEDDVA,
    **mnfl.MNFL,
    **pfedafm.PFEDAFM,
}

# data set -> what it takes when no --preset is given
DEFAULT_PRESETS = {"digits": "digits", "synthetic": "synthetic"}

__all__ = ["DEFAULT_PRESETS", "PRESETS", "Preset"]
