"""Data sets as plain arrays: the type, its checks and parts."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.data.preparation import Cells, Column, apply
from fedjax_pfl.errors import InputError, check

SCALED = 20  # largest absolute float of inputs that are scaled
MOST_CLASSES = 2**20  # of labels that are counted
SPLITS = {  # {name of a split in lower case: its part}
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


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
    # [num_train] bool: official validation examples, of the training examples
    validation: np.ndarray | None = None
    cells: Cells | None = None  # of a table, of which `inputs` made x
    inputs: tuple[Column, ...] = ()
    classes: tuple[str, ...] | None = None  # their names; None: they are numbers
    note: str = ""  # how files were read, for the first lines of a run
    packed: bool = False  # rows have several texts, as of `packing.packed`

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
        held = None if self.validation is None else self.validation[rows[:num_train]]
        return self._replace(
            x=self.x[rows],
            y=self.y[rows],
            num_train=num_train,
            columns=columns,
            validation=held,
            cells=None if self.cells is None else self.cells.take(rows),
        )

    def prepared_by(self, inputs: tuple[Column, ...]) -> "Dataset":
        """Returns a table with inputs of other numbers, such as `preparation.fit`'s."""
        assert self.cells is not None
        return self._replace(x=apply(inputs, self.cells.inputs), inputs=inputs)


def from_arrays(
    x: Any,
    y: Any,
    x_test: Any = None,
    y_test: Any = None,
    *,
    x_val: Any = None,
    y_val: Any = None,
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
      x_val: official validation examples, as x; None: there are none.
      y_val: their labels.
      name: used in messages and directories.
      num_classes: C; default: the largest label + 1, or the columns of y.
      columns: {name: a value of each example: training, validation, test examples}.

    Raises:
      InputError: shapes or types do not fit, a value is not finite, or a label is not a
        class number.
    """
    xs, ys, sizes = list[np.ndarray](), list[np.ndarray](), dict[str, int]()
    for end, one, other in (
        ("", x, y),
        ("_val", x_val, y_val),
        ("_test", x_test, y_test),
    ):
        if (one is None) != (other is None):
            raise InputError(f"{name} has only one of x{end} and y{end}.")
        if one is not None:
            xs.append(stored_inputs(f"{name}: x{end}", np.asarray(one)))
            ys.append(np.asarray(other))
            _check_labels(f"{name}: y{end}", ys[-1], xs[-1])
            sizes[end] = len(xs[-1])
            if xs[-1].shape[1:] != xs[0].shape[1:] or xs[-1].dtype != xs[0].dtype:
                kinds = " and ".join(f"{a.dtype}{list(a.shape[1:])}" for a in xs)
                raise InputError(
                    f"{name}: x and x{end} must be alike, got {kinds} per row."
                )
    inputs, labels = np.concatenate(xs), np.concatenate(ys)
    images = inputs.dtype == np.uint8 and inputs.ndim == 3
    held = sizes.get("_val", 0)
    return checked(
        Dataset(
            name,
            inputs[..., None] if images else inputs,
            stored(labels),
            sizes[""] + held,
            num_classes or _classes(name, labels),
            usual_preparation(inputs.dtype),
            columns={key: np.asarray(values) for key, values in columns.items()},
            validation=np.repeat([False, True], [sizes[""], held]) if held else None,
        )
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


def usual_preparation(dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    """Returns the preparation of inputs of a type."""
    if dtype == np.uint8:
        return prepare_images
    return prepare_integers if np.issubdtype(dtype, np.integer) else prepare_floats


def pixels(x: np.ndarray) -> np.ndarray:
    """Returns grey levels in [0, 1] as uint8."""
    return np.rint(np.clip(x, 0, 1) * (255)).astype(np.uint8)


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


def stored_inputs(name: str, x: np.ndarray) -> np.ndarray:
    """Returns inputs as uint8, int32 (other integers) or float32."""
    _check_inputs(name, x)
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "iu":
        return x.astype(np.float32)
    if x.min() < 0:
        row = np.argwhere(x < 0)[0, 0]
        raise InputError(
            f"{name} must hold tokens counted from 0, got {x[row].min()} in row {row}; "
            "other numbers must be floats."
        )
    if x.max() >= 2**31:
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
        finite = np.isfinite(x.astype(np.float32, copy=False))
    if not finite.all():
        row = np.argmin(finite.reshape(len(x), -1).all(axis=1))
        raise InputError(f"{name} must be finite in float32, row {row} is not.")


def stored(y: np.ndarray) -> np.ndarray:
    """Returns labels in the type of a federation."""
    return y.astype(label_type(y))


def label_type(y: Any) -> np.dtype:
    """Returns the type of labels in a federation: int32, bool or float32."""
    kinds: dict[str, Any] = {"f": np.float32, "b": np.bool}
    return np.dtype(kinds.get(np.asarray(y).dtype.kind, np.int32))


def _classes(name: str, y: np.ndarray) -> int:
    if y.dtype.kind not in "iu":
        return y.shape[1]
    if (most := int(y.max())) >= MOST_CLASSES:
        row = np.argwhere(y == most)[0, 0]
        raise InputError(
            f"{name}: labels must be below {MOST_CLASSES:,}, got {most} in row {row}."
        )
    return most + 1


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
    low = 0 if dataset.packed else x.min()  # marks are negative
    kinds = {"f": "targets", "b": "labels"}
    tests = len(dataset.y) - n
    official = f"{n:,} training and {tests:,} test" if tests else f"{n:,}"
    return (
        f"{dataset.name}: {x.dtype}{list(x.shape[1:])} in [{low:g}, {x.max():g}], "
        f"{dataset.num_classes:,} {kinds.get(dataset.y.dtype.kind, 'classes')}, "
        f"{official} examples{'; ' if dataset.note else ''}{dataset.note}"
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
