"""FedDVA's figures and probes: what its two latents hold, from functions that encode
and decode a client's images.

Axes: n images of a client, d_z and d_c dimensions of the latents; images [n, H, W, C]
are in [-1, 1].
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

from experiments import drawing

# images along an axis of a manifold; standard deviations from its middle to its end
STEPS, REACH = 8, 2.0

Array = np.ndarray


class View(NamedTuple):
    """One client's test images, and its model as functions."""

    name: str
    x: Array  # [n, H, W, C]
    y: Array  # [n] labels
    # images -> posterior means [n, d_z], [n, d_c]
    encode: Callable[[Array], tuple[Array, Array]]
    # z [n, d_z], c [n, d_c] -> images [n, H, W, C]
    decode: Callable[[Array, Array], Array]


def reconstructions(path: str | Path, views: Sequence[View], columns: int = 10) -> None:
    """Draws for every client a row of test images and, below it, a row of their
    reconstructions."""
    rows = []
    for view in views:
        x = np.asarray(view.x[:columns])
        rows += [(view.name, x), ("", np.asarray(view.decode(*view.encode(x))))]
    _draw_rows(path, rows, columns, "test images, each above its reconstruction")


def axes_of(means: Array, count: int) -> Array:
    """The first principal axes of latents [n, d], each scaled to one standard
    deviation: [count, d]; zeros past d."""
    centred = means - means.mean(axis=0)
    _, scale, rows = np.linalg.svd(centred, full_matrices=False)
    found = rows[:count] * scale[:count, None] / np.sqrt(len(means))
    return np.vstack([found, np.zeros((count - len(found), means.shape[1]))])


def path_through(means: Array, steps: int = STEPS) -> Array:
    """Points from -2 to 2 standard deviations along the first principal axis of latents
    [n, d]: [steps, d]."""
    return means.mean(axis=0) + np.linspace(-REACH, REACH, steps)[:, None] * axes_of(
        means, 1
    )


def plane_through(means: Array, steps: int = STEPS) -> Array:
    """The same along the first two axes: [steps, steps, d]; a latent of one dimension
    has one row, [1, steps, 1]."""
    if means.shape[1] == 1:
        return path_through(means, steps)[None]
    first, second = axes_of(means, 2)
    along = np.linspace(-REACH, REACH, steps)
    return (
        means.mean(axis=0)
        + along[:, None, None] * first
        + along[None, :, None] * second
    )


def manifolds(folder: str | Path, view: View, all_c: Array) -> None:
    """Draws a client's decoder on grids: z against c, z alone with c held, and c alone
    with z held.

    What is held is the client's mean.

    Args:
      folder: gets manifold_zc (rows z, columns c, FedDVA's Fig. 3b), manifold_z and
        manifold_c, as PNG and PDF.
      view: the client.
      all_c: [m, d_c], c of all clients, so that its axes lead from client to client.
    """
    z, c = (np.asarray(part) for part in view.encode(view.x))
    grids = {
        "manifold_zc": (
            path_through(z)[:, None],
            path_through(all_c)[None],
            "rows: z; columns: c",
        ),
        "manifold_z": (
            plane_through(z),
            c.mean(axis=0)[None, None],
            "z along two axes, c held",
        ),
        "manifold_c": (
            z.mean(axis=0)[None, None],
            plane_through(all_c),
            "c along two axes, z held",
        ),
    }
    for name, (z_grid, c_grid, title) in grids.items():
        shape = np.broadcast_shapes(z_grid.shape[:2], c_grid.shape[:2])
        flat = (
            np.broadcast_to(g, (*shape, g.shape[-1])).reshape(-1, g.shape[-1])
            for g in (z_grid, c_grid)
        )
        images = np.asarray(view.decode(*flat))
        images = images.reshape(*shape, *images.shape[1:])
        _draw_rows(
            Path(folder) / name,
            [("", row) for row in images],
            shape[1],
            f"{view.name}: {title}",
        )


