"""Preparation of a run's inputs: fitted on training rows of the clients that train, or
taken from a file of --prepare."""

from collections.abc import Sequence
from pathlib import Path

from absl import logging

from fedjax_pfl.data import loading, preparation
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.partition import Partition, flat
from fedjax_pfl.data.preparation import Column, Preparation
from fedjax_pfl.data.sources import text
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import groups
from fedjax_pfl.experiment.checkpoints import read_json
from fedjax_pfl.models import pretrained

FIXED = "none"  # of --prepare
FILE, TOKENIZER = "preparation.json", "tokenizer.json"  # in a run directory


def recorded(folder: Path) -> Preparation | None:
    """Returns the preparation that a run directory records."""
    file, own = folder / FILE, folder / TOKENIZER
    found = Preparation.from_json(read_json(file)) if file.is_file() else None
    if found is not None and own.is_file():
        return found._replace(tokenizer=str(own))
    return found


def check_private(data: groups.Data, dataset: Dataset, folders: Sequence[str]) -> None:
    """Raises InputError if differential privacy would publish numbers of clients'
    rows.

    Args:
      folders: of pretrained networks, whose vocabulary is fixed.
    """
    fixed = bool(folders) or _own_vocabulary(data)
    fitted = dataset.cells is not None or (dataset.words is not None and not fixed)
    if fitted and data.prepare is None:
        kind = "means and deviations" if dataset.words is None else "a vocabulary"
        raise InputError(
            f"--dp excludes {kind} of clients' rows: give --prepare=FILE of public "
            f"rows, or --prepare={FIXED}."
        )


def columns(
    data: groups.Data,
    dataset: Dataset,
    trained: Partition,
    start: groups.Start | None = None,
) -> Dataset:
    """Returns a table with the numbers of training rows of the clients that train, or
    of --prepare, or else of the run that the network starts from; other data sets
    unchanged."""
    if dataset.cells is None:
        return dataset
    if data.prepare is None and start is not None:
        return dataset.prepared_by(_earlier(start, dataset))
    if data.prepare is None:
        rows = flat(trained.train, trained.train_sizes)
        return dataset.prepared_by(preparation.fit(dataset.cells, rows))
    if data.prepare == FIXED:
        return dataset.prepared_by(preparation.unfitted(dataset.cells))
    known = _public(f"table:{data.prepare}", data).inputs
    unused = [x.name for x in known if x.name not in dataset.cells.inputs]
    if unused:
        names = ", ".join(unused)
        logging.warning("%s has no input %s of --prepare.", dataset.name, names)
    return dataset.prepared_by(_ordered(f"--prepare={data.prepare}", known, dataset))


def _earlier(start: groups.Start, dataset: Dataset) -> tuple[Column, ...]:
    """Returns the columns of the run that the network starts from.

    Raises:
      InputError: the run has no table, or one with other inputs.
    """
    assert dataset.cells is not None
    earlier = recorded(start.path)
    if earlier is None or not earlier.columns:
        raise InputError(f"{dataset.name} needs a run of a table, got {start}.")
    _ordered(str(start), earlier.columns, dataset)  # refuses further inputs
    for column in earlier.columns:
        if column.name not in dataset.cells.inputs:
            name = column.name
            raise InputError(f"{dataset.name} must have the input {name} of {start}.")
    return earlier.columns


def _ordered(
    source: str, known: Sequence[Column], dataset: Dataset
) -> tuple[Column, ...]:
    """Returns the columns of another table in the order of a data set's inputs."""
    assert dataset.cells is not None
    found = {column.name: column for column in known}
    for name, cells in dataset.cells.inputs.items():
        if name not in found:
            raise InputError(f"{source} must have the input {name}.")
        if (found[name].categories is None) != (cells.dtype != object):
            raise InputError(
                f"{source}: {name} must have the type that it has in {dataset.name}."
            )
    return tuple(found[name] for name in dataset.cells.inputs)


def _public(name: str, data: groups.Data) -> Dataset:
    """Loads the file of --prepare with the options of the data set."""
    return loading.load(
        name,
        tokenizer=data.tokenizer,
        max_length=data.max_length,
        missing=data.missing if name.startswith("table:") else None,
        categories=data.categories if name.startswith("table:") else None,
    )


def vocabulary(
    data: groups.Data,
    dataset: Dataset,
    trained: Partition,
    folders: Sequence[str],
    private: bool,
    start: groups.Start | None = None,
) -> Dataset:
    """Returns a data set of tokens with its final vocabulary.

    Args:
      folders: of pretrained networks; the vocabulary is that of the first.
      private: the vocabulary of a tokenizer.json is taken whole.
      start: the run whose network is adapted, or where training starts.

    Raises:
      InputError: that run has no texts, or shorter ones.
    """
    known = None if start is None else recorded(start.path)
    if start is not None and known is None:
        raise InputError(f"{start} has no {FILE}: it must be a run of texts.")
    if known is not None and known.words is None:
        raise InputError(f"{dataset.name} needs a run of texts, got {start}.")
    if known is not None and data.prepare is None:
        return text.like(dataset, known.words or (), known.max_length or 0)
    if folders:
        return text.using(dataset, pretrained.words(folders[0]))
    if data.prepare not in (None, FIXED):
        words = _public(f"text:{data.prepare}", data).words or ()
    elif _own_vocabulary(data) and (private or data.prepare == FIXED):
        own = pretrained.words_of(str(data.tokenizer))
        words = tuple(dict.fromkeys((*text.SPECIAL, *own)))
    elif data.prepare == FIXED:
        raise InputError(f"--prepare={FIXED} needs --tokenizer=FILE.json.")
    else:
        rows = flat(trained.train, trained.train_sizes)
        return text.restricted(dataset, rows)
    if known is None:
        return text.using(dataset, words)
    if tuple(words) != known.words:
        raise InputError(f"--prepare gives other tokens than {start}: leave it out.")
    return text.like(dataset, words, known.max_length or 0)


def _own_vocabulary(data: groups.Data) -> bool:
    return (data.tokenizer or "").endswith(".json")


def preparation_of(
    data: groups.Data, dataset: Dataset, folders: Sequence[str]
) -> Preparation | None:
    """Returns what new raw rows need, None for data of a fixed preparation."""
    if dataset.words is None and dataset.cells is None and dataset.classes is None:
        return None
    usual = "word" if dataset.positions is None else "char"
    own = pretrained.tokenizer(folders[0]) if folders else None
    tokens = dataset.words is not None
    return Preparation(
        dataset.inputs,
        dataset.words,
        (data.tokenizer or own or usual) if tokens else None,
        dataset.x.shape[1] if tokens else None,
        dataset.classes,
        data.prepare or "clients",
    )
