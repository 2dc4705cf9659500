"""The methods of PFLlib that have a counterpart here, for `benchmarks.agreement`.

PFLlib's FedGC has none. A method of `METHODS` names PFLlib's server, the argument of
PFLlib's command line that each hyperparameter becomes, and the hyperparameters at which
both do the same.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_pfl.experiment.config import Config

# name of a hyperparameter, function of the run's settings, or value
Argument = str | float | Callable[[Config], float]


def _all(server: Any) -> list[float]:
    return server.rs_test_acc


class Method(NamedTuple):
    """A server of PFLlib and how it corresponds to a method."""

    module: str  # of flcore.servers
    server: str  # its class
    arguments: dict[str, Argument] = {}  # noqa: RUF012
    # ours, with the values that a comparison requires; None: the default
    hparams: dict[str, Any] = {}  # noqa: RUF012
    score: str = "pre/acc/micro"
    # rounds that a score of PFLlib comes after the same one here; negative: before
    lag: int = 0
    read: Callable[[Any], list[float]] = _all  # server -> scores
    settings: tuple[str, ...] = ()  # further flags of the run
    shared: bool = False  # its clients exchange a model, here of the same network
    body_only: bool = False  # its model has no head
    differs: str = ""  # what remains different


SAME = {"alpha": 1 / 11, "beta": 1 / 11}
LOCAL = "PFLlib's penalty has no gradient: it is Local there, as at lam=0 here"

METHODS = {
    "local": Method("serverlocal", "Local"),
    "fedavg": Method("serveravg", "FedAvg"),
    "fedprox": Method("serverprox", "FedProx", {"mu": "mu"}),
    "scaffold": Method(
        "serverscaffold", "SCAFFOLD", {"server_learning_rate": "server_lr"}
    ),
    "feddyn": Method(
        "serverdyn",
        "FedDyn",
        {"alpha": "alpha"},
        differs="the proximal term is the norm in PFLlib, its square here",
    ),
    "moon": Method("servermoon", "MOON", {"mu": "mu", "tau": "tau"}),
    "fedlc": Method(
        "serverlc",
        "FedLC",
        {"tau": 1.0},
        {"tau": 0.0},
        differs="PFLlib's margin counts the examples of all clients, and is one "
        "constant where the classes have equally many: tau=0 here",
    ),
    "fedntd": Method(
        "serverntd",
        "FedNTD",
        {"beta": "beta", "tau": "tau"},
        differs="PFLlib averages uniformly, here weighted by examples",
    ),
    "fedgen": Method(
        "servergen",
        "FedGen",
        {
            "noise_dim": "noise",
            "hidden_dim": "hidden",
            "generator_learning_rate": "generator_lr",
            "server_epochs": "server_steps",
            "localize_feature_extractor": False,
        },
        {"alpha": 1.0, "shared": "model"},
    ),
    "fedcross": Method(
        "servercross",
        "FedCross",
        {
            "fedcross_alpha": "alpha",
            "first_stage_bound": 0,
            "collaberative_model_select_strategy": 1,
        },
        {"select": "lowest"},
        settings=("--eval_every=1",),
        score="post/acc/micro",
        lag=1,
        differs="PFLlib adds the similarities of pairs of layers",
    ),
    "fedbn": Method(
        "serverbn", "FedBN", differs="the network has no batch norm: FedAvg"
    ),
    "fedper": Method("serverper", "FedPer"),
    "fedrep": Method(
        "serverrep", "FedRep", {"plocal_epochs": "head_epochs"}, {"body_epochs": None}
    ),
    "lg_fedavg": Method("serverlg", "LG_FedAvg"),
    "fedbabu": Method(
        "serverbabu",
        "FedBABU",
        {"fine_tuning_epochs": "fine_tune_epochs"},
        {"fine_tune": "all"},
        settings=("--eval_every=0",),
        differs="PFLlib fine-tunes the client's model after one more local training",
    ),
    "per_fedavg": Method(
        "serverperavg",
        "PerAvg",
        hparams={"alpha": None, "beta": None},
        differs="PFLlib cuts a batch of 2B in two and takes two epochs a round",
    ),
    "pfedme": Method(
        "serverpFedMe",
        "pFedMe",
        {
            "lamda": "lam",
            "K": "inner_steps",
            "p_learning_rate": "inner_lr",
            "beta": "beta",
        },
        score="pre/global_acc/micro",
        read=lambda server: server.rs_test_acc_per,
        differs="PFLlib decays the weights of theta, and scores w",
    ),
    "ditto": Method(
        "serverditto",
        "Ditto",
        {"mu": "lam", "plocal_epochs": "personal_epochs"},
        {"personal_epochs": 1},
        # the global model's and the personal ones' in turns
        read=lambda server: server.rs_test_acc[1::2],
    ),
    "apfl": Method(
        "serverapfl",
        "APFL",
        {"alpha": "alpha"},
        {"adaptive": True, "lr_alpha": None},
        differs="PFLlib trains v alone and replaces it by the mixture after a round",
    ),
    "fedamp": Method(
        "serveramp",
        "FedAMP",
        {"alphaK": "alpha", "sigma": "sigma", "lamda": 1.0},
        {"lam": 0.0},
        differs=LOCAL,
    ),
    "fedphp": Method(
        "serverphp",
        "FedPHP",
        {"mu": "mu0", "lamda": "lam"},
        score="post/global_acc/micro",
    ),
    "fedrod": Method("serverrod", "FedROD", hparams={"gamma": 1.0}),
    "fedfomo": Method(
        "serverfomo",
        "FedFomo",
        {"M": "received"},
        {"val": 0.2, "epsilon": 0.0},
        differs="PFLlib trains in one order of the examples",
    ),
    "fedala": Method(
        "serverala",
        "FedALA",
        {"rand_percent": "percent", "eta": "lr_weights", "layer_idx": 2},
        {"blended": "head", "window": 10, "threshold": 0.1},
    ),
    "fedcp": Method("servercp", "FedCP", {"lamda": "lam"}, {"policy": "gumbel"}),
    "fd": Method(
        "serverfd",
        "FD",
        {"lamda": "gamma"},
        differs="PFLlib averages logits and takes them for probabilities",
    ),
    "fml": Method(
        "serverfml",
        "FML",
        # 1/11 CE + 10/11 KL / 10 is 2/11 of our loss with 10 classes
        SAME | {"local_learning_rate": lambda config: 5.5 * config.lr},
        {"alpha": 0.5, "beta": 0.5, "clip": 55.0},
        shared=True,
        differs="PFLlib lets gradients into both models",
    ),
    "fedkd": Method(
        "serverkd",
        "FedKD",
        {
            "mentee_learning_rate": lambda config: config.lr,
            "T_start": 0.95,
            "T_end": 0.98,
        },
        shared=True,
        differs="PFLlib sends low-rank parameters, divides the divergence by the "
        "classes and clips gradients",
    ),
    "fedproto": Method(
        "serverproto",
        "FedProto",
        {"lamda": "lam"},
        score="pre/proto_acc/micro",
        differs="PFLlib's prototypes are the features seen during training",
    ),
    "apple": Method(
        "serverapple",
        "APPLE",
        {
            "dr_learning_rate": "coef_lr",
            "mu": "mu",
            "L": "last",
            # which it multiplies by the number of clients
            "local_learning_rate": lambda config: config.lr / config.clients,
        },
        {"scheduler": "cosine", "coef_momentum": 0.0, "start": "common"},
        differs="PFLlib sends the combination in place of the core model, and divides "
        "the gradient of p by the number of parameters",
    ),
    "gpfl": Method(
        "servergpfl",
        "GPFL",
        {"lamda": "lam", "mu": "mu"},
        differs="PFLlib's conditions come from the embeddings trained last",
    ),
    "fedgh": Method(
        "servergh",
        "FedGH",
        {"server_learning_rate": "server_lr"},
        {"server_epochs": 1},
        differs="PFLlib's common head is the object of the first client's head, "
        "which that client trains",
    ),
    "feddbe": Method(
        "serverdbe",
        "FedDBE",
        {"kl_weight": "kappa", "momentum": "momentum"},
        settings=("--eval_every=1",),
        lag=-1,
        differs="PFLlib's initialisation is one round more, which counts here, and "
        "keeps no model",
    ),
    "fedcac": Method(
        "servercac",
        "FedCAC",
        {"tau": "tau", "beta": "beta"},
        differs="PFLlib starts the second round from critical parameters of the "
        "initial model",
    ),
    "pfl_da": Method("serverda", "PFL_DA", {"lamda": 1.0}, {"variant": "pfllib"}),
    "fedas": Method(
        "serveras",
        "FedAS",
        hparams={"align_lr": 0.01, "align_epochs": 1},
        differs="PFLlib aligns in batches of 16 and drops short ones there",
    ),
    "fedpcl": Method(
        "serverpcl",
        "FedPCL",
        {"tau": "tau"},
        {"clip": 10.0},
        body_only=True,
        differs="PFLlib indexes prototypes by their order of arrival, not by class, "
        "and predicts classes that a client does not have",
    ),
    "fedpac": Method(
        "serverpac",
        "FedPAC",
        {"lamda": "lam"},
        {"head_epochs": 1, "head_lr": 1.0},
        differs="PFLlib combines heads in another order of the clients than their "
        "statistics",
    ),
    "fedmtl": Method(
        "servermtl",
        "FedMTL",
        {"itk": 4000},
        {"variant": "pfllib"},
    ),
}


def arguments(config: Config) -> dict[str, Any]:
    """Returns the arguments of PFLlib's command line that belong to the method of a
    run."""

    def value(x: Argument) -> Any:
        if isinstance(x, str):
            return config.hparams[x]
        return x(config) if callable(x) else x

    return {k: value(x) for k, x in METHODS[config.algo].arguments.items()}


def flags(name: str, model: str) -> list[str]:
    """Returns the flags of a run of a method at which both libraries do the same."""
    method = METHODS[name]
    shared = [f"--shared_model={model}"] if method.shared else []
    hparams = {k: v for k, v in method.hparams.items() if v is not None}
    given = [f"--hparam={k}={v}" for k, v in hparams.items()]
    return [f"--algo={name}", *shared, *method.settings, *given]
