"""What a run directory records, read back: the settings, which nobody may have edited,
the layout, and the rows."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments import networks, schema, settings, stopping, unseen
from experiments.config import SETTINGS, Config
from experiments.files import Row, damaged, lines, read_derived, read_json
from fedjax_pfl import hyperparameters, user_code
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.engine import checkpoint
from fedjax_pfl.engine.memory import Memory
from fedjax_pfl.errors import InputError


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run."""

    platform: str
    kind: str
    count: int


class Layout(NamedTuple):
    """How the clients of a run are laid out on a machine."""

    width: int  # clients trained at once per device
    conv: str  # the form of convolutions
    devices: Devices
    runs: int = 1  # trained at once, see `at_once`

    def content(self, memory: Memory) -> Row:
        """What layout.json holds of it."""
        return self._asdict() | {
            "devices": dataclasses.asdict(self.devices),
            "memory": memory._asdict(),
        }

    def changes(self, now: "Layout") -> str:
        """What differs in another one, as `width 3 -> 1, devices 2 -> 1`; nothing if it
        is the same."""
        rows = [layout._replace(devices=layout.devices.count) for layout in (self, now)]  # type: ignore[arg-type]
        pairs = zip(self._fields, *rows, strict=True)
        return ", ".join(
            f"{name} {before} -> {after}"
            for name, before, after in pairs
            if before != after
        )


def signed(config: Config) -> Row:
    """The settings as they are written, with a digest of each."""
    values = vars(config)
    return values | {
        "digests": {name: _digest(value) for name, value in values.items()}
    }


# in partition.json the hashes of a user's own parts: their settings, and what they are
OWN_FILES = {
    "algo": (("algo",), "method"),
    "model_file": (("model", "shared_model"), "model"),
    "networks": (("model",), "clients' networks"),
    "dataset_file": (("dataset", "public"), "data set"),
    "partition_file": (("partition",), "partition"),
}


def own_files(config: Config, num_clients: int) -> dict[str, str]:
    """The hashes of the files of a user's own parts; nothing of parts that have a name
    here."""
    found: dict[str, str] = {}
    for key, (names, _) in OWN_FILES.items():
        # of public, how many
        texts = [re.sub(r":\d+$", "", getattr(config, name) or "") for name in names]
        if key == "model_file":
            texts = [*networks.architectures(config.model, num_clients)[0], *texts[1:]]
        digest = (
            _networks(config, num_clients)
            if key == "networks"
            else user_code.digest(texts)
        )
        found |= {key: digest} if digest else {}
    return found


def other_files(known: Row, now: Row) -> list[str]:
    """What the parts of a user's own are whose files are not the ones that are `known`;
    runs begun before the clients' networks were recorded may have any."""
    keys = [key for key in OWN_FILES if key in known or key != "networks"]
    return [OWN_FILES[key][1] for key in keys if known.get(key) != now.get(key)]


def _networks(config: Config, num_clients: int) -> str | None:
    """The hash of the names in --model=file:PATH, each client's; None of another
    model."""
    if not config.model.startswith("file:"):
        return None
    names, of = networks.architectures(config.model, num_clients)
    return _digest([names[place] for place in of])


def read_config(path: Path) -> Config:
    """The settings of a run, with the defaults of those that came into being since.

    Raises:
      InputError: there are none, the file is damaged, or a setting is not the one that
        was written.
    """
    file = path / "config.json"
    config = read_json(file, schema.CONFIG)
    digests = config.pop("digests")
    if names := [
        name
        for name in config | digests
        if _digest(config.get(name)) != digests.get(name, _digest(None))
    ]:
        raise InputError(
            f"{file} was edited ({', '.join(names)}), so the run would not be the one "
            "that was begun: undo that, "
            "or start a new run with another --workdir."
        )
    if unknown := [
        name for name in config if name not in SETTINGS and name != "hparams"
    ]:
        raise damaged(
            file, f"it has a setting {unknown[0]!r}, which this version does not know"
        )
    try:
        # its file need not be there to read what came of it
        if user_code.named(config["algo"]):
            found = Config(**config)
        else:
            hyperparameters.check(find(config["algo"]), config["hparams"])
            found = settings.completed(config)
        settings.check_ranges(found)
    except InputError as error:
        raise damaged(file, str(error).rstrip(".")) from None
    return found


def read_layout(path: Path) -> Layout:
    """How the clients of a run are laid out."""
    found = read_json(path / "layout.json", schema.LAYOUT)
    devices = (found["devices"][name] for name in ("platform", "kind", "count"))
    return Layout(
        found["width"], found["conv"], Devices(*devices), found.get("runs", 1)
    )


def is_run(path: Path) -> bool:
    """Does a run directory hold all that a resume needs?"""
    # unlike Path.is_file, False for a name that is too long
    return os.path.isfile(path / "config.json")


def is_complete(path: Path, config: Config) -> bool:
    """Has this run directory all the rounds of these settings, by its summary, or has
    it ended before by --stop_at or --patience?"""
    content = read_derived(path / "summary.json", schema.SUMMARY)
    whole = bool(content) and content["status"] == "complete"
    if not whole or content["rounds"] < config.rounds:
        return whole and stopping.ended(path, config) is not None
    return unseen.as_asked(config, content)


def complete(path: Path, count: int) -> Iterator[tuple[bytes, Row]]:
    """The lines and rows of rounds 0 to count - 1; what follows, a torn last line
    included, may go.

    Raises:
      InputError: one of them is not there, or not in its place; the message says from
        where the run can go on.
    """
    found = 0
    for line, row in lines(
        path, schema.METRICS if path.stem == "metrics" else schema.SCORES
    ):
        if found == count or row["round"] != found:
            break
        found += 1
        yield line, row
    if found < count:
        folder = path.parent / "checkpoints"
        known = checkpoint.steps(folder)
        later = ", ".join(str(step) for step in known if step > found)
        earlier = [step for step in known if step <= found]
        way = (
            f"resume from step {earlier[-1]}" if earlier else "start again from round 0"
        )
        raise InputError(
            f"{path} does not hold the rounds 0 to {count - 1} once each, but only the "
            f"first {found}: delete the "
            f"folders {later} in {folder} to {way}, or take another --workdir."
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
