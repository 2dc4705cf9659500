"""The types every part of the library shares, and the legend of the axis letters.

Axes: N clients of the federation, S clients of a round, M padded rows of a client, B batch, C classes, K features,
T tasks, P public examples, Z parameters, n examples of the whole data set.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

Array = jax.Array
PyTree = Any
Scores = dict[str, tuple[Array, Array]]  # name -> (sum, count): scalars, or vectors over classes or tasks
Predictor = Callable[[Array, Array], Array]  # (x [B, *input], mask [B]) -> outputs [B, ...]


class Examples(NamedTuple):
    """The whole data set, once, on device; official training examples first, then the official test examples."""

    x: Array  # [n, *input], raw: uint8 images stay uint8 until a batch is taken
    y: Array  # [n] int32


class Rows(NamedTuple):
    """Which examples a client owns."""

    index: Array  # type: ignore[assignment]  # [..., M] int32, meaningless past `size`
    size: Array  # [...] int32


class Federation(NamedTuple):
    """Everything the clients hold: the one big argument of a jitted round."""

    examples: Examples
    train: Rows  # index [N, M], size [N]
    val: Rows  # index [N, M'], size [N]; M' may be 0
    test: Rows  # index [N, M''], size [N]
    class_counts: Array  # [N, C] int32, training examples of each class


class Data(NamedTuple):
    """One client's rows over the shared examples, and how raw inputs become floats."""

    examples: Examples
    index: Array  # type: ignore[assignment]  # [M] int32
    size: Array  # [] int32
    prepare: Callable[[Array], Array]  # raw [B, *input] -> float32 [B, *input]


class Batch(NamedTuple):
    """What one step sees."""

    x: Array  # [B, *input] float32, prepared; zeros where not valid
    y: Array  # [B] int32; zeros where not valid
    mask: Array  # [B] bool
    row: Array  # [B] int32, position in the client's list


class Client(NamedTuple):
    """One client of this round, as the inner function of a method gets it."""

    id: Array  # [] int32, global
    key: Array  # a function of (run, round, phase, id), never of the rank in the cohort
    train: Data
    val: Data
    test: Data
    class_counts: Array  # [C] int32, training examples of each class


class Network(NamedTuple):
    """Any network, as pure functions over variables {"params": parameters, "stats": running statistics}."""

    init: Callable[[Array], PyTree]  # key -> variables
    apply: Callable[..., tuple[Any, PyTree]]  # (variables, x, mask=None, train=False, key=None) -> outputs, new stats
    norms: PyTree  # the structure of the variables, bool: does this leaf belong to a batch-norm module?


class Model(NamedTuple):
    """A classifier, as pure functions over variables {"body": params, "head": params, "stats": running statistics}."""

    init: Callable[[Array], PyTree]  # key -> variables
    features: Callable[..., tuple[Array, PyTree]]  # (variables, x, mask=None, train=False, key=None) -> [B, K], stats
    head: Callable[[PyTree, Array], Array]  # (variables["head"], h [B, K]) -> logits [B, C]
    apply: Callable[..., tuple[Array, PyTree]]  # (variables, x, mask=None, train=False, key=None) -> [B, C], stats
    norms: PyTree  # the structure of the variables, bool: does this leaf belong to a batch-norm module?
    num_features: int  # K


class Task(NamedTuple):
    """What is given, as opposed to what a method chooses; host values except `lr`, which may be traced."""

    model: Model
    sizes: np.ndarray  # [N] training examples
    class_counts: np.ndarray  # [N, C]
    num_classes: int
    input_shape: tuple[int, ...]
    prepare: Callable[[Array], Array]  # raw -> float32
    lr: float | Array
    optimizer: Callable[[float | Array], Any]  # lr -> optax.GradientTransformation
    batch_size: int
    epochs: int | None = 1  # local epochs a round, or
    steps: int | None = None  # local steps a round: exactly one of the two is set
    rounds: int = 1
    participation: tuple[float, float] = (1.0, 1.0)  # the fraction of clients a round: drawn from [low, high]
    drop_last: bool = False  # drop the short last batch, to copy a paper that did
    augment: Callable[[Array, Array], Array] | None = None  # (key, x) -> x, on training batches
    bn_stats: str = "aggregate"  # aggregate | local | batch
    superclass: np.ndarray | None = None  # [C] -> superclass, where the data set has them

    @property
    def num_clients(self) -> int:
        return len(self.sizes)


class State(NamedTuple):
    """What a method carries from round to round."""

    server: PyTree  # no client axis, or a leading N where the server must see every client
    clients: PyTree  # leading client axis: N at rest, S inside a round


class Traffic(NamedTuple):
    """What travels in one round for each client of the cohort."""

    down: Array  # [S] scalars received
    up: Array  # [S] scalars sent
    ints: Array  # [S] integers and ids, both ways
    messages: Array  # [S] messages, both ways
    encrypted: Array | None = None  # [S] bytes of ciphertexts, both ways; None: nothing is encrypted


class Algorithm(NamedTuple):
    """A method as a value: five pure functions."""

    init: Callable[[Array], State]  # key -> State
    round: Callable[..., tuple[State, PyTree]]  # (key, State[S], Cohort) -> State[S], metrics
    predict: Callable[[PyTree, PyTree, Client], Predictor]  # (server, row, client): ONE client; adapts once
    score: Callable[[Array, Array, Array, Client], Scores]  # (outputs, y, mask, client)
    traffic: Callable[..., Traffic]  # (State[S], Cohort, metrics) -> Traffic
