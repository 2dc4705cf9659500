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
from fedjax_pfl.engine.parts import Round
from fedjax_pfl.engine.program import Program
from fedjax_pfl.engine.results import Result, result
from fedjax_pfl.engine.xla import compiler_options, init_options
from fedjax_pfl.errors import DivergenceError, InputError
from fedjax_pfl.kernels.platform import platform
from fedjax_pfl.types import Array, Context, Examples, Federation, RunState

TOGETHER = 16  # most rounds that one call runs
SECONDS = 0.1  # and about how long they take, since no result arrives meanwhile


class Compiled(NamedTuple):
    """The functions of `rounds`, compiled ahead of time."""

    init: Callable[..., RunState]  # (key, traced, placement)
    evaluate: Callable[..., dict[str, Array]]  # (context, RunState)
    # (context, RunState, evaluated, count): metrics [count, ...]
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
    context = _context(program, key, federation)
    start = (key, context.traced, context.federation.placement)
    draw = jax.jit(program.init, compiler_options=init_options())
    init = draw.lower(*start).compile()
    state = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        jax.eval_shape(program.init, *start),
        init.output_shardings,
    )
    together = 1 not in (eval_every, state_every)
    run = _several(program) if together else _single(program.round)
    options: dict[str, Any] = {"compiler_options": compiler_options()}
    chosen, formats = free_layouts(program, context.federation), None
    train = jax.jit(run, donate_argnums=1, in_shardings=chosen, **options)
    step = train.lower(context, state, np.bool_(True), np.int32(1)).compile()
    if chosen is not None:
        formats = step.input_formats[0][0].federation.examples
        chosen = (_examples_in(formats), None)
    score = jax.jit(program.evaluate, in_shardings=chosen, **options)
    evaluate = score.lower(context, state).compile()
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
    return _examples_in(auto), None, None, None


def _examples_in(formats: Examples) -> Context:
    """Returns the shardings of a context whose examples have these formats."""
    rest: list[Any] = [None] * len(Federation._fields)
    federation = Federation(*rest)._replace(examples=formats)
    return Context(None, None, federation, None)  # type: ignore[arg-type]  # as jax.jit takes them


def _context(program: Program, key: Array, federation: Federation) -> Context:
    """Returns the context of round 0, on all devices at once: a jitted function would
    copy it to them at every call."""
    context = program.context(key, federation)
    if program.mesh is None:
        return context
    held = context.federation.frozen
    given = *context[:2], context.federation._replace(frozen=None)
    key, traced, federation = distributed.replicate(given, program.mesh)
    if held is not None and program.task is not None:
        where = frozen.places(program.task, program.mesh)
        federation = federation._replace(frozen=distributed.place(held, where))
    return Context(key, traced, federation, context.t)


def arguments(
    program: Program, key: Array, federation: Federation, run: Compiled
) -> Context:
    """Returns the context of round 0 as the functions of `run` take it."""
    context = _context(program, key, federation)
    if run.formats is None:
        return context
    examples = jax.device_put(context.federation.examples, run.formats)
    federation = context.federation._replace(examples=examples)
    return context._replace(federation=federation)


class Plan(NamedTuple):
    """Rounds of a run, and the results that it returns."""

    rounds: int  # the number after the last one
    # every so many rounds, and the last, are evaluated; 0: only after the last
    eval_every: int = 1
    start: int = 0  # rounds that the state has behind it
    state_every: int = 1  # rounds between results with a state
    # called before each round, True ends the run; a Result then has the state after
    # each evaluated round, too
    until: Callable[[], bool] | None = None


def rounds(
    program: Program,
    key: Array,
    federation: Federation,
    *,
    state: RunState | None = None,
    functions: Compiled | None = None,
    **plan: Any,
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
      plan: fields of `Plan`, `rounds` among them.

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
        like = jax.eval_shape(program.init, key, program.traced, program.placement)
        validate.state(state, like)
    num_clients = len(federation.train.size)
    wanted = Plan(**plan)
    often = {"eval_every": wanted.eval_every, "state_every": wanted.state_every}
    run = functions or compiled(program, key, federation, **often)
    again = functools.partial(_again, program, key, federation, run)
    cause = functools.partial(divergence.cause, program, federation, again)
    for t, new, metrics, pre in _steps(program, key, federation, run, wanted, state):
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
    context = arguments(other, key, federation, run)._replace(t=np.int32(t))
    start = context.key, context.traced, context.federation.placement
    state = run.init(*start)
    metrics = run.step(context, state, np.bool_(False), np.int32(1))[1]
    return jax.tree.map(lambda x: x[0], distributed.fetch(metrics))


def rounds_at_once(
    program: Program,
    keys: Array,
    federation: Federation,
    functions: Compiled,
    *,
    state: RunState | None = None,
    **plan: Any,
) -> Iterator[list[Result | DivergenceError]]:
    """Runs several experiments in one program (`vectorized`), round by round.

    Args:
      keys: [R], one per run.
      functions: `compiled` of the same arguments.
      state: as in `rounds`, like `plan`.

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
    steps = _steps(program, keys, federation, functions, Plan(**plan), state)
    for t, new, metrics, pre in steps:
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
    plan: Plan,
    state: RunState | None,
) -> Iterator[tuple[int, RunState | None, Round | None, dict[str, np.ndarray] | None]]:
    """Yields the fields of each Result, with padding and without a check that they are
    finite."""
    rounds, eval_every, start, state_every, until = plan
    most = program.most_rounds
    validate.rounds(rounds, eval_every, start, state, state_every, most)
    context = arguments(program, key, federation, run)
    if state is None:
        given = context.key, context.traced, context.federation.placement
        state = run.init(*given)
    together = run.together and 1 not in (eval_every, state_every)
    few, t = 1, start
    while t < rounds and not (until is not None and until()):
        context = context._replace(t=np.int32(t))
        wanted = bool(eval_every) and (t % eval_every == 0 or t == rounds - 1)
        pre = distributed.fetch(run.evaluate(context, state)) if wanted else None
        alone = not together or (wanted and until is not None)
        count = 1 if alone else min(few, _free(t, rounds, eval_every, state_every))
        begin = time.perf_counter()
        state, metrics = run.step(context, state, np.bool_(wanted), np.int32(count))
        metrics = distributed.fetch(metrics)
        if together:
            fit = int(SECONDS * count / (time.perf_counter() - begin))
            few = distributed.largest(min(TOGETHER, max(1, fit)))
        for i in range(count):
            one = jax.tree.map(lambda x, i=i: x[i], metrics)
            yield t + i, None if i < count - 1 else state, one, None if i else pre
        t += count
    scores = run.evaluate(context._replace(t=np.int32(t)), state)
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
        context: Context, state: RunState, evaluated: Array, count: Array
    ) -> tuple[RunState, Round]:
        def one(i: Array, carry: tuple[RunState, Round]) -> tuple[RunState, Round]:
            state, metrics = carry
            here = context._replace(t=context.t + i)
            state, found = step(here, state, evaluated & (i == 0))
            return state, jax.tree.map(lambda all, x: all.at[i].set(x), metrics, found)

        shapes = jax.eval_shape(step, context, state, evaluated)[1]
        metrics = jax.tree.map(
            lambda x: jnp.zeros((TOGETHER, *x.shape), x.dtype), shapes
        )
        return jax.lax.fori_loop(0, count, one, (state, metrics))

    return run
