"""Data sets as plain arrays: digits, synthetic blobs, a user's .npz, and prepared
TensorFlow Datasets."""

import math
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import user_code
from fedjax_pfl.data import tfds
from fedjax_pfl.errors import InputError, check, check_shape, choose, first_line

# What numpy raises on files that are not as they were written; NotImplementedError: an
# unknown way of compressing.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    OSError,
    EOFError,
    AttributeError,
    TypeError,
    ValueError,
)


class Dataset(NamedTuple):
    """One labelled data set on the host: training examples first, then the official
    test examples."""

    name: str
    x: np.ndarray  # [n, *input], raw: uint8 images stay uint8
    y: np.ndarray  # [n] int32, in [0, num_classes)
    # rows [0, num_train) are the official training set; the rest is the official test
    # set
    num_train: int
    num_classes: int
    # raw [B, *input] -> what a model takes, float32 or int32
    prepare: Callable[[jax.Array], jax.Array]
    # [C] int32: class -> superclass, where the data set has them
    superclass: np.ndarray | None = None


DATASETS: dict[str, str] = {
    "digits": (
        "scikit-learn's 1,797 digits of 8x8 pixels, 10 classes, no official test set; "
        "needs no download"
    ),
    "synthetic": (
        "2,500 Gaussian blobs shaped 8x8, 10 classes: what every method must learn; "
        "needs no download"
    ),
    **tfds.DESCRIPTIONS,
    "tfds:NAME": (
        "another data set of TFDS: images, or numbers such as tokens, of one shape, "
        "with an integer label"
    ),
    "npz:PATH": "your own arrays: x and y, optionally x_test and y_test",
}


def load(name: str, data_dir: str | None = None, seed: int = 0) -> Dataset:
    """Loads a data set by its name in `DATASETS`.

    Args:
      name: `digits`, `synthetic`, `npz:PATH`, `tfds:NAME`, one of TensorFlow's data
        sets such as `mnist`, or a function of your own that makes one, FILE.py:NAME or
        package.module:NAME.
      data_dir: where TFDS data sets were prepared; default: the variable TFDS_DATA_DIR,
        then ~/tensorflow_datasets.
      seed: for a function of your own that has an argument of that name.

    Raises:
      InputError: the name is unknown, the data set is not prepared (with the command
        that prepares it), or the arrays cannot be learned from.
    """
    if isinstance(name, str) and name.startswith("npz:"):
        return _npz(name.removeprefix("npz:"))
    if user_code.named(name):
        return _own(name, seed)
    if not (isinstance(name, str) and name.startswith("tfds:")):
        choose("data set", name, DATASETS)
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return synthetic()
    arrays = tfds.load(name.removeprefix("tfds:"), data_dir)
    x, y = _inputs(name, "x", arrays.x), arrays.y.astype(np.int32)
    prepare = _preparation(x.dtype)
    return checked(
        Dataset(
            name, x, y, arrays.num_train, arrays.num_classes, prepare, arrays.superclass
        )
    )


def synthetic(
    num_examples: int = 2500,
    num_classes: int = 10,
    shape: tuple[int, ...] = (8, 8, 1),
    seed: int = 0,
) -> Dataset:
    """Returns balanced Gaussian blobs, four fifths of them for training.

    Unit noise around class means that lie about 5.7 apart whatever the shape, so that a
    linear model is right on some 95 % in more than a few dimensions.

    Args:
      num_examples: n, training and test examples together.
      num_classes: C.
      shape: the shape of one input.
      seed: equal seeds give equal arrays.
    """
    check("num_classes", num_classes, 1, 10**6, whole=True)
    check(
        "num_examples",
        num_examples,
        num_classes,
        10**8,
        whole=True,
        why="each class has one, and memory an end",
    )
    check("seed", seed, 0, math.inf, whole=True)
    shape = check_shape("shape", shape)
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(num_classes, *shape)) * 4 / np.sqrt(np.prod(shape))
    y = rng.permutation(np.arange(num_examples, dtype=np.int32) % num_classes)
    x = (means[y] + rng.normal(size=(num_examples, *shape))).astype(np.float32)
    return Dataset(
        "synthetic", x, y, num_examples - num_examples // 5, num_classes, prepare_floats
    )


