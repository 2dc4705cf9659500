"""Settings of an experiment.

`Config` is the only source of the flags, the checks, config.json and the presets.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from fedjax_pfl import hyperparameters, user_code
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.algorithms.find import find
from fedjax_pfl.compression import RULES as COMPRESSIONS
from fedjax_pfl.data import shifts
from fedjax_pfl.data.loading import DATASETS, PREFIXES
from fedjax_pfl.data.partitioners import PARTITIONS
from fedjax_pfl.data.shifts import SHIFTS
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.experiment import text
from fedjax_pfl.experiment.presets import DEFAULT_PRESETS, PRESETS, same, tuned
from fedjax_pfl.hyperparameters import from_text, parse, typed
from fedjax_pfl.models import pretrained
from fedjax_pfl.models.adapted import ADAPTATIONS
from fedjax_pfl.models.layers import CONVOLUTIONS
from fedjax_pfl.privacy import differential_privacy
from fedjax_pfl.privacy.attacks import ATTACKS

# None where a partition of the user's own decides
BY_FILE = ("val_fraction", "test_split", "alpha", "classes_per_client", "min_size")
# of optax, those that need a learning rate and gradients only, without a key
OPTIMIZERS = (
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw"),
    *("adamw", "adan", "amsgrad", "fromage", "lamb", "lars", "lion", "novograd"),
    *("optimistic_adam", "optimistic_adam_v2", "optimistic_gradient_descent", "radam"),
    *("rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi"),
)
_MOST = 2**31 - 1  # rounds are counted in int32


def _field(default: Any, help: str, free: bool = False) -> Any:
    """Returns a field with its help; `free` ones may change when a run resumes."""
    return dataclasses.field(default=default, metadata={"help": help, "free": free})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one run.

    Each field is a flag of the same name, whose type, range and choices are those of
    the annotation. `resolve` adds a preset; `build` completes `hparams`.
    """

    algo: str = _field("", "method, or FILE.py:FUNCTION")
    preset: str | None = _field(
        None,
        "setting of a paper, which other flags override; "
        "with --dataset=digits the preset digits replaces the defaults below",
    )
    dataset: str = _field("digits", "data set, npz:PATH or FILE.py:FUNCTION")
    data_fraction: float = _field(1.0, "stratified fraction of the data set, in (0, 1]")
    tokenizer: str | None = _field(
        None, "tokens of texts: word, char or a Hugging Face tokenizer.json"
    )
    max_length: Annotated[int, Ge(1)] | None = _field(
        None, "most tokens of an example (default: 200; of speakers 80)"
    )
    image_size: Annotated[int, Ge(1)] | None = _field(
        None, "pixels per side of images of imagefolder and domains"
    )
    marks: bool = _field(False, "draw FedDVA's marks: client k has type k mod 4")
    shift: str | None = _field(
        None,
        "change of clients' examples, KIND:V1,V2,... (client i has value i mod their "
        f"number): {', '.join(SHIFTS)}",
    )
    augment: Literal["none", "flip", "crop_flip"] = _field(
        "none", "augmentation of training images"
    )
    val_fraction: float | None = _field(
        0.0, "fraction of each client's training examples held out, in [0, 1)"
    )
    test_split: Literal["pool", "official"] | None = _field(
        "pool", "pool: a quarter of each client's examples; official: the data set's"
    )
    partition: str = _field(
        "pathological",
        "assignment of examples, natural:COLUMN, file:PATH or FILE.py:FUNCTION",
    )
    alpha: float | None = _field(0.1, "Dirichlet concentration")
    classes_per_client: int | None = _field(
        2, "classes of a client (shards: shards of a client)"
    )
    min_size: int | None = _field(
        None, "least examples of a client (default: the partition's own)"
    )
    clients: int | None = _field(
        20, "number of clients; file:PATH and natural:COLUMN have their own"
    )
    unseen: Annotated[float, Interval(ge=0, lt=1)] = _field(
        0.0, "fraction of clients excluded from training and personalised afterwards"
    )
    unseen_rounds: Annotated[int, Interval(ge=1, le=_MOST)] = _field(
        1, "rounds of local training of unseen clients", free=True
    )
    participation: str = _field(
        "1", "fraction of clients per round, or a range to draw it from, as 0.1:1"
    )
    rounds: Annotated[int, Interval(ge=0, le=_MOST)] = _field(
        100, "communication rounds; may grow when a run resumes"
    )
    epochs: Annotated[int, Ge(1)] | None = _field(1, "local epochs per round")
    steps: Annotated[int, Ge(1)] | None = _field(
        None, "local steps per round, instead of epochs"
    )
    batch_size: int = _field(10, "examples per step")
    lr: float = _field(0.005, "learning rate of the clients")
    lr_decay: Annotated[float, Gt(0)] = _field(1.0, "factor on lr after each round")
    optimizer: str = _field(
        "sgd", "optimizer of the clients, by its name in optax, or FILE.py:FUNCTION"
    )
    schedule: str = _field(
        "constant",
        "factor on lr over the rounds: constant, cosine, warmup_cosine, step, or "
        "FILE.py:FUNCTION of the round",
    )
    loss: str = _field(
        "cross_entropy",
        "loss: cross_entropy, label_smoothing:0.1, focal:2, class_balanced:0.999, or "
        "FILE.py:FUNCTION of (logits, y, mask)",
    )
    mix: str = _field(
        "none", "mixed examples and labels: none, mixup:0.2, cutmix:1, FILE.py:FUNCTION"
    )
    sampling: str = _field(
        "uniform",
        "draw of a round's clients: uniform, size, power_of_choice:CANDIDATES, or "
        "FILE.py:FUNCTION of (key, round, history) that returns weights",
    )
    asynchronous: str | None = _field(
        None,
        "the server updates whenever clients arrive, a round being an update: "
        "fedasync:ALPHA, or fedbuff:BUFFER:RATE for so many clients per update",
    )
    staleness: str = _field(
        "polynomial:0.5",
        "weight of --asynchronous by staleness: constant, polynomial:A or hinge:A:B",
    )
    speeds: str | None = _field(
        None,
        "examples per second of local training, for simulated time: a number, "
        "lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, file:PATH with one per client, or "
        "FILE.py:FUNCTION of the id",
    )
    bandwidths: str | None = _field(
        None, "Mbit/s of each client both ways, for simulated time, like --speeds"
    )
    metrics: str = _field(
        "acc",
        "scores: acc, and further ones of auc, ap, balanced_accuracy, "
        "ece, f1, perplexity, as acc,auc",
    )
    momentum: Annotated[float, Interval(ge=0, lt=1)] = _field(0.0, "momentum of sgd")
    weight_decay: Annotated[float, Ge(0)] = _field(
        0.0, "weight decay, added to the gradient after clipping"
    )
    clip: Annotated[float, Gt(0)] | None = _field(
        None, "largest global norm of a gradient"
    )
    server_optimizer: str | None = _field(
        None, "FedOpt: optax optimizer that takes the averaged update as a gradient"
    )
    server_lr: Annotated[float, Gt(0)] | None = _field(
        None, "learning rate of --server_optimizer"
    )
    aggregate: Literal[
        "mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"
    ] = _field("mean", "rule that the server averages uploads by")
    compress: str | None = _field(
        None, "compression of uploads: top_k:FRACTION, qsgd:LEVELS or low_rank:RANK"
    )
    malicious: str | None = _field(
        None,
        f"fraction of malicious clients and their attack, FRACTION:ATTACK or "
        f"FRACTION:ATTACK:SCALE, one of {', '.join(ATTACKS)}",
    )
    dp: Literal["client", "adaptive", "example"] | None = _field(
        None,
        "differential privacy of clients, with adaptive clipping, or of examples",
    )
    dp_noise: Annotated[float, Ge(0)] | None = _field(
        None, "standard deviation of --dp's noise on a sum, in clipping norms"
    )
    dp_epsilon: Annotated[float, Gt(0)] | None = _field(
        None, "epsilon after all rounds, which sets --dp_noise"
    )
    dp_clip: Annotated[float, Gt(0)] = _field(1.0, "clipping norm of --dp")
    dp_sampling: Literal["fixed", "poisson"] = _field(
        "fixed", "sampling of clients that the accountant of --dp assumes"
    )
    tuned: bool = _field(
        False, "the learning rate that validation chose for the method in the preset"
    )
    drop_last: bool = _field(False, "skip the short last batch of an epoch")
    model: str = _field(
        "auto",
        "network; several: cnn,lenet (client i has number i mod G), blocks:cnn,lenet "
        "or file:PATH with a name per client; FILE.py:FUNCTION for your own; "
        "pretrained:FOLDER for weights of Hugging Face",
    )
    features: int | None = _field(
        None, "feature dimension K of every network, by adaptive average pooling"
    )
    shared_model: str | None = _field(
        None, "small network that all clients exchange (default: the smallest)"
    )
    public: str | None = _field(
        None,
        "public examples: a data set, or a number of them, as cifar100:10000 (of the "
        "clients' own data set examples that no client gets)",
    )
    bn_stats: str = _field("aggregate", "running statistics: aggregate, local or batch")
    compute_dtype: str = _field("float32", "dtype of the body: float32 or bfloat16")
    matmul_precision: Literal["default", "float32", "tensorfloat32", "bfloat16"] = (
        _field("default", "precision of matrix products and convolutions")
    )
    loop: Literal["dynamic", "static"] = _field(
        "dynamic", "trip counts of local epochs", free=True
    )
    init_from: str | None = _field(
        None, "run directory whose last checkpoint has the variables to start from"
    )
    adapt: str | None = _field(
        None,
        "train these parameters of a frozen network: lora:RANK, ffa_lora:RANK (also "
        "with :attention, :dense or :all), head, bias, norms or prompt:TOKENS",
    )
    base: str | None = _field(
        None,
        "frozen network of --adapt: the shared model of a run directory, or a folder "
        "of Hugging Face",
    )
    feature_cache: Literal["float32", "bfloat16"] | None = _field(
        None, "compute the features of --adapt=head once, and store them in this dtype"
    )
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] = _field(0, "random seed")
    eval_every: Annotated[int, Interval(ge=0, le=_MOST)] = _field(
        1, "rounds between evaluations; 0: only after the last round"
    )
    patience: Annotated[int, Interval(ge=0, le=_MOST)] = _field(
        0, "evaluations without a better validation score to stop after", free=True
    )
    checkpoint_every: Annotated[int, Interval(ge=1, le=_MOST)] = _field(
        10, "rounds between checkpoints", free=True
    )
    conv: str = _field(
        "auto", f"algorithm of convolutions: {', '.join(CONVOLUTIONS)}", free=True
    )
    width: str = _field("auto", "clients per vmapped batch on each device", free=True)
    devices: str = _field("auto", "devices to use: a number, all or auto", free=True)
    client_memory: Literal["device", "host"] = _field(
        "device", "memory of the clients' state between rounds", free=True
    )
    tensorboard: bool = _field(False, "write event files for TensorBoard", free=True)
    wandb: bool = _field(False, "log to Weights & Biases", free=True)
    data_dir: str | None = _field(
        None, "directory of prepared TFDS data sets (default: TFDS_DATA_DIR)", free=True
    )
    hparams: dict[str, Any] = dataclasses.field(default_factory=dict)

    def replace(self, **values: Any) -> "Config":
        """Returns the settings with some of them changed."""
        return dataclasses.replace(self, **values)


