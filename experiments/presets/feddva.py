"""FedDVA's experiments; the paper prints no numbers, only figures."""

from experiments.presets.preset import Preset

_MARKS = {
    "algo": "feddva",
    "dataset": "mnist",
    "marks": True,
    "partition": "dirichlet_total",  # all in all 10000: balanced, as the released code allots the marked images
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

MARKS = Preset(
    description="FedDVA, MNIST with marks: 20 clients, four types of mark, all networks as published",
    settings={**_MARKS, "clients": 20, "batch_size": 256, "rounds": 200},
    steps=2200,
    headline="post/elbo",
    protocol=_PROTOCOL,
)

SMALL = Preset(
    description="FedDVA, MNIST with marks, notebook-sized: 4 clients, hidden widths 16 to 128, a tenth of the images",
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
    + " Widths, images, batch, epochs and rounds are chosen for the time; and the encoder of c stays with its client, "
    "as with a shared one c does not tell the clients apart (experiments/README.md).",
)
