"""Clients that took no part in training: each is personalised by the method's own local
work, and scored."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.engine import contract, validate
from fedjax_pfl.engine.program import program
from fedjax_pfl.engine.sampling import shares
from fedjax_pfl.errors import InputError
from fedjax_pfl.hyperparameters import method_name
from fedjax_pfl.types import Algorithm, Array, Federation, PyTree, State, Task

Scored = dict[str, dict[str, Array]]  # {"unseen" or "unseen_post": {score: [U]}}


def scorer(
    factory: Callable[..., Algorithm] | str,
    trained: Task,
    unseen: Task,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    width: int = 1,
    rounds: int = 1,
) -> Callable[[Array, Federation, PyTree, Array], Scored]:
    """The scores of U unseen clients as a pure function of (key, their federation, the
    trained server, round t).

    They begin with the rows of `init` and do what the method has a client do in a
    round, from round t on, while the server stays as it is: whatever they send, a mean
    is its `default`. So no unseen client influences another. "unseen" scores what is
    then predicted with the trained server, as before local training, and "unseen_post"
    the model right after it.

    Args:
      trained: of the clients that train.
      unseen: of the others, who are numbered from 0.
      hparams: as of `program`, with `lr_decay` and `width`.
      rounds: of personalisation, 1 or more.

    Raises:
      InputError: the method has no way for such clients (`obstacle`).
    """
    factory = validate.method(factory)
    if why := obstacle(factory, trained, hparams):
        raise InputError(
            f"{method_name(factory)} cannot personalise unseen clients: {why}."
        )
    stays: Callable[[Array, PyTree, PyTree], PyTree] = lambda key, upload, default: (
        default
    )
    everybody = unseen._replace(participation=(1.0, 1.0))
    method, options = (
        _as_drawn(factory, trained),
        {"lr_decay": lr_decay, "width": width, "transform": stays},
    )
    on = program(method, everybody, hparams, checked=False, **options)  # type: ignore[arg-type]

    def run(key: Array, federation: Federation, server: PyTree, t: Array) -> Scored:
        validate.number_of_clients(unseen, federation)
        wanted = jax.eval_shape(on.init, key, on.traced).server
        if difference := contract.difference(wanted, contract.shapes(server)):
            raise InputError(
                f"The server is not one that {method_name(factory)} has trained here: "
                f"{difference}."
            )
        traced = {name: jnp.asarray(value, float) for name, value in on.traced.items()}

        def one(rows: PyTree, i: Array) -> tuple[PyTree, dict[str, Array]]:
            state, known = on.round(
                key, traced, federation, State(server, rows), t + i, i == rounds - 1
            )
            here = jnp.argsort(known.ids)[: unseen.num_clients]
            return state.clients, {name: x[here] for name, x in known.post.items()}

        rows, post = jax.lax.scan(one, on.init(key, traced).clients, jnp.arange(rounds))
        found = on.evaluate(
            key, traced, federation, State(server, rows), t + rounds - 1
        )
        return {
            "unseen": found,
            "unseen_post": {name: x[-1] for name, x in post.items()},
        }

    return run


def _as_drawn(
    factory: Callable[..., Algorithm], trained: Task
) -> Callable[..., Algorithm]:
    """The method with the participation of those who train, of which it may make a
    schedule."""

    @functools.wraps(factory)
    def make(task: Task, **hparams: Any) -> Algorithm:
        return factory(task._replace(participation=shares(trained)), **hparams)

    make.__name__ = method_name(factory)  # of a functools.partial, too
    return make


def obstacle(
    factory: Callable[..., Algorithm], task: Task, hparams: dict[str, Any] | None = None
) -> str:
    """Why clients that took no part cannot be personalised under the trained server;
    empty if they can."""
    one_more = among(
        task, np.append(np.arange(task.num_clients), np.argmax(task.sizes))
    )
    made = [factory(given, **(hparams or {})) for given in (task, one_more)]
    with contract.named(factory):
        contract.check_algorithm(made[0])
    servers = [
        contract.shapes(jax.eval_shape(each.init, jax.random.key(0)).server)
        for each in made
    ]
    return made[0].no_unseen or (
        "" if servers[0] == servers[1] else "its server keeps a part for each client"
    )


def among(task: Task, ids: np.ndarray) -> Task:
    """The task of some of its clients."""
    fields = ("architecture", "sizes", "class_counts")
    of: dict[str, Any] = {name: np.asarray(getattr(task, name))[ids] for name in fields}
    return task._replace(**of)
