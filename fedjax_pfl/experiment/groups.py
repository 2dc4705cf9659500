"""Groups of settings: their values, ranges, choices and help.

A field is the flag of its name, or of the name in its metadata. Its annotation has
type, range and choices, as that of a method's hyperparameter.
"""
# ruff: noqa: RUF009  # `setting` makes a field

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Interval

from fedjax_pfl import clock, hyperparameters, user_code
from fedjax_pfl.data import shifts
from fedjax_pfl.data.loading import DATASETS, PREFIXES
from fedjax_pfl.data.partitioners import PARTITIONS, rules_of
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.evaluation import FURTHER, GENERATED
from fedjax_pfl.experiment import task_options as options, text
from fedjax_pfl.models.adapted import ADAPTATIONS
from fedjax_pfl.options import Options
from fedjax_pfl.uploads.chain import Option
from fedjax_pfl.uploads.server import SERVERS

NAMES = "names:"  # of --unseen
MOST = 2**31 - 1  # rounds and steps are counted in int32
Count = Annotated[int, Interval(ge=1, le=MOST)]
Fraction = Annotated[float, Interval(gt=0, le=1)]
Rest = Annotated[float, Interval(ge=0, lt=1)]
# of optax, those that need a learning rate and gradients only, without a key
OPTIMIZERS = (
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw"),
    *("adamw", "adan", "amsgrad", "fromage", "lamb", "lars", "lion", "novograd"),
    *("optimistic_adam", "optimistic_adam_v2", "optimistic_gradient_descent", "radam"),
    *("rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi"),
)


def setting(
    default: Any,
    help: str,
    *,
    free: bool = False,
    flag: str = "",
    needs: str = "",
    excludes: tuple[str, ...] = (),
    options: Options | None = None,
) -> Any:
    """Returns a field of a group.

    Args:
      help: one line.
      free: it may change when a run resumes.
      flag: of the command line; default: the field's name.
      needs: settings without which this one has no effect, as SETTING&SETTING, or as
        SETTING=VALUE|VALUE, where VALUE: is the start of a value.
      excludes: settings that must then have their defaults.
      options: factories by which the value is read.
    """
    if options is not None:
        end = ", ".join([*options.forms(), "FILE.py:NAME"])
        help = f"{help}: {end}"
    metadata = {"help": help, "free": free, "flag": flag, "options": options}
    needed = tuple(map(Need.read, needs.split("&"))) if needs else ()
    metadata |= {"needs": needed, "excludes": excludes}
    return dataclasses.field(default=default, metadata=metadata)


class Need(NamedTuple):
    """A setting that another one needs, given or with one of some values."""

    flag: str
    values: tuple[str, ...]  # those that end in ":" are starts of values

    @classmethod
    def read(cls, text: str) -> "Need":
        """Returns the need of SETTING or SETTING=VALUE|VALUE."""
        flag, equals, values = text.partition("=")
        return cls(flag, tuple(values.split("|")) if equals else ())

    def met(self, value: Any) -> bool:
        """Returns whether a value of the other setting is enough."""
        starts = tuple(x for x in self.values if x.endswith(":"))
        known = str(value) in self.values or str(value).startswith(starts)
        return known if self.values else bool(value)

    def __str__(self) -> str:
        return f"--{self.flag}{'=' if self.values else ''}{', '.join(self.values)}"


