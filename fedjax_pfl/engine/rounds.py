"""The loop over communication rounds on the host: compile, evaluate, train."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from fedjax_pfl.engine import distributed, divergence, frozen, memory, validate
from fedjax_pfl.engine.memory import Memory
from fedjax_pfl.engine.method import Traced
from fedjax_pfl.engine.program import Program, Round
from fedjax_pfl.engine.results import Result, result
from fedjax_pfl.engine.xla import compiler_options, init_options
from fedjax_pfl.errors import DivergenceError, InputError
from fedjax_pfl.kernels.platform import platform
from fedjax_pfl.types import Array, Examples, Federation, RunState

TOGETHER = 16  # most rounds that one call runs
SECONDS = 0.1  # and about how long they take, since no result arrives meanwhile


class Compiled(NamedTuple):
    """The functions of `rounds`, compiled ahead of time."""

    init: Callable[..., RunState]  # (key, traced, placement)
    evaluate: Callable[..., dict[str, Array]]  # (key, traced, federation, RunState, t)
    # (key, traced, federation, RunState, t, evaluated, count): metrics [count, ...]
    step: Callable[..., tuple[RunState, Round]]
    memory: Memory  # of the larger of evaluation and step
    together: bool = False  # True if a step may be several rounds
    # layouts of the examples that the functions read without a copy; None: the default
    formats: Examples | None = None


def compiled(
    program: Program,
    key: Array,
    federation: Federation,
    *,
    eval_every: int = 1,
    state_every: int = 1,
) -> Compiled:
    """Compiles the functions that `rounds` runs with these arguments, and determines
    their memory."""
    # these are run without being compiled as a whole
    if program.on_host or jax.config.values["jax_disable_jit"]:
        unknown = Memory(None, None)
        single = _single(program.round)
        return Compiled(program.init, program.evaluate, single, unknown)
    key, traced, federation = _arguments(program, key, federation)
    start = (key, traced, federation.placement)
    draw = jax.jit(program.init, compiler_options=init_options())
    init = draw.lower(*start).compile()
    state = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        jax.eval_shape(program.init, *start),
        init.output_shardings,
    )
    together = 1 not in (eval_every, state_every)
    run = _several(program) if together else _single(program.round)
    given = (key, traced, federation, state, np.int32(0))
    options: dict[str, Any] = {"compiler_options": compiler_options()}
    chosen, formats = free_layouts(program, federation), None
    train = jax.jit(run, donate_argnums=3, in_shardings=chosen, **options)
    step = train.lower(*given, np.bool_(True), np.int32(1)).compile()
    if chosen is not None:
        formats = step.input_formats[0][2].examples
        chosen = (None, None, chosen[2]._replace(examples=formats), None, None)
    score = jax.jit(program.evaluate, in_shardings=chosen, **options)
    evaluate = score.lower(*given).compile()
    devices = 1 if program.mesh is None else len(program.mesh.local_devices)
    needed = memory.of([evaluate, step], devices=devices)
    return Compiled(init, evaluate, step, needed, together, formats)


def free_layouts(program: Program, federation: Federation) -> Any:
    """Returns the `in_shardings` of a step that let the compiler choose the layout of
    the examples, which a TPU would otherwise copy in every round; None on a CPU and
    over several devices."""
    if platform() == "cpu" or program.mesh is not None:
        return None
    auto = jax.tree.map(lambda _: Format(Layout.AUTO), federation.examples)
    rest: list[Any] = [None] * len(Federation._fields)
    return None, None, Federation(*rest)._replace(examples=auto), *[None] * 4


def _arguments(
    program: Program, key: Array, federation: Federation
) -> tuple[Array, Traced, Federation]:
    """Returns key, traced hyperparameters and federation as the compiled functions take
    them."""
    traced = {name: jnp.asarray(value, float) for name, value in program.traced.items()}
    federation = frozen.with_frozen(federation, program.task)
    if not program.on_host:
        federation = federation._replace(placement=program.placement)
    if program.mesh is None:
        return key, traced, federation
    # once: a jitted function would copy them to the devices at every call
    return distributed.replicate((key, traced, federation), program.mesh)


def arguments(
    program: Program, key: Array, federation: Federation, run: Compiled
) -> tuple[Array, Traced, Federation]:
    """Returns key, traced hyperparameters and federation as the functions of `run` take
    them."""
    key, traced, federation = _arguments(program, key, federation)
    if run.formats is not None:
        examples = jax.device_put(federation.examples, run.formats)
        federation = federation._replace(examples=examples)
    return key, traced, federation


def rounds(
    program: Program,
    key: Array,
    federation: Federation,
    *,
    rounds: int,
    eval_every: int = 1,
    start: int = 0,
    state: RunState | None = None,
    state_every: int = 1,
    functions: Compiled | None = None,
    until: Callable[[], bool] | None = None,
) -> Iterator[Result]:
    """Runs an experiment round by round from `start`, and ends with the scores after
    the last round.

    Each function is compiled once. Every `eval_every`-th round and the last are
    evaluated; with 0 only the scores at the end. A Result has the state after every
    `state_every`-th round and the last: short rounds between those and evaluations run
    together in one call.

    Args:
      state: after `start` rounds, of a Result of the same layout, or of another one as
        `program.place(other.unplace(state))`. It is donated, as are the states of the
        results: copy one with `jax.device_get` to keep it.
      functions: `compiled` of the same arguments; None: compiled here.
      until: called before each round; True ends the run. A Result then has the state
        after each evaluated round, too.

    Yields:
      a Result per round, and one with the scores after the last.

    Raises:
      DivergenceError: an active client's loss or state, or the server's, is not finite;
        that round is not yielded.
    """
    if np.ndim(program.traced["lr"]):
        raise InputError("This program is of several runs: use `rounds_at_once`.")
    if program.task is not None:
        validate.key(key)
        validate.federation(program.task, federation)
    if state is not None and not program.on_host:
        wanted = jax.eval_shape(program.init, key, program.traced, program.placement)
        validate.state(state, wanted)
    num_clients = len(federation.train.size)
    run = functions or compiled(
        program, key, federation, eval_every=eval_every, state_every=state_every
    )
    again = functools.partial(_again, program, key, federation, run)
    cause = functools.partial(divergence.cause, program, federation, again)
    for t, new, metrics, pre in _steps(
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
        yield result(t, new, metrics, pre, num_clients, cause)


def _again(
    program: Program,
    key: Array,
    federation: Federation,
    run: Compiled,
    t: int,
    rate: float,
) -> Round:
    """Returns the results of round t from the initial state with another rate."""
    other = program._replace(traced=program.traced | {"lr": rate, "lr_decay": 1.0})
    given = arguments(other, key, federation, run)
    state = run.init(*given[:2], given[2].placement)
    metrics = run.step(*given, state, np.int32(t), np.bool_(False), np.int32(1))[1]
    return jax.tree.map(lambda x: x[0], distributed.fetch(metrics))


def rounds_at_once(
    program: Program,
    keys: Array,
    federation: Federation,
    functions: Compiled,
    *,
    rounds: int,
    eval_every: int = 1,
    start: int = 0,
    state: RunState | None = None,
    state_every: int = 1,
    until: Callable[[], bool] | None = None,
) -> Iterator[list[Result | DivergenceError]]:
    """Runs several experiments in one program (`vectorized`), round by round.

    Args:
      keys: [R], one per run.
      functions: `compiled` of the same arguments.
      rounds: like the others, as in `rounds`.

    Yields:
      for each run its Result, with the state of all (`trees.gather` takes one's), or
      from the round on in which it is no longer finite the error; the others continue.
    """
    if np.ndim(program.traced["lr"]) != 1:
        raise InputError("This program is of one run: use `rounds`, or `vectorized`.")
    validate.key(keys, np.shape(program.traced["lr"]))
    # [R, N], or [N] where all runs share them
    num_clients = federation.train.size.shape[-1]
    failed: dict[int, DivergenceError] = {}
    cause = functools.partial(divergence.cause, program, federation, None)
    for t, new, metrics, pre in _steps(
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
                one = failed.get(i) or result(t, new, mine, scores, num_clients, cause)
            except DivergenceError as error:
                one = failed[i] = error
            found.append(one)
        yield found


def _steps(
    program: Program,
    key: Array,
    federation: Federation,
    run: Compiled,
    rounds: int,
    eval_every: int,
    start: int,
    state: RunState | None,
    state_every: int,
    until: Callable[[], bool] | None,
) -> Iterator[tuple[int, RunState | None, Round | None, dict[str, np.ndarray] | None]]:
    """Yields the fields of each Result, with padding and without a check that they are
    finite."""
    most = program.most_rounds
    validate.rounds(rounds, eval_every, start, state, state_every, most)
    key, traced, federation = arguments(program, key, federation, run)
    if state is None:
        state = run.init(key, traced, federation.placement)
    together = run.together and 1 not in (eval_every, state_every)
    few, t = 1, start
    while t < rounds and not (until is not None and until()):
        args = (key, traced, federation, state, np.int32(t))
        wanted = bool(eval_every) and (t % eval_every == 0 or t == rounds - 1)
        pre = distributed.fetch(run.evaluate(*args)) if wanted else None
        alone = not together or (wanted and until is not None)
        count = 1 if alone else min(few, _free(t, rounds, eval_every, state_every))
        begin = time.perf_counter()
        state, metrics = run.step(*args, np.bool_(wanted), np.int32(count))
        metrics = distributed.fetch(metrics)
        if together:
            fit = int(SECONDS * count / (time.perf_counter() - begin))
            few = distributed.largest(min(TOGETHER, max(1, fit)))
        for i in range(count):
            one = jax.tree.map(lambda x, i=i: x[i], metrics)
            yield t + i, None if i < count - 1 else state, one, None if i else pre
        t += count
    scores = run.evaluate(key, traced, federation, state, np.int32(t))
    yield t, state, None, distributed.fetch(scores)


def _free(t: int, rounds: int, eval_every: int, state_every: int) -> int:
    """Returns the number of rounds from t to the first after which the state is
    requested, or before which scores are."""
    ends = [rounds, (t // state_every + 1) * state_every]
    if eval_every:
        ends += [(t // eval_every + 1) * eval_every, max(rounds - 1, t + 1)]
    return min(ends) - t


def _single(
    step: Callable[..., tuple[RunState, Round]],
) -> Callable[..., tuple[RunState, Round]]:
    """Returns a round with the arguments and results of `_several`."""

    def run(*args: Any) -> tuple[RunState, Round]:
        state, metrics = step(*args[:-1])
        return state, jax.tree.map(lambda x: x[None], metrics)

    return run


def _several(program: Program) -> Callable[..., tuple[RunState, Round]]:
    """Returns a function of rounds t to t + count - 1; `evaluated` is for the first,
    the metrics are [TOGETHER, ...].

    Each is the same compiled code for every count: a resumed run may take other counts.
    """
    step = jax.jit(program.round)  # traced once, for the shapes and in the loop

    def run(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: RunState,
        t: Array,
        evaluated: Array,
        count: Array,
    ) -> tuple[RunState, Round]:
        def one(i: Array, carry: tuple[RunState, Round]) -> tuple[RunState, Round]:
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
