"""Malicious clients, which train on wrong labels or send wrong updates."""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge

from fedjax_pfl import keys, trees, uploads
from fedjax_pfl.engine import validate
from fedjax_pfl.errors import check, choose
from fedjax_pfl.hyperparameters import method_name, shared
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Cohort,
    Metrics,
    PyTree,
    Scores,
    State,
    Task,
)

ATTACKS = ("label_flip", "sign_flip", "scale", "gaussian")
BENIGN = "benign_"  # prefix of the scores of clients that are not malicious


class Options(NamedTuple):
    """Hyperparameters of malicious clients.

    Args:
      attack_scale: factor of the update in [0, inf): sign_flip sends -attack_scale
        times it, scale sends attack_scale times it, and gaussian numbers of that
        standard deviation.
    """

    attack_scale: Annotated[float, Ge(0)] = 1.0


def chosen(clients: int, fraction: float, seed: int = 0) -> np.ndarray:
    """Returns which clients are malicious, bool [N]: the nearest number to fraction N,
    the same in every round."""
    check("malicious", fraction, 0, 1, open_high=True)
    count = math.floor(fraction * clients + 0.5)
    drawn = np.random.default_rng(seed).permutation(clients)[:count]
    return np.isin(np.arange(clients), drawn)


def malicious(
    factory: Callable[..., Algorithm] | str,
    fraction: float,
    attack: str = "sign_flip",
    *,
    seed: int = 0,
) -> Callable[..., Algorithm]:
    """Returns the method with a fraction of the clients malicious.

    label_flip: they train on the label C - 1 - y. sign_flip, scale and gaussian: they
    train as before and send default - s update, default + s update, or default + s
    times standard normal numbers, where s is `attack_scale` and the update is the
    upload minus `default` (see `Cohort.mean`). The method's scores of the other clients
    are also reported as `benign_*`.

    Args:
      factory: a method or its name.
      fraction: of the clients, in [0, 1).
      seed: draws the malicious clients.

    Returns:
      a factory with the hyperparameters of `Options`, all traced.

    Raises:
      InputError: a value is invalid, or a wrong update has no mean to go to.
    """
    factory = validate.method(factory)
    name = method_name(factory)
    choose("attack", attack, ATTACKS)
    check("malicious", fraction, 0, 1, open_high=True)

    @functools.wraps(factory)
    def make(task: Task, *, on: Options, **hparams: Any) -> Algorithm:
        bad = chosen(task.num_clients, fraction, seed)
        return _attacked(name, factory(task, **hparams), task, bad, attack, on)

    made = shared(Options)(make)
    made.__name__ = name
    return made


def _attacked(
    name: str,
    method: Algorithm,
    task: Task,
    bad: np.ndarray,
    attack: str,
    on: Options,
) -> Algorithm:
    def is_bad(id: Array) -> Array:
        return jnp.asarray(bad)[jnp.minimum(id, len(bad) - 1)]

    def change(c: Client, _: PyTree, upload: PyTree, default: PyTree) -> PyTree:
        key = keys.fold(uploads.key_of(c), keys.Client.ATTACK)
        sent = _wrong(attack, key, on.attack_scale, upload, default)
        return trees.choose(is_bad(c.id), sent, upload)

    def flipped(c: Client) -> Client:
        examples = c.train.examples
        y = jnp.where(is_bad(c.id), task.num_classes - 1 - examples.y, examples.y)
        return c._replace(train=c.train._replace(examples=examples._replace(y=y)))

    def round(key: Array, state: State, cohort: Cohort) -> tuple[State, Metrics]:
        def mean(client: Any, *rows: PyTree, **options: Any) -> Any:
            wrong = uploads.sending(client, change, options["default"])
            return cohort.mean(lambda c, *rows: wrong(c, (), *rows), *rows, **options)

        if attack == "label_flip":
            through = uploads.Through(cohort, client=flipped)
            state, metrics = method.round(key, state, through)
        else:
            through = uploads.Through(cohort, mean)
            state, metrics = method.round(key, state, through)
            uploads.must_send(name, through.means)
        good = ~is_bad(cohort.ids)
        benign = {
            f"{BENIGN}{score}": jnp.where(good, x, jnp.nan)
            for score, x in metrics.post.items()
        }
        return state, metrics._replace(post=metrics.post | benign)

    def score(outputs: PyTree, y: Array, mask: Array, c: Client) -> Scores:
        found, good = method.score(outputs, y, mask, c), ~is_bad(c.id)
        benign = {
            f"{BENIGN}{name}": jax.tree.map(lambda x: jnp.where(good, x, 0), pair)
            for name, pair in found.items()
        }
        return found | benign

    return method._replace(round=round, score=score)


def _wrong(
    attack: str, key: Array, scale: Any, upload: PyTree, default: PyTree
) -> PyTree:
    """Returns what a malicious client sends."""
    if attack == "gaussian":
        noise = uploads.random_like(key, upload)
        return jax.tree.map(
            lambda d, n: (d + scale * n).astype(d.dtype), default, noise
        )
    factor = -scale if attack == "sign_flip" else scale

    def moved(x: Array, d: Array) -> Array:
        return (d + factor * (x - d)).astype(x.dtype)

    return jax.tree.map(moved, upload, default)
