"""The experiment of a run: its data, task and program."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import local_training, simulate, trees
from fedjax_pfl.data import datasets
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.data.preparation import Preparation
from fedjax_pfl.engine import distributed
from fedjax_pfl.engine.schedule import Schedule
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.types import Array, Federation, PyTree, RunState, Task


class Unseen(NamedTuple):
    """Clients that do not train."""

    ids: np.ndarray  # [U] rows of the whole partition
    names: tuple[str, ...]
    partition: Partition
    federation: Federation
    task: Task


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that a run computes with, for N clients that train.

    Attributes:
      config: the settings, with the number of clients, the network, the width and the
        devices that were chosen.
      everybody: the partition with the clients that do not train.
      alone: the program on one device, for the same states by client id.
      names: of the clients, [N].
      headline: the primary score, and "max" or "min".
      networks: [N] name of each client's network.
      planned: local steps and examples of each client in a round, [N] each.
      examples: counts of the data set: used, available, and of its whole.
      marks: type of mark on each client's images, without --marks empty.
      preparation: of new raw rows; None: it is fixed.
      schedule: arrivals of an asynchronous run.
      member: index in a batch of experiments that is one program; None: it is alone.
      batch: number of experiments in the batch.
    """

    config: Config
    dataset: datasets.Dataset
    unmarked: datasets.Dataset
    public: datasets.Dataset | None
    everybody: Partition
    partition: Partition
    federation: Federation
    task: Task
    program: simulate.Program
    alone: simulate.Program
    names: tuple[str, ...]
    headline: tuple[str, str]
    networks: np.ndarray
    planned: tuple[np.ndarray, ...]
    examples: dict[str, int]
    marks: tuple[str, ...] = ()
    preparation: Preparation | None = None
    unseen: Unseen | None = None
    schedule: Schedule | None = None
    member: int | None = None
    batch: int = 1

    @property
    def key(self) -> Array:
        """Returns the random key of the seed."""
        return jax.random.key(self.config.seed)

    @property
    def classes(self) -> tuple[str, ...]:
        """Returns the names of the classes; empty where they are numbers."""
        return self.dataset.classes or ()

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Sets `matmul_precision` and `loop` for the programs traced in the context."""
        wanted = self.config.matmul_precision
        precision = None if wanted == "default" else wanted
        with (
            jax.default_matmul_precision(precision),
            local_training.loop(self.config.loop),
        ):
            yield

    def state_shapes(self) -> RunState:
        """Returns the state's structure, with shapes and dtypes instead of arrays."""
        program = self.alone
        traced = {name: jnp.float32(value) for name, value in program.traced.items()}
        return jax.eval_shape(lambda: program.unplace(program.init(self.key, traced)))

    def fetch(self, state: RunState | None) -> RunState:
        """Returns the state of a result on every host, rows by client id."""
        if self.member is not None:
            state = trees.gather(state, self.member)
        return self.program.unplace(distributed.fetch(state))

    def predictor(
        self, state: RunState, t: int, client: int
    ) -> Callable[[Any], PyTree]:
        """Returns one client's model after `t` rounds, raw inputs [B, ...] -> outputs.

        Args:
          state: as `fetch` returns it.
        """
        program = self.alone
        traced = {name: jnp.float32(value) for name, value in program.traced.items()}
        predict, placed = (
            jax.jit(program.predict, static_argnums=5),
            program.place(state),
        )
        given = (self.key, traced, self.federation, placed, jnp.int32(t), client)

        def run(x: Any) -> PyTree:
            with self.tracing():
                return predict(*given, jnp.asarray(x))

        return run
