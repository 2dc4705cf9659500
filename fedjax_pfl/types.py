"""The contract: the types every part of the library shares, and the legend of the axis letters.

Axes: N clients of the federation, S clients of a round, M padded rows of a client, B batch, C classes, K features,
T class groups (pFedC's tasks), P public examples, G architectures, Z parameters, n examples of the whole data set.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax

from fedjax_pfl.errors import ArchitectureError

Array = jax.Array
PyTree = Any
Scores = dict[str, tuple[Array, Array]]  # name -> (sum, count): scalars, or vectors over classes or tasks
Predictor = Callable[[Array, Array], PyTree]  # (x [B, ...] prepared, mask [B]) -> outputs [B, ...]


class Examples(NamedTuple):
    """The whole data set, once, on device; official training examples first, then the official test examples."""

    x: Array  # [n, *input], raw: uint8 images stay uint8 until a batch is taken
    y: Array  # [n] int32


class Rows(NamedTuple):
    """Which examples a client owns."""

    index: Array  # type: ignore[assignment]  # hides tuple.index; [..., M] int32, meaningless past `size`
    size: Array  # [...] int32


class Placement(NamedTuple):
    """In which row of State.clients each client lies: by architecture, and over the devices; R rows in all."""

    client: Array  # [R] int32, whose row it is; N or more: an empty row
    row: Array  # [N] int32, the row of each client
    steps: Array  # [N] int32, local steps per round, by which clients are assigned to devices


class Federation(NamedTuple):
    """Everything the clients hold: the one big argument of a jitted round."""

    examples: Examples
    train: Rows  # index [N, M], size [N]
    val: Rows  # index [N, M'], size [N]; M' may be 0
    test: Rows  # index [N, M''], size [N]
    class_counts: Array  # [N, C] int32, training examples of each class
    public: Examples | None = None  # the pool of public examples, P of them; their labels may be meaningless
    placement: Placement | None = None  # set by the engine; None: row i is client i's
    masked: Examples | None = None  # see `Data`; other values must change nothing, which a test checks


class Data(NamedTuple):
    """One client's rows over the shared examples, and how raw inputs become what a model takes."""

    examples: Examples
    index: Array  # type: ignore[assignment]  # hides tuple.index; [M] int32
    size: Array  # [] int32
    prepare: Callable[[Array], Array]  # raw [B, *input] -> the model's input [B, ...]
    masked: Examples | None = None  # what masked rows of a batch hold, x prepared [...] and y []; None: zeros


class Batch(NamedTuple):
    """What one step sees."""

    x: Array  # [B, ...], prepared; anything finite where not valid
    y: Array  # [B] int32; any label where not valid
    mask: Array  # [B] bool
    row: Array  # [B] int32, position in the client's list


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


class Client(NamedTuple):
    """One client of this round, as the inner function of a method gets it; closed over, no argument of jax.vmap."""

    id: Array  # [] int32, global
    key: Array  # a function of (run, round, phase, id), never of the rank in the cohort; None with phase=None
    train: Data
    val: Data
    test: Data
    public: Data | None  # the pool of public examples; of size 0 where the client is inactive
    class_counts: Array  # [C] int32, training examples of each class
    model: Model  # of the client's architecture; static
    group: int  # which architecture it is, 0 to G - 1; static


class Task(NamedTuple):
    """What is given, as opposed to what a method chooses; host values except `lr`, which may be traced."""

    models: tuple[Model, ...]  # [G] architectures
    architecture: np.ndarray  # [N] of each client, 0 to G - 1
    sizes: np.ndarray  # [N] training examples
    class_counts: np.ndarray  # [N, C]
    num_classes: int
    input: jax.ShapeDtypeStruct  # one raw example, as a row of `Examples.x`
    prepare: Callable[[Array], Array]  # raw [B, *input] -> the models' input [B, ...]
    lr: float | Array
    optimizer: Callable[[float | Array], optax.GradientTransformation]  # of the learning rate
    batch_size: int
    epochs: int | None = 1  # local epochs a round, or
    steps: int | None = None  # local steps a round: exactly one of the two is set
    rounds: int = 1
    participation: tuple[float, float] = (1.0, 1.0)  # the fraction of clients a round: drawn from [low, high]
    drop_last: bool = False  # drop the short last batch, to copy a paper that did
    augment: Callable[[Array, Array], Array] | None = None  # (key, x) -> x, on training batches
    bn_stats: str = "aggregate"  # aggregate | local | batch
    superclass: np.ndarray | None = None  # [C] -> superclass, where the data set has them
    shared: Model | None = None  # the small model that all clients exchange (FML, FedKD, ...)
    public: jax.ShapeDtypeStruct | None = None  # the pool of public examples [P, *input], raw; None: there is none
    prepare_public: Callable[[Array], Array] | None = None  # as `prepare`

    @property
    def num_clients(self) -> int:
        return len(self.sizes)

    @property
    def model(self) -> Model:
        """The only architecture; ArchitectureError if there are several."""
        if len(self.models) > 1:
            raise ArchitectureError(f"This needs clients of one architecture, and there are {len(self.models)}.")
        return self.models[0]


