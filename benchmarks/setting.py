"""The models of the benchmarks, and random clients to train them on."""

import numpy as np

from fedjax_pfl import models, simulate
from fedjax_pfl.data.datasets import Dataset, prepare_images
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.partitioners import partition
from fedjax_pfl.types import Federation, Model, Task

BATCH, CLIENTS, CLASSES = 10, 20, 10
SHAPES = {
    "linear": (32, 32, 3),
    "mlp": (8, 8, 1),
    "mlp28": (28, 28, 1),
    "lenet": (28, 28, 1),
    "cnn": (32, 32, 3),
    "resnet18": (32, 32, 3),
}
BATCHES = {"resnet18": 16}


def dataset(shape: tuple[int, ...], size: int) -> Dataset:
    """Random images with labels in equal numbers."""
    rng = np.random.default_rng(0)
    y = np.arange(size, dtype=np.int32) % CLASSES
    return Dataset(
        "random",
        rng.integers(0, 256, (size, *shape), np.uint8),
        y,
        size,
        CLASSES,
        prepare_images,
    )


def network(model: str) -> str:
    """Its name in `models`; the MLP is here twice, on the digits' 8x8 pixels and on
    MNIST's 28x28."""
    return "mlp" if model == "mlp28" else model


def batch_size(model: str) -> int:
    return BATCHES.get(model, BATCH)


def in_form(model: str, conv: str) -> Model:
    return models.model(network(model), SHAPES[model], CLASSES, conv=conv)


def build(
    model: str,
    *,
    conv: str = "auto",
    clients: int = CLIENTS,
    split: str = "iid",
    steps: int | None = None,
    each: int = 100,
    made: Model | None = None,
    public: int = 0,
) -> tuple[Task, Federation]:
    """A task of `steps` local steps, or of one epoch if it is None, over clients with
    `each` images on average, and public images.

    `made` takes the place of the model of this name."""
    data = dataset(SHAPES[model], clients * each * 4 // 3)
    pool = dataset(SHAPES[model], public) if public else None
    parts = partition(data, split, num_clients=clients, seed=0)
    f = federate(data, parts, public=pool)
    local = {"rounds": 1} | (
        {"epochs": 1} if steps is None else {"epochs": None, "steps": steps}
    )
    made = made or in_form(model, conv)
    task = simulate.task(
        data,
        f.class_counts,
        made,
        shared=made,
        lr=0.01,
        batch_size=batch_size(model),
        **local,
    )
    if pool is not None:
        task = simulate.with_public(task, pool)
    return task, simulate.with_frozen(f, task)
