"""The loop over communication rounds, and runs from settings to results."""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import simulate
from fedjax_pfl.data import datasets, federate
from fedjax_pfl.engine import memory
from fedjax_pfl.engine.parts import BENIGN
from fedjax_pfl.errors import DivergenceError, InputError
from fedjax_pfl.experiment import (
    callbacks as standard,
    config as settings,
    groups,
    metrics,
    results,
    text,
    upload_options,
    warm_start,
)
from fedjax_pfl.experiment.build import build, num_parameters
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.types import Experiment
from fedjax_pfl.types import Array, Federation, RunState

DIVERGED = 3  # exit code
Callback = Callable[[simulate.Result], Any]


def train(
    experiment: Experiment,
    callbacks: Sequence[Callback] = (),
    *,
    start: int = 0,
    state: RunState | None = None,
    functions: simulate.Compiled | None = None,
) -> None:
    """Runs the rounds; stops early when a callback returns True.

    The last result has the scores after the last round, and no metrics.

    Args:
      callbacks: called with each `Result`, in their order; see `callbacks`.
      start: rounds that are done.
      state: the state after them, as `RunDirectory.reopen` returns it.
      functions: as `compiled` returns them.

    Raises:
      DivergenceError: a loss or a state is not finite any more.
    """
    arguments = _arguments([experiment])
    options = _options([experiment], start, [] if state is None else [state])
    ended: list[bool] = []
    with _started([callbacks], [experiment], start):
        for result in simulate.rounds(
            *arguments, functions=functions, until=lambda: bool(ended), **options
        ):
            if any([callback(result) for callback in callbacks]):
                ended.append(True)


def train_at_once(
    experiments: Sequence[Experiment],
    callbacks: Sequence[Sequence[Callback]],
    *,
    start: int = 0,
    states: Sequence[RunState] = (),
    functions: simulate.Compiled | None = None,
) -> dict[int, DivergenceError]:
    """Runs several experiments as one compiled program, each with its own callbacks.

    Args:
      experiments: of `build_at_once`.
      start: rounds that are done in all of them.
      states: of each experiment after them.

    Returns:
      the errors of those that diverged, by index.

    Raises:
      InputError: the experiments are not one program.
    """
    arguments, options = _arguments(experiments), _options(experiments, start, states)
    functions = functions or compiled(experiments)
    failed: dict[int, DivergenceError] = {}
    with _started(callbacks, experiments, start):
        for found in simulate.rounds_at_once(*arguments, functions, **options):
            stopped: list[standard.Stopped] = []
            for i, result in enumerate(found):
                if isinstance(result, DivergenceError):
                    failed[i] = result
                    continue
                try:
                    for callback in callbacks[i]:
                        callback(result)
                except standard.Stopped as error:
                    stopped.append(error)
            if stopped and len(stopped) == len(found) - len(failed):
                raise stopped[0]  # all have a checkpoint of this round
    return failed


def build_at_once(
    configs: Sequence[settings.Config], room: Sequence[int] = federate.ROOM
) -> list[Experiment]:
    """Builds experiments; several are on one device and share their examples."""
    if len(configs) == 1:
        return [build(configs[0], room)]
    made = [build(config.replace(**groups.ONE_DEVICE), room) for config in configs]
    for i, each in enumerate(made):
        federation = each.federation
        if each.dataset is made[0].dataset:
            examples = made[0].federation.examples
            federation = federation._replace(examples=examples)
        options: dict[str, Any] = {"member": i, "batch": len(made)}
        made[i] = dataclasses.replace(each, federation=federation, **options)
    return made


def compiled(experiments: Sequence[Experiment]) -> simulate.Compiled:
    """Compiles experiments as one program.

    Raises:
      NoRoomError: it needs more memory than there is.
      InputError: the experiments differ in more than traced values.
    """
    config = experiments[0].config
    with experiments[0].tracing():
        functions = simulate.compiled(
            *_arguments(experiments),
            eval_every=config.eval_every,
            state_every=config.checkpoint_every,
        )
    memory.check(functions.memory, "use a smaller --width, --model or --clients")
    return functions


def _arguments(
    experiments: Sequence[Experiment],
) -> tuple[simulate.Program, Array, Federation]:
    """Returns program, key and federation; of several experiments as one."""
    first = experiments[0]
    if first.member is None:
        return first.program, first.key, first.federation
    programs = [each.program for each in experiments]
    federations = [each.federation for each in experiments]
    program, federation = simulate.vectorized(programs, federations)
    return program, jnp.stack([each.key for each in experiments]), federation


