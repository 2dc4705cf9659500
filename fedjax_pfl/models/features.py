"""Features of a frozen body, computed once in place of the examples: training of the
head alone then reads them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from fedjax_pfl import trees
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.models.nnx_model import DTYPES, composed
from fedjax_pfl.types import Array, Model, PyTree, Task


def cached(
    task: Task,
    dataset: Dataset,
    public: Dataset | None = None,
    *,
    dtype: str = "float32",
    batch: int = 256,
) -> tuple[Task, Dataset, Dataset | None]:
    """Replaces the examples by their features, and the model by its head.

    Results are those of training on the examples, to rounding. `Program.predict` then
    takes features.

    Args:
      task: of one architecture that trains its head alone (`models.head`).
      dataset: of all clients.
      public: the public examples, if the task has them.
      dtype: of the stored features, "float32" or "bfloat16".
      batch: examples per device and step.

    Returns:
      (the task, the data set, the public examples), for `federate` and `program`.

    Raises:
      InputError: the body is trained, or its features of an example differ between
        batches: augmentation, mixing, dropout.
    """
    choose("dtype", dtype, DTYPES)
    model = task.model
    _check(task, model, dataset)
    compute = extractor(model, dataset.prepare, batch)
    made = _replaced(dataset, compute, dtype)
    pool = None if public is None else _replaced(public, compute, dtype)
    alone = head_only(model, len(made.x.shape) == 3)
    task = task._replace(
        models=(alone,),
        shared=None if task.shared is None else alone,
        input=jax.ShapeDtypeStruct(made.x.shape[1:], made.x.dtype),
        prepare=made.prepare,
    )
    if pool is not None:
        shape = jax.ShapeDtypeStruct(pool.x.shape, pool.x.dtype)
        task = task._replace(public=shape, prepare_public=pool.prepare)
    return task, made, pool


def head_only(model: Model, positions: bool = False) -> Model:
    """Returns the model of features [B, K], or [B, L, K] with labels per position."""

    def features(
        variables: PyTree,
        x: Array,
        mask: Array | None = None,
        train: bool = False,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        h = x.reshape(-1, x.shape[-1]) if positions else x
        return h, variables["stats"]

    apply = composed(features, model.head)
    return model._replace(features=features, apply=apply, frozen=None)


def extractor(
    model: Model, prepare: Callable[[Array], Array], batch: int = 256
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns raw inputs [n, *input] -> features [n, K], or [n, L, K] with labels per
    position, computed on all devices of the process."""
    mesh = jax.make_mesh(
        (jax.local_device_count(),),
        ("examples",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.local_devices(),
    )
    everywhere, by_row = (NamedSharding(mesh, spec) for spec in (P(), P("examples")))
    variables = jax.jit(model.init)(jax.random.key(0))
    assert model.frozen is not None
    given = jax.device_put((variables, trees.read(model.frozen.values)), everywhere)
    size = batch * mesh.size

    @jax.jit
    def some(variables: PyTree, frozen: PyTree, x: Array) -> Array:
        features, _, _ = model.frozen.functions(frozen)  # type: ignore[union-attr]
        h = features(variables, prepare(x))[0]
        return h.reshape(len(x), -1, h.shape[-1])

    def run(x: np.ndarray) -> np.ndarray:
        found = []
        for first in range(0, len(x), size):
            rows = x[first : first + size]
            padded = np.concatenate([rows, np.repeat(rows[:1], size - len(rows), 0)])
            h = some(*given, jax.device_put(padded, by_row))
            found.append(np.asarray(h)[: len(rows)])
        whole = np.concatenate(found)
        return whole[:, 0] if whole.shape[1] == 1 else whole

    return run


def _replaced(
    dataset: Dataset, compute: Callable[[np.ndarray], np.ndarray], dtype: str
) -> Dataset:
    h = compute(dataset.x).astype(jnp.dtype(dtype))
    prepare = lambda x: x.astype(jnp.float32)
    return dataset._replace(x=h, prepare=prepare, words=None)


def _check(task: Task, model: Model, dataset: Dataset) -> None:
    """Raises InputError unless an example has the same features in every batch."""
    body = jax.eval_shape(model.init, jax.random.key(0))["body"]
    if model.frozen is None or jax.tree.leaves(body):
        raise InputError(
            "Cached features need a model that trains its head alone: models.head()."
        )
    if task.augment is not None or task.mix is not None:
        raise InputError("Cached features exclude augmentation and mixing of inputs.")
    if task.shared is not None and task.shared is not model:
        raise InputError("Cached features exclude another `shared` model.")
    x = dataset.prepare(jnp.asarray(dataset.x[:2]))
    variables = model.init(jax.random.key(0))
    pair = [
        model.features(variables, x, mask=jnp.ones(len(x), bool), train=train, key=key)
        for train, key in ((False, None), (True, jax.random.key(1)))
    ]
    if not np.allclose(pair[0][0], pair[1][0], rtol=1e-4, atol=1e-5):
        raise InputError(
            "Cached features need a body that computes the same in training: it has "
            "dropout or statistics of the batch."
        )
