"""Options on what clients send, from the settings of a run."""

from typing import Any

import numpy as np

from fedjax_pfl.experiment.groups import Server, Uploads
from fedjax_pfl.experiment.task_options import COMPRESSIONS
from fedjax_pfl.types import Task
from fedjax_pfl.uploads import chain, optimizer, private
from fedjax_pfl.uploads.attacks import chosen
from fedjax_pfl.uploads.privacy import noise_for
from fedjax_pfl.uploads.robust import ASSUMED, robust


def flips_labels(uploads: Uploads) -> bool:
    """Returns whether malicious clients train on wrong labels."""
    share, make = uploads.attack
    return bool(share) and make() is None


def malicious(uploads: Uploads, clients: int) -> np.ndarray | None:
    """Returns the clients that attack, the same for every seed, as seeds share a
    program; None: none."""
    share, _ = uploads.attack
    return chosen(clients, share) if share else None


def options(uploads: Uploads, server: Server, task: Task) -> dict[str, Any]:
    """Returns the arguments `uploads` and `server` of a program.

    Args:
      task: of the clients that train.
    """
    share, make = uploads.attack
    parts = [make() if share else None]
    if uploads.compress is not None:
        parts.append(COMPRESSIONS.read(uploads.compress)())
    if server.aggregate != "mean":
        parts.append(robust(server.aggregate, share or ASSUMED))
    if uploads.dp in ("client", "adaptive"):
        noise = noise_of(uploads, server.rounds, task)
        parts.append(private(uploads.dp_clip, noise, adaptive=uploads.dp == "adaptive"))
    rule = None
    if server.server_optimizer is not None:
        rule = optimizer(server.server_optimizer, server.server_lr or 1.0)
    return {"uploads": chain(*filter(None, parts)), "server": rule}


def noise_of(uploads: Uploads, rounds: int, task: Task) -> float:
    """Returns the noise of --dp: as given, or the least for --dp_epsilon."""
    if uploads.dp_noise is not None:
        return uploads.dp_noise
    given: dict[str, Any] = {"delta": uploads.dp_delta, "sampling": uploads.dp_sampling}
    return noise_for(uploads.dp_epsilon or 0.0, task, rounds, **given)
