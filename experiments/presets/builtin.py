"""The data sets that need no download."""

from experiments.presets.preset import Preset

_LEARNING = {
    "model": "mlp",
    "batch_size": 10,
    "epochs": 5,
    # of 0.03, 0.1, 0.3: Ditto wobbles at 0.3, FedAvg and pFedC are slower at 0.03; flat
    # by round 20
    "lr": 0.1,
}
_TWO_CLASSES = {
    "partition": "pathological",
    "classes_per_client": 2,
    "clients": 20,
    **_LEARNING,
    "rounds": 40,
}
# the paper's 5 goes with its lr of 0.005; with 0.1 the features collapse
_HPARAMS = {"fedcp": {"lam": 1.0}}

BUILTIN: dict[str, Preset] = {
    "digits": Preset(
        description=(
            "digits, 100 clients of 17 or 18, Dirichlet over classes (0.1 each), MLP "
            "of 64: run it first"
        ),
        settings={
            "dataset": "digits",
            "partition": "dirichlet_hsu",
            "alpha": 1.0,
            "clients": 100,
            **_LEARNING,
            "rounds": 20,
        },
        headline="pre/acc",
        hparams=_HPARAMS,
        measured={
            "local": "91.0",
            "fedavg": "91.0",
            "fedrep": "90.9",
            "pfedc": "91.9",
            "fedrod": "92.9",
            "fedavg_ft": "94.3",
            "ditto": "94.9",
        },
    ),
    "digits_pathological": Preset(
        description=(
            "digits, 20 clients with 2 classes each, an MLP of 64: where being alone "
            "is best"
        ),
        settings={"dataset": "digits", **_TWO_CLASSES},
        headline="post/acc_present",
        hparams=_HPARAMS,
    ),
    "synthetic": Preset(
        description=(
            "Gaussian blobs, 20 clients with 2 classes each: what every method must "
            "learn"
        ),
        settings={
            "dataset": "synthetic",
            **_TWO_CLASSES,
            "epochs": 1,
            "rounds": 20,
            "lr": 0.05,
        },
        headline="post/acc_present",
    ),
}
