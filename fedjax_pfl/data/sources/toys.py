"""Small data sets that need no download."""

import numpy as np

from fedjax_pfl.data.datasets import (
    Dataset,
    from_arrays,
    prepare_digits,
    prepare_floats,
)
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import check, check_shape


@register(
    "digits",
    "scikit-learn's 1,797 digits of 8x8 pixels, 10 classes, no official test set; "
    "needs no download",
)
def digits() -> Dataset:
    """Returns scikit-learn's digits."""
    # imported here: scikit-learn takes a second
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = bunch.images.astype(np.uint8)[..., None], bunch.target.astype(np.int32)
    return Dataset("digits", x, y, len(y), 10, prepare_digits)


@register(
    "diabetes",
    "scikit-learn's 442 patients, 10 numbers, regression; column sex; needs no "
    "download",
)
def diabetes() -> Dataset:
    """Returns scikit-learn's diabetes table, 442 patients: 10 inputs, and as target the
    progression in standard deviations; column `sex`."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    x, y = np.asarray(bunch.data, np.float64), np.asarray(bunch.target, np.float64)
    sex = np.array([f"{value:g}" for value in x[:, 1]])
    x, y = (x - x.mean(axis=0)) / x.std(axis=0), (y - y.mean()) / y.std()
    return from_arrays(x, y[:, None], name="diabetes", columns={"sex": sex})


@register(
    "synthetic",
    "2,500 Gaussian blobs shaped 8x8, 10 classes, for tests; needs no download",
)
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
