"""Data sets as plain arrays: built-in ones, prepared TensorFlow Datasets, and your
own."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import user_code
from fedjax_pfl.data import tfds
from fedjax_pfl.errors import InputError, check, check_shape, choose, in_one_line

ARRAYS = ("x", "y", "x_test", "y_test")
SCALED = 20  # largest absolute float of inputs that are scaled
# columns of a Hugging Face data set that are taken without `columns`
_INPUTS = ("image", "img", "pixel_values", "x")
_LABELS = ("label", "labels", "fine_label", "y")


class Dataset(NamedTuple):
    """A labelled data set on the host: training examples, then official test
    examples."""

    name: str
    x: np.ndarray  # [n, *input], raw: uint8 images stay uint8
    # [n] int32, in [0, num_classes); [n, L] int32, one label per position, -1 for none;
    # [n, num_classes] bool, several classes; [n, num_classes] float32, regression
    y: np.ndarray
    num_train: int  # rows [0, num_train) are the official training set
    num_classes: int
    # raw [B, *input] -> the input of a model, float32 or int32
    prepare: Callable[[jax.Array], jax.Array]
    superclass: np.ndarray | None = None  # [C] int32: class -> superclass
    # of tokens: the text of token i, of which 0 is padding and 1 is unknown
    words: tuple[str, ...] | None = None
    # {name: [n]}: a value per example, such as its speaker
    columns: Mapping[str, np.ndarray] = MappingProxyType({})

    @property
    def positions(self) -> int | None:
        """Labels per example, None where an example has one label or one row of
        targets."""
        several = self.y.ndim == 2 and self.y.dtype.kind in "iu"
        return self.y.shape[1] if several else None

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens; None where inputs are no tokens."""
        if self.words is not None:
            return len(self.words)
        tokens = self.x.dtype.kind in "iu" and self.x.dtype != np.uint8
        return int(self.x.max()) + 1 if tokens else None

    def take(self, rows: np.ndarray, num_train: int) -> "Dataset":
        """Returns the data set of some rows, the first `num_train` for training."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return self._replace(
            x=self.x[rows], y=self.y[rows], num_train=num_train, columns=columns
        )


DATASETS: dict[str, str] = {
    "digits": (
        "scikit-learn's 1,797 digits of 8x8 pixels, 10 classes, no official test set; "
        "needs no download"
    ),
    "diabetes": (
        "scikit-learn's 442 patients, 10 numbers, regression; column sex; needs no "
        "download"
    ),
    "synthetic": (
        "2,500 Gaussian blobs shaped 8x8, 10 classes, for tests; needs no download"
    ),
    **tfds.DESCRIPTIONS,
    "tfds:NAME": (
        "another data set of TFDS: images, texts, or numbers such as tokens, of one "
        "shape, with an integer label"
    ),
    "npz:PATH": (
        "your own arrays x and y, optionally x_test and y_test: an .npz, or a folder "
        "of .npy or .npz files; other arrays [n] are columns, such as the user"
    ),
    "text:PATH": (
        "texts: a JSON object {speaker: text} for the next character, or .csv, .json "
        "or .jsonl rows of text and label (.gz too)"
    ),
    "table:PATH": (
        "numbers: .csv, .json or .jsonl rows with a column label, or target for "
        "regression; texts are columns, such as the sensor"
    ),
    "imagefolder:PATH": (
        "images: CLASS/*.png, CLIENT/CLASS/*.png, train/ and test/ of these, or "
        "Tiny-ImageNet's layout"
    ),
    "domains:A,B": (
        "several data sets of the same classes of images, resized to one shape, as "
        "values of the column domain"
    ),
    "usps:PATH": "9,298 digits, 16x16 grey, 10 classes: .h5 with train and test",
}
# of names with an argument, such as npz:PATH
PREFIXES = tuple(f"{x.partition(':')[0]}:" for x in DATASETS if ":" in x)


def load(
    source: Any,
    data_dir: str | None = None,
    seed: int = 0,
    columns: tuple[str, str] | None = None,
    *,
    tokenizer: str | None = None,
    max_length: int | None = None,
    image_size: int | None = None,
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

    Raises:
      InputError: the name is unknown, the data set is not prepared (with the command
        that prepares it), or the arrays cannot be learned from.
    """
    if isinstance(source, str) and not user_code.named(source):
        return _named(source, data_dir, tokenizer, max_length, image_size)
    if isinstance(source, str) or callable(source):
        return _called(source, seed, columns)
    return _converted(source, "dataset", columns)


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    name: str = "arrays",
    num_classes: int | None = None,
    columns: Mapping[str, Any] = MappingProxyType({}),
) -> Dataset:
    """Returns a data set of arrays.

    Args:
      x: [n, *input]. uint8 inputs are images with pixels in 0..255, which become
        [-1, 1]; grey images [n, H, W] get a channel axis. Other integers are tokens and
        become int32, all other numbers float32.
      y: [n] integer labels, counted from 0; [n, L] one label per token of x [n, L], -1
        for none; [n, C] booleans, several classes; [n, C] real numbers, regression.
      x_test: official test examples, as x; None: there are none.
      y_test: their labels.
      name: used in messages and directories.
      num_classes: C; default: the largest label + 1, or the columns of y.
      columns: {name: a value of each example, training examples first}.

    Raises:
      InputError: shapes or types do not fit, a value is not finite, or a label is not a
        class number.
    """
    if (x_test is None) != (y_test is None):
        raise InputError(f"{name} has only one of x_test and y_test.")
    xs, ys = [_inputs(f"{name}: x", np.asarray(x))], [np.asarray(y)]
    _check_labels(f"{name}: y", ys[0], xs[0])
    if x_test is not None:
        xs.append(_inputs(f"{name}: x_test", np.asarray(x_test)))
        ys.append(np.asarray(y_test))
        _check_labels(f"{name}: y_test", ys[1], xs[1])
    if len({(a.shape[1:], a.dtype) for a in xs}) > 1:
        kinds = " and ".join(f"{a.dtype}{list(a.shape[1:])}" for a in xs)
        raise InputError(f"{name}: x and x_test must be alike, got {kinds} per row.")
    inputs, labels = np.concatenate(xs), np.concatenate(ys)
    images = inputs.dtype == np.uint8 and inputs.ndim == 3
    return checked(
        Dataset(
            name,
            inputs[..., None] if images else inputs,
            _stored(labels),
            len(ys[0]),
            num_classes or _classes(labels),
            _preparation(inputs.dtype),
            columns={key: np.asarray(values) for key, values in columns.items()},
        )
    )


