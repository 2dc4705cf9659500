"""Names with a hint, and numbers with their nouns."""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError, nearest

# Names of PFLlib, Flower and FL-bench, by kind, with what to write here instead.
ALIASES: dict[str, dict[str, str]] = {
    "flag": {
        "algorithm": "--algo",
        "batch-size": "--batch_size",
        "client_lr": "--lr",
        "data": "--dataset",
        "device": "the environment variable JAX_PLATFORMS",
        "fraction_fit": "--participation",
        "global_epoch": "--rounds",
        "global_rounds": "--rounds",
        "goal": "--workdir",
        "join_ratio": "--participation",
        "lamda": "--hparam=lam=VALUE",
        "learning_rate": "--lr",
        "learning_rate_decay_gamma": "--lr_decay",
        "local_epoch": "--epochs",
        "local_epochs": "--epochs",
        "local_learning_rate": "--lr",
        "local_lr": "--lr",
        "local_steps": "--steps",
        "method": "--algo",
        "min_fit_clients": "--participation",
        "num_client": "--clients",
        "num_clients": "--clients",
        "num_rounds": "--rounds",
        "output": "--workdir",
        "random_join_ratio": "--participation=LOW:HIGH",
        "root": "--workdir",
        "seeds_list": "--seeds",
        "targets": "the command report, which computes rounds to a score",
        "times": "--seeds",
    },
    "algo": {
        "fedavgm": "fedavg with --server_optimizer=fedavgm",
        "fedadam": "fedavg with --server_optimizer=fedadam",
        "fedyogi": "fedavg with --server_optimizer=fedyogi",
        "fedadagrad": "fedavg with --server_optimizer=fedadagrad",
        "finetune": "fedavg_ft",
        "fml": "mutual learning, listed by --list",
        "perfedavg": "per_fedavg",
    },
    "dataset": {
        "femnist": "",
        "cifar": "cifar10 or cifar100",
        "fmnist": "fashion_mnist",
        "fashionmnist": "fashion_mnist",
        "tiny_imagenet": "npz:PATH with your own copy",
        "tinyimagenet": "npz:PATH with your own copy",
    },
    "partition": {
        "dir": "dirichlet_class",
        "dirichlet": "dirichlet_class or dirichlet_hsu",
        "pat": "pathological",
        "noniid": "pathological or dirichlet_class",
        "exdir": "dirichlet_class",
    },
}

# the papers' names of the methods
METHODS = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg_ft": "FedAvg, fine-tuned",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "per_fedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "lg_fedavg": "LG-FedAvg",
    "fedbabu": "FedBABU",
    "fedbn": "FedBN",
    "fedma": "FedMA",
    "pfedma": "FedMA, fine-tuned",
    "fedrod": "FedRoD",
    "ditto": "Ditto",
    "apfl": "APFL",
    "fedamp": "FedAMP",
    "fedphp": "FedPHP",
    "fedala": "FedALA",
    "fedfomo": "FedFomo",
    "pfedhn": "pFedHN",
    "mocha": "MOCHA",
    "fedproto": "FedProto",
    "fd": "FD",
    "fml": "FML",
    "fedkd": "FedKD",
    "fedapen": "FedAPEN",
    "mnfl": "MNFL",
    "mnfl_het": "MNFL",
    "fedmd": "FedMD",
    "sim_pfd": "Sim-pFD",
    "topk_pfd": "TopK-pFD",
    "feddf": "FedDF",
    "pfeddf": "FedDF, fine-tuned",
    "fedem": "FedEM",
    "fedcp": "FedCP",
    "feddva": "FedDVA",
    "pfedc": "pFedC",
    "privacy_pfedc": "Privacy-pFedC",
    "pfedafm": "pFedAFM",
    "moon": "MOON",
    "feddyn": "FedDyn",
    "fedlc": "FedLC",
    "fedntd": "FedNTD",
    "feddbe": "FedDBE",
    "knn_per": "kNN-Per",
    "fedadmm": "FedADMM",
    "fedgh": "FedGH",
    "fedpac": "FedPAC",
    "fedas": "FedAS",
    "fedtgp": "FedTGP",
    "pfedsim": "pFedSim",
    "fedcac": "FedCAC",
    "gpfl": "GPFL",
    "fedmtl": "FedMTL",
    "fedmrl": "FedMRL",
    "fedgen": "FedGen",
    "fedpcl": "FedPCL",
    "apple": "APPLE",
    "ccvr": "CCVR",
    "fedl2g": "FedL2G",
    "fedsr": "FedSR",
    "pfl_da": "PFL-DA",
    "fedcross": "FedCross",
    "cfl": "CFL",
    "fednova": "FedNova",
    "hetlora": "HetLoRA",
    "fedsa_lora": "FedSA-LoRA",
    "flora": "FLoRA",
    "pfedlora": "pFedLoRA",
    "pfedfda": "pFedFDA",
    "floco": "Floco",
    "fedap": "FedAP",
    "pfedla": "pFedLA",
    "pefll": "PeFLL",
    "fedssa": "FedSSA",
    "flute": "FLUTE",
}


def proper(label: str) -> str:
    """Returns a label, as `ditto, lam=1`, with the paper's name of its method."""
    method, comma, rest = label.partition(",")
    return METHODS.get(method, method) + comma + rest


def hint(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns a sentence with the name that was probably meant, or an empty text."""
    other = ALIASES.get(kind, {}).get(name.lower().replace("-", "_"))
    if other is None:
        near = nearest(name, known)
        other = f"--{near}" if near and kind == "flag" else near
    return f" Did you mean {other}?" if other else ""


def choose(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns `name`; InputError with a hint and the known names if it is unknown."""
    known = list(known)
    if name in known or user_code.named(name):
        return name
    file = f" Did you mean {name}:NAME?" if name.endswith(".py") else ""
    raise InputError(
        f"Unknown {kind} {name!r}.{file or hint(kind, name, known)} "
        f"Known: {', '.join(known)}."
    )


def plural(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `1 round` and `12,000 rounds`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Returns a time to read, such as `40 s`, `3 min` and `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def content(path: str) -> str:
    """Returns the content of a text file; InputError if it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None


def summary(thing: Any) -> str:
    """Returns a text, a preset's description, or the first sentence of a docstring."""
    if isinstance(known := getattr(thing, "description", thing), str):
        return known
    paragraph = (inspect.getdoc(thing) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).partition(". ")[0].rstrip(".")