def scatter(path: str | Path, views: Sequence[View]) -> None:
    """Draws t-SNE of z and of c of test images, coloured by client and by class
    (FedDVA's Fig. 5)."""
    from sklearn.manifold import TSNE  # imported here: scikit-learn takes a second

    z, c, client, label = latents(views)
    with drawing.drawn(
        path, (8, 7.6), drawing.SMALL, suffixes=drawing.SUFFIXES
    ) as figure:
        panels = figure.subplots(2, 2)
        for column, (name, points) in enumerate((("z, shared", z), ("c, personal", c))):
            start: Any = "pca" if points.shape[1] > 1 else "random"
            perplexity = min(30, (len(points) - 1) / 3)
            flat = TSNE(
                init=start, perplexity=perplexity, random_state=0
            ).fit_transform(points)
            names = (
                [view.name for view in views],
                [str(i) for i in range(int(label.max()) + 1)],
            )
            for row, (what, colour) in enumerate(
                (("client", client), ("class", label))
            ):
                _points(
                    panels[row, column],
                    flat,
                    colour,
                    names[row],
                    what if column else "",
                )
                panels[row, column].set_title(
                    f"{name}, by {what}", loc="left", fontsize=9
                )


def swaps(path: str | Path, one: View, other: View, columns: int = 8) -> None:
    """Draws two clients' images, and what the decoders make of z of one with c of the
    other.

    With a decoder's own c and foreign z the content should change and the client's look
    stay; with its own z and foreign c the other way round, as far as a decoder that
    never saw that c can."""
    columns = min(columns, len(one.x), len(other.x))
    (z_1, c_1), (z_2, c_2) = (view.encode(view.x[:columns]) for view in (one, other))
    rows = [
        (one.name, one.x[:columns]),
        (other.name, other.x[:columns]),
        (f"{one.name}: own c,\nz of {other.name}", one.decode(z_2, c_1)),
        (f"{other.name}: own c,\nz of {one.name}", other.decode(z_1, c_2)),
        (f"{one.name}: own z,\nc of {other.name}", one.decode(z_1, c_2)),
        (f"{other.name}: own z,\nc of {one.name}", other.decode(z_2, c_1)),
    ]
    _draw_rows(
        path,
        [(name, np.asarray(x)) for name, x in rows],
        columns,
        "shared and personal latents swapped",
    )


def latents(views: Sequence[View]) -> tuple[Array, Array, Array, Array]:
    """z [m, d_z], c [m, d_c], the place of the client [m] and the label [m] of every
    client's images."""
    parts = [tuple(map(np.asarray, view.encode(view.x))) for view in views]
    z, c = (np.concatenate(part) for part in zip(*parts, strict=True))
    client = np.repeat(np.arange(len(views)), [len(part[0]) for part in parts])
    return z, c, client, np.concatenate([view.y for view in views])


def probes(
    views: Sequence[View], kinds: Sequence[str], seed: int = 0
) -> dict[str, float]:
    """Measures by linear probes what z and c hold.

    Logistic regression on standardised latents, fitted on a random half of the images
    and scored on the other.

    Args:
      views: the clients.
      kinds: of each client, such as its type of mark.
      seed: of the halves.

    Returns:
      accuracies `kind_from_z`, `kind_from_c`, `label_from_z`, `label_from_c` and the
      chances `kind_chance` and `label_chance` (the largest share); `silhouette_z` and
      `silhouette_c`, of the clusters by client, in [-1, 1].
    """
    from sklearn.metrics import silhouette_score

    z, c, client, label = latents(views)
    kind = np.unique(np.asarray(kinds), return_inverse=True)[1][client]
    found: dict[str, float] = {}
    for name, target in (("kind", kind), ("label", label)):
        found |= {
            f"{name}_from_{k}": _probe(points, target, seed)
            for k, points in (("z", z), ("c", c))
        }
        found[f"{name}_chance"] = float(np.bincount(target).max() / len(target))
    for k, points in (("z", z), ("c", c)):
        clusters = 1 < len(views) < len(points)  # else there is nothing to tell apart
        found[f"silhouette_{k}"] = (
            float(silhouette_score(points, client, random_state=seed))
            if clusters
            else math.nan
        )
    return found


