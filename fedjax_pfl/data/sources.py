"""Data sets of files that a user has: tables of numbers, USPS digits, and several
domains as one data set."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedjax_pfl.data import text
from fedjax_pfl.data.datasets import Dataset, from_arrays
from fedjax_pfl.errors import InputError, in_one_line

# columns of a table that are values of clients, never inputs
OWNERS = ("client", "user", "speaker", "writer", "sensor", "hospital", "domain")
_LEVELS = 256  # of a uint8 image


def table(path: str) -> Dataset:
    """Reads a table of numbers, .csv, .json or .jsonl.

    Numbers are inputs, scaled to mean 0 and deviation 1 over the training rows. Texts,
    and columns named as in `OWNERS`, are columns of the data set. `label` is a class;
    `target`, `target_2` ... are regression targets.

    Raises:
      InputError: the file cannot be read, or has no label, no target or no inputs.
    """
    name, columns = f"table:{path}", dict[str, np.ndarray]()
    rows, num_train = text.as_columns(path, text.read(path), ())
    targets = [x for x in rows if x == "target" or x.startswith("target_")]
    if ("label" in rows) == bool(targets):
        raise InputError(f"{path} must have a column `label`, or `target`.")
    inputs = []
    for column, values in rows.items():
        numbers = None if column in OWNERS else _numbers(values)
        if column == "label":
            y, classes = text.classes_of(values)
        elif column in targets:
            if numbers is None:
                raise InputError(f"{path}: {column} must be numbers.")
        elif numbers is None:
            columns[column] = values.astype(str)
        else:
            inputs.append(numbers)
    if not inputs:
        raise InputError(f"{path} must have a column of numbers next to its labels.")
    x = np.stack(inputs, axis=1)
    mean, scale = x[:num_train].mean(axis=0), x[:num_train].std(axis=0)
    x = (x - mean) / np.where(scale > 0, scale, 1)
    if targets:
        y = np.stack([np.asarray(rows[t], np.float32) for t in targets], axis=1)
        classes = len(targets)
    made = from_arrays(x, y, name=name, num_classes=classes, columns=columns)
    return made._replace(num_train=num_train)


def _numbers(values: np.ndarray) -> np.ndarray | None:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return None


def diabetes() -> Dataset:
    """Returns scikit-learn's diabetes table, 442 patients: 10 inputs, and as target the
    progression in standard deviations; column `sex`."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    x, y = np.asarray(bunch.data, np.float64), np.asarray(bunch.target, np.float64)
    sex = np.array([f"{value:g}" for value in x[:, 1]])
    x, y = (x - x.mean(axis=0)) / x.std(axis=0), (y - y.mean()) / y.std()
    return from_arrays(x, y[:, None], name="diabetes", columns={"sex": sex})


def usps(path: str) -> Dataset:
    """Reads the USPS digits of an .h5 file with /train and /test, each of `data` in [0,
    1] and `target`.

    Returns:
      uint8 images [n, 16, 16, 1], the official test set at the end.

    Raises:
      InputError: h5py is missing, or the file has other content.
    """
    try:
        import h5py

        with h5py.File(Path(path).expanduser()) as file:
            parts = [
                (file[s]["data"][()], file[s]["target"][()]) for s in ("train", "test")
            ]
        x, x_test = (_pixels(data.reshape(len(data), 16, 16)) for data, _ in parts)
    except ImportError:
        raise InputError("usps needs h5py: pip install -e '.[data]' adds it.") from None
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({in_one_line(error)}).") from error
    y, y_test = (target.astype(np.int32) for _, target in parts)
    return from_arrays(x, y, x_test, y_test, name=f"usps:{path}", num_classes=10)


def _pixels(x: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(x, 0, 1) * (_LEVELS - 1)).astype(np.uint8)


def domains(
    name: str,
    sources: Sequence[str],
    load: Callable[[str], Dataset],
    image_size: int | None = None,
) -> Dataset:
    """Joins data sets of the same classes; each is a value of the column `domain`.

    Args:
      name: of the result.
      sources: names of data sets of images.
      load: name -> data set.
      image_size: side to which all images are resized; default: the largest.

    Returns:
      uint8 images [n, S, S, C]; colour if one of the data sets is.

    Raises:
      InputError: fewer than two, inputs that are no images, or other classes.
    """
    if len(sources) < 2:
        raise InputError(f"{name} must name two data sets or more.")
    parts = [load(source) for source in sources]
    names = [Path(source.partition(":")[2] or source).stem for source in sources]
    if len(set(names)) < len(names):
        raise InputError(f"{name}: its data sets must have other names: {names}.")
    for part in parts:
        if part.x.ndim != 4:
            raise InputError(f"{name} needs images, {part.name} has other inputs.")
        if part.num_classes != parts[0].num_classes:
            raise InputError(
                f"{name} needs the same classes, got {part.num_classes} of {part.name} "
                f"and {parts[0].num_classes} of {parts[0].name}."
            )
    side = image_size or max(max(part.x.shape[1:3]) for part in parts)
    colour = any(part.x.shape[3] == 3 for part in parts)
    images = [_shaped(_bytes(part), side, colour) for part in parts]
    pieces: list[tuple[np.ndarray, ...]] = []
    for test in (False, True):
        for source, part, x in zip(names, parts, images, strict=True):
            rows = slice(part.num_train, None) if test else slice(part.num_train)
            y = part.y[rows]
            pieces.append((x[rows], y, np.full(len(y), source)))
    x, y, domain = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return parts[0]._replace(
        name=name,
        x=x,
        y=y,
        num_train=sum(part.num_train for part in parts),
        prepare=from_arrays(x[:1], y[:1] * 0).prepare,
        superclass=None,
        columns={"domain": domain},
    )


def _bytes(dataset: Dataset) -> np.ndarray:
    """Images of a data set as uint8 with black 0 and white 255."""
    if dataset.name == "digits":  # of 17 levels
        return np.rint(dataset.x * (255 / 16)).astype(np.uint8)
    if dataset.x.dtype == np.uint8:
        return dataset.x
    low, high = dataset.x.min(), dataset.x.max()
    return _pixels((dataset.x - low) / max(high - low, 1e-12))


def _shaped(x: np.ndarray, side: int, colour: bool) -> np.ndarray:
    """uint8 images [n, H, W, C] resized to [n, side, side, 1 or 3]."""
    from PIL import Image

    count, channels = len(x), x.shape[3]
    if x.shape[1:3] != (side, side):
        planes = np.moveaxis(x, 3, 1).reshape(-1, *x.shape[1:3])
        how = Image.Resampling.BILINEAR
        resized = [Image.fromarray(p).resize((side, side), how) for p in planes]
        x = np.stack([np.asarray(p) for p in resized])
        x = np.moveaxis(x.reshape(count, channels, side, side), 1, 3)
    return np.repeat(x, 3, axis=3) if colour and x.shape[3] == 1 else x