class Own(NamedTuple):
    """Marks a result of the function for one client whose structure is that of the client's architecture."""

    tree: PyTree


class Grouped(NamedTuple):
    """Stacked trees, one per architecture; where there is only one architecture, its plain tree stands instead."""

    trees: tuple[PyTree, ...]  # [G] trees, leading axis: the clients of that architecture


class State(NamedTuple):
    """What a method carries from round to round."""

    server: PyTree  # no client axis, or a leading N where the server must see every client
    clients: PyTree  # leading client axis: N at rest, S inside a round; parts of it may be Grouped


class Metrics(NamedTuple):
    """What a round reports."""

    loss: Any = None  # [S] mean training loss; required
    post: Any = None  # {score: [S]} right after local training (`evaluate.post`); required
    clients: dict[str, Array] = {}  # noqa: RUF012  # {name: [S]}; immutable by convention
    server: dict[str, Array] = {}  # noqa: RUF012  # {name: any shape}, such as the coefficients [N, N]


class Cohort(Protocol):
    """The clients of a round and how to run a function over them; padded places are inactive and change nothing."""

    ids: Array  # [S] int32, distinct; N or more in padding, where jax's indexing reads some row and writes nothing
    active: Array  # [S] bool: takes part; the others are padding or dropped out
    sizes: Array  # [S] int32 training examples
    trained: Array  # [S] bool: takes part and has training examples
    class_counts: Array  # [S, C] int32
    total: Array  # [] int32 training examples of all N clients
    round: Array  # [] int32
    evaluated: Array  # [] bool: are test scores wanted now?
    public: Data | None  # the pool of public examples, for the server

    def map(self, client: Callable[..., PyTree], *rows: PyTree, phase: int | None = 0) -> PyTree:
        """Results [S, ...] of client(c, *rows); those marked `Own` come back Grouped; of inactive clients undefined.

        Args:
          rows: trees with the axis S, or Grouped.
          phase: distinguishes the calls of one round, whose clients else had the same keys; None: no c.key.
        """

    def mean(
        self,
        client: Callable[..., tuple[PyTree, ...]],
        *rows: PyTree,
        weight: PyTree = None,
        default: PyTree,
        phase: int | None = 0,
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Maps `client`, which returns a tuple, and averages its first result, the upload, over the active clients.

        Args:
          weight: not yet normalised; None (uniform), [S], or a prefix tree of the first result whose leaves are None,
            [S], or [S, ...] with axes that stand for the last ones of every leaf below (see `aggregate.shares`).
          default: a tree like the first result, taken where nobody has a weight. If the first result is marked `Own`,
            it is averaged within each architecture, and `default` is Grouped as the mean is.

        Returns:
          (the mean, in the types of the first result, and the other results [S, ...] as a tuple).
        """

    def scan(
        self, client: Callable[..., tuple[PyTree, PyTree]], carry: PyTree, *rows: PyTree, phase: int | None = 0
    ) -> tuple[PyTree, PyTree]:
        """Active clients of one architecture one after another, in random order: carry, results = client(c, carry,
        *rows); returns the last carry and the results [S, ...], zeros where inactive."""

    def everywhere(self, rows: PyTree) -> PyTree:
        """Rows [S, ...] on every device: what a step on the host is given."""


class Traffic(NamedTuple):
    """What travels in one round for each client of the cohort."""

    down: Array  # [S] scalars received
    up: Array  # [S] scalars sent
    ints: Array  # [S] integers and ids, both ways
    messages: Array  # [S] messages, both ways
    encrypted: Array | None = None  # [S] bytes of ciphertexts, both ways; None: nothing is encrypted


class Algorithm(NamedTuple):
    """A method as a value: pure functions, and what is known of them."""

    init: Callable[[Array], State]  # key -> State, rows by client id
    round: Callable[[Array, State, Cohort], tuple[State, Metrics]]  # (key, State[S], Cohort) -> State[S], Metrics
    predict: Callable[[PyTree, PyTree, Client], Predictor]  # (server, row, client): ONE client; adapts once
    score: Callable[[PyTree, Array, Array, Client], Scores]  # (outputs [B, ...], y, mask, client)
    traffic: Callable[[State, Cohort, Metrics], Traffic] | None = None  # None: the size of the upload, both ways
    headline: tuple[str, str] = ("acc", "max")  # the score that decides, and whether more or less of it is better
    personalise: Callable[[PyTree, PyTree, Client], PyTree] | None = None  # (server, row, client) -> row, untrained
    one_architecture: bool = True  # False: clients may be of several architectures