def subset(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """Returns a stratified random part: of each class, in train and in test apart,
    `fraction` (at least one example).

    Args:
      dataset: what to take from; the order of its examples is kept.
      fraction: in (0, 1]; 1 returns the data set itself.
      seed: equal seeds give equal parts.
    """
    check("data_fraction", fraction, 0, 1, open_low=True)
    if fraction == 1:
        return dataset
    rng = np.random.default_rng(seed)
    train = _stratified(rng, dataset.y[: dataset.num_train], fraction)
    test = dataset.num_train + _stratified(
        rng, dataset.y[dataset.num_train :], fraction
    )
    rows = np.concatenate([train, test])
    return dataset._replace(x=dataset.x[rows], y=dataset.y[rows], num_train=len(train))


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
    """uint8 pixels to [-1, 1]: x / 255, then mean 0.5 and standard deviation 0.5
    (PFLlib's)."""
    return (x.astype(jnp.float32) / 255 - 0.5) / 0.5


def prepare_digits(x: jax.Array) -> jax.Array:
    """The 17 grey levels 0..16 of scikit-learn's digits to [-1, 1]."""
    return (x.astype(jnp.float32) / 16 - 0.5) / 0.5


def prepare_floats(x: jax.Array) -> jax.Array:
    """Inputs that are numbers already: float32, unchanged."""
    return x.astype(jnp.float32)


def prepare_integers(x: jax.Array) -> jax.Array:
    """Tokens and other whole numbers: int32, unchanged."""
    return x.astype(jnp.int32)


def _preparation(dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    """uint8 are pixels, other integers stay integers, the rest becomes float32."""
    if dtype == np.uint8:
        return prepare_images
    return prepare_integers if np.issubdtype(dtype, np.integer) else prepare_floats


def _digits() -> Dataset:
    # imported here: scikit-learn takes a second
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = bunch.images.astype(np.uint8)[..., None], bunch.target.astype(np.int32)
    return Dataset("digits", x, y, len(y), 10, prepare_digits)


def _npz(path: str) -> Dataset:
    """A user's arrays; everything that can be wrong with them is said here."""
    arrays = read_npz(path, required=("x", "y"), optional=("x_test", "y_test"))
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise InputError(
            f"{path} has only one of x_test and y_test: store both, or neither."
        )
    xs, ys = [_inputs(path, "x", arrays["x"])], [_labels(path, "y", arrays["y"])]
    if "x_test" in arrays:
        xs.append(_inputs(path, "x_test", arrays["x_test"]))
        ys.append(_labels(path, "y_test", arrays["y_test"]))
        if xs[0].shape[1:] != xs[1].shape[1:] or xs[0].dtype != xs[1].dtype:
            raise InputError(
                f"{path}: x_test is {_kind(xs[1])} a row but x is {_kind(xs[0])}: "
                "store both alike."
            )
    for x, y, suffix in zip(xs, ys, ("", "_test"), strict=False):
        if len(x) != len(y):
            raise InputError(
                f"{path}: x{suffix} has {len(x)} rows but y{suffix} has {len(y)}: "
                "store one label a row."
            )
    y = np.concatenate(ys)
    num_classes = int(y.max()) + 1
    if num_classes > max(len(y), 2):
        raise InputError(
            f"{path}: label {num_classes - 1} in only {len(y)} examples cannot be a "
            "class number: number them from 0."
        )
    prepare = _preparation(xs[0].dtype)
    return Dataset(
        f"npz:{path}",
        np.concatenate(xs),
        y.astype(np.int32),
        len(ys[0]),
        num_classes,
        prepare,
    )


def read_npz(
    path: str | Path, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Reads the named arrays of an .npz file.

    Raises:
      InputError: no such file, not an .npz, a required array is missing, or an array
        holds Python objects.
    """
    path = os.path.expanduser(path)
    # unlike Path.is_file, False for a name that is too long
    if not os.path.isfile(path):
        raise InputError(
            f"There is no file {path!r}: give the path of an .npz with the arrays "
            f"{', '.join(required)}."
        )
    if not zipfile.is_zipfile(path) and os.access(path, os.R_OK) and not _was_zip(path):
        what = "it is a .npy of one array, a text, or another file"
        raise InputError(
            f"{path} cannot be read as .npz ({what}): write it with numpy.savez."
        )
    try:
        # Opened here because np.load leaves a damaged file open.
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            missing = [name for name in required if name not in file]
            if missing:
                raise InputError(
                    f"{path} lacks the array {missing[0]!r}: it has "
                    f"{', '.join(file.files) or 'none'}."
                )
            return {
                name: _array(path, file, name)
                for name in (*required, *optional)
                if name in file
            }
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(
            f"{path} cannot be read as .npz ({error}): write it with numpy.savez."
        ) from error


def _was_zip(path: str) -> bool:
    """Does a file begin as an .npz does? Then it is one that was damaged."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _array(path: str | Path, file: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(file[name])
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise InputError(
            f"{path}: {name} holds Python objects: store numbers in one rectangular "
            "array."
        ) from error


def _own(name: str, seed: int) -> Dataset:
    """What a user's function returns, checked as the arrays of a file are."""
    takes = user_code.parameters(user_code.load("dataset", name))
    made = user_code.call(
        "dataset", name, **({"seed": seed} if "seed" in takes else {})
    )
    with user_code.blamed("dataset", name):
        if not isinstance(made, Dataset):
            raise InputError(
                f"it returns {type(made).__name__}, not a fedjax_pfl.Dataset."
            )
        given = np.asarray(made.x)
        x = given if given.dtype == np.uint8 else _inputs("the data set", "x", given)
        y = _labels("the data set", "y", np.asarray(made.y))
        found = checked(made._replace(name=name, x=x, y=y))._replace(
            y=y.astype(np.int32)
        )
        prepared(found)
        return found


def prepared(dataset: Dataset) -> jax.ShapeDtypeStruct:
    """Returns the shape of a prepared batch of two; InputError unless `prepare` makes
    one."""
    # on a device: float32 for float64
    kind = jax.dtypes.canonicalize_dtype(dataset.x.dtype)
    batch = jax.ShapeDtypeStruct((2, *dataset.x.shape[1:]), kind)
    try:
        found: jax.ShapeDtypeStruct = jax.eval_shape(dataset.prepare, batch)
    except Exception as error:  # of a user's function
        start = (
            f"prepare of {dataset.name} fails on a batch "
            f"{batch.dtype}{list(batch.shape)}"
        )
        raise InputError(
            f"{start} ({first_line(error)}): write it with jax.numpy, raw [B, ...] -> "
            "input."
        ) from error
    if getattr(found, "shape", ())[:1] != (2,):
        raise InputError(
            f"prepare makes {found} of a batch of 2: it must keep the first axis."
        )
    return found


def _inputs(path: str, name: str, x: np.ndarray) -> np.ndarray:
    """Inputs as uint8 (grey images get a channel axis), int32 (other integers) or
    float32."""
    if x.ndim < 2 or x.size == 0:
        raise InputError(
            f"{path}: {name} has shape {x.shape}: it must be [examples, ...] and not "
            "be empty."
        )
    if x.dtype == np.uint8:
        return x[..., None] if x.ndim == 3 else x
    _check_values(f"{path}: {name}", x)
    return x.astype(np.int32 if x.dtype.kind in "iu" else np.float32)


def _check_values(name: str, x: np.ndarray) -> None:
    """InputError unless all of x are real numbers that int32 or float32 holds."""
    if x.dtype.kind in "iu":
        if np.iinfo(x.dtype).max >= 2**31 and (x.min() < -(2**31) or x.max() >= 2**31):
            raise InputError(
                f"{name} has integers that int32 cannot hold: store them smaller, or "
                "as floats."
            )
    elif jnp.issubdtype(x.dtype, jnp.floating):
        # a float64 beyond float32 becomes infinite, and is said to be below
        with np.errstate(over="ignore"):
            finite = np.isfinite(x.astype(np.float32, copy=False))
        if not finite.all():
            row = np.argmin(finite.reshape(len(x), -1).all(axis=1))
            raise InputError(
                f"{name} has NaN or infinite values in float32, first in row {row}: "
                "repair it."
            )
    elif x.dtype.kind != "b":
        raise InputError(
            f"{name} has type {x.dtype}: store uint8 images or real numbers."
        )


def _labels(path: str, name: str, y: np.ndarray) -> np.ndarray:
    if y.ndim != 1 or y.size == 0:
        raise InputError(
            f"{path}: {name} has shape {y.shape}: it must be [examples], one class "
            "number each, not empty."
        )
    if y.dtype.kind not in "iu":
        raise InputError(
            f"{path}: {name} has type {y.dtype}: labels must be integers, counted from "
            "0."
        )
    if y.min() < 0:
        raise InputError(
            f"{path}: {name} holds the label {y.min()}: labels must be 0 or more; "
            "shift them to start at 0."
        )
    return y


def _kind(x: np.ndarray) -> str:
    return f"{x.dtype}{list(x.shape[1:])}"


def check_inputs(dataset: Dataset) -> str:
    """Returns how messages name the data set.

    Raises:
      InputError: it is none, its parts are no arrays, or its inputs are not real and
        finite.
    """
    if not isinstance(dataset, Dataset):
        raise InputError(
            f"The data set is {type(dataset).__name__}, not a fedjax_pfl.Dataset."
        )
    name = f"Data set {dataset.name}"
    for part in ("x", "y"):
        if not isinstance(given := getattr(dataset, part), np.ndarray | jax.Array):
            raise InputError(
                f"{name} has {part} as {type(given).__name__}: make it an array, with "
                "numpy.asarray."
            )
    x = np.asarray(dataset.x)
    if x.ndim < 2 or not x.size:
        raise InputError(
            f"{name} has x {_kind(x[None])}: x must be [examples, ...], not empty."
        )
    _check_values(f"{name}: x", x)
    if not callable(dataset.prepare):
        raise InputError(
            f"{name}: prepare={dataset.prepare!r} must be a function, raw [B, ...] -> "
            "what a model takes."
        )
    return name


def checked(dataset: Dataset) -> Dataset:
    """Returns the data set.

    Raises:
      InputError: its parts do not fit each other (of a user's program, or of a prepared
        copy that is damaged).
    """
    name = check_inputs(dataset)
    x, y = np.asarray(dataset.x), np.asarray(dataset.y)
    if y.ndim != 1 or y.dtype.kind not in "iu" or y.dtype == np.uint64 or not y.size:
        raise InputError(
            f"{name} has y {_kind(y[None])}: labels y must be integers [examples], a "
            "class for each example."
        )
    if len(x) != len(y):
        raise InputError(
            f"{name} has {len(x)} inputs x but {len(y)} labels y: store one label each."
        )
    check(
        f"{name}: num_train",
        dataset.num_train,
        1,
        len(y),
        whole=True,
        why="it has so many examples",
    )
    check(f"{name}: num_classes", dataset.num_classes, 1, 2**31 - 1, whole=True)
    if y.min() < 0 or y.max() >= dataset.num_classes:
        raise InputError(
            f"{name} has {dataset.num_classes} classes but labels "
            f"{y.min()}..{y.max()}: number them from 0, or prepare "
            "it anew."
        )
    if dataset.superclass is not None and np.shape(dataset.superclass) != (
        dataset.num_classes,
    ):
        raise InputError(
            f"{name} has {dataset.num_classes} classes but {len(dataset.superclass)} "
            "in superclass."
        )
    return dataset
