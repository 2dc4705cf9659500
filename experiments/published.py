"""The paper's number for a run, what of the run to compare with it, and where the run
is not the paper's."""

from typing import Any, NamedTuple

from experiments.config import BY_FILE, FREE, SETTINGS, Config, same, without_effect
from experiments.files import Row
from experiments.presets import PRESETS, Preset
from experiments.presets.preset import Cell
from fedjax_pfl import user_code
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.simulate import hyperparameters

# less of one is a smaller experiment, else the same
_SIZES = ("rounds", "clients", "data_fraction", "epochs", "steps", "examples")
_LONG = 40  # characters of a value that are shown


class Difference(NamedTuple):
    """A setting of a run that is not the paper's, or the number of its examples."""

    name: str
    value: Any
    wanted: Any

    @property
    def kind(self) -> str:
        """reduced: it only makes the experiment smaller; longer: it has more rounds;
        changed: all else."""
        if self.name in _SIZES and self.value is not None and self.wanted is not None:
            if self.value < self.wanted:
                return "reduced"
            if self.name == "rounds":
                return "longer"
        return "changed"


def cell(preset: Preset, config: Config) -> Cell:
    """What the paper publishes for a run's settings; of the preset itself where no
    other of its cells fits.

    A cell without a number of the method is the paper's setting all the same, but one
    that has it comes first.
    """
    algo, known = config.algo, config.hparams | vars(config)
    fitting = [
        found
        for found in preset.cells
        if all(same(n, known.get(n), x) for n, x in found.where.items())
    ]
    having = [found for found in fitting if algo in {**found.numbers, **found.rounds}]
    return next(
        iter(having + fitting),
        Cell({}, {algo: preset.published[algo]} if algo in preset.published else {}),
    )


def differences(config: Config, examples: Row | None = None) -> list[Difference]:
    """Where a run is not the paper's; what cannot change its last scores does not
    count.

    Args:
      examples: {"used", "available", "of"}, those used, there, and of the whole data
        set; None: not known.
    """
    preset = PRESETS.get(config.preset or "")
    found = _settings(preset, config) if preset else []
    if examples and examples["available"] < examples["of"]:
        found.append(Difference("examples", examples["used"], examples["of"]))
    return found


def _settings(preset: Preset, config: Config) -> list[Difference]:
    algo, where = config.algo, cell(preset, config).where
    wanted = {name: setting.default for name, setting in SETTINGS.items()} | dict(
        preset.settings
    )
    if algo not in preset.own:
        wanted |= preset.baselines
    usual = (
        config.hparams
        if user_code.named(algo)
        else hyperparameters(find(algo)) | preset.hparams.get(algo, {})
    )
    wanted |= {name: value for name, value in where.items() if name in SETTINGS}
    usual |= {name: value for name, value in where.items() if name not in SETTINGS}
    off = {"algo", "preset", "seed", "eval_every", *FREE, *without_effect(config)}
    names = [name for name in SETTINGS if name not in off]
    found = [
        Difference(name, value, wanted[name])
        for name, value in ((name, getattr(config, name)) for name in names)
        if not (same(name, value, wanted[name]) or (name in BY_FILE and value is None))
    ]
    return found + [
        Difference(hparam(n), x, usual[n])
        for n, x in config.hparams.items()
        if x != usual[n]
    ]


def deviations(config: Config, examples: Row | None = None) -> str:
    """In words, as `reduced: rounds 3 of 40; changed: lr 0.1, not 0.005`; empty for the
    preset's own settings."""
    found, parts = differences(config, examples), []
    for kind, between, apart in (
        ("reduced", " of ", ", "),
        ("longer", ", not ", "; "),
        ("changed", ", not ", "; "),
    ):
        if said := [
            f"{d.name} {shown(d.value)}{between}{shown(d.wanted)}"
            for d in found
            if d.kind == kind
        ]:
            parts.append(f"{kind}: {apart.join(said)}")
    return "; ".join(parts)


def hparam(name: str) -> str:
    """What a hyperparameter is called beside settings, of which one may have its
    name."""
    return f"hparam.{name}" if name in SETTINGS else name


def shown(value: Any) -> str:
    """A value in a table; a long one (a task map, say) is cut."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."


def comparison(config: Config, examples: Row | None = None) -> Row | None:
    """For summary.json: the preset's name, what is published for it, and every setting
    that is not the preset's."""
    preset, algo = PRESETS.get(config.preset or ""), config.algo
    if not preset:
        return None
    found = cell(preset, config)
    return {
        "name": config.preset,
        "compare": preset.headline_of(algo),
        "published": found.numbers.get(algo),
        "published_rounds": found.rounds.get(algo),
        "deviations": deviations(config, examples),
        "differs": [
            {"setting": d.name, "value": d.value, "preset": d.wanted}
            for d in differences(config, examples)
        ],
    }


def beside(config: Config, examples: Row | None = None) -> str | None:
    """What other methods had in a run's setting, where its preset knows and the run
    does not deviate from it."""
    preset = PRESETS.get(config.preset or "")
    if not preset or not preset.measured or differences(config, examples):
        return None
    found = ", ".join(f"{method} {value}" for method, value in preset.measured.items())
    return (
        f"In this setting, {preset.headline} in %, mean of seeds 0, 1, 2 "
        f"(experiments/README.md): {found}."
    )


def sentence(config: Config, examples: Row | None = None) -> str | None:
    """The paper's number, what to compare with it, and where this run is not the
    paper's; None if nothing is known."""
    preset, algo = PRESETS.get(config.preset or ""), config.algo
    if not preset or not (preset.published or preset.cells):
        return None
    found = cell(preset, config)
    parts = []
    if algo in found.numbers:
        parts.append(
            f"The paper's {algo}: {found.numbers[algo]} % (compare "
            f"{preset.headline_of(algo)})."
        )
    if algo in found.rounds:
        parts.append(f"The paper's {algo} converged in {found.rounds[algo]} rounds.")
    if not parts:
        parts.append(f"The paper has no number of {algo} at these settings.")
    differing = deviations(config, examples)
    return " ".join(
        [*parts, *([f"This run is not the paper's: {differing}."] if differing else [])]
    )