def _named(
    name: str,
    data_dir: str | None,
    tokenizer: str | None,
    max_length: int | None,
    image_size: int | None,
) -> Dataset:
    # imported here: they make a Dataset
    from fedjax_pfl.data import images, sources, text

    kind, _, path = name.partition(":")
    if not name.startswith(PREFIXES):
        choose("data set", name, DATASETS)
    makers: dict[str, Callable[[], Dataset]] = {
        "npz": lambda: from_arrays(**_read(path), name=name),
        "text": lambda: text.load(path, tokenizer, max_length),
        "table": lambda: sources.table(path),
        "imagefolder": lambda: images.load(path, image_size),
        "usps": lambda: sources.usps(path),
        "domains": lambda: sources.domains(
            name, path.split(","), lambda part: load(part, data_dir), image_size
        ),
        "digits": _digits,
        "diabetes": sources.diabetes,
        "synthetic": synthetic,
    }
    if kind in makers:
        return checked(makers[kind]())
    arrays = tfds.load(name.removeprefix("tfds:"), data_dir)
    texts = arrays.pop("texts")
    if texts is not None:
        return text.classified(
            name,
            texts,
            arrays["y"],
            num_train=arrays["num_train"],
            num_classes=arrays["num_classes"],
            tokens=tokenizer,
            max_length=max_length,
        )
    x = arrays["x"] = _inputs(f"{name}: x", arrays["x"])
    return checked(Dataset(name=name, prepare=_preparation(x.dtype), **arrays))