_FIELDS = {field.name: field for field in dataclasses.fields(Config) if field.metadata}
HELP = {name: field.metadata["help"] for name, field in _FIELDS.items()}
FREE = {name for name, field in _FIELDS.items() if field.metadata["free"]}
# Kind, default, range and choices by name
SETTINGS = {name: hyperparameters.of(Config)[name] for name in _FIELDS}


def resolve(given: Mapping[str, Any]) -> Config:
    """Returns the given settings over those of a preset and the defaults.

    Args:
      given: settings by name, as values or as text. `hparams` is {name: value or text};
        `config` is the path of a config.json that takes the place of the preset.

    Raises:
      InputError: an unknown name, or a value out of range.
    """
    base = read(Path(given["config"]).expanduser()) if given.get("config") else None
    usual = base.preset if base else DEFAULT_PRESETS.get(given.get("dataset", "digits"))
    name = usual if given.get("preset") is None else given["preset"]
    preset = PRESETS[text.choose("preset", name, PRESETS)] if name else None
    start = preset.settings_of(given.get("algo")) if preset else {}
    values = dict(vars(base)) if base else dict(start)
    for setting, x in given.items():
        if setting not in ("config", "hparams"):
            values[setting] = from_text(SETTINGS[setting], x)
    values["preset"] = name
    if not values.get("algo"):
        raise InputError(f"Choose a method with --algo: {', '.join(ALGORITHMS)}.")
    if given.get("steps") is not None and given.get("epochs") is not None:
        raise InputError("Specify exactly one of --epochs and --steps.")
    by_steps = values.get("steps") is not None and given.get("epochs") is None
    values["epochs" if by_steps else "steps"] = None
    values |= _by_partition(values.get("partition", Config.partition), values, given)
    algo = text.choose("algo", values["algo"], ALGORITHMS)
    known = {base.algo: base.hparams} if base else preset.hparams if preset else {}
    if values.get("tuned") and given.get("lr") is None:
        if (lr := tuned(name, algo)) is None:
            raise InputError(f"--tuned: {algo} has no tuned rate in preset {name}.")
        values["lr"] = lr
    own = typed(find(algo), given.get("hparams", {}))
    values["hparams"] = known.get(algo, {}) | own
    return complete(Config(**values))


