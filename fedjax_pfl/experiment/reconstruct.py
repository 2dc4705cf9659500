"""Reconstructs training images from what clients of runs send:
`fedjax-pfl reconstruct RUN [RUN ...] --images=8`.

RUN is a run directory, or the directory of a sweep.

Each attacked client holds some of its images as its only training examples, takes the
method's local steps on them in one batch and sends its update. The attacker is the
server. It knows the update, the method, its own state and the number of images, and
draws the client's private parameters itself. With --private=known it knows those before
training, an upper bound. Printed are PSNR and SSIM of the images, matched over the
batch, as means over images. Each RUN gets reconstruction.json, and reconstruction.png
with the original images and their classes above the reconstructed ones and their PSNR.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedjax_pfl.algorithms.find import find
from fedjax_pfl.errors import InputError, check, choose
from fedjax_pfl.experiment import cli, results, upload_options
from fedjax_pfl.experiment.build import build
from fedjax_pfl.experiment.groups import ONE_DEVICE
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.types import Experiment
from fedjax_pfl.experiment.warm_start import first_state
from fedjax_pfl.privacy import reconstruction
from fedjax_pfl.types import PyTree, RunState

FLAGS = {
    "images": cli.Flag(int, "images of a client, in one batch", 8),
    "clients": cli.Flag(int, "clients attacked, from 0 on", 1),
    "round": cli.Flag(int, "0: the first round; else after the last one", 0),
    "attack": cli.Flag(str, ", ".join(reconstruction.ATTACKS), "inverting"),
    "labels": cli.Flag(str, "known, inferred (from the head's bias) or drawn", "known"),
    "private": cli.Flag(
        str, "what a client keeps: drawn by the attacker, or known to it", "drawn"
    ),
    "steps": cli.Flag(int, "steps of the attack's optimizer", 1000),
    "restarts": cli.Flag(int, "random starts of the attack", 1),
    "tv": cli.Flag(float, "weight of the total variation (inverting)", 0.01),
    **cli.TRUST,
}
LABELS = ("known", "inferred", "drawn")
PRIVATE = ("drawn", "known")


def attack(e: Experiment, state: RunState, t: int, **options: Any) -> dict[str, Any]:
    """Attacks clients of an experiment.

    Args:
      state: rows by client id.
      t: the round.
      options: those of `FLAGS`.

    Returns:
      {"psnr", "ssim", "distance": [clients] means over images, "original", "found":
      [clients, B, H, W, D] prepared, "label", "psnr_of_image": [clients, B]}.
    """
    given = {name: flag.default for name, flag in FLAGS.items()} | options
    choose("labels", given["labels"], LABELS)
    choose("private", given["private"], PRIVATE)
    count = given["images"]
    check("images", count, 1, int(np.min(e.task.sizes)), whole=True)
    check("clients", given["clients"], 1, e.task.num_clients, whole=True)
    shape = e.task.prepared.shape[1:]
    if len(shape) != 3:
        raise InputError(f"A reconstruction needs images, got inputs {shape}.")
    run = _attacked(e, state, t, given)
    found: dict[str, list[Any]] = {}
    for client in range(given["clients"]):
        rows = e.partition.train[client][:count]
        x = np.asarray(e.task.prepare(jnp.asarray(e.dataset.x[rows])))
        y = jnp.asarray(e.dataset.y[rows], jnp.int32)
        result = jax.device_get(run(jnp.int32(client), jnp.asarray(x), y))
        images = reconstruction.matched(x, result.x)
        quality = reconstruction.quality(x, images)
        each: dict[str, Any] = {n: float(np.mean(v)) for n, v in quality.items()}
        each |= {"distance": float(result.distance), "original": x, "found": images}
        each |= {"label": np.asarray(y), "psnr_of_image": quality["psnr"]}
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return found


def _attacked(
    e: Experiment, state: RunState, t: int, given: dict[str, Any]
) -> Callable[..., reconstruction.Reconstruction]:
    """Returns the attack on (client, x, y), compiled."""
    factory, hparams = find(e.config.algo), e.config.hparams
    options = upload_options.options(e.config.uploads, e.config.server, e.task)
    task = e.task._replace(batch_size=given["images"], epochs=1, steps=None)
    send = reconstruction.sender(
        factory,
        task,
        hparams,
        t=t,
        lr_decay=e.config.lr_decay,
        uploads=options["uploads"],
    )
    low, high = _bounds(e)
    guess = factory(task, **hparams).init(jax.random.key(e.config.seed + 1))

    def run(client: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        key = jax.random.fold_in(e.key, client)
        own = jax.tree.map(lambda row: row[client][None], state.rows)
        sent = send(key, {}, state.with_rows(own), x, y)
        labels = y if given["labels"] == "known" else None
        if given["labels"] == "inferred":
            scale = e.config.lr * e.config.lr_decay**t
            labels = reconstruction.inferred_labels(
                sent, len(x), e.task.num_classes, scale
            )
        row = own
        if given["private"] == "drawn":
            row = jax.tree.map(lambda row: row[:1], guess.clients), own[1]

        def simulated(x: jax.Array, y: jax.Array) -> PyTree:
            return send(jax.random.key(1), {}, state.with_rows(row), x, y)

        return reconstruction.reconstruct(
            jax.random.fold_in(key, 1),
            simulated,
            sent,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            labels,
            num_classes=e.task.num_classes,
            attack=given["attack"],
            steps=given["steps"],
            restarts=given["restarts"],
            tv=given["tv"],
            bounds=(low, high),
        )

    return jax.jit(run)


def _bounds(e: Experiment) -> tuple[float, float]:
    """Returns the smallest and the largest prepared value of a sample of images."""
    x = np.asarray(e.task.prepare(jnp.asarray(e.dataset.x[:256])))
    return float(x.min()), float(x.max())


def picture(
    found: dict[str, Any], title: str = "", classes: Sequence[str] = ()
) -> Figure:
    """Draws the original images of the first client with their classes above the
    reconstructed ones with their PSNR.

    Args:
      classes: names; default: numbers.
    """
    label, psnr = found["label"][0], found["psnr_of_image"][0]
    rows = {
        "original": [classes[y] if classes else f"class {y}" for y in label],
        "found": [f"{x:.1f} dB" for x in psnr],
    }
    low, high = float(found["original"][0].min()), float(found["original"][0].max())
    size = max(3.0, 1.1 * len(label) + 0.5), 3.0
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=9)
    for axes, (name, titles) in zip(
        figure.subplots(2, len(label), squeeze=False), rows.items(), strict=True
    ):
        for axis, image, text in zip(axes, found[name][0], titles, strict=True):
            shown = np.clip((image - low) / (high - low), 0, 1)
            axis.imshow(shown[..., 0] if shown.shape[-1] == 1 else shown, cmap="gray")
            axis.set(xticks=[], yticks=[])
            axis.set_title(text, fontsize=8)
        axes[0].set_ylabel("reconstructed" if name == "found" else name, fontsize=8)
    return figure


def write(path: str | Path, **options: Any) -> dict[str, Any]:
    """Attacks clients of one run, writes the files and returns the row of the table."""
    directory = RunDirectory(path)
    # the derivative of an update compiles fastest with XLA's convolutions
    given = ONE_DEVICE | {"conv": "xla", "client_memory": "device"}
    e = build(directory.config.replace(**given))
    if len(e.task.models) > 1:
        raise InputError("A reconstruction needs clients of one architecture.")
    t, state = directory.restore(e) if options.get("round") else (0, None)
    with e.tracing():
        state = first_state(e) if state is None else state
        found = attack(e, jax.tree.map(jnp.asarray, state), t, **options)
    row = {"method": e.config.algo, "round": t}
    row |= {name: float(np.mean(found[name])) for name in ("psnr", "ssim", "distance")}
    file = directory.path / "reconstruction"
    file.with_suffix(".json").write_text(json.dumps(row | options, indent=1))
    title = f"{e.config.algo}, client {e.names[0]}: PSNR {found['psnr'][0]:.1f} dB"
    picture(found, title, e.classes or ()).savefig(file.with_suffix(".png"))
    return row


@cli.isolated
def main(argv: Sequence[str]) -> int:
    """Runs the command `reconstruct` and returns its exit code."""
    parsed = cli.parse(argv, FLAGS, __doc__ or "")
    rows = [write(run.path, **parsed.given) for run in results.find(parsed.words)]
    table = pd.DataFrame(rows).rename(columns={"psnr": "PSNR (dB)", "ssim": "SSIM"})
    print(table.to_string(index=False, float_format="{:.3g}".format))
    return 0
