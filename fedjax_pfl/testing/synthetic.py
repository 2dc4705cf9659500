"""A small synthetic federation, and the task of its clients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import models
from fedjax_pfl.models import nets
from fedjax_pfl.types import Examples, Federation, Subset, Task

N, C, SHAPE = 5, 4, (6,)
LABEL = jax.ShapeDtypeStruct((), jnp.int32)
# training examples: uneven, one client with a single example
SIZES = np.array([7, 19, 1, 12, 4])
OWN = [(0, 1), (1, 2), (3,), (2, 0), (0, 1, 2, 3)]  # the classes of each client


# also where a test first asks for it in a function that is traced
@jax.ensure_compile_time_eval()
def federation(
    width: int = 19,
    seed: int = 0,
    input: jax.ShapeDtypeStruct | None = None,
    public: jax.ShapeDtypeStruct | None = None,
    label: jax.ShapeDtypeStruct = LABEL,
) -> Federation:
    """N clients over shared Gaussian blobs.

    Args:
      width: padded length of the training rows.
      input: one raw example; default six floats.
      public: the pool of public examples [P, *input]; None: there is none.
      label: the labels of one example, as `Task.label`.
    """
    shape, dtype = (SHAPE, np.float32) if input is None else (input.shape, input.dtype)
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(C, *shape)) * 2
    test = np.maximum(SIZES // 3, 2)
    y = np.concatenate(
        [np.resize(own, n + m) for own, n, m in zip(OWN, SIZES, test, strict=True)]
    )
    x = _typed(centres[y] + rng.normal(size=(len(y), *shape)), dtype)
    # the last example is nobody's: padding points to it
    x = np.concatenate([x, np.zeros((1, *shape), dtype)])
    y = np.append(y, 0).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(SIZES + test)])[:-1]

    def rows(first: np.ndarray, sizes: np.ndarray, width: int) -> Subset:
        index = np.full((N, width), len(y) - 1, np.int32)
        for i in range(N):
            index[i, : sizes[i]] = first[i] + np.arange(sizes[i])
        return Subset(jnp.asarray(index), jnp.asarray(sizes, jnp.int32))

    y = _labelled(y, label)
    counts = np.stack(
        [_counts(y[s : s + n]) for s, n in zip(starts, SIZES, strict=True)]
    )
    splits = (
        rows(starts, SIZES, width),
        rows(starts, 0 * SIZES, 0),
        rows(starts + SIZES, test, int(test.max())),
    )
    pool = None
    if public is not None:
        drawn = 2 * rng.normal(size=public.shape)
        pool = Examples(
            jnp.asarray(_typed(drawn, public.dtype)), jnp.zeros(len(drawn), jnp.int32)
        )
    return Federation(
        Examples(jnp.asarray(x), jnp.asarray(y)),
        *splits,
        jnp.asarray(counts, jnp.int32),
        pool,
    )


def _labelled(y: np.ndarray, label: jax.ShapeDtypeStruct) -> np.ndarray:
    """Labels of another kind from classes [n].

    Of positions the first half of the examples has 0 to L - 1 masked ones at the end.
    """
    if not label.shape:
        return y
    at = np.arange(label.shape[0])
    if label.dtype == np.int32:
        known = label.shape[0] - np.arange(len(y)) % label.shape[0]
        return np.where(at < known[:, None], (y[:, None] + at) % C, -1)
    member = (y[:, None] == at) | (y[:, None] == at + 1)
    return member.astype(label.dtype)


def _counts(y: np.ndarray) -> np.ndarray:
    if y.ndim == 1 or y.dtype.kind == "i":
        return np.bincount(y[y >= 0], minlength=C)
    return np.sum(y, axis=0) if y.dtype == bool else np.zeros(y.shape[1], int)


def _typed(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Examples of the type; whole numbers from 0 to 9."""
    return (
        x if jnp.issubdtype(dtype, jnp.floating) else np.clip(np.rint(x) + 4, 0, 9)
    ).astype(dtype)


def task(**options: Any) -> Task:
    """A Task of the synthetic federation: two epochs in batches of 4 on a small
    multilayer perceptron.

    Args:
      options: fields of Task that differ; for other inputs `models` and `input`, for
        methods that need them `public` or `shared`.
    """
    given = {
        "architecture": np.zeros(len(options.get("sizes", SIZES)), np.int32),
        "sizes": SIZES,
        "class_counts": np.asarray(
            federation(label=options.get("label", LABEL)).class_counts
        ),
        "num_classes": C,
        "input": jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        "prepare": lambda x: x.astype(jnp.float32),
        "lr": 0.1,
        "optimizer": optax.sgd,
        "batch_size": 4,
        "epochs": 2,
        "rounds": 3,
    }
    if "models" not in options:
        mlp = lambda shape, classes, rngs: nets.mlp(shape, classes, rngs, hidden=8)
        given["models"] = (
            models.model(mlp, SHAPE, C, bn_stats=options.get("bn_stats", "aggregate")),
        )
    return Task(**(given | options))