class Group:
    """Base of the groups."""

    def check(self) -> None:
        """Raises InputError for settings of the group that contradict each other."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(Group):
    """Data."""

    dataset: str = setting("digits", "data set of --list, npz:PATH or FILE.py:FUNCTION")
    data_fraction: Fraction = setting(1.0, "stratified fraction of the data set")
    tokenizer: str | None = setting(
        None, "tokens of texts: word, char or a Hugging Face tokenizer.json"
    )
    max_length: Count | None = setting(
        None, "most tokens of an example (default: 200; of speakers 80)"
    )
    pack: bool = setting(
        False,
        "fill rows of --max_length with several conversations of a client, none of "
        "which sees another",
        needs="dataset=chat:",
        excludes=("public",),
    )
    image_size: Count | None = setting(
        None,
        "pixels per side of images of imagefolder and domains",
        needs="dataset=imagefolder:|domains:",
    )
    missing: Literal["mean", "median", "indicator"] | None = setting(
        None,
        "fill missing numbers of a table; indicator: by the mean, with an input that "
        "is 1 where they are",
        needs="dataset=table:",
    )
    categories: Literal["onehot"] | None = setting(
        None, "make inputs of the categories of a table", needs="dataset=table:"
    )
    prepare: str | None = setting(
        None,
        "public file whose rows give the vocabulary of texts, or the means, fills and "
        "categories of a table (none: none is computed; default: of training rows of "
        "the clients that train)",
    )
    marks: bool = setting(False, "draw FedDVA's marks: client k has type k mod 4")
    shift: str | None = setting(
        None,
        "change of clients' examples, KIND:V1,V2,... (client i has value i mod their "
        "number)",
        options=shifts.SHIFTS,
    )
    augment: Literal["none", "flip", "crop_flip"] = setting(
        "none", "augmentation of training images"
    )
    public: str | None = setting(
        None,
        "public examples: a data set, or a number of them, as cifar100:10000 (of the "
        "clients' own data set examples that no client gets)",
    )
    data_dir: str | None = setting(
        None, "directory of prepared TFDS data sets (default: TFDS_DATA_DIR)", free=True
    )

    def check(self) -> None:
        """Raises InputError for an unknown data set."""
        for name in (self.dataset, public(self.public)[0]):
            if name is not None and not name.startswith(PREFIXES):
                text.choose("dataset", name, DATASETS)


def public(spec: str | None) -> tuple[str | None, int | None]:
    """Returns data set and number of --public; no number: all examples."""
    head, _, count = (spec or "").rpartition(":")
    if not head or not count.lstrip("-").isdecimal():
        return spec, None
    check("public", int(count), 1, MOST, whole=True)
    return head, int(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition(Group):
    """Partition."""

    rule: str = setting(
        "pathological",
        "assignment of examples of --list, natural:COLUMN, file:PATH or "
        "FILE.py:FUNCTION",
        flag="partition",
    )
    clients: Count | None = setting(
        20, "number of clients; file:PATH and natural:COLUMN have their own"
    )
    alpha: Annotated[float, Interval(ge=1e-6, le=1e6)] | None = setting(
        0.1, "Dirichlet concentration", needs=f"partition={'|'.join(rules_of('alpha'))}"
    )
    classes_per_client: Count | None = setting(
        2,
        "classes of a client (shards: shards of a client)",
        needs=f"partition={'|'.join(rules_of('per_client'))}",
    )
    min_size: Annotated[int, Ge(0)] | None = setting(
        None, "least examples of a client (default: the partition's own)"
    )
    val_fraction: Rest | None = setting(
        0.0, "fraction of each client's training examples held out"
    )
    test_split: Literal["pool", "official"] | None = setting(
        "pool", "pool: a quarter of each client's examples; official: the data set's"
    )
    unseen: str | None = setting(
        None,
        "clients excluded from training and personalised afterwards: their fraction, "
        "or names:H11,H03",
    )

    def __post_init__(self) -> None:
        given = str(self.unseen or 0)  # a number in Python and in earlier runs
        if not given.startswith(NAMES):
            share = hyperparameters.parse(float, "unseen", given)
            object.__setattr__(self, "unseen", f"{share:g}" if share else None)

    @property
    def held_out(self) -> float | list[str]:
        """Returns the fraction of clients that do not train, or their names."""
        given = self.unseen or "0"
        if given.startswith(NAMES):
            return given.removeprefix(NAMES).split(",")
        return float(given)

    @property
    def given(self) -> bool:
        """Returns True for a partition of the user's own, which has its own sizes."""
        return self.rule.startswith("file:") or user_code.named(self.rule)

    @property
    def column(self) -> str | None:
        """Returns COLUMN of natural:COLUMN."""
        kind, _, column = self.rule.partition(":")
        return column if kind == "natural" else None

    def check(self) -> None:
        """Raises InputError for an unknown partition, or a fraction out of range."""
        if isinstance(self.held_out, float):
            check("unseen", self.held_out, 0, 1, open_high=True)
        if not self.given:
            natural = self.rule.startswith("natural:")
            name = "natural:COLUMN" if natural else self.rule
            text.choose("partition", name, PARTITIONS)


