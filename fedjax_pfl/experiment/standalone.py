"""Predictions of a run without its data set, by the shapes in inputs.json."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import simulate
from fedjax_pfl.data import datasets
from fedjax_pfl.data.preparation import Preparation
from fedjax_pfl.engine import frozen
from fedjax_pfl.experiment import config as settings, inputs
from fedjax_pfl.experiment.build import (
    architectures,
    for_server,
    make_program,
    make_task,
    network_names,
)
from fedjax_pfl.experiment.checkpoints import read_json
from fedjax_pfl.experiment.groups import ONE_DEVICE
from fedjax_pfl.experiment.types import Absent, Experiment, NeedsDataError, Trained
from fedjax_pfl.types import Federation, Subset

FILE = "inputs.json"
PREPARATIONS = {
    function.__name__: function
    for function in (
        datasets.prepare_images,
        datasets.prepare_digits,
        datasets.prepare_floats,
        datasets.prepare_integers,
    )
}


def recorded(e: Experiment) -> dict[str, Any]:
    """Returns the content of inputs.json."""
    spec, superclass = e.config.model.name, e.dataset.superclass
    words = spec.startswith("file:") and architectures(spec, len(e.everybody.train))
    # --feature_cache replaces the inputs of the experiment
    dataset = e.unmarked if e.config.feature_cache else e.dataset
    return {
        "examples": _facts(dataset),
        "public": None if e.public is None else _facts(e.public),
        "superclass": None if superclass is None else np.asarray(superclass).tolist(),
        "networks": [words[0][i] for i in words[1]] if words else None,
    }


def _facts(dataset: datasets.Dataset) -> dict[str, Any]:
    name = getattr(dataset.prepare, "__name__", "")
    return {
        "count": len(dataset.x),
        "shape": dataset.x.shape[1:],
        "dtype": str(dataset.x.dtype),
        "label_shape": dataset.y.shape[1:],
        "label_dtype": str(dataset.y.dtype),
        "num_classes": dataset.num_classes,
        "vocabulary": dataset.vocabulary,
        "prepare": name if PREPARATIONS.get(name) is dataset.prepare else None,
    }


def _stand_in(
    facts: dict[str, Any], known: Preparation | None, superclass: Any = None
) -> datasets.Dataset:
    """Returns a data set of one example with the shapes and types of recorded ones."""
    if facts["prepare"] is None:
        raise NeedsDataError("Its inputs have a preparation of their own.")
    x = np.zeros((1, *facts["shape"]), facts["dtype"])
    if facts["vocabulary"] is not None:
        x.flat[0] = facts["vocabulary"] - 1
    return datasets.Dataset(
        "recorded",
        x,
        np.zeros((1, *facts["label_shape"]), facts["label_dtype"]),
        1,
        facts["num_classes"],
        PREPARATIONS[facts["prepare"]],
        superclass=None if superclass is None else np.asarray(superclass, np.int32),
        words=None if known is None else known.words,
    )


def _federation(counts: np.ndarray, sizes: np.ndarray) -> Federation:
    """Returns the federation of clients whose examples are not there."""
    index = jnp.zeros((len(sizes), 1), jnp.int32)
    here = Subset(index, jnp.asarray(sizes, jnp.int32))
    return Federation(Absent(), here, here, here, jnp.asarray(counts))  # type: ignore[arg-type]  # in place of Examples


def owned(folder: Path) -> tuple[np.ndarray, list[str], tuple[str, ...]] | None:
    """Returns training examples of the clients that train by class [N, C], names of
    clients and of classes; None in a run of an earlier version."""
    if not (folder / FILE).is_file():
        return None
    known, preparation = read_json(folder / "partition.json"), inputs.recorded(folder)
    with np.load(folder / "partition.npz") as arrays:
        counts = np.delete(arrays["class_counts"], known["unseen"], axis=0)
    classes = None if preparation is None else preparation.classes
    return counts, known["clients"], classes or ()


def trained(path: str | Path) -> Trained:
    """Returns what predictions of a run need, from the files of its directory alone.

    Raises:
      NeedsDataError: the run is of an earlier version, or has a data set of the user's
        own with its own preparation.
    """
    folder = Path(path).expanduser()
    config = settings.read(folder / "config.json")
    if not (folder / FILE).is_file():
        raise NeedsDataError("It is of an earlier version.")
    facts, known = read_json(folder / FILE), read_json(folder / "partition.json")
    preparation = inputs.recorded(folder)
    with np.load(folder / "partition.npz") as arrays:
        counts, sizes = arrays["class_counts"], arrays["train_sizes"]
    config = config.replace(
        **ONE_DEVICE,
        **{"client_memory": "device", "feature_cache": None},
        **{"model": ",".join(facts["networks"])} if facts["networks"] else {},
        # of a synchronous run they are read for reports alone
        **{} if config.asynchronous else {"speeds": None, "bandwidths": None},
    )
    dataset = _stand_in(facts["examples"], preparation, facts["superclass"])
    dataset = dataset._replace(packed=config.pack)
    everyone = make_task(config, dataset, _federation(counts, sizes))
    if facts["public"] is not None:
        pool = _stand_in(facts["public"], preparation)
        count = facts["public"]["count"]
        everyone = simulate.with_public(everyone, pool)
        shape = jax.ShapeDtypeStruct((count, *pool.x.shape[1:]), pool.x.dtype)
        everyone = everyone._replace(public=shape)
    ids = np.delete(np.arange(len(sizes)), known["unseen"])
    task, schedule = for_server(config, everyone, ids)
    task = frozen.placed(task)
    federation = _federation(counts[ids], sizes[ids])
    return Trained(
        config=config,
        task=task,
        federation=simulate.with_frozen(federation, task),
        alone=make_program(config, task, schedule),
        names=tuple(known["clients"]),
        classes=None if preparation is None else preparation.classes,
        networks=network_names(config.algo, config.model.name, len(sizes))[ids],
        preparation=preparation,
    )
