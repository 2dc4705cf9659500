"""The cause of a round that is not finite, found on the host afterwards.

A finite round computes nothing of this. The state before the round is donated, so the
round is repeated from the initial state with a tiny learning rate instead.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import trees
from fedjax_pfl.engine.parts import Round
from fedjax_pfl.engine.program import Program
from fedjax_pfl.types import Federation, Task

RATE = 1e-6  # learning rate of the repeated round
LARGEST = 2**30  # bytes of a state that is drawn once more
# logit of the label, all others being 0
_POINTS = {"all logits are equal": 0.0, "a label has probability 1": 100.0}
_LOWER = "lower the learning rate (--lr) or clip gradients (--clip)"
_SEVERAL = "a lower learning rate may help, and a run alone names the cause"


class Found(NamedTuple):
    """The first value that was not finite, its clients and a hint."""

    name: str
    ids: np.ndarray  # of its clients
    hint: str


def wrong(metrics: Round) -> dict[str, np.ndarray]:
    """Returns which active clients have a loss, and a state, that is not finite [S]."""
    # the loss may be of another model than the one that is kept, as in Ditto
    active = np.asarray(metrics.active)
    return {
        "loss": active & ~np.isfinite(metrics.loss),
        "state (or the server's)": active & ~np.asarray(metrics.finite),
    }


def cause(
    program: Program,
    federation: Federation,
    again: Callable[[int, float], Round] | None,
    t: int,
    name: str,
    ids: np.ndarray,
) -> Found:
    """Returns what was first not finite in round t, and a hint.

    Looks at the learning rate, the clients' inputs and the gradient of the loss, and
    then at the same round with a learning rate of 1e-6.

    Args:
      program: of several runs only the names are known.
      again: (t, rate) -> round t from the initial state with this learning rate;
        None: of several runs.
      name: as of `wrong`.
      ids: of the clients.
    """
    task = program.task
    if task is None or again is None:
        return Found(name, ids, _SEVERAL)
    factor = 1.0 if task.schedule is None else float(task.schedule(jnp.int32(t)))
    with np.errstate(over="ignore"):
        decay = np.float32(program.traced["lr_decay"]) ** np.float32(t)
    rate = float(np.float32(program.traced["lr"]) * decay * np.float32(factor))
    if not np.isfinite(rate):
        return Found(f"learning rate ({rate})", ids, "check --lr and its schedule")
    for i in ids:
        bad, size = _inputs(task, federation, int(i))
        if bad:
            hint = f"`prepare` returns NaN or infinity for {bad} of {size} rows"
            return Found("input", np.array([i]), hint)
    if (point := without_gradient(task)) is not None:
        hint = f"it has none where {point}, whatever the learning rate"
        return Found("gradient of the loss", ids, hint)
    if _is_small(program):
        found = again(t, RATE / max(1.0, abs(factor)))
        if np.isin(found.ids[wrong(found)[name]], ids).any():
            hint = f"nor is it with a learning rate of {RATE:g} from the initial state"
            return Found(name, ids, hint)
    return Found(name, ids, _LOWER)


def _inputs(task: Task, federation: Federation, i: int) -> tuple[int, int]:
    """Returns how many training examples of a client are not finite, and their
    number."""
    size = int(federation.train.size[i])
    # padding included: one shape for all clients
    x = task.prepare(federation.examples.x[federation.train.index[i]])
    finite = np.asarray(trees.finite(x, len(x)))
    return int((~finite[:size]).sum()), size


def without_gradient(task: Task) -> str | None:
    """Returns a point where the task's own loss is finite and its gradient is not."""
    if task.loss is None:
        return None
    own = jnp.eye(task.num_classes)
    kind = np.dtype(task.label.dtype).kind
    y = jnp.arange(task.num_classes) if kind == "i" else own.astype(task.label.dtype)
    points = {"outputs are targets": 1.0} if kind == "f" else _POINTS
    for name, logit in points.items():
        logits = logit * (2 * own - 1 if kind == "b" else own)
        mask = jnp.ones(len(own), bool)
        value, gradient = jax.value_and_grad(task.loss)(logits, y, mask)
        if jnp.isfinite(value) and not jnp.isfinite(gradient).all():
            return name
    return None


def _is_small(program: Program) -> bool:
    if program.on_host:
        return False
    like = jax.eval_shape(
        program.init, jax.random.key(0), program.traced, program.placement
    )
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like)) <= LARGEST
