"""The round loop on the host: compile, evaluate, train, several rounds at once where
they are short."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.engine import memory, multihost, validate
from fedjax_pfl.engine.memory import Memory
from fedjax_pfl.engine.method import Traced
from fedjax_pfl.engine.program import Program, Round
from fedjax_pfl.engine.results import Result, check_finite, without_padding
from fedjax_pfl.engine.xla import compiler_options, init_options
from fedjax_pfl.errors import DivergenceError, InputError
from fedjax_pfl.types import Array, Federation, State

TOGETHER = 16  # rounds that go to the devices at once, at most
SECONDS = 0.1  # and about how long those take, since nothing is heard of them meanwhile


class Compiled(NamedTuple):
    """What `rounds` runs, compiled ahead of time."""

    init: Callable[..., State]  # (key, traced, placement)
    evaluate: Callable[..., dict[str, Array]]  # (key, traced, federation, State, t)
    step: Callable[
        ..., tuple[State, Round]
    ]  # (key, traced, federation, State, t, evaluated, count): metrics [count, ...]
    memory: Memory  # of the larger of evaluation and step
    together: bool = False  # may a step be of several rounds?


def compiled(
    program: Program,
    key: Array,
    federation: Federation,
    *,
    eval_every: int = 1,
    state_every: int = 1,
) -> Compiled:
    """Compiles the functions that `rounds` runs with these arguments, and accounts for
    their memory."""
    # it is run without being compiled as a whole
    if program.on_host or jax.config.values["jax_disable_jit"]:
        return Compiled(
            program.init,
            program.evaluate,
            _single(program.round),
            Memory(None, None, None),
        )
    key, traced, federation = _arguments(program, key, federation)
    once = jax.jit(program.init, compiler_options=init_options())
    init = once.lower(key, traced, federation.placement).compile()
    shapes = jax.eval_shape(program.init, key, traced, federation.placement)
    where = init.output_shardings
    state = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, where
    )
    t = np.int32(0)
    together = 1 not in (eval_every, state_every)
    run = _several(program) if together else _single(program.round)
    given = (key, traced, federation, state, t)
    options: dict[str, Any] = {"compiler_options": compiler_options()}
    step = (
        jax.jit(run, donate_argnums=3, **options)
        .lower(*given, np.bool_(True), np.int32(1))
        .compile()
    )
    evaluate = jax.jit(program.evaluate, **options).lower(*given).compile()
    devices = 1 if program.mesh is None else len(program.mesh.local_devices)
    return Compiled(
        init, evaluate, step, memory.of([evaluate, step], devices=devices), together
    )


def _arguments(
    program: Program, key: Array, federation: Federation
) -> tuple[Array, Traced, Federation]:
    """Key, traced hyperparameters and federation as the compiled functions take
    them."""
    traced = {name: jnp.asarray(value, float) for name, value in program.traced.items()}
    if not program.on_host:
        federation = federation._replace(placement=program.placement)
    # once: a jitted function would copy them to the devices at every call
    if program.mesh is not None:
        key, traced, federation = multihost.replicate(
            (key, traced, federation), program.mesh
        )
    return key, traced, federation


def rounds(
    program: Program,
    key: Array,
    federation: Federation,
    *,
    rounds: int,
    eval_every: int = 1,
    start: int = 0,
    state: State | None = None,
    state_every: int = 1,
    functions: Compiled | None = None,
    until: Callable[[], bool] | None = None,
) -> Iterator[Result]:
    """Runs an experiment round by round from `start`, and closes with the scores after
    the last round.

    Each function is compiled once; the state's buffers are donated to the next round.
    Every `eval_every`-th round and the last are evaluated, none but the closing one if
    it is 0. The state is sure to be there after every `state_every`-th round and the
    last: of short rounds between those and evaluations several go to the devices at
    once, since starting one can take as long as itself.

    Args:
      state: after `start` rounds, of a Result of the same layout, or of another one as
        `program.place(other.unplace(state))` has it: clients' rows lie where they are
        trained, and by architecture, with several also on one device. It is donated, as
        the states of the results are: `jax.device_get` one to keep it.
      functions: what `compiled` returned for the same arguments; None: compiled here.
      until: asked before each round; True: there is no further one, only the closing
        scores. The state is then sure to be there after each evaluated round, too.

    Raises:
      DivergenceError: an active client's loss or state, or the server's, is not finite;
        that round is not yielded.
    """
    validate.rounds(rounds, eval_every, start, state, state_every)
    if np.ndim(program.traced["lr"]):
        raise InputError("This program is of several runs: `rounds_at_once` runs them.")
    if program.task is not None:
        validate.key(key)
        validate.federation(program.task, federation)
    if state is not None and not program.on_host:
        validate.state(
            state, jax.eval_shape(program.init, key, program.traced, program.placement)
        )
    num_clients = len(federation.train.size)
    run = functions or compiled(
        program, key, federation, eval_every=eval_every, state_every=state_every
    )
    for t, new, known, pre in _course(
        program,
        key,
        federation,
        run,
        rounds,
        eval_every,
        start,
        state,
        state_every,
        until,
    ):
        metrics = None if known is None else without_padding(known, num_clients)
        if metrics is not None:
            check_finite(t, metrics)
        yield Result(t, new, metrics, pre)


def rounds_at_once(
    program: Program,
    keys: Array,
    federation: Federation,
    functions: Compiled,
    *,
    rounds: int,
    eval_every: int = 1,
    start: int = 0,
    state: State | None = None,
    state_every: int = 1,
    until: Callable[[], bool] | None = None,
) -> Iterator[list[Result | DivergenceError]]:
    """Runs several experiments in one, round by round: `rounds` for what `vectorized`
    returns.

    Args:
      keys: [R], of each run.
      functions: what `compiled` returned for the same arguments.
      rounds: and the others, as `rounds` takes them.

    Yields:
      for each run its Result, with the state of all (`trees.gather` takes one's), or
      the error
      from the round on in which it is no longer finite; the others go on.
    """
    if not np.ndim(program.traced["lr"]):
        raise InputError(
            "This program is of one run: `rounds` runs it, and `vectorized` makes one "
            "of several."
        )
    validate.kind_of_key(keys)
    if (count := np.size(program.traced["lr"])) != (len(keys) if np.ndim(keys) else 0):
        raise InputError(
            f"These are {count} runs: give each a key, as jax.random.split(key, "
            f"{count}) makes them."
        )
    # [R, N], or [N] where all runs share them
    num_clients = federation.train.size.shape[-1]
    validate.rounds(rounds, eval_every, start, state, state_every)
    failed: dict[int, DivergenceError] = {}
    for t, new, metrics, pre in _course(
        program,
        keys,
        federation,
        functions,
        rounds,
        eval_every,
        start,
        state,
        state_every,
        until,
    ):
        found: list[Result | DivergenceError] = []
        for i in range(len(keys)):
            mine, scores = jax.tree.map(lambda x, i=i: x[i], (metrics, pre))
            try:
                if mine is not None and i not in failed:
                    check_finite(t, mine := without_padding(mine, num_clients))
            except DivergenceError as error:
                failed[i] = error
            found.append(failed[i] if i in failed else Result(t, new, mine, scores))
        yield found


def _course(
    program: Program,
    key: Array,
    federation: Federation,
    run: Compiled,
    rounds: int,
    eval_every: int,
    start: int,
    state: State | None,
    state_every: int,
    until: Callable[[], bool] | None,
) -> Iterator[tuple[int, State | None, Round | None, dict[str, np.ndarray] | None]]:
    """The fields of each Result as they come from the devices: padding is in them, and
    what is not finite."""
    key, traced, federation = _arguments(program, key, federation)
    if state is None:
        state = run.init(key, traced, federation.placement)
    together = run.together and 1 not in (eval_every, state_every)
    few, t = 1, start
    while t < rounds and not (until is not None and until()):
        wanted = bool(eval_every) and (t % eval_every == 0 or t == rounds - 1)
        pre = (
            multihost.fetch(run.evaluate(key, traced, federation, state, np.int32(t)))
            if wanted
            else None
        )
        alone = not together or (wanted and until is not None)
        count = 1 if alone else min(few, _free(t, rounds, eval_every, state_every))
        begin = time.perf_counter()
        state, metrics = run.step(
            key,
            traced,
            federation,
            state,
            np.int32(t),
            np.bool_(wanted),
            np.int32(count),
        )
        metrics = multihost.fetch(metrics)
        if together:
            few = multihost.largest(
                min(
                    TOGETHER,
                    max(1, int(SECONDS * count / (time.perf_counter() - begin))),
                )
            )
        for i in range(count):
            one = jax.tree.map(lambda x, i=i: x[i], metrics)
            yield t + i, None if i < count - 1 else state, one, None if i else pre
        t += count
    yield (
        t,
        state,
        None,
        multihost.fetch(run.evaluate(key, traced, federation, state, np.int32(t))),
    )


def _free(t: int, rounds: int, eval_every: int, state_every: int) -> int:
    """The rounds from t on to the first after which the state is wanted, or before
    which scores are."""
    ends = [rounds, (t // state_every + 1) * state_every]
    if eval_every:
        ends += [(t // eval_every + 1) * eval_every, max(rounds - 1, t + 1)]
    return min(ends) - t


def _single(
    step: Callable[..., tuple[State, Round]],
) -> Callable[..., tuple[State, Round]]:
    """A round as `_several` has it, for one."""

    def run(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: State,
        t: Array,
        evaluated: Array,
        _: Array,
    ) -> tuple[State, Round]:
        state, metrics = step(key, traced, federation, state, t, evaluated)
        return state, jax.tree.map(lambda x: x[None], metrics)

    return run


def _several(program: Program) -> Callable[..., tuple[State, Round]]:
    """Rounds t to t + count - 1; `evaluated` is of the first, the metrics are
    [TOGETHER, ...].

    However many, each is the same compiled code: a resumed run need not take as many at
    once.
    """
    step = jax.jit(program.round)  # traced once, for the shapes and in the loop

    def run(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: State,
        t: Array,
        evaluated: Array,
        count: Array,
    ) -> tuple[State, Round]:
        def one(i: Array, carry: tuple[State, Round]) -> tuple[State, Round]:
            state, metrics = carry
            state, found = step(
                key, traced, federation, state, t + i, evaluated & (i == 0)
            )
            return state, jax.tree.map(lambda all, x: all.at[i].set(x), metrics, found)

        shapes = jax.eval_shape(step, key, traced, federation, state, t, evaluated)[1]
        metrics = jax.tree.map(
            lambda x: jnp.zeros((TOGETHER, *x.shape), x.dtype), shapes
        )
        return jax.lax.fori_loop(0, count, one, (state, metrics))

    return run
