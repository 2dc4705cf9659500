"""Options on what clients send, from the settings of a run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from fedjax_pfl.errors import check
from fedjax_pfl.hyperparameters import parse
from fedjax_pfl.options import Options
from fedjax_pfl.types import Task
from fedjax_pfl.uploads import attack, chain, low_rank, optimizer, private, qsgd, top_k
from fedjax_pfl.uploads.attacks import chosen
from fedjax_pfl.uploads.chain import Option
from fedjax_pfl.uploads.privacy import noise_for
from fedjax_pfl.uploads.robust import ASSUMED, robust

if TYPE_CHECKING:
    from fedjax_pfl.experiment.groups import Server, Uploads

Scale = Annotated[float, Ge(0)]


def label_flip() -> None:
    """Trains on the labels C - 1 - y."""


def sign_flip(scale: Scale = 1.0) -> Option:
    """Sends -scale times the update."""
    return attack("sign_flip", scale)


def scale(scale: Scale = 1.0) -> Option:
    """Sends scale times the update."""
    return attack("scale", scale)


def gaussian(scale: Scale = 1.0) -> Option:
    """Sends normal numbers of the standard deviation scale."""
    return attack("gaussian", scale)


ATTACKS = Options(
    "malicious", {x.__name__: x for x in (label_flip, sign_flip, scale, gaussian)}
)
COMPRESSIONS = Options(
    "compress",
    {x.__name__: x for x in (top_k, qsgd, low_rank)},
    own=lambda function: function(),
)


def malicious(uploads: "Uploads") -> tuple[float, Callable[..., Option | None]]:
    """Returns the fraction of malicious clients, and what makes their attack."""
    fraction, _, rest = (uploads.malicious or "0:label_flip").partition(":")
    share = parse(float, "malicious", fraction)
    check("malicious", share, 0, 1, open_high=True)
    return share, ATTACKS.read(rest)


def flips_labels(uploads: "Uploads") -> bool:
    """Returns whether malicious clients train on wrong labels."""
    share, make = malicious(uploads)
    return bool(share) and make() is None


def with_malicious(uploads: "Uploads", task: Task) -> Task:
    """Returns the task with the clients that attack, the same for every seed, as seeds
    share a program."""
    share, _ = malicious(uploads)
    if not share:
        return task
    return task._replace(malicious=chosen(task.num_clients, share))


def options(uploads: "Uploads", server: "Server", task: Task) -> dict[str, Any]:
    """Returns the arguments `uploads` and `server` of a program.

    Args:
      task: of the clients that train.
    """
    share, make = malicious(uploads)
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


def noise_of(uploads: "Uploads", rounds: int, task: Task) -> float:
    """Returns the noise of --dp: as given, or the least for --dp_epsilon."""
    if uploads.dp_noise is not None:
        return uploads.dp_noise
    given: dict[str, Any] = {"delta": uploads.dp_delta, "sampling": uploads.dp_sampling}
    return noise_for(uploads.dp_epsilon or 0.0, task, rounds, **given)