def swap_accuracy(
    view: View, classify: Callable[[Array], Array], seed: int = 0
) -> float:
    """How often an image decoded from z of one test image and c of another is still of
    the class of the former.

    Args:
      view: the client, both images being its own; c comes from images of another class.
      classify: images -> labels [n], of a classifier that was trained on plain images.
      seed: of the pairs.
    """
    z, c = (np.asarray(part) for part in view.encode(view.x))
    partner = np.random.default_rng(seed).permutation(len(z))
    differs = view.y != view.y[partner]
    if not differs.any():
        return float("nan")
    images = view.decode(z[differs], c[partner][differs])
    return float(np.mean(np.asarray(classify(np.asarray(images))) == view.y[differs]))


def swap_kind(
    views: Sequence[View], kinds: Sequence[str], classify: Callable[[Array], Array]
) -> float:
    """How often z of one client's image, decoded with the mean c and the decoder of
    another, shows the other's kind.

    Args:
      views: the clients; each gets z of the next client of another kind.
      kinds: of each client.
      classify: images -> kinds [n], of a classifier of images of all clients, or of
        their reconstructions: a mark that z does not place comes out as the mean of
        such marks.
    """
    hits, kinds = [], list(kinds)
    for k, view in enumerate(views):
        others = [
            j % len(views)
            for j in range(k + 1, k + len(views))
            if kinds[j % len(views)] != kinds[k]
        ]
        if others:
            z = np.asarray(views[others[0]].encode(views[others[0]].x)[0])
            c = np.asarray(view.encode(view.x)[1]).mean(axis=0)
            images = np.asarray(view.decode(z, np.broadcast_to(c, (len(z), len(c)))))
            hits.append(np.mean(np.asarray(classify(images)) == kinds[k]))
    return float(np.mean(hits)) if hits else float("nan")


def _probe(points: Array, target: Array, seed: int) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    order = np.random.default_rng(seed).permutation(len(target))
    fit, held = np.array_split(order, 2)
    if len(np.unique(target[fit])) == 1:
        return float(np.mean(target[held] == target[fit][0]))
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    return float(model.fit(points[fit], target[fit]).score(points[held], target[held]))


def _points(
    axes: Any, flat: Array, colour: Array, names: Sequence[str], legend: str
) -> None:
    palette = matplotlib.colormaps["tab10" if len(names) <= 10 else "tab20"]
    for i, name in enumerate(names):
        mine = colour == i
        axes.scatter(
            *flat[mine].T,
            s=6,
            color=palette(i % palette.N),
            linewidths=0,
            alpha=0.8,
            label=name,
        )
    axes.set(xticks=[], yticks=[])
    if legend:
        outside: Any = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
        axes.legend(
            title=legend,
            frameon=False,
            markerscale=2,
            fontsize=7,
            ncols=1 + len(names) // 20,
            **outside,
        )


def _draw_rows(
    path: str | Path, rows: Sequence[tuple[str, Array]], columns: int, title: str
) -> None:
    """Rows of images, each with a name on its left."""
    margin = 0.5 + 0.075 * max(
        len(line) for name, _ in rows for line in [*name.split("\n"), ""]
    )
    size = (margin + 0.62 * columns, 0.4 + 0.64 * len(rows))
    with drawing.drawn(path, size, drawing.SMALL, suffixes=drawing.SUFFIXES) as figure:
        figure.suptitle(title, fontsize=9)
        panels = figure.subplots(len(rows), columns, squeeze=False)
        for line, (name, images) in zip(panels, rows, strict=True):
            for axes in line:
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
            for axes, image in zip(line, images, strict=False):
                shown = np.clip((np.asarray(image, float) + 1) / 2, 0, 1)
                axes.imshow(
                    shown[..., 0] if shown.shape[-1] == 1 else shown,
                    cmap="gray",
                    vmin=0,
                    vmax=1,
                )
            line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
