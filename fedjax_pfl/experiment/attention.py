"""Attention of one client's model: Grad-CAM of each of its predictions.

FedCP (Zhang et al., KDD 2023), Figure 3, shows the global head alone, the personal head
alone, and both.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from fedjax_pfl.attention import grad_cam
from fedjax_pfl.engine.parts import BENIGN
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment.build import build
from fedjax_pfl.experiment.export import of_client
from fedjax_pfl.experiment.results import Run
from fedjax_pfl.types import Array, Predictor, PyTree

IMAGES = 8  # drawn of a client
IMAGE, ALL = "image", "all"  # `all`: the model that `acc` scores
_ACC = "_acc"


def maps(run: Run, client: int | str, images: int = IMAGES) -> dict[str, np.ndarray]:
    """Computes Grad-CAM of the true classes of a client's first test images.

    Returns:
      {"image": [B, H, W, D] raw, name of each prediction: [B, H', W']}. Where a method
      scores several predictions, as FedCP each head alone, their names are those of
      the scores; last is `all`, the model of `acc`.

    Raises:
      InputError: inputs are no images with a class, or the model has no convolution.
    """
    # Grad-CAM finds convolutions of XLA
    e = build(run.experiment.config.replace(conv="xla"))
    client = e.index(client)
    # rows of padding follow those of the client
    rows = e.partition.test[client][: min(images, e.partition.test_sizes[client])]
    x, y = e.dataset.x[rows], np.asarray(e.dataset.y[rows])
    if x.ndim != 4 or y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer):
        raise InputError("Grad-CAM needs images, and one class per image.")
    (t, state), names = run.checkpoint, _names(run)

    def explained(predictor: Predictor, *_: Any) -> Predictor:
        def found(x: Array, mask: Array) -> PyTree:
            def one(j: Any = slice(None)) -> Array:
                return grad_cam(
                    lambda x: predictor(x, mask)[(..., j)], x, jnp.asarray(y)
                )

            outputs = jax.eval_shape(predictor, x, mask)
            shape: tuple[int, ...] = getattr(outputs, "shape", ())
            if len(shape) == 2:
                return {ALL: one()}
            if len(shape) != 3 or shape[2] != len(names) + 1:
                raise InputError("Grad-CAM needs a method that predicts logits.")
            return {name: one(j) for j, name in enumerate(names, 1)} | {ALL: one(0)}

        return found

    found = of_client(e, state, t, client, x, explained)
    return {IMAGE: x} | {name: found[name] for name in (*names, ALL) if name in found}


def _names(run: Run) -> list[str]:
    """Returns the predictions that the method scores besides its own, as `global` of
    global_acc."""
    scores = run.scores.loc[run.scores["point"] == "pre", "score"].unique()
    own = [x for x in scores if x.endswith(_ACC) and not x.startswith(BENIGN)]
    return [x.removesuffix(_ACC) for x in own]


def figure(found: dict[str, np.ndarray]) -> Figure:
    """Draws images above the maps of `maps`, each from 0 to its largest value."""
    count = len(found[IMAGE])
    drawn = Figure(figsize=(1 + count, 1.05 * len(found)), dpi=150)
    axes = drawn.subplots(len(found), count, squeeze=False)
    low, high = float(found[IMAGE].min()), float(found[IMAGE].max())
    images = (found[IMAGE] - low) / max(high - low, 1e-30)
    height, width = images.shape[1:3]
    for row, (name, values) in zip(axes, found.items(), strict=True):
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        for axis, image, value in zip(row, images, values, strict=True):
            axis.imshow(image[..., 0] if image.shape[-1] == 1 else image, cmap="gray")
            axis.set(xticks=[], yticks=[])
            if name != IMAGE:
                over: Any = {"cmap": "jet", "alpha": 0.5, "vmin": 0}
                over |= {"vmax": max(float(value.max()), 1e-30)}
                extent = (-0.5, width - 0.5, height - 0.5, -0.5)
                axis.imshow(value, extent=extent, interpolation="bilinear", **over)
    drawn.tight_layout(pad=0.2)
    return drawn