def _called(source: Any, seed: int, columns: tuple[str, str] | None) -> Dataset:
    """The data set that a function returns."""
    own = isinstance(source, str)
    function = user_code.load("dataset", source) if own else source
    name = source if own else getattr(function, "__name__", "dataset")
    given = {"seed": seed} if "seed" in user_code.parameters(function) else {}
    call = user_code.bound(function, "dataset", name, **given)
    with user_code.blamed("dataset", name):
        return _converted(call(), name, columns)


def _converted(made: Any, name: str, columns: tuple[str, str] | None) -> Dataset:
    if isinstance(made, Dataset):
        x, y = _inputs(f"{name}: x", np.asarray(made.x)), np.asarray(made.y)
        found = checked(made._replace(name=name, x=x, y=y))
        prepared(found)
        return found._replace(y=_stored(y))
    parts = made.values() if isinstance(made, Mapping) else [made]
    if any(hasattr(part, "column_names") for part in parts):
        return _hugging_face(made, name, columns)
    if isinstance(made, tuple):
        return from_arrays(*made, name=name)
    if isinstance(made, Mapping):
        return from_arrays(**_arrays(name, made), name=name)
    raise InputError(
        f"`{name}` must be a fedjax_pfl.Dataset, arrays (x, y) or a Hugging Face data "
        f"set, got {type(made).__name__}."
    )


def _hugging_face(made: Any, name: str, columns: tuple[str, str] | None) -> Dataset:
    """A data set of the library `datasets`, which is not imported."""
    splits = made if isinstance(made, Mapping) else {"train": made}
    if "train" not in splits:
        raise InputError(f"{name} must have a split train, got {', '.join(splits)}.")
    found = list(splits["train"].column_names)
    x, y = columns or (
        next((name for name in known if name in found), "")
        for known in (_INPUTS, _LABELS)
    )
    if x not in found or y not in found:
        raise InputError(
            f"`columns` must name the inputs and the labels of {name}, got "
            f"{columns}. It has {', '.join(found)}."
        )
    arrays: dict[str, Any] = {}
    for split, end in (("train", ""), ("test", "_test")):
        if split in splits:
            rows = [np.asarray(each) for each in splits[split][x]]
            if len({row.shape for row in rows}) > 1:
                raise InputError(f"{name}: {x} must have one shape. Resize it first.")
            arrays[f"x{end}"] = np.asarray(rows)
            arrays[f"y{end}"] = np.asarray(list(splits[split][y]))
    features = splits["train"].features
    parts = [splits[split] for split in ("train", "test") if split in splits]
    # Images and lists have other types: they are no values of clients.
    values = {
        other: np.concatenate([np.asarray(list(part[other])) for part in parts])
        for other in found
        if other not in (x, y)
        and all(other in part.column_names for part in parts)
        and str(getattr(features[other], "dtype", "")).startswith(("int", "string"))
    }
    classes = getattr(features[y], "num_classes", None)
    return from_arrays(**arrays, name=name, num_classes=classes, columns=values)


def _read(path: str) -> dict[str, Any]:
    """Reads the arrays of an .npz, or of a folder: x.npy and y.npy, or train.npz and
    test.npz."""
    folder = Path(os.path.expanduser(path))
    if not os.path.isdir(folder):
        found = read_npz(path, ARRAYS[:2], None)
        columns = {}
        for name in sorted(
            {name.removesuffix("_test") for name in found} - set(ARRAYS)
        ):
            parts = [found[end] for end in (name, f"{name}_test") if end in found]
            columns[name] = np.concatenate(parts)
        return _arrays(path, found) | {"columns": columns}
    found = {file.stem: np.load(file) for file in folder.glob("*.npy")}
    for file in folder.glob("*.npz"):
        end = "_test" if file.stem == "test" else ""
        arrays = read_npz(file, ARRAYS[:2], ARRAYS[2:])
        found |= {f"{name}{end}": array for name, array in arrays.items()}
    return _arrays(path, found)


