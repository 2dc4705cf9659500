"""TensorFlow Datasets prepared on disk, read without TensorFlow and cached as plain
arrays."""

import functools
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl import cache
from fedjax_pfl.data.datasets import Dataset, stored_inputs, usual_preparation
from fedjax_pfl.data.sources import celeba, text
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError, first_line

DESCRIPTIONS: dict[str, str] = {
    "mnist": "70,000 handwritten digits, 28x28 grey, 10 classes (TFDS)",
    "fashion_mnist": "70,000 pieces of clothing, 28x28 grey, 10 classes (TFDS)",
    "cifar10": "60,000 photographs, 32x32 colour, 10 classes (TFDS)",
    "cifar100": "60,000 photographs, 32x32 colour, 100 classes, 20 superclasses (TFDS)",
    "cifar100_coarse": "the photographs of cifar100 with 20 coarse labels (TFDS)",
    "emnist/balanced": "131,600 characters, 28x28 grey, 47 classes (TFDS)",
    "emnist/digits": "280,000 digits, 28x28 grey, 10 classes (TFDS)",
    "emnist/letters": "103,600 letters, 28x28 grey, 26 classes, numbered from 0 (TFDS)",
    "emnist/byclass": "814,255 characters, 28x28 grey, 62 classes (TFDS)",
    "emnist/bymerge": "814,255 characters, 28x28 grey, 47 classes (TFDS)",
    "emnist/mnist": (
        "70,000 digits in MNIST's sizes, cut by EMNIST from the source of both, 10 "
        "classes (TFDS)"
    ),
    "ag_news_subset": "127,600 pieces of news, title and text, 4 classes (TFDS)",
    "celeb_a": (
        "19,547 faces by attribute (bald, hat, blond, black hair), 64x64 colour, 4 "
        "classes, no test set (TFDS)"
    ),
}

# training and test examples of the whole data set; a prepared copy may be a part
SIZES: dict[str, int] = {
    "mnist": 70_000,
    "fashion_mnist": 70_000,
    "cifar10": 60_000,
    "cifar100": 60_000,
    "cifar100_coarse": 60_000,
    "emnist/balanced": 131_600,
    "emnist/digits": 280_000,
    "emnist/letters": 103_600,
    "emnist/byclass": 814_255,
    "emnist/bymerge": 814_255,
    "emnist/mnist": 70_000,
    "ag_news_subset": 127_600,
    # Bald has 4,547, the other attributes more than the 5,000 that are taken
    "celeb_a": 19_547,
}

_CLASSES = {
    "cifar100": 100,
    "cifar100_coarse": 20,
    "emnist/balanced": 47,
    "emnist/letters": 26,
    "emnist/byclass": 62,
    "emnist/bymerge": 47,
    "celeb_a": 4,
    "ag_news_subset": 4,
}  # all others: 10
_CACHE_FORMAT = 1  # of the cache files
_SEPARATOR = "\0"  # of texts there


@register(
    "tfds:NAME",
    "another data set of TFDS: images, texts, or numbers such as tokens, of one "
    "shape, with an integer label",
)
def load(
    name: str,
    data_dir: str | None = None,
    tokenizer: str | None = None,
    max_length: int | None = None,
) -> Dataset:
    """Returns a prepared data set of TFDS; arguments as of `read` and
    `text.classified`."""
    arrays = read(name, data_dir)
    texts = arrays.pop("texts")
    if texts is not None:
        del arrays["x"], arrays["superclass"]
        y = arrays.pop("y")
        options: Any = {"tokens": tokenizer, "max_length": max_length}
        return text.classified(name, texts, y, **arrays, **options)
    x = arrays["x"] = stored_inputs(f"{name}: x", arrays["x"])
    return Dataset(name=name, prepare=usual_preparation(x.dtype), **arrays)


for _name, _description in DESCRIPTIONS.items():
    register(_name, _description)(functools.partial(load, _name))


def read(name: str, data_dir: str | None = None) -> dict[str, Any]:
    """Reads a prepared data set of images, or of numbers of one shape, from the cache
    where that is fresh.

    Note: TFDS stores EMNIST transposed, as its authors do.

    Args:
      name: a key of `DESCRIPTIONS`, or the TFDS name of another data set, whose classes
        are counted.
      data_dir: TFDS's data directory; default: TFDS_DATA_DIR, then
        ~/tensorflow_datasets.

    Returns:
      x [n, *input]: uint8 images, or numbers as they are; y [n]; num_train;
      num_classes; superclass [C] int32 or None; texts [n] in place of x, or None.

    Raises:
      InputError: the data set is not prepared, not in the array_record format, has
        other inputs, or cannot be read.
    """
    # both cifar100s are one decoded copy
    source = "cifar100" if name == "cifar100_coarse" else name
    root = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    folder = _version_folder(Path(os.path.expanduser(root)), source)
    arrays = cache.stored(
        folder,
        f"{source.replace('/', '-')}-{folder.name}",
        [_CACHE_FORMAT, source],
        sorted(folder.iterdir()),
        lambda: _decode(source, folder),
    )
    y, superclass = arrays["y"], None
    if name == "emnist/letters":
        y = y - 1  # TFDS counts letters from 1
    if name == "cifar100":
        superclass = np.zeros(100, np.int32)
        superclass[y] = arrays["coarse"]
    if name == "cifar100_coarse":
        y = arrays["coarse"]
    counted = int(y.max(initial=0)) + 1
    return {
        "x": arrays["x"],
        "texts": _split(arrays["x"]) if "texts" in arrays else None,
        "y": y.astype(np.int32),
        "num_train": int(arrays["num_train"]),
        "num_classes": _CLASSES.get(name, 10 if name in DESCRIPTIONS else counted),
        "superclass": superclass,
    }


