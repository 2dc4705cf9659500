"""The data sets that need no download."""

from experiments.presets.preset import Preset

_SMALL = {
    "partition": "pathological",
    "classes_per_client": 2,
    "clients": 20,
    "model": "mlp",
    "batch_size": 10,
    "epochs": 5,
    "lr": 0.1,  # of 0.03, 0.1, 0.3: Ditto wobbles at 0.3, FedAvg and pFedC are slower at 0.03; flat by round 20
    "rounds": 40,
}

DIGITS = Preset(
    description="digits, 20 clients with 2 classes each, an MLP of 64: the first thing to run",
    settings={"dataset": "digits", **_SMALL},
    headline="post/acc_present",
    hparams={"fedcp": {"lam": 1.0}},  # the paper's 5 goes with its lr of 0.005; with 0.1 the features collapse
)

SYNTHETIC = Preset(
    description="Gaussian blobs, 20 clients with 2 classes each: what every method must learn",
    settings={"dataset": "synthetic", **_SMALL, "epochs": 1, "rounds": 20, "lr": 0.05},
    headline="post/acc_present",
)