def _options(
    experiments: Sequence[Experiment], start: int, states: Sequence[RunState]
) -> dict[str, Any]:
    """Returns the other arguments of `simulate.rounds`."""
    state = None
    if states:
        pairs = zip(experiments, states, strict=True)
        state, *others = [each.program.place(state) for each, state in pairs]
        if others:
            state = jax.tree.map(lambda *leaves: jnp.stack(leaves), state, *others)
    c = experiments[0].config
    options = {"rounds": c.rounds, "eval_every": c.eval_every, "start": start}
    return options | {"state_every": c.checkpoint_every, "state": state}


@contextlib.contextmanager
def _started(
    callbacks: Sequence[Sequence[Any]], experiments: Sequence[Experiment], start: int
) -> Iterator[None]:
    """Calls `start` of all callbacks, and `close` in the end."""
    with contextlib.ExitStack() as stack, experiments[0].tracing():
        for own, experiment in zip(callbacks, experiments, strict=True):
            for callback in own:
                if hasattr(callback, "start"):
                    callback.start(experiment, start)
                if hasattr(callback, "close"):
                    stack.callback(callback.close)
        yield


def run(given: Mapping[str, Any], workdir: str | None, resume: bool = False) -> int:
    """Runs one experiment into its directory and returns the exit code.

    Args:
      given: the user's settings, see `config.resolve`.
      workdir: the directory; None: named by the settings.
      resume: goes on with the recorded run.
    """
    config = settings.Config() if resume and workdir else settings.resolve(given)
    directory = RunDirectory(workdir or f"runs/{settings.run_name(given, config)}")
    if resume:
        if not directory.recorded:
            raise InputError(f"{directory.path} holds no run to resume.")
        config = settings.resumed(directory.config, given)
    else:
        directory.check_free()
    return execute([directory], [config])


def execute(
    directories: Sequence[RunDirectory],
    configs: Sequence[settings.Config],
    room: Sequence[int] = federate.ROOM,
    show: Callable[[RunDirectory], str] | None = None,
) -> int:
    """Runs experiments into their directories, from the start or the last checkpoint.

    Several are one compiled program.

    Args:
      room: as of `build`.
      show: returns the text about a finished run of several; None: one run, with
        `describe`, its rounds and `closing`.

    Returns:
      the exit code.

    Raises:
      InputError: the settings are wrong, or several are not one program.
    """
    failed: dict[int, DivergenceError] = {}
    with contextlib.ExitStack() as stack:
        for directory in directories:
            directory.lock()
            stack.callback(directory.unlock)
        if not all(map(complete, directories, configs)):
            try:
                failed = _execute(directories, configs, room, show is None)
            except standard.Stopped as stopped:
                say(f"Stopped; --resume --workdir={directories[0].path} continues.")
                return 128 + int(stopped.args[0])
        for i, directory in enumerate(directories):
            if i in failed:
                directory.summarize(status="diverged")
                print(f"{directory.path}: {failed[i]}", file=sys.stderr)
            elif jax.process_index() == 0:
                say((show or closing)(directory))
    return DIVERGED if failed else 0


def _execute(
    directories: Sequence[RunDirectory],
    configs: Sequence[settings.Config],
    room: Sequence[int],
    alone: bool,
) -> dict[int, DivergenceError]:
    """Returns the errors of the runs that diverged, by index."""
    new = not any(directory.begun for directory in directories)
    experiments = build_at_once(configs, room)
    start, states = (0, []) if new else _opened(directories, experiments)
    if configs[0].init_from is not None and not start:
        states = [warm_start.first_state(each) for each in experiments]
    if alone:
        say(describe(experiments[0], directories))
    begin = time.perf_counter()
    functions = compiled(experiments)
    spent = round(time.perf_counter() - begin, 3)
    if new:  # what cannot run is refused before it has a directory
        _opened(directories, experiments)
    interrupt = standard.Interrupt()
    given = configs[0].evaluation, configs[0].run, interrupt
    each = [standard_callbacks(directory, *given) for directory in directories]
    bar = alone or sys.stdout.isatty()
    each[0] += [interrupt, standard.ProgressBar()] if bar else [interrupt]
    for directory in directories:
        seconds = directory.summary.get("seconds", {})
        directory.summarize(status="running", seconds=seconds | {"compile": spent})
    options: dict[str, Any] = {"start": start, "functions": functions}
    if len(experiments) > 1:
        return train_at_once(experiments, each, states=states, **options)
    try:
        train(experiments[0], each[0], state=states[0] if states else None, **options)
    except DivergenceError as error:
        return {0: error}
    return {}


