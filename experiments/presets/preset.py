"""What a preset is."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_NONE: Mapping = MappingProxyType({})


class Preset(NamedTuple):
    """The setting of an experiment, its price, and the numbers to expect."""

    description: str  # one line, shown by --list
    settings: Mapping[str, Any]  # flag -> value
    time: str  # how long, on what
    headline: str  # the score and the point that the paper reports, as in summary.json
    headlines: Mapping[str, str] = _NONE  # method -> its own headline, where the paper scores it otherwise
    published: Mapping[str, str] = _NONE  # method -> the paper's number in %
    hparams: Mapping[str, dict[str, Any]] = _NONE  # method -> hyperparameter -> value, where not the method's default

    def headline_of(self, method: str) -> str:
        """What of a run to compare with the paper's number."""
        return self.headlines.get(method, self.headline)