# None where a partition of the user's own decides
BY_FILE = ("val_fraction", "test_split", "alpha", "classes_per_client", "min_size")


class Start(NamedTuple):
    """A run whose network is adapted, or trained further."""

    flag: str
    run: str

    def __str__(self) -> str:
        return f"--{self.flag}={self.run}"

    @property
    def path(self) -> Path:
        """Returns its directory."""
        return Path(self.run).expanduser()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Group):
    """Networks."""

    name: str = setting(
        "auto",
        "network of --list; several: cnn,lenet (client i has number i mod G), "
        "blocks:cnn,lenet or file:PATH with a name per client; FILE.py:FUNCTION for "
        "your own; "
        "pretrained:FOLDER for weights of Hugging Face",
        flag="model",
    )
    features: Count | None = setting(
        None, "feature dimension K of every network, by adaptive average pooling"
    )
    shared_model: str | None = setting(
        None, "small network that all clients exchange (default: the smallest)"
    )
    bn_stats: Literal["aggregate", "local", "batch"] = setting(
        "aggregate", "running statistics"
    )
    compute_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype of the body"
    )
    init_from: str | None = setting(
        None, "run directory whose last checkpoint has the variables to start from"
    )
    adapt: str | None = setting(
        None, "train these parameters of a frozen network", options=ADAPTATIONS
    )
    base: str | None = setting(
        None,
        "frozen network of --adapt: the shared model of a run directory, or a folder "
        "of Hugging Face",
        needs="adapt",
    )
    base_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype in which the frozen network is held", needs="adapt"
    )
    blocks: Literal["unrolled", "scanned", "rematerialised"] = setting(
        "unrolled",
        "transformer blocks of the frozen network; scanned ones are compiled once, "
        "rematerialised ones need less memory",
        needs="adapt",
    )
    feature_cache: Literal["float32", "bfloat16"] | None = setting(
        None,
        "compute the features of --adapt=head once, and store them in this dtype",
        needs="adapt=head",
    )
    conv: Literal["auto", "winograd", "fused", "matmul", "packed", "pooled", "xla"] = (
        setting("auto", "algorithm of convolutions", free=True)
    )

    @property
    def start(self) -> Start | None:
        """Returns the run whose vocabulary, or columns of a table, the network has."""
        runs = {"base": self.base, "init_from": self.init_from}
        return next((Start(flag, run) for flag, run in runs.items() if run), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(Group):
    """Local training."""

    epochs: Count | None = setting(1, "local epochs per round")
    steps: Count | None = setting(None, "local steps per round, instead of epochs")
    batch_size: Count = setting(10, "examples per step")
    drop_last: bool = setting(
        False, "skip the short last batch of an epoch", needs="epochs"
    )
    lr: Annotated[float, Gt(0)] = setting(0.005, "learning rate of the clients")
    lr_decay: Annotated[float, Gt(0)] = setting(1.0, "factor on lr after each round")
    schedule: str = setting(
        "constant", "factor on lr over the rounds", options=options.SCHEDULES
    )
    optimizer: str = setting(
        "sgd",
        "optimizer of the clients, by its name in optax, as adam, adamw, rmsprop or "
        "lion, or FILE.py:FUNCTION",
    )
    momentum: Rest = setting(0.0, "momentum of sgd", needs="optimizer=sgd")
    weight_decay: Annotated[float, Ge(0)] = setting(
        0.0, "weight decay, added to the gradient after clipping"
    )
    clip: Annotated[float, Gt(0)] | None = setting(
        None, "largest global norm of a gradient"
    )
    loss: str = setting("cross_entropy", "loss", options=options.LOSSES)
    mix: str = setting("none", "mixed examples and labels", options=options.MIXES)

    def check(self) -> None:
        """Raises InputError for an unknown optimizer or one that has its own decay, and
        unless local work is either epochs or steps."""
        if (self.epochs is None) == (self.steps is None):
            raise InputError("Specify exactly one of --epochs and --steps.")
        if not user_code.named(self.optimizer):
            text.choose("optimizer", self.optimizer, OPTIMIZERS)
        elif self.weight_decay or self.clip is not None:
            raise InputError(
                "--weight_decay and --clip belong in an optimizer of your own."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server(Group):
    """Rounds and server."""

    rounds: Annotated[int, Interval(ge=0, le=MOST)] = setting(
        100, "communication rounds; may grow when a run resumes"
    )
    participation: str = setting(
        "1", "fraction of clients per round, or a range to draw it from, as 0.1:1"
    )
    sampling: str = setting(
        "uniform", "draw of a round's clients", options=options.SAMPLINGS
    )
    aggregate: Literal[
        "mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"
    ] = setting("mean", "rule that the server averages uploads by")
    server_optimizer: str | None = setting(
        None,
        "FedOpt: optimizer that takes the averaged update as a gradient, one of "
        f"{', '.join(SERVERS)}, or of optax",
        needs="server_lr",
    )
    server_lr: Annotated[float, Gt(0)] | None = setting(
        None, "learning rate of --server_optimizer", needs="server_optimizer"
    )
    asynchronous: str | None = setting(
        None,
        "the server updates whenever clients arrive, a round being an update",
        excludes=("sampling", "aggregate", "dp"),
        options=options.RULES,
    )
    staleness: str = setting(
        "polynomial:0.5",
        "weight of --asynchronous by staleness",
        needs="asynchronous",
        options=options.STALENESS,
    )
    speeds: str | None = setting(
        None,
        "examples per second of local training, for simulated time: a number, "
        "lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, file:PATH with one per client, or "
        "FILE.py:FUNCTION of the id",
    )
    bandwidths: str | None = setting(
        None, "Mbit/s of each client both ways, for simulated time, like --speeds"
    )

    @property
    def participants(self) -> tuple[float, float]:
        """Returns the range of `0.1:1`, or of `0.5` twice the same number."""
        try:
            found = hyperparameters.values(participants, str(self.participation))
            return participants(**found)
        except InputError as error:
            message = f"--participation={self.participation}: {error}"
            raise InputError(message) from None

    def check(self) -> None:
        """Raises InputError for a value that is none."""
        low, high = self.participants
        for name in ("speeds", "bandwidths"):
            if (spec := getattr(self, name)) is not None:
                clock.read(spec, name)
        servers = (*SERVERS, *OPTIMIZERS)
        choose("server_optimizer", self.server_optimizer or "sgd", servers)
        if self.asynchronous is not None and low != high:
            raise InputError("--asynchronous excludes a range of --participation.")


def participants(low: Fraction, high: Fraction | None = None) -> tuple[float, float]:
    """Returns a range of fractions, by default of one number."""
    if high is not None and low > high:
        raise InputError(f"`low` must be at most high={high:g}, got {low:g}.")
    return low, low if high is None else high


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uploads(Group):
    """Uploads."""

    compress: str | None = setting(
        None, "compression of uploads", options=options.COMPRESSIONS
    )
    malicious: str | None = setting(
        None,
        f"fraction of malicious clients and their attack, FRACTION:ATTACK or "
        f"FRACTION:ATTACK:SCALE, one of {', '.join(options.ATTACKS)}, or "
        "FRACTION:FILE.py:FUNCTION",
    )
    dp: Literal["client", "adaptive", "example"] | None = setting(
        None,
        "differential privacy of clients, with adaptive clipping, or of examples",
    )
    dp_noise: Annotated[float, Ge(0)] | None = setting(
        None,
        "standard deviation of --dp's noise on a sum, in clipping norms",
        needs="dp",
    )
    dp_epsilon: Annotated[float, Gt(0)] | None = setting(
        None, "epsilon after all rounds, in place of --dp_noise", needs="dp"
    )
    dp_delta: Annotated[float, Interval(gt=0, lt=1)] | None = setting(
        None,
        "delta of --dp (default: n^-1.1 of n clients, or n examples of a client)",
        needs="dp",
    )
    dp_clip: Annotated[float, Gt(0)] = setting(1.0, "clipping norm of --dp", needs="dp")
    dp_sampling: Literal["fixed", "poisson"] = setting(
        "fixed", "sampling of clients that the accountant of --dp assumes", needs="dp"
    )

    @property
    def attack(self) -> tuple[float, Callable[..., Option | None]]:
        """Returns the fraction of malicious clients, and what makes their attack."""
        fraction, _, rest = (self.malicious or "0:label_flip").partition(":")
        share = hyperparameters.parse(float, "malicious", fraction)
        check("malicious", share, 0, 1, open_high=True)
        return share, options.ATTACKS.read(rest)

    def check(self) -> None:
        """Raises InputError for settings that do not fit each other."""
        _ = self.attack
        if self.dp is None:
            return
        if (self.dp_noise is None) == (self.dp_epsilon is None):
            got = "neither" if self.dp_noise is None else "both"
            raise InputError(
                f"--dp needs one of --dp_noise and --dp_epsilon, got {got}."
            )
        if self.dp == "example" and self.dp_epsilon is not None:
            raise InputError("--dp=example needs --dp_noise in place of --dp_epsilon.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(Group):
    """Evaluation."""

    metrics: str | None = setting(
        None,
        f"scores: acc, and further ones of {', '.join(FURTHER)}, as "
        "acc,auc (default: acc); of conversations also "
        f"{', '.join(GENERATED)}, after the last round",
    )
    eval_every: Annotated[int, Interval(ge=0, le=MOST)] = setting(
        1, "rounds between evaluations; 0: only after the last round"
    )
    patience: Annotated[int, Interval(ge=0, le=MOST)] = setting(
        0,
        "evaluations without a better validation score to stop after",
        free=True,
        needs="eval_every&val_fraction",
    )
    watch: str | None = setting(
        None,
        "validation score that stops and compares runs, as val/auc (default: the first "
        "of --metrics, else the method's)",
        free=True,
    )
    unseen_rounds: Count = setting(
        1, "rounds of local training of unseen clients", free=True, needs="unseen"
    )

    def check(self) -> None:
        """Raises InputError for an unknown score."""
        if self.watch is not None and not self.watch.startswith("val/"):
            raise InputError(f"--watch={self.watch} must be val/SCORE, as val/auc.")
        for name in self.scores:
            choose("metric", name, ("acc", *FURTHER, *GENERATED))
        if self.generated and self.patience:
            raise InputError(f"--metrics={self.generated[0]} excludes --patience.")
        if (self.watch or "").removeprefix("val/") in GENERATED:
            raise InputError(f"--watch={self.watch} must be of a score of every round.")

    @property
    def generated(self) -> tuple[str, ...]:
        """Returns the names of --metrics that are of generated answers."""
        return tuple(name for name in GENERATED if name in self.scores)

    @property
    def scores(self) -> list[str]:
        """Returns the names of --metrics."""
        return ("acc" if self.metrics is None else self.metrics).split(",")


ONE_DEVICE = {"devices": "1", "base_devices": "1"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Group):
    """Run and devices."""

    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] = setting(0, "random seed")
    checkpoint_every: Count = setting(10, "rounds between checkpoints", free=True)
    matmul_precision: Literal["default", "float32", "tensorfloat32", "bfloat16"] = (
        setting("default", "precision of matrix products and convolutions")
    )
    loop: Literal["dynamic", "static"] = setting(
        "dynamic", "trip counts of local epochs", free=True
    )
    width: str = setting("auto", "clients per vmapped batch on each device", free=True)
    devices: str = setting("auto", "devices to use: a number, all or auto", free=True)
    base_devices: str = setting(
        "1",
        "devices that share one copy of the frozen network of --adapt: a number, or "
        "auto, the least whose memory holds it",
        needs="adapt",
        free=True,
    )
    client_memory: Literal["device", "host"] = setting(
        "device", "memory of the clients' state between rounds", free=True
    )
    tensorboard: bool = setting(False, "write event files for TensorBoard", free=True)
    wandb: bool = setting(False, "log to Weights & Biases", free=True)

    def check(self) -> None:
        """Raises InputError for numbers that are none."""
        for name in ("width", "devices", "base_devices"):
            value = getattr(self, name)
            if value != "auto" and (name, value) != ("devices", "all"):
                number = hyperparameters.parse(int, name, value)
                check(name, number, 1, math.inf)
