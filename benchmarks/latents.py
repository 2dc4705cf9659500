"""Figures of a FedDVA run: reconstructions, and what the two latents hold.

    python -m benchmarks.latents RUN
    python -m benchmarks.latents RUN --algo=fedavg,fedrep,ditto --rounds=20

RUN is a run directory. Printed are accuracies from few labels, and figures are written
to RUN/figures. With flags of `sweep`, methods are trained on the latents [z; c] of the
run's clients, which are frozen: RUN/latents.npz has the posterior means by each
client's own encoders.
"""

import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedjax_pfl import trees
from fedjax_pfl.algorithms.feddva import phases
from fedjax_pfl.algorithms.feddva.feddva import networks
from fedjax_pfl.experiment import cli, sweep
from fedjax_pfl.experiment.results import Run, load
from fedjax_pfl.models.vae import DualVAE
from fedjax_pfl.types import PyTree

PER_CLIENT, SHOWN = 200, 8  # test images of a client, and clients and images drawn
LABELS, DRAWS = (50, 200, 1000), 5  # labelled images of `few_labels`, and draws of them


def models(run: Run) -> tuple[DualVAE, Callable[[int], PyTree]]:
    """Returns the networks of a run, and the variables of a client at its end."""
    e, h = run.experiment, run.config["hparams"]
    names = ("latent", "personal", "hidden", "head")
    server, clients = run.state().method

    def variables(k: int) -> PyTree:
        return trees.merge(jax.tree.map(lambda x: x[k], clients), server)

    return networks(e.task, *(h[name] for name in names))[0], variables


def views(run: Run) -> pd.DataFrame:
    """Returns test images and what the clients' models make of them, a row per image.

    Columns: client, label, kind (type of mark, without marks the client), x and decoded
    [H, W, C] in [-1, 1], z and c (means of the shared and of the personal latent).
    """
    e, (nets, of) = run.experiment, models(run)
    parts = []
    for k in range(e.task.num_clients):
        rows = e.partition.test[k, : min(PER_CLIENT, e.partition.test_sizes[k])]
        x: Any = e.dataset.prepare(e.dataset.x[rows])
        out = phases.forward(nets, of(k), x)
        found = {"x": x, "decoded": out.mean, "z": out.latents[:, : -nets.personal]}
        found |= {"c": out.latents[:, -nets.personal :], "label": e.dataset.y[rows]}
        part = pd.DataFrame({name: list(np.asarray(x)) for name, x in found.items()})
        parts.append(part.assign(client=k, kind=e.marks[k] if e.marks else str(k)))
    return pd.concat(parts, ignore_index=True)


def probes(of: pd.DataFrame) -> dict[str, float]:
    """Returns what linear probes find in the latents of test images.

    Logistic regression on one half of the images, scored on the other: kind_from_z,
    kind_from_c, label_from_z and label_from_c, and the share of the most frequent
    value, kind_chance and label_chance; silhouette_z and silhouette_c, of the clusters
    by client.
    """
    from sklearn.metrics import silhouette_score

    order = np.random.default_rng(0).permutation(len(of))
    fit, held = (of.iloc[half] for half in np.array_split(order, 2))
    found = {
        f"silhouette_{x}": float(silhouette_score(np.stack(of[x]), of["client"]))
        for x in ("z", "c")
    }
    for name in ("kind", "label"):
        found[f"{name}_chance"] = of[name].value_counts(normalize=True).max()
        for latent in ("z", "c"):
            halves = ((np.stack(x[latent]), x[name]) for x in (fit, held))
            found[f"{name}_from_{latent}"] = _linear(*halves)
    return found


def few_labels(of: pd.DataFrame) -> pd.DataFrame:
    """Returns accuracies in [0, 1] of linear probes of the digit from z, c, both, and
    the pixels: a row per number of labelled images, as far as there are more.

    `of` has test images as `views` has them. Nobody trained on these images: they stand
    for those of new clients. Means over draws of the labelled images, each scored on
    all other images.
    """
    z, c, x = (np.stack(of[name]).reshape(len(of), -1) for name in ("z", "c", "x"))
    given = {"z": z, "c": c, "z and c": np.hstack([z, c]), "pixels": x}
    y, table = of["label"].to_numpy(), {}
    for count in (n for n in LABELS if n < len(of)):
        scores: dict[str, list[float]] = {name: [] for name in given}
        for draw in range(DRAWS):
            order = np.random.default_rng(draw).permutation(len(of))
            few, rest = order[:count], order[count:]
            for name, found in given.items():
                sides = (found[few], y[few]), (found[rest], y[rest])
                scores[name].append(_linear(*sides))
        table[count] = {name: np.mean(each) for name, each in scores.items()}
    return pd.DataFrame.from_dict(table, orient="index").rename_axis("labels")


