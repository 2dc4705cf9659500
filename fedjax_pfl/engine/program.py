"""An experiment as pure functions of its key and its traced hyperparameters.

`keys.Run` and `keys.Round` list the random streams. The sampling stream does not depend
on the method: two methods with one key see the same clients and, for their main local
training, the same batches.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fedjax_pfl import hyperparameters
from fedjax_pfl.engine import contract, frozen, validate
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.method import Setting, Traced, as_arrays
from fedjax_pfl.engine.parts import Clock, Parts, Round, parts
from fedjax_pfl.engine.placement import Layout, Placement, free, lay_out
from fedjax_pfl.engine.storage import OnDevices, OnHost, jitted
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Context,
    Federation,
    Method,
    PyTree,
    RunState,
    Task,
    Traffic,
    Upload,
)
from fedjax_pfl.uploads.chain import Chain, Option, chain


class Program(NamedTuple):
    """An experiment as pure functions; `traced` are its traced hyperparameters."""

    traced: dict[str, float]
    init: Callable[..., RunState]  # (key, traced, placement=None) -> RunState
    # (context, RunState[N], evaluated) -> RunState, Round
    round: Callable[..., tuple[RunState, Round]]
    # (context, RunState[N]) -> {name: [N]}
    evaluate: Callable[..., dict[str, Array]]
    # (context, RunState[N], client id, raw x [B, *input]) -> outputs
    predict: Callable[..., PyTree]
    # rows by client id -> rows as the other functions take them, over the devices
    place: Callable[[RunState], RunState]
    # the inverse; both change nothing on a single device with one architecture
    unplace: Callable[[RunState], RunState]
    # for Federation.placement, where one compiled program serves several partitions
    placement: Placement | None = None
    mesh: Mesh | None = None  # of several devices
    # rows are NumPy arrays in host memory, and no function can be traced
    on_host: bool = False
    setting: Setting | None = None  # None: the functions are of several runs
    most_rounds: int | None = None  # None: any number

    @property
    def task(self) -> Task | None:
        """The task; None for several runs."""
        return None if self.setting is None else self.setting.task

    def context(
        self,
        key: Array,
        federation: Federation,
        t: Array | int = 0,
        traced: Traced | None = None,
    ) -> Context:
        """Returns the context of round `t`, with the program's numbers, but for those
        in `traced`, as arrays."""
        numbers = as_arrays(self.traced | (traced or {}))
        federation = frozen.with_frozen(federation, self.task)
        if not self.on_host:
            federation = federation._replace(placement=self.placement)
        # a number of NumPy compiles nothing
        number: Any = t if isinstance(t, jax.Array) else np.int32(t)
        return Context(key, numbers, federation, number)


def program(
    factory: Callable[..., Algorithm | Method] | str,
    task: Task,
    hparams: dict[str, Any] | None = None,
    *,
    width: int = 1,
    devices: int = 1,
    storage: Literal["device", "host"] = "device",
    clock: Clock | None = None,
    checked: bool = True,
    **options: Any,
) -> Program:
    """Makes an experiment from a method and a task.

    Hyperparameters annotated float, numbers of options, `lr` and `lr_decay` become
    `traced`, arguments of every function: other values need no new compilation and can
    be vmapped over. Frozen variables in files are read to the devices here.

    Over several devices, and with several architectures, the rows of State.clients are
    in the order of the placement; `unplace` returns them in the clients' order. The
    devices may be those of several processes, which all call the same functions with
    the same arguments; `distributed.fetch` copies results to every host.

    Args:
      factory: the method, or its name.
      hparams: hyperparameters that differ from the defaults.
      width: clients per vmapped batch on each device.
      devices: devices that share the clients of a round (`xla.split_cpu` makes several
        of a CPU).
      storage: memory of the rows of State.clients; those on the host are overwritten by
        each round, and no function can be traced.
      clock: None: synchronous rounds; else `asynchronous.Arrivals`.
      checked: traces one round on shapes alone, to find a method's mistakes early.
      options: `lr_decay`, `uploads` and `server`, as in `set_up`; `base_devices`
        (default 1) of the devices share one copy of the frozen variables and train the
        same clients together.

    Raises:
      InputError: an unknown hyperparameter, a value out of range, too many devices, a
        method that breaks the contract, or a storage or clock that it cannot have.
    """
    base = options.pop("base_devices", 1)
    setting = set_up(factory, task, hparams, **options)
    if clock is not None:
        setting = setting._replace(task=clock.task(setting.task))
    task = setting.task
    validate.layout(task, setting.lr_decay, width, devices, base, storage)
    layout = lay_out(task, width, devices, base)
    setting = setting._replace(task=frozen.placed(task, layout.mesh))
    on = parts(setting, layout, clock)
    found = from_parts(on, setting)
    if checked:
        functions = found.init, found.round, found.evaluate
        contract.check_shapes(setting.task, found.traced, *functions)
    if storage == "host":
        found = from_parts(jitted(on), setting, OnHost(setting.task, on))
    return found._replace(most_rounds=None if clock is None else clock.most_rounds)


def set_up(
    factory: Callable[..., Algorithm | Method] | str,
    task: Task,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    uploads: Chain | Option | Upload | None = None,
    server: Option | optax.GradientTransformation | None = None,
) -> Setting:
    """Returns what a run computes with, as data.

    Args:
      factory: as in `program`, like `hparams`.
      lr_decay: factor by which lr shrinks per round.
      uploads: options on what clients send, `uploads.chain(...)`.
      server: optimizer that takes the averaged update as its gradient (FedOpt), of
        `uploads.server` or of optax with its learning rate.

    Raises:
      InputError: an unknown hyperparameter, or an invalid value of the task.
    """
    if uploads is None:
        uploads = Chain()
    changes = uploads if isinstance(uploads, Chain) else chain(uploads)
    found, hparams = validate.method(factory), hparams or {}
    hyperparameters.check(found, hparams)
    return Setting(found, validate.task(task), hparams, lr_decay, changes, server)


def from_parts(on: Parts, setting: Setting, host: OnHost | None = None) -> Program:
    """Returns the program of its functions for the rows of a cohort.

    Args:
      host: where rows are in host memory, which keeps them; `on` are then `jitted`.
    """
    task, layout = setting.task, on.layout
    # what is not traced as a whole has no mesh in its types
    mesh = None if host is not None else layout.mesh

    def storage(where: Placement | None = None) -> OnDevices | OnHost:
        return OnDevices(task, layout, where) if host is None else host

    def init(key: Array, traced: Traced, where: Placement | None = None) -> RunState:
        return storage(where).init(on.init, key, traced)

    def of_all(
        function: Callable[..., PyTree], context: Context, state: RunState
    ) -> PyTree:
        """Returns what a function of Parts returns of all clients, by id."""
        kept = storage(context.federation.placement)
        return kept.joined(
            (ids, function(context, here, ids, lengths))
            for here, ids, lengths in kept.everybody(state)
        )

    def round(
        context: Context, state: RunState, evaluated: Array
    ) -> tuple[RunState, Round]:
        if host is not None:
            host.check(state)
        context, state, evaluated = free(mesh, context, state, evaluated)
        kept = storage(context.federation.placement)

        def loss(ids: Array) -> Array:
            if kept.where is not None:
                return of_all(on.losses, context, state)[ids]
            here = kept.read(state, ids, (len(ids),))
            return on.losses(context, here, ids, (len(ids),))

        past = {"record": state.record} | ({} if host else {"loss": loss})
        ids, active = on.draw(kept.where, context.key, context.t, **past)
        here = kept.of_round(state, ids)
        new, known = on.train(context, here, ids, active, evaluated)
        return kept.write(state, new, ids, active), known

    def evaluate(context: Context, state: RunState) -> dict[str, Array]:
        if host is not None:
            host.check(state)
        context, state = free(mesh, context, state)
        return of_all(on.score, context, state)

    def predict(context: Context, state: RunState, id: int | Array, x: Array) -> PyTree:
        validate.client(task, id, x)
        held = context.federation.frozen
        method = on.runner(context.traced, context.t, held)
        group = int(task.architecture[int(id)]) if len(task.models) > 1 else 0
        ids = jnp.asarray(id, jnp.int32)[None]
        lengths = tuple(int(g == group) for g in range(len(task.models)))
        alone = Cohort(
            context,
            frozen.bind(task, held),
            ids,
            ids >= 0,
            evaluated=jnp.bool(True),
            layout=Layout(lengths),
        )

        def client(c: Client, row: PyTree) -> PyTree:
            predictor = method.predict(state.method.server, row, c)
            return predictor(
                task.prepare(jnp.asarray(x)), jnp.ones(jnp.shape(x)[0], bool)
            )

        kept = storage(context.federation.placement)
        own = kept.read(state, ids, lengths).method.clients
        return jax.tree.map(lambda x: x[0], alone.map(client, own))

    def arranged(state: RunState, where: Placement | None = None) -> RunState:
        return storage(where).place(state)

    # the placement is an argument: other partitions need no new compilation
    placed = arranged if host is not None else jax.jit(arranged)
    return Program(
        on.traced,
        init,
        round,
        evaluate,
        predict,
        lambda state: placed(state, layout.placement),
        storage().unplace,
        layout.placement,
        layout.mesh,
        on_host=host is not None,
        setting=setting,
    )


def numbers(program: Program) -> int:
    """Returns the largest number of scalars and integers that a client receives and
    sends in the first round, with everybody's data 0."""
    task = program.task
    assert task is not None
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), contract.abstract(task))
    sizes = jnp.asarray(task.sizes, jnp.int32)
    empty = empty._replace(
        train=empty.train._replace(size=sizes),
        class_counts=jnp.asarray(task.class_counts, jnp.int32),
        frozen=frozen.values(task) or None,
    )

    def first(key: Array) -> Traffic:
        state = program.init(key, program.traced)
        context = Context(key, program.traced, empty, jnp.int32(0))
        return program.round(context, state, jnp.bool(False))[1].traffic

    # what does not count is no part of the compiled function
    found = jax.jit(first)(jax.random.key(0))
    return int(jnp.max(found.down + found.up + found.ints))
