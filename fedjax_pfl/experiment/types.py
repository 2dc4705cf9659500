"""The experiment of a run: its data, task and program."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import simulate, trees
from fedjax_pfl.data import datasets
from fedjax_pfl.data.partition import Partition
from fedjax_pfl.data.preparation import Preparation
from fedjax_pfl.data.sources.text import encode
from fedjax_pfl.engine import distributed
from fedjax_pfl.engine.method import as_arrays
from fedjax_pfl.engine.schedule import Schedule
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import clients
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.types import Array, Federation, PyTree, RunState, Task


class NeedsDataError(InputError):
    """A prediction that needs the data set of its run."""


class Unseen(NamedTuple):
    """Clients that do not train."""

    ids: np.ndarray  # [U] rows of the whole partition
    names: tuple[str, ...]
    partition: Partition
    federation: Federation
    task: Task


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Absent:
    """Examples of a run whose data set is not there."""

    @property
    def x(self) -> Any:
        raise NeedsDataError("Predictions need clients' training examples.")

    y = x


@dataclasses.dataclass(frozen=True)
class Trained:
    """Everything that checkpoints and predictions of N clients need.

    Attributes:
      config: the settings, with the number of clients, the network, the width and the
        devices that were chosen.
      alone: the program on one device, for states by client id.
      names: of the clients, [N].
      classes: names of the classes; None: they are numbers.
      networks: [N] name of each client's network.
      preparation: of new raw rows; None: it is fixed.
    """

    config: Config
    task: Task
    federation: Federation
    alone: simulate.Program
    names: tuple[str, ...]
    classes: tuple[str, ...] | None
    networks: np.ndarray
    preparation: Preparation | None

    @property
    def key(self) -> Array:
        """Returns the random key of the seed."""
        return jax.random.key(self.config.seed)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Sets `matmul_precision` for the programs traced in the context."""
        wanted = self.config.matmul_precision
        precision = None if wanted == "default" else wanted
        with jax.default_matmul_precision(precision):
            yield

    @functools.cached_property
    def traced(self) -> dict[str, Array]:
        """Traced hyperparameters as arrays."""
        return as_arrays(self.alone.traced)

    def state_shapes(self) -> RunState:
        """Returns the state's structure, with shapes and dtypes instead of arrays."""
        program = self.alone
        return jax.eval_shape(
            lambda: program.unplace(program.init(self.key, self.traced))
        )

    @functools.cached_property
    def _predict(self) -> Callable[..., PyTree]:
        # of several architectures the client's is static
        static = 2 if len(self.task.models) > 1 else ()
        return jax.jit(self.alone.predict, static_argnums=static)

    def inputs(self, rows: Any) -> np.ndarray:
        """Returns raw rows as inputs [B, *input].

        Args:
          rows: of a table {column: cells} or a pandas frame, texts, or an array of the
            inputs themselves.
        """
        known = self.preparation
        if known is not None and known.columns and hasattr(rows, "keys"):
            return known.inputs(rows)
        if not len(rows):
            raise InputError("There must be a row to predict.")
        if known is not None and known.words and isinstance(rows[0], str):
            length, tokenizer = known.max_length or 0, known.tokenizer or ""
            return encode(rows, known.words, length, tokenizer)
        return np.asarray(rows)

    def index(self, client: int | str) -> int:
        """Returns the number of a client, as `clients.index`."""
        return clients.index(self.names, client, self.config.unseen)

    def predictor(
        self, state: RunState, t: int, client: int | str
    ) -> Callable[[Any], PyTree]:
        """Returns one client's model after `t` rounds, raw rows -> outputs [B, ...].

        Args:
          state: rows by client id.
          client: its number, its name, or "#3" for number 3.
        """
        id = self.index(client)
        context = self.alone.context(self.key, self.federation, t)
        given = (context, self.alone.place(state), id)

        def run(rows: Any) -> PyTree:
            with self.tracing():
                return self._predict(*given, jnp.asarray(self.inputs(rows)))

        return run


@dataclasses.dataclass(frozen=True)
class Experiment(Trained):
    """Everything that a run computes with, for N clients that train.

    Attributes:
      everybody: the partition with the clients that do not train.
      headline: the primary score, and "max" or "min".
      planned: local steps and examples of each client in a round, [N] each.
      examples: counts of the data set: used, available, and of its whole.
      marks: type of mark on each client's images, without --marks empty.
      schedule: arrivals of an asynchronous run.
      member: index in a batch of experiments that is one program; None: it is alone.
      batch: number of experiments in the batch.
    """

    dataset: datasets.Dataset
    unmarked: datasets.Dataset
    public: datasets.Dataset | None
    everybody: Partition
    partition: Partition
    program: simulate.Program
    headline: tuple[str, str]
    planned: tuple[np.ndarray, ...]
    examples: dict[str, int]
    marks: tuple[str, ...] = ()
    unseen: Unseen | None = None
    schedule: Schedule | None = None
    member: int | None = None
    batch: int = 1

    def fetch(self, state: RunState | None) -> RunState:
        """Returns the state of a result on every host, rows by client id."""
        if self.member is not None:
            state = trees.gather(state, self.member)
        return self.program.unplace(distributed.fetch(state))
