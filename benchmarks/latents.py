"""Figures of a FedDVA run: reconstructions, and what the two latents hold.

    python -m benchmarks.latents RUN

RUN is a run directory. The figures are written to RUN/figures.
"""

import sys
import textwrap
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedjax_pfl import server_optimizer, trees
from fedjax_pfl.algorithms.feddva import phases
from fedjax_pfl.algorithms.feddva.feddva import networks
from fedjax_pfl.experiment.results import Run, load

PER_CLIENT, SHOWN = 200, 8  # test images of a client, and clients and images drawn


def views(run: Run) -> pd.DataFrame:
    """Returns test images and what the clients' models make of them, a row per image.

    Columns: client, label, kind (type of mark, without marks the client), x and decoded
    [H, W, C] in [-1, 1], z and c (means of the shared and of the personal latent).
    """
    e, h = run.experiment, run.config["hparams"]
    names = ("latent", "personal", "hidden", "head")
    nets, _ = networks(e.task, *(h[name] for name in names))
    server, clients = server_optimizer.plain(run.state().server), run.state().clients
    parts = []
    for k in range(e.task.num_clients):
        own = jax.tree.map(lambda x, k=k: x[k], clients)
        rows = e.partition.test[k, : min(PER_CLIENT, e.partition.test_sizes[k])]
        x: Any = e.dataset.prepare(e.dataset.x[rows])
        out = phases.forward(nets, trees.merge(own, server), x)
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
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import silhouette_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    order = np.random.default_rng(0).permutation(len(of))
    fit, held = (of.iloc[half] for half in np.array_split(order, 2))
    found = {
        f"silhouette_{x}": float(silhouette_score(np.stack(of[x]), of["client"]))
        for x in ("z", "c")
    }
    for name in ("kind", "label"):
        found[f"{name}_chance"] = of[name].value_counts(normalize=True).max()
        for latent in ("z", "c"):
            model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
            model.fit(np.stack(fit[latent]), fit[name])
            score = model.score(np.stack(held[latent]), held[name])
            found[f"{name}_from_{latent}"] = float(score)
    return found


def figures(run: Run) -> dict[str, Figure]:
    """Draws test images above their reconstructions, and t-SNE of both latents."""
    from sklearn.manifold import TSNE

    of = views(run)
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


def main() -> None:
    """Draws the figures of the run of the command line."""
    run = load(sys.argv[1])
    (run.path / "figures").mkdir(exist_ok=True)
    for name, figure in figures(run).items():
        figure.savefig(run.path / "figures" / f"{name}.png")


if __name__ == "__main__":
    main()