def read_npz(
    path: str | Path,
    required: tuple[str, ...],
    optional: tuple[str, ...] | None = (),
) -> dict[str, np.ndarray]:
    """Reads the named arrays of an .npz file, all of them for optional=None.

    Raises:
      InputError: the file cannot be read, or a required array is missing.
    """
    try:
        # opened here because numpy leaves a damaged file open
        with open(os.path.expanduser(path), "rb") as stream, np.load(stream) as file:
            found = dict(file)
    except Exception as error:  # of the zip file or of numpy
        raise InputError(f"{path} cannot be read ({in_one_line(error)}).") from error
    known = _arrays(path, found, required, optional or ())
    return found if optional is None else known


def _arrays(
    source: Any,
    found: Mapping[str, Any],
    required: tuple[str, ...] = ARRAYS[:2],
    optional: tuple[str, ...] = ARRAYS[2:],
) -> dict[str, Any]:
    for name in required:
        if name not in found:
            raise InputError(
                f"{source} must have the arrays {', '.join(required)}, got "
                f"{', '.join(found) or 'none'}."
            )
    return {name: found[name] for name in (*required, *optional) if name in found}


def synthetic(
    num_examples: int = 2500,
    num_classes: int = 10,
    shape: tuple[int, ...] = (8, 8, 1),
    seed: int = 0,
) -> Dataset:
    """Returns balanced Gaussian blobs, four fifths of them for training.

    The noise has variance 1 and the distance between class means is about 5.7.

    Args:
      num_examples: n, training and test examples together.
      num_classes: C.
      shape: shape of one input.
      seed: equal seeds give equal arrays.
    """
    check("num_classes", num_classes, 1, 10**6, whole=True)
    check("num_examples", num_examples, num_classes, 10**8, whole=True)
    shape = check_shape("shape", shape)
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(num_classes, *shape)) * 4 / np.sqrt(np.prod(shape))
    y = rng.permutation(np.arange(num_examples, dtype=np.int32) % num_classes)
    x = (means[y] + rng.normal(size=(num_examples, *shape))).astype(np.float32)
    return Dataset(
        "synthetic", x, y, num_examples - num_examples // 5, num_classes, prepare_floats
    )


