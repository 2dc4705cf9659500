"""What a preset is."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

_NONE: Mapping = MappingProxyType({})


class Cell(NamedTuple):
    """What a paper publishes for other values of some settings than the preset's."""

    where: Mapping[str, Any]  # flags and hyperparameters -> their values
    # method -> the paper's number in %; without any, they are not known
    numbers: Mapping[str, str] = _NONE
    rounds: Mapping[str, int] = _NONE  # method -> the rounds in which it converged


class Preset(NamedTuple):
    """The setting of an experiment, its size, and the numbers to expect."""

    description: str  # one line, shown by --list
    settings: Mapping[str, Any]  # flag -> value
    headline: str  # the score and the point that the paper reports, as in summary.json
    steps: int | None = None  # client steps per round, on all of the data
    # method -> its own headline, where the paper scores it otherwise
    headlines: Mapping[str, str] = _NONE
    # method -> the paper's number in %, at these settings
    published: Mapping[str, str] = _NONE
    # method -> hyperparameter -> value, where not the method's default
    hparams: Mapping[str, dict[str, Any]] = _NONE
    # method -> its own settings, not the paper's: flag -> value
    methods: Mapping[str, Mapping[str, Any]] = _NONE
    cells: tuple[Cell, ...] = ()  # the paper's numbers at further settings
    own: tuple[str, ...] = ()  # the paper's own methods
    baselines: Mapping[str, Any] = _NONE  # flag -> value that the paper gave all others
    # method -> the headline in % that was measured here, at these settings
    measured: Mapping[str, str] = _NONE
    # how the paper got its numbers, and what they can be compared with
    protocol: str = ""

    def headline_of(self, method: str) -> str:
        """What of a run to compare with the paper's number."""
        return self.headlines.get(method, self.headline)

    def settings_of(self, method: str | None) -> dict[str, Any]:
        """Flag -> value for a method; None: for the preset's own."""
        return {
            **self.settings,
            **self.methods.get(method or self.settings.get("algo", ""), {}),
        }


def numbers(methods: Sequence[str], text: str) -> dict[str, str]:
    """A row or a column of a table: the methods' numbers, - where the paper has none;
    of two columns both, as 1.0/2.0."""
    found = zip(methods, text.replace(";", "").split(), strict=True)
    return {
        method: x.replace("±", " ± ").replace("/", " and ")
        for method, x in found
        if x != "-"
    }
