"""A method as a function of its traced hyperparameters and of the round."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import evaluation, hyperparameters, optimizers, traffic
from fedjax_pfl.algorithms import SEVERAL_ARCHITECTURES
from fedjax_pfl.averaging import BODY_AND_HEAD
from fedjax_pfl.engine import averaged, contract, frozen
from fedjax_pfl.engine.averaged import Averaged
from fedjax_pfl.errors import ArchitectureError, ContractError, InputError
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Cohort,
    Method,
    Metrics,
    Predictor,
    PyTree,
    RunState,
    Scores,
    Task,
    Traffic,
)
from fedjax_pfl.uploads.chain import Chain, Option, composed, instances, numbers

Traced = dict[str, Array]  # the traced numbers by name
Factory = Callable[..., Algorithm | Method]


def as_arrays(numbers: dict[str, Any]) -> Traced:
    """Returns traced numbers as arrays."""
    return {name: jnp.asarray(value, float) for name, value in numbers.items()}


class Setting(NamedTuple):
    """A method with its hyperparameters, and the options of a run, as data."""

    factory: Factory
    task: Task
    hparams: dict[str, Any]
    lr_decay: float = 1.0
    uploads: Chain = Chain()
    server: Option | optax.GradientTransformation | None = None

    @property
    def trainings(self) -> int:
        """`Method.trainings`; 0 for a method that writes its own round."""
        made = self.factory(self.task, **self.hparams)
        return made.trainings if isinstance(made, Method) else 0

    @property
    def name(self) -> str:
        """The name of the method."""
        return hyperparameters.method_name(self.factory)

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, the server's optimizer as `server`."""
        server = {} if self.server is None else {"server": self.server}
        return self.uploads.named | server


class Runner(NamedTuple):
    """The functions of a method under the options of a run, in one trace."""

    init: Callable[[Array], RunState]
    # (key, RunState[S], Cohort) -> RunState[S], Metrics
    round: Callable[[Array, RunState, Cohort], tuple[RunState, Metrics]]
    predict: Callable[..., Predictor]  # as of `Algorithm`
    score: Callable[..., Scores]
    traffic: Callable[[RunState, Cohort, Metrics], Traffic]
    headline: tuple[str, str]
    averaged: Averaged | None  # None: the method writes its own round


def _sets_rate(task: Task) -> bool:
    if task.work is None:
        return False
    return jax.eval_shape(task.work, jnp.int32(0), jnp.int32(0)).lr is not None


# options that a method may exclude -> does the task have them?
EXCLUDED: dict[str, Callable[[Task], bool]] = {
    "optimizer": lambda task: not optimizers.plain_sgd(task.optimizer, _examples(task)),
    "loss": lambda task: task.loss is not None,
    "label": lambda task: np.dtype(task.label.dtype).kind != "i",
    "positions": lambda task: task.label.shape != (),
    "mix": lambda task: task.mix is not None,
    "lr": _sets_rate,
    "work": lambda task: task.work is not None,
}


def headline(task: Task, made: Algorithm | Method) -> tuple[str, str]:
    """Returns the primary score of a method on a task: its own where labels are
    classes."""
    kind = np.dtype(task.label.dtype).kind
    return evaluation.HEADLINES.get(kind, made.headline)


def bound(setting: Setting) -> tuple[Callable[..., Runner], dict[str, float]]:
    """Returns the method as a function of its traced numbers, the round and the task's
    frozen variables, and the values of these numbers.

    Numbers of options are named as by `uploads.chain`: `compress.fraction`.

    Raises:
      InputError: the method does not take the hyperparameters, the task, the clients'
        architectures or the options.
    """
    factory, task, options = setting.factory, setting.task, setting.options
    hyperparameters.check(factory, setting.hparams)
    known = hyperparameters.of(factory)
    hparams = hyperparameters.defaults(factory) | setting.hparams
    made = _check(factory, task, hparams)
    _check_options(setting, made)
    task = task._replace(optimizer=optimizers.in_param_types(task.optimizer))
    traced = {
        name: float(value)
        for name, value in hparams.items()
        if known[name].traced and value is not None
    }
    static = {name: value for name, value in hparams.items() if name not in traced}
    rates = {"lr": float(task.lr), "lr_decay": float(setting.lr_decay)}
    values = traced | numbers(options) | rates

    def runner(
        given: Traced, t: Array | int, held: tuple[Array, ...] | None = None
    ) -> Runner:
        free = {
            name: jnp.asarray(value, jnp.float32)
            for name, value in (values | given).items()
        }
        lr, decay = free.pop("lr"), free.pop("lr_decay")
        lr = lr * decay ** jnp.asarray(t, jnp.float32)
        if task.schedule is not None:
            lr = lr * task.schedule(jnp.asarray(t))
        here = task if held is None else frozen.bind(task, held)
        own = {name: free[name] for name in traced}
        with contract.named(factory):
            made = factory(here._replace(lr=lr), **static, **own)
            return run(made, here, instances(options, free))

    return runner, values


