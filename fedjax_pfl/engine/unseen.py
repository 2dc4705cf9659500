"""Scores of held-out clients, personalised by the method's own local work."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.engine import contract, validate
from fedjax_pfl.engine.method import as_arrays
from fedjax_pfl.engine.parts import parts
from fedjax_pfl.engine.placement import lay_out
from fedjax_pfl.engine.program import Program, from_parts, set_up
from fedjax_pfl.engine.sampling import shares
from fedjax_pfl.errors import InputError
from fedjax_pfl.hyperparameters import method_name
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Context,
    Federation,
    Method,
    PyTree,
    RunState,
    State,
    Task,
)

Scored = dict[str, dict[str, Array]]  # {"unseen" or "unseen_post": {score: [U]}}


def scorer(
    factory: Callable[..., Algorithm | Method] | str,
    trained: Task,
    unseen: Task,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    width: int = 1,
    rounds: int = 1,
) -> Callable[[Array, Federation, PyTree, Array], Scored]:
    """Returns the scores of U held-out clients as a pure function of (key, their
    federation, the trained server, round t).

    "unseen" are the scores of their predictions with the trained server, as before
    local training; "unseen_post" those right after it.

    Args:
      as of `personalised`.
    """
    on, train = personalised(
        factory, trained, unseen, hparams, lr_decay=lr_decay, width=width, rounds=rounds
    )

    def run(key: Array, federation: Federation, server: PyTree, t: Array) -> Scored:
        context, state, post = train(key, federation, server, t)
        last = {name: x[-1] for name, x in post.items()}
        return {"unseen": on.evaluate(context, state), "unseen_post": last}

    return run


def personalised(
    factory: Callable[..., Algorithm | Method] | str,
    trained: Task,
    unseen: Task,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    width: int = 1,
    rounds: int = 1,
) -> tuple[Program, Callable[..., tuple[Context, RunState, dict[str, Array]]]]:
    """Returns the program of U held-out clients, and (key, their federation, the
    trained server, round t) -> context and state after local training, and the scores
    right after each of its rounds [rounds, U].

    They start with the rows of `init` and take the local steps of rounds t, t + 1, ...,
    while the server does not change: every mean is its `default`, so that no held-out
    client influences another.

    Args:
      trained: task of the clients that train.
      unseen: task of the held-out clients, numbered from 0.
      hparams: as in `program`, like `lr_decay` and `width`.
      rounds: rounds of personalisation, 1 or more.

    Raises:
      InputError: the method cannot personalise such clients (`obstacle`).
    """
    factory = validate.method(factory)
    if why := obstacle(factory, trained, hparams):
        raise InputError(
            f"{method_name(factory)} cannot personalise held-out clients: {why}."
        )

    @functools.wraps(factory)
    def method(task: Task, **hparams: Any) -> Algorithm | Method:
        # a method may make a schedule of the participation of those who train
        return factory(task._replace(participation=shares(trained)), **hparams)

    method.__name__ = method_name(factory)  # of a functools.partial, too
    everybody = unseen._replace(participation=(1.0, 1.0))
    setting = set_up(method, everybody, hparams, lr_decay=lr_decay)
    layout = lay_out(setting.task, width)
    on = from_parts(parts(setting, layout, held=True), setting)

    def train(
        key: Array, federation: Federation, server: PyTree, t: Array
    ) -> tuple[Context, RunState, dict[str, Array]]:
        validate.number_of_clients(unseen, federation)
        wanted = jax.eval_shape(on.init, key, on.traced).method.server
        contract.check_like("The server must be that of this method", wanted, server)
        context = Context(key, as_arrays(on.traced), federation, t)

        def after(rows: PyTree) -> RunState:
            return RunState(State(server, rows))

        def one(rows: PyTree, i: Array) -> tuple[PyTree, dict[str, Array]]:
            here = context._replace(t=t + i)
            state, known = on.round(here, after(rows), i == rounds - 1)
            by_id = jnp.argsort(known.ids)[: unseen.num_clients]
            found = {name: x[by_id] for name, x in known.post.items()}
            return state.method.clients, found

        start = on.init(key, context.traced).method.clients
        rows, post = jax.lax.scan(one, start, jnp.arange(rounds))
        return context._replace(t=t + rounds - 1), after(rows), post

    return on, train


def obstacle(
    factory: Callable[..., Algorithm | Method],
    task: Task,
    hparams: dict[str, Any] | None = None,
) -> str:
    """Returns why held-out clients cannot be personalised with the trained server;
    empty if they can."""
    ids = np.arange(task.num_clients)
    one_more = among(task, np.append(ids, np.argmax(task.sizes)))
    # a state may have a row per client of the largest cohort, too
    one_more = one_more._replace(participation=(1.0, 1.0))
    made = [factory(given, **(hparams or {})) for given in (task, one_more)]
    servers = [
        contract.shapes(jax.eval_shape(each.init, jax.random.key(0)).server)
        for each in made
    ]
    per_client = "" if servers[0] == servers[1] else "its server has a row per client"
    return made[0].no_unseen or per_client


def among(task: Task, ids: np.ndarray) -> Task:
    """Returns the task of some of its clients."""
    fields = ("architecture", "sizes", "class_counts")
    of: dict[str, Any] = {name: np.asarray(getattr(task, name))[ids] for name in fields}
    if task.malicious is not None:
        of["malicious"] = np.asarray(task.malicious)[ids]
    return task._replace(**of)
