"""FedDVA's experiments; the paper prints no numbers, only figures."""

from typing import Any

from experiments.presets.preset import Preset

_MARKS = {
    "algo": "feddva",
    "dataset": "mnist",
    "marks": True,
    # all in all 10000: balanced, as the released code allots the marked images
    "partition": "dirichlet_total",
    "alpha": 10_000.0,
    "epochs": 5,
    "optimizer": "adam",
    "lr": 0.001,
    "clip": 10.0,  # the paper says nothing of it
}
_PROTOCOL = (
    "the paper has figures and no numbers: latents of z mixed over clients, of c clustered by client. "
    "`python -m experiments.figures RUN` draws them and measures both by linear probes."
)

# the paper gives no number
_LABELS = {"marks": False, "partition": "dirichlet_hsu", "alpha": 0.5}
_ORDER = (
    "the paper has curves of accuracy over rounds and no numbers: FedDVA above FedAvg, FedAvg fine-tuned and Ditto, "
    "with a narrower band over clients. It gives no number for the label skew: here each client draws its classes "
    "from Dirichlet 0.5; the released code cuts each class over the clients (dirichlet_total). Running statistics of "
    "the classifiers on the CNN are averaged, FedDVA's stay with the client (for all: --bn_stats=local)."
)
_TENTH = {
    "model": "cnn_dva_small",
    "data_fraction": 0.1,
    "batch_size": 32,
    "epochs": 2,
    "rounds": 20,
    "eval_every": 1,
}


def _classification(description: str, small: bool, **settings: Any) -> Preset:
    """FedDVA's classifier of [z; c] beside classifiers on the CNN of the same width."""
    size = _TENTH if small else {"model": "cnn_dva", "batch_size": 256, "rounds": 200}
    classify = {"latent": 8, "personal": 8, "head": "personal"} | (
        {"hidden": 128} if small else {}
    )
    smaller = ", a tenth of the images, hidden widths 16 to 128" if small else ""
    return Preset(
        description=f"FedDVA, {description}, 20 clients{smaller}",
        settings={**_MARKS, "clients": 20, **settings, **size},
        headline="post/acc",
        # its fine-tuned model is what predicts
        headlines={"fedavg": "pre/acc", "fedavg_ft": "pre/acc"},
        hparams={
            "feddva": classify,
            "ditto": {"lam": 0.1},
            "fedavg_ft": {"fine_tune_epochs": 5},
        },
        protocol=_ORDER,
    )


def _both(name: str, description: str, **settings: Any) -> dict[str, Preset]:
    made = {
        small: _classification(description, small, **settings)
        for small in (False, True)
    }
    return {f"feddva_{name}": made[False], f"feddva_{name}_small": made[True]}


FEDDVA: dict[str, Preset] = {
    "feddva_marks": Preset(
        description="FedDVA, MNIST with marks: 20 clients, four types of mark, all networks as published",
        settings={**_MARKS, "clients": 20, "batch_size": 256, "rounds": 200},
        steps=1100,
        headline="post/elbo",
        protocol=_PROTOCOL,
    ),
    "feddva_small": Preset(
        description="FedDVA, MNIST with marks, notebook-sized: 4 clients, hidden widths 16 to 128, a tenth of the "
        "images",
        settings={
            **_MARKS,
            "clients": 4,
            "data_fraction": 0.1,
            "batch_size": 64,
            "epochs": 2,
            "rounds": 20,
            "eval_every": 5,
        },
        headline="post/elbo",
        hparams={"feddva": {"hidden": 128, "exchange": "z"}},
        protocol=_PROTOCOL
        + " Widths, images, batch, epochs and rounds are chosen for the time; and the encoder of c stays with its "
        "client, as with a shared one c does not tell the clients apart (experiments/README.md).",
    ),
    **_both("classify_marks", "Fig. 6: classification, MNIST with marks"),
    **_both(
        "classify_mnist", "Fig. 7: classification, MNIST with label skew", **_LABELS
    ),
    **_both(
        "classify_cifar10",
        "Fig. 7: classification, CIFAR-10 with label skew",
        dataset="cifar10",
        **_LABELS,
    ),
}
