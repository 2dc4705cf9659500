"""The contract: what a method is given and returns, and the legend of the axis letters.

Axes: N clients of the federation, S clients of a round, M examples of a client with
padding, B batch, C classes, K features, T class groups (pFedC's tasks), P public
examples, G architectures, Z parameters, n examples of the whole data set.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax
from chex import Numeric

from fedjax_pfl.errors import ArchitectureError

Array = jax.Array
PyTree = Any
# name -> (sum, count) over unmasked rows: scalars, or vectors, as over classes, whose
# ratios are averaged where counted
Scores = dict[str, tuple[Array, Array]]
# (x [B, ...] prepared, mask [B]) -> outputs [B, ...]
Predictor = Callable[[Array, Array], PyTree]


class Examples(NamedTuple):
    """Inputs and labels; in `Federation.examples` the official training examples, then
    the test's."""

    x: Array  # [n, *input], raw: uint8 images stay uint8 until a batch is taken
    # [n] int32; [n, L] int32, one label per position, -1 for none; [n, C] bool,
    # several classes; [n, C] float32, regression targets
    y: Array


class Subset(NamedTuple):
    """The examples of each client, as positions in `Federation.examples`; the last axis
    is padded."""

    index: Array  # type: ignore[assignment]  # hides tuple.index; [..., M] int32, meaningless past `size`
    size: Array  # [...] int32


class Federation(NamedTuple):
    """Everything the clients hold: the one big argument of a jitted round."""

    examples: Examples
    train: Subset  # index [N, M], size [N]
    val: Subset  # index [N, M'], size [N]; M' may be 0
    test: Subset  # index [N, M''], size [N]
    class_counts: Array  # [N, C] int32, training examples of each class
    # the pool of public examples, P of them; their labels may be meaningless
    public: Examples | None = None
    # of `engine.placement`: which rows of State.clients are whose; None: row i is
    # client i's
    placement: Any = None
    # as of `Data`; no result may depend on it, which a test checks
    mask_fill: Examples | None = None
    # arrays of `Frozen.values` of the task's models, see `engine.frozen`
    frozen: tuple[Array, ...] | None = None


class Context(NamedTuple):
    """The arguments of a run's functions but for its state."""

    key: Array  # of the run
    traced: dict[str, Any]  # the traced numbers by name, []
    federation: Federation
    t: Any  # [] int32, the round


class Data(NamedTuple):
    """One client's train, validation, test or public examples, as positions in
    everybody's, and how raw inputs become what a model takes. Methods read them through
    `local` and `evaluate`."""

    examples: Examples
    index: Array  # type: ignore[assignment]  # hides tuple.index; [M] int32
    size: Array  # [] int32
    prepare: Callable[[Array], Array]  # raw [B, *input] -> the model's input [B, ...]
    # content of the rows where Batch.mask is False: x prepared [...], y [];
    # None: the client's first example
    mask_fill: Examples | None = None
    # of training examples, as of `Task.work`
    work: "Work | None" = None
    loop: str = "dynamic"  # as of `Task`


class Work(NamedTuple):
    """One client's local work in a round, where it differs from the task's; arrays of
    shape []."""

    lr: Array | None = None  # factor of the learning rate
    epochs: Array | None = None  # in place of the task's epochs or steps
    steps: Array | None = None  # likewise
    batch_size: Array | None = None  # at most the task's
    limit: Array | None = None  # steps after which a straggler returns


class Batch(NamedTuple):
    """Examples of one local step.

    With L labels per example the rows of `y`, `mask` and of a model's outputs are the
    B L positions of the batch, example after example.
    """

    x: Array  # [B, ...], prepared; anything finite where the mask is False
    # [B] or [B L] int32; any label where the mask is False
    y: Array
    # [B] or [B L] bool: does this row count? Every mean and sum over it must use it
    mask: Array
    row: Array  # [B] int32, position in Data.index


