"""Seconds a round of FedDVA relative to a plain variational autoencoder under FedAvg:

    python -m benchmarks.feddva [--markdown] [--hidden=512] [--federation=4,512]
    [--repeats=3]

28x28 pixels, batch 256, Adam; FedDVA with 5 epochs of the decoder and 5 of the
encoders, the plain one with 5 of both together. That has FedDVA's encoder of z, of 8
dimensions, and its decoder, and shares both. One process, one device, a round without
evaluation; both take turns, and the medians are printed. FedDVA has two encoders and
goes through the networks twice: with a backward pass of twice the forward's cost, 8
encoders and 5 decoders against 3 and 3, which is 2.2 where they cost the same.
"""

import statistics
from functools import partial

import jax
import jax.numpy as jnp
import optax
from absl import flags

from benchmarks import report
from benchmarks.runner import Runner
from benchmarks.setting import CLASSES, dataset
from fedjax_pfl import averaging, local_training, losses, models, simulate
from fedjax_pfl.algorithms.feddva import dva
from fedjax_pfl.algorithms.feddva.feddva import feddva
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.partitioners import partition
from fedjax_pfl.models import cnn_dva, vae
from fedjax_pfl.models.nnx_model import network
from fedjax_pfl.types import (
    Array,
    Batch,
    Client,
    Federation,
    Method,
    PyTree,
    State,
    Task,
    Update,
)

FLAGS = flags.FLAGS

SHAPE, BATCH, LATENT = (28, 28, 1), 256, 8


def plain_vae(task: Task, *, hidden: int = 512) -> Method:
    """A variational autoencoder under FedAvg: encoder and decoder are trained together
    and averaged."""
    widths = cnn_dva.channels(SHAPE, hidden)
    nets = {
        "encoder": network(
            lambda rngs: vae.RepresentationEncoder(SHAPE, LATENT, widths, rngs)
        ),
        "decoder": network(lambda rngs: vae.Decoder(SHAPE, LATENT, widths, rngs)),
    }

    def init(key: Array) -> PyTree:
        made = {name: net.init(key) for name, net in nets.items()}
        return {name: w["params"] for name, w in made.items()} | {
            "stats": {name: w["stats"] for name, w in made.items()}
        }

    def run(w: PyTree, name: str, x: Array, mask: Array | None, train: bool) -> tuple:
        return nets[name].apply(
            {"params": w[name], "stats": w["stats"][name]}, x, mask=mask, train=train
        )

    def loss(w: PyTree, batch: Batch, key: Array) -> tuple[Array, PyTree]:
        q, seen = run(w, "encoder", batch.x, batch.mask, True)
        mean, made = run(w, "decoder", dva.sample(key, q), batch.mask, True)
        value = dva.reconstruction(batch.x, mean) + dva.kl_standard(q)
        return losses.masked_mean(value, batch.mask), {"encoder": seen, "decoder": made}

    def predict(server: PyTree, own: PyTree, c: Client):
        return lambda x, mask: run(
            server,
            "decoder",
            run(server, "encoder", x, mask, False)[0].mean,
            mask,
            False,
        )[0]

    def score(outputs: PyTree, y: Array, mask: Array, c: Client) -> dict:
        return {
            "size": (
                jnp.where(mask, jnp.abs(outputs).sum((1, 2, 3)), 0).sum(),
                mask.sum(),
            )
        }

    split = averaging.split(
        task, (), variables=jax.eval_shape(lambda: init(jax.random.key(0)))
    )

    def client(c: Client, server: PyTree, own: PyTree) -> Update:
        w, value = local_training.sgd(
            c.key, c.train, loss, split.receive(server, own), task, train=tuple(nets)
        )
        shared, own = split.send(w)
        return Update(shared, own, predict(w, own, c), value)

    return averaging.from_client(
        lambda key: State(*split.send(init(key))),
        client,
        predict,
        score=score,
        headline=("size", "max"),
    )


def build(
    clients: int, images: int, epochs: int = 5, batch: int = BATCH
) -> tuple[Task, Federation]:
    """The task on random images, and its clients."""
    data = dataset(SHAPE, clients * images * 4 // 3)
    f = federate(data, partition(data, "iid", num_clients=clients, seed=0))
    model = models.model("linear", SHAPE, CLASSES)  # neither method takes it
    options: dict = {"batch_size": batch, "epochs": epochs, "optimizer": optax.adam}
    return simulate.task(data, f.class_counts, model, lr=0.001, **options), f


def main(argv) -> None:
    del argv
    clients, images = map(int, FLAGS.federation)
    task, federation = build(clients, images)
    factories = {"plain VAE, FedAvg": plain_vae, "FedDVA": feddva}
    make = lambda factory: Runner(
        partial(factory, hidden=FLAGS.hidden), task, federation, 1, 1
    )
    runners = {name: make(factory) for name, factory in factories.items()}
    turns = [
        {name: runner() for name, runner in runners.items()}
        for _ in range(FLAGS.repeats + 1)
    ][1:]
    print(report.machine())
    print(
        f"{clients} clients of {images} images, last convolution {FLAGS.hidden} "
        "channels; 1 x width 1\n"
    )
    rows: list[tuple] = [("method", "s a round", "of plain", "compile s", "MiB")]
    for name, runner in runners.items():
        seconds = statistics.median(turn[name] for turn in turns)
        ratio = statistics.median(
            turn[name] / turn["plain VAE, FedAvg"] for turn in turns
        )
        rows.append((name, seconds, ratio, runner.compile, runner.bytes / 2**20))
    print(report.table(rows))


if __name__ == "__main__":
    flags.DEFINE_integer(
        "hidden",
        512,
        "channels of the last convolution, see the method",
        lower_bound=16,
    )
    flags.DEFINE_list(
        "federation",
        ["4", "512"],
        "how many clients, all of them in each round; images of each",
    )
    flags.DEFINE_integer("repeats", 3, "turns that a median is taken of", lower_bound=1)
    report.run(main)
