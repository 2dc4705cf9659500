"""FedDVA's figures and probes of a run directory, see `dva_figures`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import dva_figures, runs, scores
from experiments.files import write_json
from experiments.plain import plural
from experiments.records import finite
from fedjax_pfl import server_optimizer, trees
from fedjax_pfl.algorithms.feddva import phases as dva_phases
from fedjax_pfl.algorithms.feddva.feddva import networks

PER_CLIENT = 200  # test images of each client, at most
REFERENCE = 3000  # images that the classifier of the swaps is fitted on, at most


def views(run: runs.Run) -> list[dva_figures.View]:
    """Every client's test images and model at the last checkpoint."""
    e, h, marks = run.experiment, run.config.hparams, _marks(run)
    nets, _ = networks(
        e.task, *(h[name] for name in ("latent", "personal", "hidden", "head"))
    )

    @jax.jit
    def encode(w: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = dva_phases.forward(nets, w, x)
        return out.z.mean, out.latents[:, -nets.personal :]

    @jax.jit
    def decode(w: Any, latents: jax.Array) -> jax.Array:
        return nets.decoder.apply(
            {"params": w["decoder"], "stats": w["stats"]["decoder"]}, latents
        )[0]

    def view(k: int) -> dva_figures.View:
        w = trees.merge(
            jax.tree.map(lambda x: x[k], run.state.clients),
            server_optimizer.plain(run.state.server),
        )
        index = e.partition.test[k, : min(PER_CLIENT, e.partition.test_sizes[k])]
        name = f"client {k}" + (f", {marks[k].replace('_', ' ')}" if marks else "")
        latents = lambda z, c: jnp.asarray(np.concatenate([z, c], axis=-1), jnp.float32)
        x = np.asarray(e.dataset.prepare(e.dataset.x[index]))
        return dva_figures.View(
            name,
            x,
            e.dataset.y[index],
            lambda x: encode(w, x),
            lambda z, c: decode(w, latents(z, c)),
        )

    return [view(k) for k in range(e.task.num_clients)]


def probes(run: runs.Run, found: list[dva_figures.View]) -> dict[str, float]:
    """`dva_figures.probes` by type of mark, or by client without marks; and with marks
    `swap_accuracy`, of the client without any, judged by a classifier of its training
    images, and `swap_kind`, judged by one of reconstructions."""
    e, marks = run.experiment, _marks(run)
    values = dva_figures.probes(found, marks or [view.name for view in found])
    if "plain" in marks:
        plain, own = (
            marks.index("plain"),
            [np.asarray(view.decode(*view.encode(view.x))) for view in found],
        )
        index = e.partition.train[
            plain, : min(REFERENCE, e.partition.train_sizes[plain])
        ]
        digits = _classifier(e.dataset.prepare(e.dataset.x[index]), e.dataset.y[index])
        values["swap_accuracy"] = dva_figures.swap_accuracy(found[plain], digits)
        kinds = _classifier(
            np.concatenate(own), np.repeat(marks, [len(x) for x in own])
        )
        values["swap_kind"] = dva_figures.swap_kind(found, marks, kinds)
    return values


def _marks(run: runs.Run) -> list[str]:
    """The type of mark of each client that trains; empty without --marks."""
    return (
        run.experiment.of_trained(run.experiment.marks).tolist()
        if run.experiment.marks
        else []
    )


def _classifier(x: Any, target: np.ndarray):
    """Of images [n, H, W, C]: a support vector machine on pixels."""
    from sklearn.svm import SVC  # imported here: scikit-learn takes a second

    if len(np.unique(target)) == 1:
        return lambda x: np.full(len(x), target[0])
    flat = lambda x: np.asarray(x).reshape(len(x), -1)
    model = SVC().fit(flat(x), target)
    return lambda x: model.predict(flat(x))


def draw(run: runs.Run, folder: Path) -> str:
    """Draws all figures into a folder, as PNG and PDF, and measures the probes:
    probes.json, and as a text."""
    folder.mkdir(exist_ok=True)
    found = views(run)
    dva_figures.reconstructions(folder / "reconstructions", found[:8])
    c = dva_figures.latents(found)[1]
    for k, view in enumerate(found[:4]):
        (folder / f"client{k}").mkdir(exist_ok=True)
        dva_figures.manifolds(folder / f"client{k}", view, c)
    dva_figures.scatter(folder / "latents", found)
    if len(found) > 1:
        dva_figures.swaps(folder / "swaps", found[0], found[1])
    values = probes(run, found)
    write_json(
        folder / "probes.json",
        {name: finite(x) for name, x in values.items()} | {"round": run.round},
    )
    shown = ", ".join(f"{name} {scores.labelled('', x)}" for name, x in values.items())
    return f"After {plural(run.round, 'round')}: {shown}"