class Network(NamedTuple):
    """Any network: pure functions over {"params": parameters, "stats": running
    statistics}."""

    init: Callable[[Array], PyTree]  # key -> variables
    # (variables, x, mask=None, train=False, key=None) -> outputs, new stats
    apply: Callable[..., tuple[Any, PyTree]]
    # the structure of the variables, bool: does this leaf belong to a batch-norm
    # module?
    bn_mask: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """An array in a file, read anew at each use.

    Attributes:
      shape: of the array.
      dtype: in which it is read.
      load: dtype -> the array, of this dtype or another.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    load: Callable[[np.dtype[Any]], np.ndarray]

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    def astype(self, dtype: Any) -> "Stored":
        """Returns the array, read in another dtype."""
        return dataclasses.replace(self, dtype=np.dtype(dtype))

    def read(self) -> np.ndarray:
        """Reads the array."""
        return np.ascontiguousarray(self.load(self.dtype), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)


class Frozen(NamedTuple):
    """Variables of a model that nobody trains: one copy, whatever the number of
    clients."""

    values: PyTree  # of arrays, or `Stored` until they are on the devices
    # values -> the functions `features`, `head` and `apply` of the model
    functions: Callable[[PyTree], tuple[Callable[..., Any], ...]]
    # trained variables -> variables of the network without adapters
    merge: Callable[[PyTree], PyTree]
    # of each value the axis that devices which share one base divide; -1: none
    axes: PyTree
    scale: float = 1.0  # factor of LoRA's products


class Hidden(NamedTuple):
    """Input x of a `Model` that computes the features before the logits, or the logits
    of these; one of the two is None."""

    x: Array | None = None  # [B, L] tokens -> [B L, K]
    h: Array | None = None  # [n, K] of any positions -> logits [n, C]


class Model(NamedTuple):
    """A classifier: pure functions over {"body": params, "head": params, "stats":
    statistics}."""

    init: Callable[[Array], PyTree]  # key -> variables
    # (variables, x, mask=None, train=False, key=None) -> [B, K], stats
    features: Callable[..., tuple[Array, PyTree]]
    # (variables["head"], h [B, K]) -> logits [B, C]
    head: Callable[[PyTree, Array], Array]
    # (variables, x, mask=None, train=False, key=None) -> [B, C], stats
    apply: Callable[..., tuple[Array, PyTree]]
    # the structure of the variables, bool: does this leaf belong to a batch-norm
    # module?
    bn_mask: PyTree
    num_features: int  # K
    # variables that are not among those above; in a round they are its arguments
    frozen: Frozen | None = None
    # (texts B, most tokens of one) -> an empty cache of `models.text.Step`, which
    # `features` then takes as x; None: the model has no such cache
    cache: Callable[[int, int], PyTree] | None = None
    unembeds: bool = False  # the features are logits, and `features` takes `Hidden`


class Client(NamedTuple):
    """One client of a round, as a method's function gets it: under `jax.vmap`, without
    a client axis.

    Where the client is inactive, all its data have size 0, and its class counts are 0.
    """

    id: Array  # [] int32 among all N; N or more in padding
    # a function of (run, round, phase, id), not of the slot in the cohort; None with
    # phase=None
    key: Array
    train: Data
    val: Data
    test: Data  # for scores alone
    public: Data | None  # the pool of public examples
    class_counts: Array  # [C] int32, training examples of each class
    model: Model  # of the client's architecture; static
    architecture: int  # its number, 0 to G - 1; static
    round: Any = None  # [] int32, number of the communication round
    evaluated: Any = None  # [] bool: is this round evaluated?
    malicious: Any = None  # [] bool, as of `Task`; None: no client is


class Task(NamedTuple):
    """The setting, the same for every method; host values except `lr`, which may be
    traced."""

    models: tuple[Model, ...]  # [G] architectures
    architecture: np.ndarray  # [N] of each client, 0 to G - 1
    sizes: np.ndarray  # [N] training examples
    class_counts: np.ndarray  # [N, C]
    num_classes: int
    input: jax.ShapeDtypeStruct  # one raw example, as a row of `Examples.x`
    prepare: Callable[[Array], Array]  # raw [B, *input] -> the models' input [B, ...]
    lr: Numeric
    # learning rate -> optimizer
    optimizer: Callable[[Numeric], optax.GradientTransformation]
    batch_size: int
    epochs: int | None = 1  # local epochs per round
    # local steps per round; one of `epochs` and `steps` is None
    steps: int | None = None
    # of the whole run; needed by schedules over the rounds (FedPHP, FedKD, MOCHA)
    rounds: int | None = None
    # share of the clients in a round, drawn from [low, high]
    participation: tuple[float, float] = (1.0, 1.0)
    drop_last: bool = False  # drop the short last batch, to copy a paper that did
    # trip counts of loops over batches, one of `local_training.LOOPS`
    loop: str = "dynamic"
    # (key, x) -> x, on training batches
    augment: Callable[[Array, Array], Array] | None = None
    # (logits [B, C], y, mask [B]) -> [], a mean over valid rows; None: cross entropy
    loss: Callable[[Array, Array, Array], Array] | None = None
    # (key, x, labels [B, C], mask [B]) -> x, soft labels [B, C], in training
    mix: Callable[..., tuple[Array, Array]] | None = None
    # (round) -> factor of lr
    schedule: Callable[[Array], Array] | None = None
    # (key, round, History) -> weights [N] of the draw of a round's clients; None:
    # uniform
    sampling: Callable[[Array, Array, "History"], Array] | None = None
    # (client id, round) -> Work; None: all clients have the task's local work
    work: Callable[[Array, Array], "Work"] | None = None
    # further scores of logits, or lora_error: names in `evaluation.FURTHER`
    metrics: tuple[str, ...] = ()
    # (key, gradients [B, ...], mask [B]) -> gradient of a step of `local_training.sgd`;
    # None: that of the mean loss
    per_example: Callable[[Array, PyTree, Array], PyTree] | None = None
    # batch norm's statistics are averaged; "local": each client's own; "batch": none
    bn_stats: str = "aggregate"
    # the labels of one example, as a row of `Examples.y`
    label: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct((), np.int32)
    # [C] -> superclass, where the data set has them
    superclass: np.ndarray | None = None
    # the small model that all clients exchange (FML, FedKD, ...)
    shared: Model | None = None
    # the pool of public examples [P, *input], raw; None: there is none
    public: jax.ShapeDtypeStruct | None = None
    prepare_public: Callable[[Array], Array] | None = None  # as `prepare`
    # [N] bool: clients that attack; the scores of the others are reported, too
    malicious: np.ndarray | None = None

    @property
    def num_clients(self) -> int:
        return len(self.sizes)

    @property
    def prepared(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one example as the models take it, [1, ...]."""
        return jax.eval_shape(
            self.prepare, jax.ShapeDtypeStruct((1, *self.input.shape), self.input.dtype)
        )

    @property
    def cohort_sizes(self) -> tuple[int, int]:
        """The least and the largest number of clients of a round, max(1, floor(fraction
        N)) each."""
        low, high = (
            max(1, math.floor(x * self.num_clients + 1e-9)) for x in self.participation
        )
        return low, high

    @property
    def model(self) -> Model:
        """The only architecture; ArchitectureError if there are several."""
        if len(self.models) > 1:
            raise ArchitectureError(
                "This needs clients of one architecture, and there are "
                f"{len(self.models)}."
            )
        return self.models[0]