def subset(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """Returns a stratified random part of a data set.

    Args:
      dataset: data set whose order of examples is kept.
      fraction: share of each class in (0, 1], at least one example, in train and in
        test; 1 returns the data set itself.
      seed: equal seeds give equal parts.
    """
    check("data_fraction", fraction, 0, 1, open_low=True)
    if fraction == 1:
        return dataset
    rng, n = np.random.default_rng(seed), dataset.num_train
    y = strata(dataset)
    train = _stratified(rng, y[:n], fraction)
    rows = np.append(train, n + _stratified(rng, y[n:], fraction))
    return dataset.take(rows, len(train))


def strata(dataset: Dataset) -> np.ndarray:
    """Returns the class of every example [n], 0 where it has not one class."""
    y = np.asarray(dataset.y)
    return y if y.ndim == 1 and y.dtype.kind in "iu" else np.zeros(len(y), np.int32)


def _stratified(rng: np.random.Generator, y: np.ndarray, fraction: float) -> np.ndarray:
    """Sorted positions of round(fraction * size), at least one, random examples of
    every class."""
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    sizes = np.bincount(y)
    # position within its class
    rank = np.arange(len(y)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    keep = np.maximum(np.rint(fraction * sizes), 1)
    return np.sort(order[rank < np.repeat(keep, sizes)])


def prepare_images(x: jax.Array) -> jax.Array:
    """Maps uint8 pixels to [-1, 1]: x / 255, then mean 0.5 and standard deviation 0.5
    (PFLlib's)."""
    return (x.astype(jnp.float32) / 255 - 0.5) / 0.5


def prepare_digits(x: jax.Array) -> jax.Array:
    """Maps the 17 grey levels 0..16 of scikit-learn's digits to [-1, 1]."""
    return (x.astype(jnp.float32) / 16 - 0.5) / 0.5


def prepare_floats(x: jax.Array) -> jax.Array:
    """Casts to float32."""
    return x.astype(jnp.float32)


def prepare_integers(x: jax.Array) -> jax.Array:
    """Casts tokens and other whole numbers to int32."""
    return x.astype(jnp.int32)


def _preparation(dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    if dtype == np.uint8:
        return prepare_images
    return prepare_integers if np.issubdtype(dtype, np.integer) else prepare_floats


def _digits() -> Dataset:
    # imported here: scikit-learn takes a second
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = bunch.images.astype(np.uint8)[..., None], bunch.target.astype(np.int32)
    return Dataset("digits", x, y, len(y), 10, prepare_digits)


def prepared(dataset: Dataset) -> jax.ShapeDtypeStruct:
    """Returns the shape and type of a prepared batch of two.

    Raises:
      InputError: `prepare` does not keep the first axis.
    """
    # on a device: float32 for float64
    kind = jax.dtypes.canonicalize_dtype(dataset.x.dtype)
    batch = jax.ShapeDtypeStruct((2, *dataset.x.shape[1:]), kind)
    found: jax.ShapeDtypeStruct = jax.eval_shape(dataset.prepare, batch)
    if getattr(found, "shape", ())[:1] != (2,):
        raise InputError(
            f"`prepare` of {dataset.name} must keep the first axis, got {found} for a "
            "batch of 2."
        )
    return found


def _inputs(name: str, x: np.ndarray) -> np.ndarray:
    """Returns inputs as uint8, int32 (other integers) or float32."""
    _check_inputs(name, x)
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "iu":
        return x.astype(np.float32)
    if max(-int(x.min()) - 1, int(x.max())) >= 2**31:
        raise InputError(f"{name} must hold integers that fit int32.")
    return x.astype(np.int32)


def _check_inputs(name: str, x: np.ndarray) -> None:
    if x.ndim < 2 or x.size == 0:
        raise InputError(
            f"{name} must be [examples, ...] and not empty, got shape {x.shape}."
        )
    if x.dtype.kind in "iub":
        return
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(f"{name} must be uint8 images or real numbers, got {x.dtype}.")
    # a float64 beyond float32 becomes infinite
    with np.errstate(over="ignore"):
        finite = np.isfinite(x.astype(np.float32)).reshape(len(x), -1).all(axis=1)
    if not finite.all():
        row = np.argmin(finite)
        raise InputError(f"{name} must be finite in float32, row {row} is not.")


def _stored(y: np.ndarray) -> np.ndarray:
    return y.astype(label_type(y))


def label_type(y: Any) -> np.dtype:
    """Returns the type of labels in a federation: int32, bool or float32."""
    kinds: dict[str, Any] = {"f": np.float32, "b": np.bool}
    return np.dtype(kinds.get(np.asarray(y).dtype.kind, np.int32))


def _classes(y: np.ndarray) -> int:
    return int(y.max()) + 1 if y.dtype.kind in "iu" else y.shape[1]


def _check_labels(name: str, y: np.ndarray, x: np.ndarray) -> None:
    whole, count = y.dtype.kind in "iu", len(x)
    tokens = y.shape == x.shape and x.dtype.kind in "iu"
    row = y.ndim == 2 and (y.dtype.kind in "bf" or (whole and tokens))
    if y.shape[:1] != (count,) or not (row or (whole and y.ndim == 1)):
        raise InputError(
            f"{name} must be {count} integer labels, one per input, got "
            f"{y.dtype}{list(y.shape)}."
        )
    if y.dtype.kind == "f" and not np.isfinite(y.astype(np.float32)).all():
        raise InputError(f"{name} must be finite.")
    least = 0 if y.ndim == 1 else -1
    if whole and y.min() < least:
        raise InputError(f"{name} must be labels counted from 0, got {y.min()}.")


def check_inputs(dataset: Dataset) -> None:
    """Raises InputError unless this is a data set with real and finite inputs."""
    if not isinstance(dataset, Dataset):
        raise InputError(
            f"`dataset` must be a fedjax_pfl.Dataset, got {type(dataset).__name__}."
        )
    _check_inputs(f"{dataset.name}: x", np.asarray(dataset.x))


def checked(dataset: Dataset) -> Dataset:
    """Returns the data set.

    Raises:
      InputError: its inputs, labels, `num_train` and `num_classes` do not fit each
        other.
    """
    check_inputs(dataset)
    name, y = dataset.name, np.asarray(dataset.y)
    _check_labels(f"{name}: y", y, dataset.x)
    for column, values in dataset.columns.items():
        if np.shape(values) != (len(y),):
            raise InputError(
                f"{name}: column {column} must have {len(y)} values, got shape "
                f"{np.shape(values)}."
            )
    check(f"{name}: num_train", dataset.num_train, 1, len(y), whole=True)
    check(f"{name}: num_classes", dataset.num_classes, 1, 2**31, whole=True)
    if y.dtype.kind not in "iu":
        if y.shape[1] != dataset.num_classes:
            raise InputError(
                f"{name}: num_classes must be {y.shape[1]}, the columns of y, got "
                f"{dataset.num_classes}."
            )
    elif y.max() >= dataset.num_classes:
        raise InputError(
            f"{name}: labels must be below num_classes={dataset.num_classes}, got "
            f"{y.max()}."
        )
    return dataset


def describe(dataset: Dataset) -> str:
    """Returns a line about a data set: type, shape, range, classes and examples."""
    x, n = dataset.x, dataset.num_train
    kinds = {"f": "targets", "b": "labels"}
    tests = len(dataset.y) - n
    official = f"{n:,} training and {tests:,} test" if tests else f"{n:,}"
    return (
        f"{dataset.name}: {x.dtype}{list(x.shape[1:])} in [{x.min():g}, {x.max():g}], "
        f"{dataset.num_classes:,} {kinds.get(dataset.y.dtype.kind, 'classes')}, "
        f"{official} examples"
    )


def unusual(dataset: Dataset, as_numbers: bool) -> list[str]:
    """Returns sentences about inputs and labels that are likely to be a mistake.

    Args:
      as_numbers: integer inputs become floats, as in the networks of `MODELS`.
    """
    x, shape = dataset.x, dataset.x.shape[1:]
    low, high = float(x.min()), float(x.max())
    known, floats = dataset.x.dtype == np.uint8, dataset.x.dtype.kind == "f"
    classes = dataset.y.dtype.kind in "iu"
    counted = dataset.y[dataset.y >= 0] if classes else np.zeros(0, int)
    empty = np.bincount(counted, minlength=dataset.num_classes) == 0
    missing = int(empty.sum()) if classes and dataset.words is None else 0
    channels = (1, 3, 4)
    found = {
        "integers are taken as plain numbers, neither scaled nor embedded: give images "
        "as uint8, and tokens to a network with an embedding": as_numbers
        and not (known or floats),
        "floats are not scaled: divide them, or give images as uint8": floats
        and max(-low, high) > SCALED,
        "pixels up to 1 as uint8 are nearly black: give them as floats": known
        and dataset.prepare is prepare_images
        and high <= 1,
        "all inputs are equal": low == high,
        "channels come first: images are [height, width, channels]": len(shape) == 3
        and shape[0] in channels
        and shape[2] not in channels,
        f"{missing} classes have no example": missing > 0,
        "there is a single class": classes and dataset.num_classes == 1,
    }
    return [f"{dataset.name}: {text}." for text, holds in found.items() if holds]
