"""Options of a task and of its uploads by their names on the command line.

A name may have values, as focal:2. FILE.py:NAME is a function of the user's own, with
the arguments of the field of `Task`.
"""

from collections.abc import Callable
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Interval

from fedjax_pfl import augment, losses
from fedjax_pfl.engine import asynchronous
from fedjax_pfl.engine.sampling import power_of_choice
from fedjax_pfl.errors import InputError
from fedjax_pfl.options import Options
from fedjax_pfl.types import Task, Upload
from fedjax_pfl.uploads import attack, low_rank, qsgd, top_k
from fedjax_pfl.uploads.chain import Option

Scale = Annotated[float, Ge(0)]


def of_labels() -> None:
    """Returns the loss of the labels: cross entropy of classes, binary cross entropy of
    several labels, squared error of targets."""


def unmixed() -> None:
    """Trains on the examples as they are."""


def uniform() -> None:
    """Draws clients uniformly."""


def by_size(task: Task) -> Callable[..., Any]:
    """Draws clients in proportion to their training examples."""
    return lambda key, t, history: jnp.asarray(task.sizes)


def by_loss(task: Task, candidates: Annotated[int, Ge(1)] | None = None) -> Any:
    """Draws candidates by size, of which those of highest loss train, by default twice
    a round's clients."""
    most, n = max(task.cohort_sizes), task.num_clients
    found = min(2 * most, n) if candidates is None else candidates
    if not most <= found <= n:
        raise InputError(f"`candidates` must be in [{most}, {n}], got {found}.")
    return power_of_choice(task.sizes, found)


def constant() -> None:
    """Keeps the learning rate."""


def cosine(rounds: int) -> Callable[[Any], Any]:
    """Lowers the learning rate by half a cosine to 0."""
    return optax.cosine_decay_schedule(1.0, rounds)


def warmup_cosine(rounds: int) -> Callable[[Any], Any]:
    """Raises the learning rate linearly for a tenth of the rounds, then as cosine."""
    warmup = -(-rounds // 10)
    decay = optax.cosine_decay_schedule(1.0, max(rounds - warmup, 1))
    return lambda t: jnp.where(t < warmup, (t + 1) / warmup, decay(t - warmup))


def step(rounds: int) -> Callable[[Any], Any]:
    """Divides the learning rate by 10 after a half and three quarters of the rounds."""
    cuts = {rounds // 2: 0.1, 3 * rounds // 4: 0.1}
    return optax.piecewise_constant_schedule(1.0, cuts)


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


def class_balanced(
    beta: Annotated[float, Interval(ge=0, lt=1)] = 0.999, *, class_counts: np.ndarray
) -> losses.Loss:
    """Weighs classes by (1 - beta) / (1 - beta^n), of n examples (Cui et al., CVPR
    2019)."""
    return losses.class_balanced(beta, class_counts)


LOSSES = Options(
    "loss",
    {
        "cross_entropy": of_labels,
        "label_smoothing": losses.label_smoothing,
        "focal": losses.focal,
        "class_balanced": class_balanced,
    },
    given=("class_counts",),
)
MIXES = Options(
    "mix", {"none": unmixed, "mixup": augment.mixup, "cutmix": augment.cutmix}
)
SCHEDULES = Options(
    "schedule",
    {x.__name__: x for x in (constant, cosine, warmup_cosine, step)},
    given=("rounds",),
)
SAMPLINGS = Options(
    "sampling",
    {"uniform": uniform, "size": by_size, "power_of_choice": by_loss},
    given=("task",),
)
RULES = Options(
    "asynchronous",
    {x.__name__: x for x in (asynchronous.fedasync, asynchronous.fedbuff)},
    given=("staleness",),
    own=lambda function, staleness: function(staleness),
    makes=(asynchronous.Rule,),
)
_WEIGHTS = (asynchronous.constant, asynchronous.polynomial, asynchronous.hinge)
STALENESS = Options("staleness", {x.__name__: x for x in _WEIGHTS})
ATTACKS = Options(
    "malicious",
    {x.__name__: x for x in (label_flip, sign_flip, scale, gaussian)},
    own=lambda function: function(),
    makes=(Upload, Option),
)
COMPRESSIONS = Options(
    "compress",
    {x.__name__: x for x in (top_k, qsgd, low_rank)},
    own=lambda function: function(),
    makes=(Upload, Option),
)