class Own(NamedTuple):
    """Marks a result of a client's function whose tree structure is its architecture's,
    as a whole model's; of an upload so marked the mean is taken within each
    architecture."""

    tree: PyTree


class Grouped(NamedTuple):
    """Stacked trees, one per architecture; of a single architecture its plain tree
    is used instead."""

    # [G] trees, leading axis: the clients of that architecture
    trees: tuple[PyTree, ...]


class History(NamedTuple):
    """The run before a round, as `Task.sampling` sees it."""

    number: Array  # [] int32, clients that the round draws
    # (ids [d]) -> [d], mean loss on a client's training examples of the model that it
    # would use before the round; computed where it is called
    loss: Callable[[Array], Array]
    # of every client's rounds so far: their number [N] int32, the last one [N] int32
    # (-1 before the first) and its mean training loss [N] (0 before the first)
    participations: Array
    last_round: Array
    last_loss: Array


class State(NamedTuple):
    """Values that a method carries from round to round."""

    # no client axis, or a leading N, by client id, where the server must see every
    # client
    server: PyTree
    # `init`: leading axis N by client id; `round`: S, the clients of its cohort; parts
    # may be Grouped
    clients: PyTree


class RunState(NamedTuple):
    """Everything that a run carries from round to round."""

    method: State  # the method's own, whatever the options
    # of the options on uploads: State.server has no client axis, State.clients has
    uploads: State = State((), ())
    optimizer: PyTree = ()  # state of the server's optimizer
    record: PyTree = ()  # {"history": ...} of sampling, {"versions": ...} of the clock

    @property
    def server(self) -> PyTree:
        """The method's State.server."""
        return self.method.server

    @property
    def clients(self) -> PyTree:
        """The method's State.clients."""
        return self.method.clients

    @property
    def rows(self) -> PyTree:
        """All that has an entry per client."""
        return self.method.clients, self.uploads.clients

    def with_rows(self, rows: PyTree) -> "RunState":
        """Returns the state with other entries per client."""
        method, uploads = rows
        return self._replace(
            method=self.method._replace(clients=method),
            uploads=self.uploads._replace(clients=uploads),
        )