def _by_partition(
    spec: str, values: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings that the partition decides."""
    file = spec.startswith("file:")
    if not (file or user_code.named(spec)):
        natural = spec.startswith("natural:")
        text.choose("partition", "natural:COLUMN" if natural else spec, PARTITIONS)
        missing = [name for name in BY_FILE if values.get(name, 0) is None]
        own = {"clients": values.get("clients")} if natural else {}
        return {name: getattr(Config, name) for name in missing} | own
    if unused := [name for name in BY_FILE if given.get(name) is not None]:
        raise InputError(f"--{unused[0]} has no effect with --partition={spec}.")
    return dict.fromkeys(BY_FILE) | ({"clients": given.get("clients")} if file else {})


def complete(config: Config) -> Config:
    """Returns the settings with all hyperparameters of the method.

    Raises:
      InputError: a value out of range, or settings that contradict each other.
    """
    text.choose("algo", config.algo, ALGORITHMS)
    hparams = hyperparameters.defaults(find(config.algo)) | config.hparams
    config = config.replace(hparams=hparams)
    hyperparameters.check(find(config.algo), hparams)
    for name, known in SETTINGS.items():
        hyperparameters.check_value(known, getattr(config, name))
    if config.shift is not None:
        shifts.parse(config.shift)
    if not config.dataset.startswith(PREFIXES):
        text.choose("dataset", config.dataset, DATASETS)
    text.choose("conv", config.conv, CONVOLUTIONS)
    if not user_code.named(config.optimizer):
        text.choose("optimizer", config.optimizer, OPTIMIZERS)
    elif config.weight_decay or config.clip is not None:
        raise InputError(
            "--weight_decay and --clip belong in an optimizer of your own."
        )
    text.choose("server_optimizer", config.server_optimizer or "sgd", OPTIMIZERS)
    if config.momentum and config.optimizer != "sgd":
        raise InputError("--momentum needs --optimizer=sgd.")
    if (config.server_optimizer is None) != (config.server_lr is None):
        raise InputError("--server_optimizer and --server_lr need each other.")
    participation(config.participation)
    if config.asynchronous is not None:
        _check_asynchronous(config)
    attack(config)
    compression(config)
    if config.adapt is not None:
        ADAPTATIONS.read(config.adapt)
    if config.adapt is None and config.base is not None:
        raise InputError("--base needs --adapt.")
    if config.base is not None and pretrained.is_folder(config.base):
        model = pretrained.PREFIX + config.base
        config = config.replace(model=model, base=None)
    if config.feature_cache is not None and config.adapt != "head":
        raise InputError("--feature_cache needs --adapt=head.")
    config = _with_noise(config)
    for name in ("width", "devices"):
        if getattr(config, name) not in ("auto", "all"):
            check(name, parse(int, name, getattr(config, name)), 1, math.inf)
    return config


def _check_asynchronous(config: Config) -> None:
    """Raises InputError for settings that need rounds of a whole cohort."""
    low, high = participation(config.participation)
    known = {
        "a range of --participation": low != high,
        "--sampling": config.sampling != "uniform",
        "--aggregate": config.aggregate != "mean",
        "--server_optimizer": config.server_optimizer is not None,
        "--dp": config.dp is not None,
        "--client_memory=host": config.client_memory == "host",
    }
    if excluded := [name for name, given in known.items() if given]:
        raise InputError(f"--asynchronous excludes {', '.join(excluded)}.")


def read(path: Path) -> Config:
    """Returns the settings of a config.json; names that are no settings are ignored.

    Raises:
      InputError: the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {
            name: content[name] for name in (*SETTINGS, "hparams") if name in content
        }
        return Config(**known)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


Fraction = Annotated[float, Interval(gt=0, le=1)]


def participants(low: Fraction, high: Fraction | None = None) -> tuple[float, float]:
    """Returns a range of fractions, by default of one number."""
    if high is not None and low > high:
        raise InputError(f"`low` must be at most high={high:g}, got {low:g}.")
    return low, low if high is None else high


def participation(value: str) -> tuple[float, float]:
    """Returns the range of `0.1:1`, or of `0.5` twice the same number."""
    try:
        return participants(**hyperparameters.values(participants, str(value)))
    except InputError as error:
        raise InputError(f"--participation={value}: {error}") from None


def attack(config: Config) -> tuple[float, str, float]:
    """Returns fraction, attack and scale of `0.2:sign_flip` or `0.2:scale:10`.

    Without malicious clients the fraction is 0.
    """
    fraction, _, rest = (config.malicious or f"0:{ATTACKS[0]}").partition(":")
    name, _, scale = rest.partition(":")
    share = parse(float, "malicious", fraction)
    check("malicious", share, 0, 1, open_high=True)
    found = text.choose("attack", name, ATTACKS)
    return share, found, parse(float, "malicious", scale or "1")


def compression(config: Config) -> tuple[str, float] | None:
    """Returns rule and amount of `top_k:0.01`."""
    if config.compress is None:
        return None
    name, _, amount = config.compress.partition(":")
    rule = text.choose("compression", name, COMPRESSIONS)
    return rule, parse(float, "compress", amount)


def accounted(config: Config) -> dict[str, Any]:
    """Returns the arguments of `differential_privacy.epsilon` for clients."""
    if config.clients is None:
        raise InputError("--dp_epsilon needs --clients; specify --dp_noise.")
    n = config.clients - math.floor(config.unseen * config.clients + 0.5)
    most = max(1, math.floor(participation(config.participation)[1] * n + 1e-9))
    return {"clients": n, "cohort": most, "sampling": config.dp_sampling}


def _with_noise(config: Config) -> Config:
    """Returns the settings with the noise that --dp_epsilon needs."""
    if config.dp is None:
        if config.dp_noise is not None or config.dp_epsilon is not None:
            raise InputError("--dp_noise and --dp_epsilon need --dp.")
        return config
    if config.dp_noise is not None:
        return config
    if config.dp_epsilon is None or config.dp == "example":
        raise InputError(f"--dp={config.dp} needs --dp_noise.")
    noise = differential_privacy.noise_for(
        config.dp_epsilon, config.rounds, **accounted(config)
    )
    return config.replace(dp_noise=noise)


def resumed(recorded: Config, given: Mapping[str, Any]) -> Config:
    """Returns recorded settings with the given ones, where a resume may change them.

    Raises:
      InputError: others differ; the message has both values of each.
    """
    wanted = {name: x for name, x in given.items() if name not in ("hparams", "config")}
    hparams = given.get("hparams", {})
    if wanted.get("algo", recorded.algo) == recorded.algo:
        hparams = typed(find(recorded.algo), hparams)
    pairs = [(name, getattr(recorded, name), x) for name, x in wanted.items()]
    pairs += [(f"hparam {n}", recorded.hparams.get(n), x) for n, x in hparams.items()]
    differing = [
        f"{name} (recorded {before}, now {now})"
        for name, before, now in pairs
        if name not in {*FREE, "rounds"} and not same(name, before, now)
    ]
    if wanted.get("rounds", recorded.rounds) < recorded.rounds:
        differing += [f"rounds (recorded {recorded.rounds}, may only grow)"]
    if differing:
        raise InputError(
            f"The recorded run has other settings: {', '.join(differing)}. "
            "Choose another directory by --workdir (run) or --root (sweep)."
        )
    changed = {n: x for n, x in wanted.items() if n in FREE or n == "rounds"}
    return complete(recorded.replace(**changed))


def changes(given: Mapping[str, Any]) -> list[str]:
    """Returns what the user set as name=value, but for what names a run otherwise."""
    skipped = {"algo", "seed", "rounds", "preset", *FREE}
    parts = [f"{n}={x}" for n, x in given.items() if n in SETTINGS and n not in skipped]
    return parts + [f"{name}={x}" for name, x in given.get("hparams", {}).items()]


def run_name(given: Mapping[str, Any], config: Config, seed: str = "") -> str:
    """Returns ALGO-DATASET-PARTITION-seedK and the user's changes as a file name."""
    preset = [given["preset"]] if given.get("preset") else []
    names = map(user_code.short, (config.algo, config.dataset, config.partition))
    own = [x for x in changes(given) if not x.startswith(("dataset=", "partition="))]
    return file_name([*preset, *names, seed or f"seed{config.seed}", *own])


def file_name(parts: list[str]) -> str:
    """Returns words as the name of a file."""
    return "-".join(re.sub(r"[^\w.=+-]+", "_", str(part)) for part in parts)