def _opened(
    directories: Sequence[RunDirectory], experiments: Sequence[Experiment]
) -> tuple[int, list[RunState]]:
    """Opens run directories; returns the next round, and states to go on with."""
    pairs = zip(directories, experiments, strict=True)
    opened = [directory.open(experiment) for directory, experiment in pairs]
    start = opened[0][0]
    if any(step != start for step, _ in opened):
        raise InputError("Runs at once must go on from the same round.")
    return start, [state for _, state in opened if state is not None]


def standard_callbacks(
    directory: RunDirectory,
    evaluation: groups.Evaluation,
    run: groups.Run,
    interrupt: standard.Interrupt | None = None,
) -> list[Any]:
    """Returns the callbacks that write a run directory, in their order."""
    early = None
    if evaluation.patience:
        early = standard.EarlyStopping(evaluation.patience, directory)
    unseen = standard.UnseenClients(early)
    found = [
        early,
        unseen,
        standard.Answers() if evaluation.generated else None,
        standard.MetricsWriter(directory, unseen),
        standard.TensorBoard(directory) if run.tensorboard else None,
        standard.WandB(directory) if run.wandb else None,
        standard.ClientTable(directory),
        standard.Curves(directory),
        standard.Checkpointer(directory, run.checkpoint_every, interrupt),
    ]
    return [callback for callback in found if callback is not None]


def complete(directory: RunDirectory, config: settings.Config) -> bool:
    """Returns whether a run has all rounds of its settings, or stopped by patience."""
    found = directory.summary
    if found.get("status") != "complete":
        return False
    if config.unseen and found["unseen_rounds"] != config.unseen_rounds:
        return False
    if found["rounds"] < directory.config.rounds:
        return found["patience"] == config.patience
    return found["rounds"] >= config.rounds


def say(*messages: str) -> None:
    """Prints on process 0."""
    if jax.process_index() == 0:
        print(*messages, sep="\n", flush=True)


def describe(e: Experiment, directories: Sequence[RunDirectory]) -> str:
    """Returns three lines about experiments that begin."""
    c, n = e.config, e.examples
    part = f" ({n['used']:,} of {n['of']:,} examples)" if n["used"] < n["of"] else ""
    sizes = ", ".join(f"{num_parameters(model):,}" for model in e.task.models)
    preset = f", preset {c.preset}" if c.preset else ""
    private = ""
    if c.dp is not None:
        noise = upload_options.noise_of(c.uploads, c.rounds, e.task)
        private = (
            f"\n{metrics.guarantee(e, c.rounds)} after all rounds, noise {noise:g}"
        )
    work = text.plural(c.epochs or c.steps or 0, "epoch" if c.epochs else "step")
    return (
        f"{c.algo} on {c.dataset}{part}{preset}: "
        f"{text.plural(e.task.num_clients, 'client')} ({c.partition.rule}), "
        f"{c.model.name} with {sizes} parameters, "
        f"{text.plural(c.rounds, 'round')} of {work}\n"
        f"{datasets.describe(e.dataset)}\n"
        f"{', '.join(str(directory.path) for directory in directories)}: "
        f"width {c.width} on {c.devices} x {jax.devices()[0].device_kind}"
        f"{private}"
    )


def closing(directory: RunDirectory) -> str:
    """Returns the headline, its costs and the published number of a finished run."""
    run = results.load(directory.path)
    table, name = results.final([run]), run.headline[0]
    names = [name, *(run.config.get("metrics") or "acc").split(",")]
    attacked = table["score"].eq(BENIGN + name).any()
    rows = functools.reduce(results.benign, dict.fromkeys(names), table)
    shown_scores = [*names, "positives", "nan_rows", *map(metrics.baseline, names)]
    rows = rows[rows["score"].isin(shown_scores)]
    shown = results.statistics(rows, run.headline).to_string()
    costs = results.comparison([run], table).drop(results.FLOOR, errors="ignore")
    left = ("before", "after", "10 %", "settings")
    kept = [x for x in costs.columns if not x.endswith(left)]
    parts = "; ".join(f"{title}: {costs.iloc[0][title]}" for title in kept)
    ending = [f"All results: fedjax-pfl report {directory.path}", *results.notes([run])]
    of = ["Scores are of benign clients."] * bool(attacked)
    return "\n".join(["", shown, parts, *of, *ending])