def run(made: Algorithm | Method, task: Task, options: dict[str, Any]) -> Runner:
    """Returns the functions of a method under options, an `Upload` each and the
    optimizer `server`."""
    best = headline(task, made)
    if isinstance(made, Algorithm):
        return Runner(
            functools.partial(_init, made, task),
            functools.partial(_round, made),
            made.predict,
            made.score,
            functools.partial(_traffic, made),
            best,
            None,
        )
    server = options.get("server")
    parts = {name: part for name, part in options.items() if name != "server"}
    uploads = composed(parts) if options else None
    on = Averaged(made, uploads, server)
    return Runner(
        functools.partial(averaged.init, on, task),
        functools.partial(averaged.round, on),
        made.predict,
        made.score,
        functools.partial(averaged.sent, on),
        best,
        on,
    )


def _init(made: Algorithm, task: Task, key: Array) -> RunState:
    state = made.init(key)
    contract.check_init(state, task.num_clients)
    return RunState(state)


def _round(
    made: Algorithm, key: Array, state: RunState, cohort: Cohort
) -> tuple[RunState, Metrics]:
    result = made.round(key, state.method, cohort)
    contract.check_kinds(result)
    return state._replace(method=result[0]), result[1]


def _traffic(
    made: Algorithm, state: RunState, cohort: Cohort, metrics: Metrics
) -> Traffic:
    if made.traffic is not None:
        return made.traffic(state.method, cohort, metrics)
    if jax.tree.leaves(state.method.server):
        raise ContractError(
            "an Algorithm must count its own `traffic` (see "
            "fedjax_pfl.traffic.both_ways)."
        )
    return traffic.both_ways(cohort, 0)


def _check_options(setting: Setting, made: Algorithm | Method) -> None:
    """Raises InputError unless the method can have the options of a run."""
    if setting.task.per_example is not None:
        _check_examples(setting, made)
    if not setting.options:
        return
    if isinstance(made, Algorithm):
        raise InputError(
            f"{setting.name} takes no options on uploads: its round is not one mean "
            "over the clients."
        )
    on = run(made, setting.task, instances(setting.options, {})).averaged
    if on is not None:
        averaged.check(on, setting.name, setting.task)


def _check_examples(setting: Setting, made: Algorithm | Method) -> None:
    """Raises InputError unless examples reach the server through gradients alone."""
    refused = f"{setting.name} cannot have gradients per example: "
    if not isinstance(made, Method) or not made.trainings:
        raise InputError(
            f"{refused}it does not declare (`trainings`) that examples reach its "
            "upload through the gradients of local_training.sgd alone."
        )
    if setting.task.mix is not None:
        raise InputError(f"{refused}`mix` lets an example enter two gradients.")
    if averaged.averages_statistics(made):
        raise InputError(
            f"{refused}it averages running statistics: use bn_stats='local'."
        )


def _check(factory: Factory, task: Task, hparams: dict[str, Any]) -> Algorithm | Method:
    """Returns what the factory makes of the task, untraced; raises InputError unless it
    is a method that the task can have."""
    try:
        with contract.named(factory):
            made = factory(task, **hparams)
            if not isinstance(made, Algorithm | Method):
                raise ContractError(
                    "the factory must return a Method or an Algorithm, got "
                    f"{type(made).__name__}."
                )
        contract.check_stages(hyperparameters.method_name(factory), made.stages, task)
        if made.one_architecture and len(task.models) > 1:
            raise ArchitectureError
        for option, why in made.excludes.items():
            if EXCLUDED[option](task):
                raise InputError(
                    f"{hyperparameters.method_name(factory)} takes no `{option}` of "
                    f"this kind: {why}."
                )
    except ArchitectureError:
        name = hyperparameters.method_name(factory)
        raise InputError(
            f"{name} needs clients of one architecture, got {len(task.models)}: "
            f"methods for several are {', '.join(SEVERAL_ARCHITECTURES)}."
        ) from None
    return made


def _examples(task: Task) -> PyTree:
    """Returns a small tree with the structure of a model's parameters."""
    shapes = jax.eval_shape(task.models[0].init, jax.random.key(0))
    return {
        part: jax.tree.map(lambda x: np.zeros((1,) * x.ndim, np.float32), shapes[part])
        for part in BODY_AND_HEAD
    }
