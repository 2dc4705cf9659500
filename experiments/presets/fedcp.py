"""The FedCP paper's main results; its numbers are micro means before local training (`pre`), of the
best round."""

from experiments.presets.preset import Preset

_SETTINGS = {
    "algo": "fedcp",
    "partition": "dirichlet",
    "alpha": 0.1,
    "clients": 20,
    "model": "cnn",
    "batch_size": 10,
    "epochs": 1,
    "lr": 0.005,
    "rounds": 2000,  # the paper: up to 2000, until convergence
}

_STEPS = 4500
_HEADLINES = {"fedphp": "post/global_acc_micro"}  # the paper's code scores w_i, not the average h_i that it inherits
_PROTOCOL = (
    "mean of 5 repetitions; correct answers over all test examples of all clients (acc_micro), before local training "
    "(of FedPHP after it), of the best round on the test examples; up to 2000 rounds, on 60,000 images."
)

CIFAR10 = Preset(
    description="FedCP, Table 2, Cifar10, practical setting: 20 clients, Dirichlet 0.1, the 4-layer CNN",
    settings={"dataset": "cifar10", **_SETTINGS},
    steps=_STEPS,
    headline="pre/acc_micro",
    headlines=_HEADLINES,
    protocol=_PROTOCOL,
    published={
        "fedavg": "59.16 ± 0.47",
        "fedprox": "59.21 ± 0.40",
        "per_fedavg": "87.74 ± 0.19",
        "pfedme": "88.09 ± 0.32",
        "fedamp": "88.70 ± 0.18",
        "ditto": "90.59 ± 0.01",
        "fedper": "89.22 ± 0.33",
        "fedrep": "90.40 ± 0.24",
        "fedrod": "89.93 ± 0.01",
        "fedfomo": "88.06 ± 0.02",
        "fedphp": "88.92 ± 0.02",
        "fedcp": "91.30 ± 0.17",
    },
)

CIFAR100 = Preset(
    description="FedCP, Table 2, Cifar100, practical setting: 20 clients, Dirichlet 0.1, the 4-layer CNN",
    settings={"dataset": "cifar100", **_SETTINGS},
    steps=_STEPS,
    headline="pre/acc_micro",
    headlines=_HEADLINES,
    protocol=_PROTOCOL,
    published={
        "fedavg": "31.89 ± 0.47",
        "fedprox": "31.99 ± 0.41",
        "per_fedavg": "44.28 ± 0.33",
        "pfedme": "47.34 ± 0.46",
        "fedamp": "47.69 ± 0.49",
        "ditto": "52.87 ± 0.64",
        "fedper": "49.63 ± 0.54",
        "fedrep": "52.39 ± 0.35",
        "fedrod": "50.94 ± 0.11",
        "fedfomo": "45.39 ± 0.45",
        "fedphp": "50.52 ± 0.16",
        "fedcp": "59.56 ± 0.08",
    },
)