def _linear(fit: tuple[Any, Any], held: tuple[Any, Any]) -> float:
    """Returns the accuracy on `held` of a logistic regression of standardised rows
    fitted to `fit`; both are (rows [n, K], labels [n])."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    return float(model.fit(*fit).score(*held))


def figures(of: pd.DataFrame) -> dict[str, Figure]:
    """Draws test images, as `views` has them, above their reconstructions, and t-SNE of
    both latents."""
    from sklearn.manifold import TSNE

    columns = ("x", "decoded")
    few = [rows.head(SHOWN) for _, rows in of.groupby("client")][:SHOWN]
    lines = [rows[name] for rows in few for name in columns]
    images = Figure(figsize=(0.7 * SHOWN, 0.7 * len(lines)))
    for i, line in enumerate(lines):
        for j, image in enumerate(line):
            axes = images.add_subplot(len(lines), SHOWN, i * SHOWN + j + 1)
            axes.imshow(np.clip((image + 1) / 2, 0, 1), cmap="gray", vmin=0, vmax=1)
            axes.set_axis_off()
    latents = Figure(figsize=(8, 8), layout="constrained")
    for column, latent in enumerate(("z", "c")):
        tsne = TSNE(perplexity=min(30, (len(of) - 1) / 3), random_state=0)
        flat = tsne.fit_transform(np.stack(of[latent]))
        for row, colour in enumerate(("client", "label")):
            axes = latents.add_subplot(2, 2, 2 * row + column + 1)
            axes.scatter(
                flat[:, 0], flat[:, 1], c=of[colour], s=5, cmap="tab20", linewidths=0
            )
            axes.set(title=f"{latent}, coloured by {colour}", xticks=[], yticks=[])
    found = ", ".join(f"{name} {value:.2f}" for name, value in probes(of).items())
    latents.suptitle(textwrap.fill(f"Linear probes: {found}", 90), fontsize=8)
    return {"reconstructions": images, "latents": latents}


def latents(run: Run, batch: int = 256) -> dict[str, np.ndarray]:
    """Returns arrays x [n, d_z + d_c] and y [n] of the run's data set; rows of no
    client are 0."""
    e, p, (nets, of) = run.experiment, run.experiment.partition, models(run)
    width = run.config["hparams"]["latent"] + run.config["hparams"]["personal"]
    x = np.zeros((len(e.dataset.y), width), np.float32)
    encode = jax.jit(lambda w, x: phases.forward(nets, w, x).latents)
    parts = (p.train, p.train_sizes), (p.val, p.val_sizes), (p.test, p.test_sizes)
    for k in range(e.task.num_clients):
        rows = np.concatenate([index[k, : sizes[k]] for index, sizes in parts])
        for some in np.split(rows, range(batch, len(rows), batch)):
            x[some] = encode(of(k), e.dataset.prepare(e.dataset.x[some]))
    return {"x": x, "y": np.asarray(e.dataset.y)}


def main() -> None:
    """Draws the figures of the run of the command line, or trains on its latents."""
    run, flags = load(sys.argv[1]), sys.argv[2:]
    if flags:
        np.savez(run.path / "latents.npz", **latents(run))
        data = [f"--dataset=npz:{run.path / 'latents.npz'}"]
        data += [f"--partition=file:{run.path / 'partition.npz'}"]
        sys.exit(cli.guarded(lambda: sweep.sweep([*data, *flags])))
    of = views(run)
    print((100 * few_labels(of)).round(1).to_string())
    (run.path / "figures").mkdir(exist_ok=True)
    for name, figure in figures(of).items():
        figure.savefig(run.path / "figures" / f"{name}.png")


if __name__ == "__main__":
    main()
