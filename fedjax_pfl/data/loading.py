"""Data sets by name: built-in ones, files, and your own objects."""

from typing import Any

from fedjax_pfl import user_code
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.sources import (  # noqa: F401  # they register themselves
    arrays,
    chat,
    domains,
    images,
    objects,
    registry,
    table,
    text,
    tfds,
    toys,
    usps,
)
from fedjax_pfl.errors import InputError

# {NAME, or KIND:ARGUMENT: description}
DATASETS = dict(sorted(registry.DESCRIPTIONS.items(), key=lambda x: (":" in x[0], x)))
# of names with an argument, such as npz:PATH
PREFIXES = user_code.reserve(DATASETS)


def load(
    source: Any,
    data_dir: str | None = None,
    seed: int = 0,
    columns: tuple[str, str] | None = None,
    *,
    tokenizer: str | None = None,
    max_length: int | None = None,
    image_size: int | None = None,
    missing: str | None = None,
    categories: str | None = None,
    owner: str | None = None,
) -> Dataset:
    """Loads a data set.

    Args:
      source: one of
        a name in `DATASETS`, such as `digits`, `mnist`, `tfds:NAME` or `npz:PATH`;
        a function, or the name of one (FILE.py:NAME or package.module:NAME), that
        returns any of the following;
        a `Dataset`;
        arrays, as a tuple or mapping of the arguments of `from_arrays`;
        a Hugging Face `datasets` object, one split or a dictionary with `train` and
        optionally `test`.
      data_dir: folder of prepared TFDS data sets; default: the variable TFDS_DATA_DIR,
        then ~/tensorflow_datasets.
      seed: passed to a function that has an argument of this name.
      columns: names of the input and label columns of a Hugging Face data set.
      tokenizer: of texts: word, char or the file of a Hugging Face tokenizer; default:
        word for classified texts, char for speakers.
      max_length: most tokens of an example; default: 200, of speakers 80.
      image_size: side to which images of a folder, or of domains, are resized.
      missing: of a table: `mean`, `median` or `indicator` fills missing numbers.
      categories: of a table: `onehot` makes an input of each category.
      owner: of a table: column that identifies clients, and is no input.

    Raises:
      InputError: the name is unknown, the data set is not prepared (with the command
        that prepares it), or the arrays cannot be learned from.
    """
    options = {
        "tokenizer": tokenizer,
        "max_length": max_length,
        "image_size": image_size,
        "missing": missing,
        "categories": categories,
        "owner": owner,
    }
    if isinstance(source, str) and not user_code.named(source):
        own = {"data_dir": data_dir, "load": lambda part: load(part, data_dir)}
        return registry.load(source, **own, **options)
    for name in (x for x, value in options.items() if value is not None):
        raise InputError(f"`{name}` has no effect on a data set of your own.")
    if isinstance(source, str) or callable(source):
        return objects.called(source, seed, columns)
    return objects.converted(source, "dataset", columns)
