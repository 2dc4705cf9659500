"""The settings of an experiment: `Config` is their one source, for flags, checks,
config.json and presets."""

import dataclasses
import functools
import inspect
from typing import Annotated, Any, Literal

import optax
from annotated_types import Ge, Gt, Interval

from experiments.values import number
from fedjax_pfl import hyperparameters

_MOST = 2**31 - 1  # rounds are counted in int32
BY_FILE = (
    "val_fraction",
    "test_split",
    "alpha",
    "classes_per_client",
)  # None where a partition of the user's own says all


def _setting(default: Any, help: str, free: bool = False) -> Any:
    """A field with its help; `free`: it may differ between a run and its resume."""
    return dataclasses.field(default=default, metadata={"help": help, "free": free})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The effective settings of one run, as config.json holds them.

    Each field is a flag of the same name; its annotation says the flag's type, range
    and choices. None is allowed where the annotation says so.
    """

    algo: str = _setting(
        "", "the method; --list shows them all; or your own, as FILE.py:FUNCTION"
    )
    preset: str | None = _setting(
        None,
        "a named setting, which other flags override; digits and synthetic have one "
        "by default",
    )
    dataset: str = _setting(
        "digits", "the data set, or npz:PATH or FILE.py:FUNCTION for your own"
    )
    data_fraction: float = _setting(
        1.0, "the part of the data set to use, stratified, in (0, 1]"
    )
    marks: bool = _setting(
        False, "draw FedDVA's marks on square images: client k has type k mod 4"
    )
    val_fraction: float | None = _setting(
        0.0, "the part of every client's training examples held out, in [0, 1)"
    )
    test_split: Literal["pool", "official"] | None = _setting(
        "pool",
        "pool: a quarter of each client's examples; official: the data set's own",
    )
    partition: str = _setting(
        "pathological",
        "who gets which examples, or file:PATH or FILE.py:FUNCTION for your own",
    )
    alpha: float | None = _setting(0.1, "the Dirichlet concentration")
    classes_per_client: int | None = _setting(
        2, "of the pathological partitions (shards: shards per client)"
    )
    clients: int | None = _setting(
        20, "the number of clients; with file:PATH the file says it"
    )
    unseen: Annotated[float, Interval(ge=0, lt=1)] = _setting(
        0.0,
        "the part of the clients that do not train, and are personalised and scored "
        "after training, in [0, 1)",
    )
    unseen_rounds: Annotated[int, Interval(ge=1, le=_MOST)] = _setting(
        1, "rounds of local work that personalise them", free=True
    )
    participation: str = _setting(
        "1", "the part of the clients in a round, or a range as 0.1:1 drawn each round"
    )
    rounds: Annotated[int, Ge(0)] = _setting(
        100,
        "communication rounds; may grow on a resume, if the method has no schedule "
        "over them",
    )
    epochs: int | None = _setting(1, "local epochs per round")
    steps: int | None = _setting(None, "local steps per round, in place of epochs")
    batch_size: int = _setting(10, "examples per step")
    lr: float = _setting(0.005, "the clients' learning rate")
    lr_decay: Annotated[float, Gt(0)] = _setting(
        1.0, "the factor on lr from round to round"
    )
    optimizer: str = _setting(
        "sgd", "of the clients: sgd, adam, or another of optax's by its name there"
    )
    momentum: Annotated[float, Interval(ge=0, lt=1)] = _setting(
        0.0, "of the local SGD, in [0, 1)"
    )
    weight_decay: Annotated[float, Ge(0)] = _setting(
        0.0, "added to the gradient after clipping, as in PyTorch"
    )
    clip: Annotated[float, Gt(0)] | None = _setting(
        None, "the largest norm of a step's gradient"
    )
    server_optimizer: str | None = _setting(
        None,
        "at the server, for methods that average weights: one of optax's, whose step "
        "replaces the mean (FedOpt)",
    )
    server_lr: Annotated[float, Gt(0)] | None = _setting(
        None, "the rate of --server_optimizer"
    )
    drop_last: bool = _setting(False, "skip the short last batch of an epoch")
    model: str = _setting(
        "auto",
        "the network; several as cnn,lenet (client i has number i mod G), "
        "blocks:cnn,lenet (the first half of the "
        "clients has the first), or file:PATH with a name per client; a name may be "
        "your own, as FILE.py:FUNCTION; "
        "auto: cnn for images of 16x16 and more, else mlp",
    )
    features: int | None = _setting(
        None,
        "K, to which every network's features are brought by adaptive average pooling",
    )
    shared_model: str | None = _setting(
        None,
        "the small network that all clients exchange; default: the smallest of --model",
    )
    public: str | None = _setting(
        None,
        "public examples: a data set, or as many of it, drawn by --seed, as "
        "cifar100:10000",
    )
    bn_stats: str = _setting(
        "aggregate", "running statistics: aggregate, local, or batch (none kept)"
    )
    compute_dtype: str = _setting(
        "float32", "in which the body computes: float32, or bfloat16 for accelerators"
    )
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] = _setting(
        0, "of everything that is drawn"
    )
    eval_every: Annotated[int, Interval(ge=0, le=_MOST)] = _setting(
        1,
        "rounds between evaluations; the last is always evaluated, 0: only at the end",
    )
    targets: str | None = _setting(
        None,
        "scores in (0, 1] whose first round is reported: 0.8,0.9 or acc:0.8,0.9; "
        "none: no such",
        free=True,
    )
    stop_at: str | None = _setting(
        None,
        "a score at which the run ends, as acc:0.9, or at a point of it as "
        "val/acc:0.9; none: no such",
        free=True,
    )
    patience: Annotated[int, Interval(ge=0, le=_MOST)] = _setting(
        0,
        "evaluations without a better validation score after which the run ends; 0: "
        "it does not",
        free=True,
    )
    checkpoint_every: Annotated[int, Interval(ge=1, le=_MOST)] = _setting(
        10, "rounds between checkpoints", free=True
    )
    conv: str = _setting(
        "auto",
        "form of the convolutions: winograd, fused, matmul, xla, or auto: chosen here",
        free=True,
    )
    width: str = _setting(
        "auto", "clients trained at once, or auto: chosen here", free=True
    )
    devices: str = _setting(
        "auto", "devices to spread the clients over: a number, all, or auto", free=True
    )
    client_memory: Literal["device", "host"] = _setting(
        "device",
        "where clients outside a round have their state: device, host",
        free=True,
    )
    tensorboard: bool = _setting(
        False,
        "write event files for TensorBoard into the run directory, too",
        free=True,
    )
    data_dir: str | None = _setting(
        None, "where TFDS data sets were prepared (default: TFDS_DATA_DIR)", free=True
    )
    # of the method, complete
    hparams: dict[str, Any] = dataclasses.field(default_factory=dict)

    def replace(self, **values: Any) -> "Config":
        """The settings with some of them changed."""
        return dataclasses.replace(self, **values)


_FIELDS = [field for field in dataclasses.fields(Config) if field.metadata]
# methods that make their networks of the inputs' shape: of --model they take nothing
OWN_NETWORKS = ("feddva",)
_KNOWN = hyperparameters.of(Config)
# by name: kind, default, range and choices
SETTINGS = {field.name: _KNOWN[field.name] for field in _FIELDS}
HELP = {field.name: field.metadata["help"] for field in _FIELDS}
# may differ between a run and its resume
FREE = {field.name for field in _FIELDS if field.metadata["free"]}
ENDS = ("stop_at", "patience", "unseen_rounds")  # of these, what changes what comes out


@functools.cache
def optimizers() -> tuple[str, ...]:
    """The names of optax's optimizers that take a learning rate first, have defaults
    for the rest, and need no more than a gradient."""
    found = []
    for name, thing in vars(optax).items():
        arguments = (
            list(inspect.signature(thing).parameters.values())
            if inspect.isfunction(thing)
            else []
        )
        first = [p.name for p in arguments[:1]] == [
            "learning_rate"
        ] and not name.startswith("scale_by")
        if first and all(
            p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in arguments[1:]
        ):
            found.append(name)
    # lbfgs also asks for the loss, as a function; noisy_sgd keeps a random key, the
    # same for all clients
    return tuple(name for name in found if name not in ("lbfgs", "noisy_sgd"))


def participation(text: str) -> tuple[float, float]:
    """Reads `0.5`, or a range `0.1:1`."""
    low, colon, high = str(text).partition(":")
    parts = [
        number(float, "--participation", part, text)
        for part in ((low, high) if colon else (low, low))
    ]
    return parts[0], parts[1]


def without_effect(config: Config) -> dict[str, str]:
    """The settings that mean nothing in a run because of others, each with why."""
    with_alpha = "dirichlet" in config.partition
    found = (
        dict.fromkeys(("compute_dtype", "conv"), f"--algo={config.algo}")
        if config.algo in OWN_NETWORKS
        else {}
    )
    if not with_alpha:
        found["alpha"] = f"--partition={config.partition}"
    if with_alpha or config.partition in ("iid", "round_robin"):
        found["classes_per_client"] = f"--partition={config.partition}"
    return found if config.unseen else found | {"unseen_rounds": "--unseen=0"}


def same(name: str, a: Any, b: Any) -> bool:
    """Are a recorded and a given value the same setting?"""
    if name == "model" and b == "auto":
        return a in ("cnn", "mlp")  # what it may stand for
    return participation(a) == participation(b) if name == "participation" else a == b