def command(source: str, root: Path) -> str:
    """Returns the shell command that prepares a TFDS data set in the format read
    here."""
    return (
        f"pip install -e '.[prepare]' && tfds build {source} "
        f"--file_format=array_record --data_dir={shlex.quote(str(root))}"
    )


def _version_folder(root: Path, source: str) -> Path:
    """The folder of the newest prepared version."""
    found = [path.parent for path in (root / source).glob("*/dataset_info.json")]
    if not found:
        raise InputError(
            f"Data set {source!r} is not prepared in {root}: run "
            f"{command(source, root)}"
        )
    folder = max(
        found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]
    )
    if not any(".array_record" in path.name for path in folder.iterdir()):
        raise InputError(
            f"Data set {source!r} in {folder} must be in the array_record format: "
            f"delete that folder and run {command(source, root)}"
        )
    return folder


def _decode(source: str, folder: Path) -> dict[str, np.ndarray]:
    """The splits train and test in order: x, y, coarse labels (-1 where there are none)
    and the number of training examples."""
    try:
        import tensorflow_datasets as tfds

        # reads the files' own description: any version works
        builder = tfds.builder_from_directory(folder)
        if source == "celeb_a":
            return celeba.decode(builder)
        return _rows(builder, tfds.features.Image, tfds.features.Text)
    except ImportError as error:
        # array_record is imported on first use and not there on every system
        raise InputError(
            f"{source} needs tensorflow_datasets and array_record ({first_line(error)})"
            ": run pip install tensorflow-datasets array_record."
        ) from error


def _rows(builder: Any, image: type, text: type) -> dict[str, np.ndarray]:
    info = builder.info
    texts = [name for name, x in dict(info.features).items() if isinstance(x, text)]
    x_name, y_name = _columns(info, texts)
    names = [split for split in ("train", "test") if split in info.splits]
    if not names:
        raise InputError(f"{info.name!r} must have a split train or test.")
    splits = [builder.as_data_source(split) for split in names]
    is_text = x_name in texts
    # the others come first, as a title
    texts = sorted(texts, key=lambda name: name == x_name)

    def read(record: Any) -> Any:
        return _joined(record[name] for name in texts) if is_text else record[x_name]

    rows = [
        (read(record), record[y_name], record.get("coarse_label", -1))
        for split in splits
        for record in celeba.records(split, range(len(split)))
    ]
    inputs, *labels = zip(*rows, strict=True)
    y, coarse = map(np.asarray, labels)
    marked = {"texts": np.ones(1, bool)} if is_text else {}
    if is_text:
        x = np.frombuffer(_SEPARATOR.join(inputs).encode(), np.uint8)
    else:
        x = np.asarray(inputs)
    image_like = is_text or isinstance(info.features[x_name], image)
    if x.dtype == np.uint8 and not image_like:
        x = x.astype(np.int32)  # bytes are taken for pixels
    return {
        "x": x,
        "y": y.astype(np.int32),
        "coarse": coarse.astype(np.int32),
        "num_train": np.asarray(len(splits[0])),
        **marked,
    }


def _joined(parts: Iterable[Any]) -> str:
    texts = [x.decode() if isinstance(x, bytes) else str(x) for x in parts]
    return " ".join(texts).replace(_SEPARATOR, " ")


def _split(x: np.ndarray) -> list[str]:
    return x.tobytes().decode().split(_SEPARATOR)


def _columns(info: Any, texts: Sequence[str]) -> tuple[str, str]:
    """Returns the names of a record's input and label."""
    x, y = (info.supervised_keys or ("image", "label"))[:2]
    for name, kinds in ((x, "biuf"), (y, "iu")):
        if name == x and x in texts:
            continue
        feature: Any = dict(info.features).get(name)
        shape = getattr(feature, "shape", None)
        fixed = isinstance(shape, tuple) and None not in shape
        if not fixed or np.dtype(feature.np_dtype).kind not in kinds:
            found = " ".join(repr(feature or "missing").split())
            raise InputError(
                f"{info.name!r} must have images or numbers of one shape with an "
                f"integer label, but its {name} is {found}. Store its arrays as "
                "npz:PATH."
            )
    return x, y