class Metrics(NamedTuple):
    """Results that a round reports."""

    # [S] mean training loss over the local steps, of the model that the method's Note
    # names; required
    loss: Any = None
    # {score: [S]} right after local training (`evaluation.post`), the headline among
    # them; required
    post: Any = None
    clients: dict[str, Array] = {}  # noqa: RUF012  # {name: [S]}, ignored where inactive; immutable by convention
    server: dict[str, Array] = {}  # noqa: RUF012  # {name: any shape}, such as mixing weights [N, N]


class Update(NamedTuple):
    """Result of one client's round, see `averaging.from_client`."""

    upload: PyTree  # of floats; averaged by the server
    row: PyTree  # the client's entry of State.clients, kept
    predict: Predictor  # the model that the client would use now, scored as `post`
    loss: Array  # [] mean training loss
    metrics: dict[str, Array] = {}  # noqa: RUF012  # {name: []}; immutable by convention
    sent: PyTree = ()  # what `Method.finish` and `observe` read of the client, too


class Cohort(Protocol):
    """The clients of a round and how to run a function over them.

    Some of its S slots are inactive: padding, and clients that have dropped out. They
    must change nothing: where nobody trains the server is unchanged. The engine keeps
    their rows of State.clients; what a method writes into State.server by client id it
    masks itself (`trees.scatter` with `active` or `trained`). The slots are in no
    particular order, so a sum of floats over them outside `mean` is taken in the order
    of the ids (`jnp.argsort(cohort.ids)`), or the layout changes its rounding.
    """

    # [S] int32, distinct; N or more in padding: x[ids] reads some row there,
    # x.at[ids].set writes none
    ids: Array
    active: Array  # [S] bool: takes part; the others are padding or have dropped out
    sizes: Array  # [S] int32 training examples; 0 where inactive
    trained: Array  # [S] bool: takes part and has training examples
    class_counts: Array  # [S, C] int32; 0 where inactive
    total: Array  # [] int32 training examples of all N clients
    round: Array  # [] int32
    evaluated: Array  # [] bool: is this round evaluated?
    metrics: tuple[str, ...]  # as of `Task`
    public: Data | None  # the pool of public examples, for the server

    def map(
        self, client: Callable[..., PyTree], *rows: PyTree, phase: int | None = 0
    ) -> PyTree:
        """Calls client(c, *rows) per client and stacks the results, [S, ...]; those
        marked `Own` come back as Grouped. What is returned of inactive clients is
        undefined: mask it.

        Args:
          rows: trees with a leading axis S, or Grouped; each client gets its own entry.
          phase: separates the random streams of the calls in one round, so each call
            needs its own (else InputError); None: the function draws nothing, and c.key
            is None.
        """

    def mean(
        self,
        client: Callable[..., tuple[PyTree, ...]],
        *rows: PyTree,
        weight: PyTree = None,
        default: PyTree,
        phase: int | None = 0,
        combine: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None,
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Maps `client`, which returns a tuple, and averages its first result, the
        upload, over the active clients.

        Uploads are trees of floats (integers would be truncated). They alone are
        counted as sent (`Algorithm.traffic`); the other results, and those of `map` and
        `scan`, are not.

        Args:
          weight: not negative, not normalised; None (uniform over the active clients,
            those without examples included: `trained` leaves them out), [S], or a
            prefix tree of the upload whose leaves are None, [S], or [S, ...], broadcast
            against the trailing axes of every leaf below (see `aggregate.shares`).
          default: a tree like the upload, taken where the weights of the active clients
            sum to zero, and in place of every upload for unseen clients; usually the
            server's present value. Grouped where the upload is marked `Own`, as the
            mean then is.
          combine: (uploads [S, ...] in the order of the ids, shares, default) -> a tree
            like the upload, in place of the weighted mean. It needs memory for all S
            uploads on every device; shares (see `aggregate.shares`) are 0 where a
            client has no part.

        Returns:
          (the mean, in the dtypes of the upload, and the other results [S, ...] as a
          tuple).
        """

    def scan(
        self,
        client: Callable[..., tuple[PyTree, PyTree]],
        carry: PyTree,
        *rows: PyTree,
        phase: int | None = 0,
    ) -> tuple[PyTree, PyTree]:
        """Active clients of one architecture one after another, in random order: carry,
        results = client(c, carry, *rows); returns the last carry and the results [S,
        ...], zeros where inactive."""

    def replicated(self, tree: PyTree) -> PyTree:
        """The tree [S, ...] whole on every device: needed by a callback, or by another
        order of rows."""


class Traffic(NamedTuple):
    """Communication of one round per client, integers, 0 where inactive (see
    `traffic.both_ways`)."""

    down: Array  # [S] scalars received
    up: Array  # [S] scalars sent
    # [S] integers and ids, both ways (class ids that key prototypes or logits: up
    # alone)
    ints: Array
    messages: Array  # [S] messages, both ways
    # [S] bytes of ciphertexts, both ways; None: nothing is encrypted
    encrypted: Array | None = None
    # [S] scalars of public examples received; None: whoever needs them has them
    public_data: Array | None = None


class Stage(NamedTuple):
    """Work of a method that begins in a later round of a run."""

    first: Numeric  # its first round, from 0; not checked where it is traced
    # what a run that ends before lacks, such as "no cluster is split"
    missing: str
    needed: bool = False  # refuses such a run instead of a warning


class Method(NamedTuple):
    """A method whose round is one weighted mean over the clients, as data.

    `averaging.from_client` makes it, and the engine makes its round. The server sees
    nothing of the clients but the mean and the sums of the weights, unless there is a
    `finish`. The rules are those of `Algorithm`.
    """

    init: Callable[[Array], State]  # as of `Algorithm`
    # (client, State.server, its row of State.clients) -> Update; with `start` also
    # what that returns for all, and the client's entry of what it returns for each
    client: Callable[..., Update]
    # (State.server, row, client) -> Predictor, as of `Algorithm`
    predict: Callable[[PyTree, PyTree, Client], Predictor]
    score: Callable[[PyTree, Array, Array, Client], Scores]
    # cohort -> aggregation weights, as `Cohort.mean` takes them
    weight: Callable[[Cohort], PyTree] = lambda cohort: cohort.sizes
    # State.server -> what an upload is a change of, and the mean where nobody trains;
    # Grouped where the upload is marked `Own`
    default: Callable[[PyTree], PyTree] = lambda server: server
    # (key, State.server, the mean, sums of the weights over the clients) -> the next
    # State.server
    update: Callable[..., PyTree] = lambda key, server, mean, mass: mean
    # (key, State.server, cohort) -> (a tree for all clients, a tree [S, ...] for each)
    start: Callable[..., tuple[PyTree, PyTree]] | None = None
    # (key, State.server, the mean, sent [S, ...], rows before and after, cohort) ->
    # State, Metrics(clients=..., server=...), in place of `update`
    finish: Callable[..., tuple[State, Metrics]] | None = None
    # (sent [S, ...], cohort) -> {name: metric} that the simulator reports, and on which
    # no state depends
    observe: Callable[[PyTree, Cohort], dict[str, Array]] | None = None
    # keys of State.server, means of parameters that a server optimizer may move
    averages: tuple[str, ...] = ()
    # of the predictors of an Update, right after local training; None: `score`
    post: Callable[[PyTree, Array, Array, Client], Scores] | None = None
    # times that a round does the task's local work by `local_training.sgd`, if its
    # gradients are the only way of examples into upload and row; 0: there are others
    trainings: int = 0
    # as of `Algorithm`, like the others
    traffic: Callable[[State, Cohort, Metrics], Traffic] | None = None
    headline: tuple[str, str] = ("acc", "max")
    one_architecture: bool = True
    no_unseen: str = ""
    excludes: Mapping[str, str] = MappingProxyType({})
    stages: tuple[Stage, ...] = ()


class Upload(NamedTuple):
    """One change of what clients send, as `optax.GradientTransformation` is one of
    gradients; `uploads.chain` applies several.

    An update is an upload minus `Method.default`, without running statistics, of one
    architecture. Each function is pure and written for one client, but for those of the
    server.
    """

    # zeros like an update -> (state of the server, state of one client)
    init: Callable[[PyTree], tuple[PyTree, PyTree]]
    # (client, update, state of the server, state of the client) -> update, state of
    # the client, what the server's function sees
    client: Callable[..., tuple[PyTree, PyTree, PyTree]]
    # (key, mean update, seen [S, ...], active [S], state) -> mean update, state,
    # {name: metric}
    server: Callable[..., tuple[PyTree, PyTree, dict[str, Array]]] | None = None
    # (weights [S], active [S]) -> weights [S]; clients whose weight was 0 send zeros
    weight: Callable[[Array, Array], Array] | None = None
    # (updates [S, ...] by id, shares as of `aggregate.shares`) -> update, in place of
    # the weighted mean; at most one in a chain
    combine: Callable[[PyTree, PyTree], PyTree] | None = None
    # zeros like an update -> (scalars, integers) that a client sends
    size: Callable[[PyTree], tuple[Any, Any]] | None = None
    # (task) -> None; raises InputError for a task it cannot have
    check: Callable[[Task], None] | None = None


class Algorithm(NamedTuple):
    """A method as a value: pure functions, and what is known of them.

    A factory, name(task, *, hyperparameters) -> Algorithm, makes it anew in every
    trace: `task.lr` and hyperparameters that are floats are then traced, so Python
    branches on none of them, nor on any array. A round reaches clients through
    `cohort.map`, `mean` and `scan` only, and returns a State of the structure, shapes
    and dtypes that it was given. What a client sends and what it keeps goes through
    `averaging.split`, which knows of running statistics. The round's key is for the
    server's draws; a client's main local training takes `c.key` unchanged, every other
    draw `keys.fold(c.key, stream)`, a stream being of `keys.Client` or another
    `keys.Stream`.
    """

    # key -> State, State.clients by client id; give every array its dtype
    init: Callable[[Array], State]
    # (key, State[S], Cohort) -> State[S], Metrics
    round: Callable[[Array, State, Cohort], tuple[State, Metrics]]
    # (server, the client's entry of State.clients, client); called once per client, so
    # it is here that a model is fine-tuned before it predicts. c.key is that of the
    # round's training: draw from keys.fold(c.key, ...)
    predict: Callable[[PyTree, PyTree, Client], Predictor]
    # (outputs [B, ...], y, mask, client), with the headline
    score: Callable[[PyTree, Array, Array, Client], Scores]
    # see `fedjax_pfl.traffic`; None: nothing travels, as the server has no state
    traffic: Callable[[State, Cohort, Metrics], Traffic] | None = None
    # the primary score, and whether "max" or "min" is better
    headline: tuple[str, str] = ("acc", "max")
    # False: there may be several; use `c.model`, not `task.model`, and
    # `architectures.stack`
    one_architecture: bool = True
    # why unseen clients cannot be personalised, as the end of an error's sentence; "":
    # they can
    no_unseen: str = ""
    # options of a task that the method's derivation excludes, with the reason as the
    # end of an error's sentence; see `engine.method.EXCLUDED`
    excludes: Mapping[str, str] = MappingProxyType({})
    # what begins in a later round; a run that ends before is warned of, or refused
    stages: tuple[Stage, ...] = ()
